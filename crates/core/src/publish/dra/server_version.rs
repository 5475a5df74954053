//! [`ServerVersion`]: the release of an API server, and what it has.

/// The release of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    /// 1.
    pub major: u32,
    /// Such as 36.
    pub minor: u32,
    /// Such as 2.
    pub patch: u32,
}

/// The first release whose API server keeps taints and counters (gates DRADeviceTaints and DRAPartitionableDevices, on
/// by default).
const TAINTS_AND_COUNTERS: ServerVersion = ServerVersion { major: 1, minor: 36, patch: 0 };

impl ServerVersion {
    /// Reads the `gitVersion` of `/version`: `v1.36.2`, `v1.36.2-eks-1a2b`, `v1.37.0-rc.1`. `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let release = text.strip_prefix('v').unwrap_or(text).split(['-', '+']).next()?;
        let mut numbers = release.split('.').map(|number| number.parse().ok());
        let version = Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
        numbers.next().is_none().then_some(version)
    }

    /// Returns true if its API server keeps taints.
    pub fn has_taints(self) -> bool {
        self >= TAINTS_AND_COUNTERS
    }

    /// Whether its API server and scheduler have counters.
    pub fn has_counters(self) -> bool {
        self >= TAINTS_AND_COUNTERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_with_what_vendors_add() {
        for (text, expected) in [
            ("v1.36.2", Some((1, 36, 2))),
            ("1.37.0", Some((1, 37, 0))),
            ("v1.36.2-eks-1a2b3c", Some((1, 36, 2))),
            ("v1.36.2+k3s1", Some((1, 36, 2))),
            ("v1.37.0-rc.1", Some((1, 37, 0))),
            ("v1.36", None),
            ("v1.36.2.1", None),
            ("v1.x.2", None),
            ("", None),
        ] {
            let numbers = ServerVersion::parse(text).map(|version| (version.major, version.minor, version.patch));
            assert_eq!(numbers, expected, "{text}");
        }
    }
}
