//! Values as text: the words for an enum's values in configuration files and on the command line, numbers and lists for
//! messages, and the types whose serialised form is their `Display` text.
//!
//! `config` makes its parsers and error texts from [`Words`]. A value is serialised as its word.

use crate::prelude::*;
pub use serde::{Serialize, Serializer};

use crate::allocation::{AllocationPolicy, DeviceId, FallbackReason, Value};
use crate::publish::placement::Shortfall;
use crate::state::{Availability, MigStrategy, NumaHints, Pattern, ResourceName, XidClass};
use crate::topology::{AddressingMode, Guid, MigProfile, NumaNodeId, PackageId, PciAddress, Uuid};

/// Writes a number with its noun: `1 GPU`, `4 GPUs`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Writes MB/s as GB/s with one decimal, rounded down: `370.8`.
pub fn gigabytes(megabytes: u64) -> String {
    format!("{}.{}", megabytes / 1000, megabytes % 1000 / 100)
}

/// Writes things with commas between them.
pub fn list<T: ToString>(things: impl IntoIterator<Item = T>) -> String {
    things.into_iter().map(|thing| thing.to_string()).collect::<Vec<_>>().join(", ")
}

/// Writes the first `max` things as [`list`] does, and the number of the others: `a, b and 3 more`.
pub fn few<T: ToString>(things: &[T], max: usize) -> String {
    let named = list(things.iter().take(max).map(ToString::to_string));
    match things.len().saturating_sub(max) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Writes sorted numbers as `0-3, 6`: runs of three and more are joined.
pub fn ranges(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let run = |run: &[u32]| match run {
        [first, _, .., last] => format!("{first}-{last}"),
        few => list(few),
    };
    list(runs.map(run))
}

/// An enum whose values each have one word.
pub trait Words: Copy + PartialEq + 'static {
    /// Each word and its value, in the order in which people list them.
    const WORDS: &'static [(&'static str, Self)];

    /// The value of a word.
    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
    }
}

/// Implements [`Words`] for an enum: `words!(Switch { On = "on", Off = "off" })`. With `pub enum` before the name, as
/// in `words! { pub enum Switch { On = "on", Off = "off" } }`, it also defines the enum.
#[macro_export]
macro_rules! words {
    ($(#[$about:meta])* pub enum $type:ident { $($(#[$of_value:meta])* $value:ident = $word:literal),+ $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $($(#[$of_value])* $value),+ }

        $crate::words!($type { $($value = $word),+ });

        impl $crate::words::Serialize for $type {
            fn serialize<S: $crate::words::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(match self { $(Self::$value => $word),+ })
            }
        }
    };
    ($type:ty { $($value:ident = $word:literal),+ $(,)? }) => {
        impl $crate::words::Words for $type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$value)),+];
        }
    };
}

/// Implements `Display` as the serialised form.
macro_rules! shown_as_serialised {
    ($($type:ty),+) => { $(
        impl core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                self.serialize(f)
            }
        }
    )+ };
}

shown_as_serialised!(Availability, AddressingMode, FallbackReason, Shortfall, Value);
shown_as_serialised!(DeviceId, NumaNodeId, PackageId, Pattern);

/// Serialises a type as its `Display` text, and deserialises it with `FromStr`.
macro_rules! serialised_as_text {
    ($type:ty $(, $($generics:tt)+)?) => {
        impl$(<$($generics)+>)? serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de, $($($generics)+)?> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

serialised_as_text!(PciAddress);
serialised_as_text!(Uuid<OF_MIG_DEVICE>, const OF_MIG_DEVICE: bool);
serialised_as_text!(Guid);
serialised_as_text!(MigProfile);
serialised_as_text!(ResourceName);

words!(MigStrategy { None = "none", Single = "single", Mixed = "mixed" });
words!(NumaHints { Node = "node", Package = "package", Off = "off" });
words!(AllocationPolicy { BestEffort = "best-effort", Distributed = "distributed", Packed = "packed" });
words!(XidClass {
    Ignore = "ignore",
    Application = "application",
    ResetGpu = "reset-gpu",
    RebootNode = "reboot-node",
    RecoveryAction = "recovery-action",
});

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    fn assert_serialised_as_words<T: Words + Serialize>() {
        for (word, value) in T::WORDS {
            assert_eq!(serde_json::to_value(value).unwrap(), *word);
        }
    }

    #[test]
    fn runs_of_numbers_are_abbreviated() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8, 9");
        assert_eq!(ranges(&[u32::MAX]), "4294967295");
    }

    #[test]
    fn values_are_serialised_as_their_words() {
        assert_serialised_as_words::<MigStrategy>();
        assert_serialised_as_words::<NumaHints>();
        assert_serialised_as_words::<AllocationPolicy>();
        assert_serialised_as_words::<XidClass>();
    }
}
