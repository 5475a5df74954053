//! The values of labels: Kubernetes' rules for keys and values, and the form of a product's name as a value.

use crate::prelude::*;

/// The longest value, and the longest name behind the slash of a key, in bytes (Kubernetes,
/// apimachinery/pkg/util/validation).
const MOST: usize = 63;

/// Makes a text fit to be part of a value, as GPU Feature Discovery does: characters other than letters, digits, '-',
/// '_' and '.' are removed, and the words that are left are joined by '-'. The length and the first and last characters
/// are not changed.
pub fn sanitised(text: &str) -> String {
    let kept: String = text.chars().filter(|c| is_inner(*c) || c.is_ascii_whitespace()).collect();
    kept.split_ascii_whitespace().collect::<Vec<_>>().join("-")
}

/// Returns true if Kubernetes, and with it NFD, accepts this value. An empty one is valid.
pub(super) fn is_value(value: &str) -> bool {
    value.is_empty() || is_name(value)
}

/// Returns true if Kubernetes accepts this key. The prefix is one of ours, and valid.
pub(super) fn is_key(key: &str) -> bool {
    key.split_once('/').is_some_and(|(_, name)| is_name(name))
}

fn is_name(text: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= MOST && text.chars().all(is_inner) && is_end(text.chars().next()) && is_end(text.chars().last())
}

fn is_inner(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of GPU Feature Discovery's own test.
    #[test]
    fn texts_become_values_as_in_gfd() {
        for (text, value) in [
            ("a space separated string", "a-space-separated-string"),
            ("some(thing)else", "somethingelse"),
            ("some ( thing )else", "some-thing-else"),
            ("NVIDIA-TITAN-X-(Pascal)", "NVIDIA-TITAN-X-Pascal"),
            (" input  with multiple   spaces   ", "input-with-multiple-spaces"),
            ("some [ / thing / ]else", "some-thing-else"),
            ("some / thing /else", "some-thing-else"),
            ("some-thing.else_new", "some-thing.else_new"),
            ("", ""),
            ("größer\tals 1", "grer-als-1"),
        ] {
            assert_eq!(sanitised(text), value, "{text}");
        }
    }

    #[test]
    fn values_are_checked_as_kubernetes_does() {
        let long = |length: usize| "a".repeat(length);
        for value in ["", "a", "0", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1", "A_b.C-d", &long(63)] {
            assert!(is_value(value), "{value}");
        }
        for value in ["-a", "a-", ".a", "a_", "a b", "@a.b.c", "é", "a/b", "a\n", &long(64)] {
            assert!(!is_value(value), "{value}");
        }
        assert!(is_key("nvidia.com/gpu.count") && !is_key("nvidia.com/") && !is_key("gpu"));
        assert!(!is_key(&format!("nvidia.com/{}", long(64))));
    }
}
