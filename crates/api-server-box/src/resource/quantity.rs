//! Quantities in their canonical form, as the server prints them.

/// The suffixes of the three ways to write one: powers of 1024, powers of 1000.
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

/// The canonical form of a quantity (`1024Ki` is `1Mi`, `1000` is `1k`); `None` where the text is none, or is one that
/// this box does not know (exponents, more than nine decimals).
pub(super) fn canonical(text: &str) -> Option<String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || "+-.".contains(c))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (sign, digits) = match number.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let is_number = |part: &str| part.chars().all(|c| c.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !is_number(whole) || !is_number(fraction) || fraction.len() > 9 {
        return None;
    }
    // In billionths.
    let amount: i128 = format!("0{whole}{fraction:0<9}").parse().ok()?;
    if !suffix.is_empty() && BINARY.contains(&suffix) {
        let power = BINARY.iter().position(|one| *one == suffix)?;
        let amount = amount.checked_mul(1024_i128.checked_pow(u32::try_from(power).ok()?)?)?;
        // A part of a byte is rounded up.
        let mut units = (amount + 999_999_999) / 1_000_000_000;
        if units < 1024 {
            return Some(format!("{sign}{}", decimal(units.checked_mul(1_000_000_000)?)));
        }
        let mut power = 0;
        while units % 1024 == 0 && power + 1 < BINARY.len() {
            (units, power) = (units / 1024, power + 1);
        }
        return Some(format!("{sign}{units}{}", BINARY[power]));
    }
    let power = DECIMAL.iter().position(|one| *one == suffix)?;
    let scaled = amount.checked_mul(1000_i128.checked_pow(u32::try_from(power).ok()?)?)?;
    // The first suffix is a billionth already.
    let billionths = (scaled + 999_999_999) / 1_000_000_000;
    Some(if billionths == 0 { "0".to_owned() } else { format!("{sign}{}", decimal(billionths)) })
}

/// A quantity as a number, in billionths, rounded up; `None` where [`canonical`] has no form of it.
pub(super) fn billionths(text: &str) -> Option<i128> {
    let form = canonical(text)?;
    let end = form.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(form.len());
    let (number, suffix) = form.split_at(end);
    let number: i128 = number.parse().ok()?;
    match BINARY.iter().position(|one| *one == suffix).filter(|_| !suffix.is_empty()) {
        Some(power) => {
            number.checked_mul(1024_i128.checked_pow(u32::try_from(power).ok()?)?)?.checked_mul(1_000_000_000)
        }
        None => {
            let power = DECIMAL.iter().position(|one| *one == suffix)?;
            number.checked_mul(1000_i128.checked_pow(u32::try_from(power).ok()?)?)
        }
    }
}

fn decimal(mut billionths: i128) -> String {
    if billionths == 0 {
        return "0".to_owned();
    }
    let mut power = 0;
    while billionths % 1000 == 0 && power + 1 < DECIMAL.len() {
        (billionths, power) = (billionths / 1000, power + 1);
    }
    format!("{billionths}{}", DECIMAL[power])
}

#[cfg(test)]
mod tests {
    use super::{billionths, canonical};

    #[test]
    fn quantity_has_one_form() {
        for (text, form) in [
            ("81559Mi", "81559Mi"),
            ("81920Mi", "80Gi"),
            ("1024Ki", "1Mi"),
            ("1", "1"),
            ("1000", "1k"),
            ("85899345920", "85899345920"),
            ("0.5", "500m"),
            ("1.5Gi", "1536Mi"),
            ("0", "0"),
            ("512Ki", "512Ki"),
            ("0.5Ki", "512"),
            ("-2k", "-2k"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(form), "{text}");
        }
        for (text, number) in [("1n", 1), ("1500m", 1_500_000_000), ("2", 2_000_000_000), ("1Ki", 1_024_000_000_000)] {
            assert_eq!(billionths(text), Some(number), "{text}");
        }
        for text in ["", "Mi", "1 Gi", "1mi", "1.2.3", "--1", "many"] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }
}
