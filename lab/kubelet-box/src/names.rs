//! The resource names and endpoint names that a kubelet accepts in a registration.
//!
//! Called by `registration` and a test of linkwise. Pure. The rules are those of Kubernetes' extended resource names.

/// The prefix under which quotas name a resource. It counts towards [`MAX_DOMAIN`].
const QUOTA_PREFIX: &str = "requests.";
/// The longest DNS subdomain, in bytes.
const MAX_DOMAIN: usize = 253;
/// The longest name after the slash, in bytes.
const MAX_NAME: usize = 63;

/// Returns true if `name` is an extended resource name: `domain/name`, not of kubernetes.io, not beginning with
/// `requests.`, and still a qualified name with it in front.
pub fn is_extended_resource(name: &str) -> bool {
    let Some((domain, rest)) = name.split_once('/') else { return false };
    !name.contains("kubernetes.io/")
        && !name.starts_with(QUOTA_PREFIX)
        && domain.len() + QUOTA_PREFIX.len() <= MAX_DOMAIN
        && domain.split('.').all(is_label)
        && is_name(rest)
}

/// Returns true if `endpoint` names a file in the kubelet's own folder.
pub(super) fn is_file_name(endpoint: &str) -> bool {
    !matches!(endpoint, "" | "." | "..") && !endpoint.contains(['/', '\0'])
}

fn is_label(label: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
}

fn is_name(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    name.len() <= MAX_NAME && name.bytes().all(inner) && ends(name.bytes().next()) && ends(name.bytes().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_extended_resource_names_are_accepted() {
        for good in ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "a/B_c"] {
            assert!(is_extended_resource(good), "{good}");
        }
        let long_name = format!("nvidia.com/{}", "a".repeat(64));
        let long_domain = format!("{}/gpu", vec!["a".repeat(49); 5].join("."));
        let bad =
            ["gpu", "/gpu", "nvidia.com/", "Nvidia.com/gpu", "nvidia.com/a/b", "nvidia.com/-gpu", "nvidia.com/gpu."];
        let reserved = ["kubernetes.io/gpu", "x.kubernetes.io/gpu", "requests.nvidia.com/gpu"];
        for bad in bad.into_iter().chain(reserved).chain([&*long_name, &*long_domain]) {
            assert!(!is_extended_resource(bad), "{bad}");
        }
    }

    #[test]
    fn endpoints_stay_in_the_folder() {
        assert!(is_file_name("linkwise-gpu.sock"));
        for bad in ["", ".", "..", "../x.sock", "/tmp/x.sock", "a/b"] {
            assert!(!is_file_name(bad), "{bad}");
        }
    }
}
