//! [`ResourceName`]: the name under which a kubelet counts devices.

use crate::prelude::*;
use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use crate::names::is_word;
use crate::quote::quoted;
use crate::topology::MigProfile;

/// The name of an extended resource, `domain/name`, that every kubelet takes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceName(String);

/// The error for a text that is not a resource name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{} is not an extended resource name: {why}", quoted(text))]
pub struct ResourceNameError {
    text: String,
    why: &'static str,
}

impl ResourceNameError {
    /// The rule that the text breaks.
    pub fn why(&self) -> &'static str {
        self.why
    }
}

/// The prefix under which a quota names a resource. Kubernetes limits the length of the name with this prefix.
const QUOTA_PREFIX: &str = "requests.";

/// The longest DNS subdomain, in characters.
const MAX_DOMAIN: usize = 253;

/// The longest name after the slash, in characters.
const MAX_NAME: usize = 63;

impl ResourceName {
    /// The name of the whole GPUs of a node, `nvidia.com/gpu`.
    pub fn gpu() -> Self {
        Self("nvidia.com/gpu".to_owned())
    }

    /// The name of the MIG devices of one profile, as in the NVIDIA plugin: `nvidia.com/mig-1g.10gb.me`.
    pub fn mig(profile: &MigProfile) -> Self {
        Self(format!("nvidia.com/mig-{}", profile.to_string().replace('+', ".")))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The first rule of Kubernetes that a text breaks (`IsExtendedResourceName` in pkg/apis/core/v1/helper).
fn broken_rule(text: &str) -> Option<&'static str> {
    let label = |label: &str| is_word(label, b"-") && !label.bytes().any(|byte| byte.is_ascii_uppercase());
    let Some((domain, name)) = text.split_once('/') else {
        return Some("expected domain/name, such as nvidia.com/gpu");
    };
    if !domain.split('.').all(label) {
        return Some("before the slash there must be a DNS name in lower case, such as nvidia.com");
    }
    if !is_word(name, b"-_.") {
        return Some("a name has letters, digits, '-', '_' and '.' only, with a letter or digit first and last");
    }
    if text.contains("kubernetes.io/") {
        return Some("kubernetes.io is reserved for Kubernetes");
    }
    if text.starts_with(QUOTA_PREFIX) {
        return Some("'requests.' is the prefix of quotas");
    }
    if domain.len().saturating_add(QUOTA_PREFIX.len()) > MAX_DOMAIN {
        return Some("the domain is too long for a quota (244 characters at most)");
    }
    (name.len() > MAX_NAME).then_some("the name after the slash is too long (63 characters at most)")
}

impl FromStr for ResourceName {
    type Err = ResourceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match broken_rule(text) {
            None => Ok(Self(text.to_owned())),
            Some(why) => Err(ResourceNameError { text: text.to_owned(), why }),
        }
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_kubelets_refuse_are_refused() {
        let long_domain =
            |length: usize| format!("{}/gpu", vec!["a".repeat(48); 5].join(".") + &"b".repeat(length - 244));
        let long_name = |length: usize| format!("nvidia.com/{}", "a".repeat(length));
        for good in ["nvidia.com/gpu", "a/B_c", "kubernetes.io.example.com/gpu", &long_domain(244), &long_name(63)] {
            assert_eq!(good.parse::<ResourceName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        for (bad, why) in [
            ("gpu", "domain/name"),
            ("Nvidia.com/gpu", "lower case"),
            ("/gpu", "DNS name"),
            ("nvidia.com/gpu.", "first and last"),
            ("nvidia.com/a/b", "letters, digits"),
            ("kubernetes.io/gpu", "reserved"),
            ("x.kubernetes.io/gpu", "reserved"),
            ("mykubernetes.io/gpu", "reserved"),
            ("requests.nvidia.com/gpu", "prefix of quotas"),
            (&long_domain(245), "244 characters"),
            (&long_name(64), "63 characters"),
        ] {
            let error = bad.parse::<ResourceName>().unwrap_err();
            assert!(error.why().contains(why), "{error}");
        }
    }
}
