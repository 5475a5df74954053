//! Kubernetes quantities as numbers.

/// A quantity in billionths, as exact as Kubernetes' own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Quantity(pub i128);

const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

impl Quantity {
    /// Reads one; `None` where the text is none.
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
        let at = |power: usize| u32::try_from(power).ok();
        let value = if let Some(power) = BINARY.iter().position(|one| *one == suffix) {
            number.checked_mul(1024_i128.checked_pow(at(power + 1)?)?)?
        } else {
            // Written in billionths; the first suffix is one.
            let power = DECIMAL.iter().position(|one| *one == suffix)?;
            number.checked_mul(1000_i128.checked_pow(at(power)?)?)? / 1_000_000_000
        };
        Some(Self(if negative { -value } else { value }))
    }

    /// A whole number.
    pub fn of_whole(number: i128) -> Self {
        Self(number * 1_000_000_000)
    }

    /// The least whole number that is no less (`Quantity.Value`).
    pub fn ceil(self) -> i128 {
        -(-self.0).div_euclid(1_000_000_000)
    }

    /// A whole number as the API server writes it in binary units (`BinarySI`).
    pub fn binary(self) -> String {
        let mut number = self.ceil();
        let (base, units): (i128, &[&str]) = if number.abs() < 1024 { (1000, &DECIMAL[3..]) } else { (1024, &BINARY) };
        let mut unit = "";
        let larger = if base == 1000 { &units[1..] } else { units };
        for one in larger {
            if number == 0 || number % base != 0 {
                break;
            }
            (number, unit) = (number / base, one);
        }
        format!("{number}{unit}")
    }

    /// As a whole number, if it is one.
    pub fn whole(self) -> Option<i64> {
        (self.0 % 1_000_000_000 == 0).then(|| i64::try_from(self.0 / 1_000_000_000).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::Quantity;

    #[test]
    fn quantities_are_compared_as_numbers() {
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
        assert_eq!((of("3").and_then(Quantity::whole), of("1m").and_then(Quantity::whole)), (Some(3), None));
        for text in ["", "Gi", "1gi", "1.2.3", "many", "1e3", "99999999999999999999999999999999999999Ei"] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
