//! Kubernetes quantities as numbers.

/// A quantity in billionths, the precision of Kubernetes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(pub i128);

const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// Reads a quantity; parts of a billionth are rounded away from zero. `None` if the text is not a quantity, or has
    /// a form that is not modelled (exponents, more than nine decimals).
    pub fn parse(text: &str) -> Option<Self> {
        let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let (negative, digits) = match number.strip_prefix('-') {
            Some(digits) => (true, digits),
            None => (false, number.strip_prefix('+').unwrap_or(number)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let only_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.len() + fraction.len() == 0 || !only_digits(whole) || !only_digits(fraction) || fraction.len() > 9 {
            return None;
        }
        let number: i128 = format!("0{whole}{fraction:0<9}").parse().ok()?;
        let times = |base: i128, power: usize| number.checked_mul(base.checked_pow(u32::try_from(power).ok()?)?);
        let value = match (binary_power(suffix), DECIMAL.iter().position(|one| *one == suffix)) {
            (Some(power), _) => times(1024, power)?,
            // The first decimal suffix is one billionth, so that the power counts from billionths.
            (None, power) => (times(1000, power?)? + 999_999_999) / 1_000_000_000,
        };
        Some(Self(if negative { -value } else { value }))
    }

    /// The canonical form, in which the API server writes a quantity: `1Mi` for `1024Ki`, `1k` for `1000`. `None` if
    /// the text is not a quantity.
    pub fn canonical(text: &str) -> Option<String> {
        let quantity = Self::parse(text)?;
        let suffix = text.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        Some(if binary_power(suffix).is_some() { quantity.binary() } else { shortest(quantity.0, 1000, &DECIMAL) })
    }

    /// Converts a whole number.
    pub fn of_whole(number: i128) -> Self {
        Self(number * 1_000_000_000)
    }

    /// Rounds up to a whole number (`Quantity.Value`).
    pub fn ceil(self) -> i128 {
        -(-self.0).div_euclid(1_000_000_000)
    }

    /// Rounds up to a whole number, and writes it in binary units from 1024 on, as the API server does (`BinarySI`).
    pub fn binary(self) -> String {
        let number = self.ceil();
        if number.abs() < 1024 { shortest(number, 1000, &DECIMAL[3..]) } else { shortest(number, 1024, &BINARY) }
    }
}

/// The power of 1024 that a suffix stands for; `None` for a decimal suffix.
fn binary_power(suffix: &str) -> Option<usize> {
    BINARY.iter().position(|one| *one == suffix).filter(|power| *power > 0)
}

/// Writes a number in the largest unit in which it is whole.
fn shortest(mut number: i128, base: i128, units: &[&str]) -> String {
    let mut unit = 0;
    while number != 0 && number % base == 0 && unit + 1 < units.len() {
        (number, unit) = (number / base, unit + 1);
    }
    if number == 0 { "0".to_owned() } else { format!("{number}{}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::Quantity;

    #[test]
    fn quantity_has_one_canonical_form() {
        let forms = "81559Mi=81559Mi 81920Mi=80Gi 1024Ki=1Mi 1=1 1000=1k 85899345920=85899345920 0.5=500m \
                     1.5Gi=1536Mi 0=0 512Ki=512Ki 0.5Ki=512 -2k=-2k 0.1n=1n";
        for (text, form) in forms.split_whitespace().map(|words| words.split_once('=').unwrap()) {
            assert_eq!(Quantity::canonical(text).as_deref(), Some(form), "{text}");
        }
        for (text, number) in [("1n", 1), ("1500m", 1_500_000_000), ("2", 2_000_000_000), ("1Ki", 1_024_000_000_000)] {
            assert_eq!(Quantity::parse(text), Some(Quantity(number)), "{text}");
        }
        for text in ["", "Mi", "1 Gi", "1mi", "1.2.3", "--1", "many"] {
            assert_eq!(Quantity::canonical(text), None, "{text}");
        }
    }

    #[test]
    fn quantities_are_compared_and_rounded_as_numbers() {
        let of = |text: &str| Quantity::parse(text);
        for (one, other) in [("1Ki", "1024"), ("80Gi", "81920Mi"), ("0.5", "500m"), ("1k", "1000"), ("-1", "-1000m")] {
            assert_eq!(of(one), of(other), "{one} {other}");
        }
        assert!(of("1M") < of("1Mi") && of("40Gi") < of("80Gi") && of("-1") < of("0"));
        let ceil = |text: &str| of(text).map(Quantity::ceil);
        assert_eq!(["1500m", "1", "-1500m", "1n"].map(ceil), [2, 1, -1, 1].map(Some));
        for (number, text) in [(0, "0"), (3, "3"), (1000, "1k"), (1024, "1Ki"), (1536 << 20, "1536Mi"), (1025, "1025")]
        {
            assert_eq!(Quantity::of_whole(number).binary(), text);
        }
        for text in ["", "Gi", "1gi", "1.2.3", "many", "1e3", "99999999999999999999999999999999999999Ei"] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
