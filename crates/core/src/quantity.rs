//! Quantities of the Kubernetes API, limited to the whole numbers that capacities of devices need.

use crate::prelude::*;

/// The units of 1024 and its powers.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// The units of 1000 and its powers.
const DECIMAL: [&str; 6] = ["k", "M", "G", "T", "P", "E"];

/// The units below one: 1/1000 and its powers.
const PARTS: [&str; 3] = ["m", "u", "n"];

/// Writes mebibytes as Kubernetes does: in the largest binary unit that gives a whole number.
pub(crate) fn of_mebibytes(mebibytes: u64) -> String {
    whole(mebibytes, 1024, BINARY.into_iter().skip(1))
}

/// Writes a plain number as Kubernetes does: 1000 is `1k`.
pub(crate) fn of_number(number: u64) -> String {
    whole(number, 1000, core::iter::once("").chain(DECIMAL))
}

/// Writes a number in the largest unit that gives a whole number.
fn whole(mut number: u64, base: u64, mut units: impl Iterator<Item = &'static str>) -> String {
    let mut unit = units.next().unwrap_or_default();
    while number > 0
        && number.is_multiple_of(base)
        && let Some(larger) = units.next()
    {
        (number, unit) = (number / base, larger);
    }
    if number == 0 { "0".to_owned() } else { format!("{number}{unit}") }
}

/// Reads a quantity; a fraction is rounded up. Returns `None` if the text is not a quantity, or if the quantity is
/// negative, too large or has an exponent (the API server writes no exponent for amounts that it rounded to a step).
pub fn parse(text: &str) -> Option<u64> {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(end)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() + fraction.len() == 0 || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let power = |units: &[&str]| units.iter().position(|one| *one == unit).and_then(|at| u32::try_from(at + 1).ok());
    let (times, part) = match (unit, power(&BINARY), power(&DECIMAL), power(&PARTS)) {
        ("", ..) => (1, 1),
        (_, Some(power), ..) => (1024_u128.checked_pow(power)?, 1),
        (_, _, Some(power), _) => (1000_u128.checked_pow(power)?, 1),
        (_, _, _, Some(power)) => (1, 1000_u128.checked_pow(power)?),
        _ => return None,
    };
    let decimals = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    u64::try_from(digits.checked_mul(times)?.div_ceil(part.checked_mul(decimals)?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_as_kubernetes_does() {
        for (mib, expected) in [(81_559, "81559Mi"), (81_920, "80Gi"), (1 << 20, "1Ti"), (0, "0"), (1, "1Mi")] {
            assert_eq!(of_mebibytes(mib), expected);
        }
        for (number, expected) in [(1, "1"), (999, "999"), (1000, "1k"), (1024, "1024"), (2_000_000, "2M"), (0, "0")] {
            assert_eq!(of_number(number), expected);
        }
        assert_eq!(of_mebibytes(1 << 50), "1024Ei", "no unit is larger");
    }

    #[test]
    fn quantities_are_read_as_whole_numbers() {
        for (text, expected) in [
            ("1", Some(1)),
            ("1k", Some(1000)),
            ("1Ki", Some(1024)),
            ("20389Mi", Some(20_389 << 20)),
            ("1.5Gi", Some(1536 << 20)),
            ("1500m", Some(2)),
            ("1n", Some(1)),
            (".5", Some(1)),
            ("0", Some(0)),
            ("85899345920", Some(80 << 30)),
            ("15Ei", Some(15 << 60)),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        let beyond = "99999999999999999999999999999999999999999Gi";
        for text in ["16Ei", "", "Gi", "-1", "+1", "1e3", "1gi", "1.2.3", "1 Gi", "\u{e9}", "1\u{e9}", beyond] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
