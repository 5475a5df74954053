//! [`Guid`]: the EUI-64 by which an RDMA fabric knows a card or a port.

use crate::prelude::*;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::quote::quoted;

/// A GUID of a card or a port. It is never zero, which stands for an unknown one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Guid(u64);

/// The error for a text that is no GUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} is not a GUID (expected sixteen hexadecimal digits, such as b8ce:f603:00a1:b2c4, not all 0)", quoted(text))]
pub struct GuidError {
    text: String,
}

impl Guid {
    /// Makes a GUID from its number; `None` for 0.
    pub fn new(number: u64) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }

    /// Reads a GUID from the low half of a port's GID, as the kernel writes it: eight groups of four digits.
    pub fn of_gid(gid: &str) -> Option<Self> {
        let at = gid.match_indices(':').nth(3)?.0;
        gid.get(at..)?.strip_prefix(':')?.parse().ok()
    }
}

impl fmt::Display for Guid {
    /// Writes the GUID as the kernel does in /sys/class/infiniband.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |shift: u32| (self.0 >> shift) & 0xffff;
        write!(f, "{:04x}:{:04x}:{:04x}:{:04x}", part(48), part(32), part(16), part(0))
    }
}

impl FromStr for Guid {
    type Err = GuidError;

    /// Reads the kernel's form.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let groups: Vec<&str> = text.split(':').collect();
        let is_group = |group: &&str| group.len() == 4 && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_whole = groups.len() == 4 && groups.iter().all(is_group);
        let number = is_whole.then(|| u64::from_str_radix(&groups.concat(), 16).ok()).flatten();
        number.and_then(Self::new).ok_or_else(|| GuidError { text: text.to_owned() })
    }
}

impl TryFrom<String> for Guid {
    type Error = GuidError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Guid> for String {
    fn from(guid: Guid) -> Self {
        guid.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_are_read_as_the_kernel_writes_them() {
        let guid: Guid = "b8ce:f603:00a1:b2c4".parse().unwrap();
        assert_eq!((guid.0, guid.to_string().as_str()), (0xb8ce_f603_00a1_b2c4, "b8ce:f603:00a1:b2c4"));
        for wrong in ["", "0000:0000:0000:0000", "b8ce:f603:00a1", "b8ce:f603:00a1:b2c4:0000", "b8ce:f603:00a1:+2c4"] {
            assert!(wrong.parse::<Guid>().is_err(), "{wrong}");
        }
        let of_gid = |gid: &str| Guid::of_gid(gid).map(|guid| guid.to_string());
        assert_eq!(of_gid("fe80:0000:0000:0000:506b:4b03:003c:eee8").as_deref(), Some("506b:4b03:003c:eee8"));
        assert_eq!(
            [of_gid("fe80:0000:0000:0000:0000:0000:0000:0000"), of_gid("fe80::1"), of_gid("")],
            [const { None }; 3]
        );
    }
}
