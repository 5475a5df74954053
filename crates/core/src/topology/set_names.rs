//! The names of sets of GPUs in DRA: `gpus-4-0-1-2-3` is the set of `gpu-0` to `gpu-3`.
//!
//! A name has the set's size and the minor numbers of its members, so that it names the same GPUs wherever it is read:
//! in slices, claims, checkpoints and the kubelet's lists. A GPU without a name by minor number is in no set.

use crate::prelude::*;

/// The longest name of a device (a DNS label).
const MOST_NAME: usize = 63;

/// What the name of a set begins with.
const PREFIX: &str = "gpus-";

/// What the name of a GPU begins with.
const GPU: &str = "gpu-";

/// The name of the set of these GPUs; `None` where it would be too long, or not for two or more. `minors`: ascending.
pub fn set_name(minors: &[u32]) -> Option<String> {
    let name = minors.iter().fold(format!("{PREFIX}{}", minors.len()), |name, minor| format!("{name}-{minor}"));
    (minors.len() > 1 && name.len() <= MOST_NAME).then_some(name)
}

/// The minor numbers of the members of a set, ascending; `None` for what is no name of a set.
pub fn set_minors(name: &str) -> Option<Vec<u32>> {
    let (_, minors) = name.strip_prefix(PREFIX)?.split_once('-')?;
    let minors: Vec<u32> = minors.split('-').map(|minor| minor.parse().ok()).collect::<Option<_>>()?;
    let ascend = minors.windows(2).all(|pair| pair.first() < pair.last());
    // Only what we would write ourselves: no leading zeros, no other size.
    (ascend && set_name(&minors).as_deref() == Some(name)).then_some(minors)
}

/// The names of the members of a set; `None` for what is no name of a set.
pub fn set_members(name: &str) -> Option<Vec<String>> {
    Some(set_minors(name)?.into_iter().map(gpu_name).collect())
}

/// The name of a GPU by its minor number.
pub fn gpu_name(minor: u32) -> String {
    format!("{GPU}{minor}")
}

/// The minor number in the name of a GPU; `None` for any other name.
pub fn minor_of(name: &str) -> Option<u32> {
    let minor: u32 = name.strip_prefix(GPU)?.parse().ok()?;
    (gpu_name(minor) == name).then_some(minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_set_names_its_members() {
        for minors in [&[0, 1][..], &[0, 3, 4, 7], &[8, 9, 10, 11, 12, 13, 14, 15], &[0, u32::MAX]] {
            let name = set_name(minors).unwrap();
            assert_eq!(set_minors(&name).as_deref(), Some(minors), "{name}");
        }
        assert_eq!(set_name(&[0, 3]).as_deref(), Some("gpus-2-0-3"));
        assert_eq!(set_members("gpus-2-0-3"), Some(Vec::from(["gpu-0".to_owned(), "gpu-3".to_owned()])));
        assert_eq!((set_name(&[]), set_name(&[7]), set_name(&[u32::MAX; 8])), (None, None, None));
    }

    #[test]
    fn other_names_are_no_sets() {
        for name in [
            "gpu-0",
            "gpus-",
            "gpus-2",
            "gpus-2-0",
            "gpus-1-0",
            "gpus-2-0-1-2",
            "gpus-2-1-0",
            "gpus-2-1-1",
            "gpus-2-0-01",
            "gpus-02-0-1",
            "gpus-2-0-+1",
            "gpus-2-0-1-",
            "gpus-2-0-4294967296",
            "gpus-0",
            "",
        ] {
            assert_eq!(set_minors(name), None, "{name}");
        }
        assert_eq!(
            [minor_of("gpu-7"), minor_of("gpu-07"), minor_of("gpu-7-mig-x"), minor_of("gpus-2-0-1")],
            [Some(7), None, None, None]
        );
    }
}
