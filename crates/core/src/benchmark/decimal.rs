//! Decimal numbers as nccl-tests print them, read without floats.

use crate::prelude::*;

/// Reads digits with an optional fraction and multiplies the number by a thousand. `None` for signs, exponents, blanks,
/// and numbers that do not fit.
pub(super) fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) {
        return None;
    }
    let part = fraction.bytes().chain(*b"000").take(3).fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    whole.parse::<u64>().ok()?.checked_mul(1_000)?.checked_add(part)
}

/// Reads a bandwidth, which nccl-tests print with two decimals: a line that was cut in it has fewer. From 1000 GB/s on
/// there is no room for both.
pub(super) fn bandwidth(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.')?;
    let decimals = if whole.len() > 3 { 1..=2 } else { 2..=2 };
    decimals.contains(&fraction.len()).then(|| thousandths(text)).flatten()
}

/// Returns true for a whole number with an optional sign.
pub(super) fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Writes MB/s in the unit of nccl-tests, with two decimals.
pub fn gb_per_s(mb_per_s: u64) -> String {
    format!("{}.{:02} GB/s", mb_per_s / 1_000, mb_per_s % 1_000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_read_as_thousandths() {
        for (text, number) in [("0.00", 0), ("476.53", 476_530), ("9542917", 9_542_917_000), ("1.2345", 1_234)] {
            assert_eq!(thousandths(text), Some(number), "{text}");
        }
        for text in ["", ".5", "-1", "+1", "1e3", "1.5e1", "1.2.3", "N/A", "99999999999999999999"] {
            assert_eq!(thousandths(text), None, "{text}");
        }
    }

    #[test]
    fn bandwidth_that_was_cut_is_refused() {
        assert_eq!(
            [bandwidth("116.26"), bandwidth("0.97"), bandwidth("1234.5")],
            [Some(116_260), Some(970), Some(1_234_500)]
        );
        assert_eq!([bandwidth("116.2"), bandwidth("116."), bandwidth("116")], [None; 3]);
        assert_eq!(gb_per_s(476_530), "476.53 GB/s");
    }
}
