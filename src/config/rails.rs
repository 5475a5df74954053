//! A list of rails on the command line: `0-3`, `0,2,4-5`.

use std::fmt;
use std::str::FromStr;

use linkwise_core::quote::excerpt;
use linkwise_core::topology::NodeTopology;

/// Rails, in the order in which they were given: at least one, and none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rails {
    /// The rails.
    pub rails: Vec<u8>,
    text: String,
}

impl fmt::Display for Rails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Rails {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut rails: Vec<u8> = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (rail(first)?, rail(last)?);
            if first > last {
                return Err(format!("{part} goes backwards: expected {last}-{first}"));
            }
            for rail in first..=last {
                if rails.contains(&rail) {
                    return Err(format!("rail {rail} is given twice"));
                }
                rails.push(rail);
            }
        }
        Ok(Self { rails, text: text.to_owned() })
    }
}

fn rail(text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|rail| usize::from(*rail) < NodeTopology::MAX_GPUS);
    let last = NodeTopology::MAX_GPUS - 1;
    number.ok_or_else(|| format!("'{}' is not a rail (expected 0 to {last}, as in 0-3 or 0,2,4-5)", excerpt(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rails_are_numbers_and_ranges() {
        for (text, rails) in [("0-3", &[0, 1, 2, 3][..]), ("6", &[6]), ("4-5,0,2", &[4, 5, 0, 2]), ("63-63", &[63])] {
            let read: Rails = text.parse().unwrap();
            assert_eq!((read.rails.as_slice(), read.to_string().as_str()), (rails, text));
        }
        for (text, error) in [
            ("", "'' is not a rail"),
            ("0-", "'' is not a rail"),
            ("0,,1", "'' is not a rail"),
            ("64", "'64' is not a rail"),
            ("0-999", "'999' is not a rail"),
            ("-1", "'' is not a rail"),
            ("0-1-2", "'1-2' is not a rail"),
            ("3-0", "3-0 goes backwards: expected 0-3"),
            ("0-3,2", "rail 2 is given twice"),
        ] {
            let refused = text.parse::<Rails>().unwrap_err();
            assert!(refused.starts_with(error), "{text}: {refused}");
        }
    }
}
