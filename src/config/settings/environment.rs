//! The environment variables of the settings, read once at the start.

use std::collections::BTreeMap;

/// Variables and their texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The environment of this process.
    pub fn read() -> Self {
        let known = super::VARIABLES.iter().copied().flatten();
        #[expect(clippy::disallowed_methods, reason = "this is the door that the ban points to")]
        let text = |variable: &str| Some(std::env::var_os(variable)?.to_string_lossy().into_owned());
        Self(known.filter_map(|variable| Some(((*variable).to_owned(), text(variable)?))).collect())
    }

    /// An environment of these variables, for tests.
    pub fn of<const N: usize>(variables: [(&str, &str); N]) -> Self {
        Self(variables.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect())
    }

    pub(super) fn get(&self, variable: &str) -> Option<&str> {
        self.0.get(variable).map(String::as_str)
    }
}
