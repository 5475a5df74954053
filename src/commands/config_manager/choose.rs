//! Chooses a node's configuration: a function of the node's label, the existing names, and the defaults.

use std::collections::BTreeSet;

use crate::config::{ConfigDefaults, Fallback};
use linkwise_core::quote::quoted;
use thiserror::Error;

/// The configuration that the fallback `named` stands for.
const NAMED: &str = "default";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// The configuration; `None` for an empty one.
    pub name: Option<String>,
    /// The reason for the choice, for the log.
    pub why: &'static str,
}

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum NoChoice {
    #[error("the folder has no configuration")]
    NoneThere,
    #[error("the node's label names {}, and there is only {there}", quoted(.name))]
    Label { name: String, there: String },
    #[error("--default-config (DEFAULT_CONFIG) names {}, and there is only {there}", quoted(.name))]
    Default { name: String, there: String },
    #[error("the node has no such label, there is no default, and no fallback fits; there is {there}")]
    NoDefault { there: String },
}

/// Chooses a configuration. An empty label counts as no label.
pub(super) fn choose(
    label: Option<&str>,
    names: &BTreeSet<String>,
    defaults: &ConfigDefaults,
) -> Result<Choice, NoChoice> {
    if names.is_empty() {
        return Err(NoChoice::NoneThere);
    }
    let there = || names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
    let chosen = |name: &str, why| Ok(Choice { name: Some(name.to_owned()), why });
    if let Some(name) = label.filter(|name| !name.is_empty()) {
        let missing = || NoChoice::Label { name: name.to_owned(), there: there() };
        return if names.contains(name) { chosen(name, "the node's label") } else { Err(missing()) };
    }
    if let Some(name) = &defaults.name {
        let missing = || NoChoice::Default { name: name.clone(), there: there() };
        return if names.contains(name) { chosen(name, "the default") } else { Err(missing()) };
    }
    for fallback in &defaults.fallbacks {
        match (fallback, names.first()) {
            (Fallback::Named, _) if names.contains(NAMED) => return chosen(NAMED, "the fallback 'named'"),
            (Fallback::Single, Some(only)) if names.len() == 1 => return chosen(only, "the fallback 'single'"),
            (Fallback::Empty, _) => return Ok(Choice { name: None, why: "the fallback 'empty'" }),
            _ => {}
        }
    }
    Err(NoChoice::NoDefault { there: there() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(label: Option<&str>, names: &str, default: &str, fallbacks: &[Fallback]) -> Result<String, String> {
        let names = names.split(' ').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let name = (!default.is_empty()).then(|| default.to_owned());
        choose(label, &names, &ConfigDefaults { name, fallbacks: fallbacks.to_vec() })
            .map(|choice| choice.name.unwrap_or_else(|| "(empty)".to_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn label_beats_default_beats_fallbacks() {
        use Fallback::{Empty, Named, Single};
        for (label, names, default, fallbacks, expected) in [
            (Some("b"), "a b default", "a", &[Named][..], "b"),
            (Some(""), "a b default", "a", &[Named], "a"),
            (None, "a b default", "a", &[Named], "a"),
            (None, "a b default", "", &[Named, Single], "default"),
            (None, "a", "", &[Named, Single], "a"),
            (None, "a b", "", &[Named, Single, Empty], "(empty)"),
            (None, "a default", "", &[Empty, Named], "(empty)"),
        ] {
            assert_eq!(
                chosen(label, names, default, fallbacks).as_deref(),
                Ok(expected),
                "{label:?} {names} {default}"
            );
        }
    }

    #[test]
    fn missing_configuration_is_named_with_those_that_there_are() {
        use Fallback::{Named, Single};
        for (label, names, default, fallbacks, problem) in [
            (Some("x"), "a b", "a", &[][..], "the node's label names 'x', and there is only 'a', 'b'"),
            (None, "a b", "x", &[], "--default-config (DEFAULT_CONFIG) names 'x', and there is only 'a', 'b'"),
            (None, "a b", "", &[Named, Single], "no fallback fits; there is 'a', 'b'"),
            (Some("a"), "", "", &[], "the folder has no configuration"),
        ] {
            let error = chosen(label, names, default, fallbacks).unwrap_err();
            assert!(error.ends_with(problem), "{error}");
        }
    }
}
