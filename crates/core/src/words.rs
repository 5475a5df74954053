//! The words by which configuration files and the command line name the values of an enum.
//!
//! Read by `config`, which makes its parsers and its error texts from them. The serialised form of each value is its word.

use crate::allocation::AllocationPolicy;
use crate::state::{MigStrategy, NumaHints, XidClass};

/// An enum whose values each have one word.
pub trait Words: Copy + PartialEq + 'static {
    /// Each word and its value, in the order in which people list them.
    const WORDS: &'static [(&'static str, Self)];

    /// The value of a word.
    fn from_word(word: &str) -> Option<Self> {
        Self::WORDS.iter().find(|(known, _)| *known == word).map(|(_, value)| *value)
    }
}

impl Words for MigStrategy {
    const WORDS: &'static [(&'static str, Self)] =
        &[("none", Self::None), ("single", Self::Single), ("mixed", Self::Mixed)];
}

impl Words for NumaHints {
    const WORDS: &'static [(&'static str, Self)] =
        &[("node", Self::Node), ("package", Self::Package), ("off", Self::Off)];
}

impl Words for AllocationPolicy {
    const WORDS: &'static [(&'static str, Self)] =
        &[("best-effort", Self::BestEffort), ("distributed", Self::Distributed), ("packed", Self::Packed)];
}

impl Words for XidClass {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("ignore", Self::Ignore),
        ("application", Self::Application),
        ("reset-gpu", Self::ResetGpu),
        ("reboot-node", Self::RebootNode),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    fn serialised_as_words<T: Words + Serialize>() {
        for (word, value) in T::WORDS {
            assert_eq!(serde_json::to_value(value).unwrap(), *word);
        }
    }

    #[test]
    fn values_are_serialised_as_their_words() {
        serialised_as_words::<MigStrategy>();
        serialised_as_words::<NumaHints>();
        serialised_as_words::<AllocationPolicy>();
        serialised_as_words::<XidClass>();
    }
}
