//! The environment variables of the settings, read once at the start.

use std::collections::BTreeMap;

use super::Origin;
use crate::config::file::{Finding, Severity};
use crate::config::removed;

/// Variables and their texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The environment of this process.
    pub fn read() -> Self {
        let known = super::VARIABLES.iter().copied().flatten().copied().chain(removed::variables());
        #[expect(clippy::disallowed_methods, reason = "this is the door that the ban points to")]
        let text = |variable: &str| Some(std::env::var_os(variable)?.to_string_lossy().into_owned());
        Self(known.filter_map(|variable| Some((variable.to_owned(), text(variable)?))).collect())
    }

    /// An environment of these variables, for tests.
    pub fn of<const N: usize>(variables: [(&str, &str); N]) -> Self {
        Self(variables.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect())
    }

    /// An error for each variable of an earlier version that is set.
    pub(super) fn removed(&self) -> impl Iterator<Item = Finding> {
        let set = removed::variables().filter(|name| self.get(name).is_some_and(|text| !text.is_empty()));
        set.filter_map(|name| Some(Origin::Environment(name).finding("", Severity::Error, removed::refusal(name)?)))
    }

    pub(super) fn get(&self, variable: &str) -> Option<&str> {
        self.0.get(variable).map(String::as_str)
    }
}
