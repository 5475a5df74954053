//! Names of hardware: PCI addresses, UUIDs, NUMA nodes, packages, and the GUIDs (EUI-64) by which an RDMA fabric knows
//! cards and ports.
//!
//! These types parse text once. Inside the program a value of such a type is valid because it exists.

use crate::prelude::*;
use alloc::sync::Arc;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::quote::ParseError;

/// A PCI function's address, `domain:bus:device.function`, domain included.
///
/// Addresses are ordered by domain, bus, device and function. Ties between sets of GPUs are broken in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// Makes an address from its numbers; `None` if the device is above 31 or the function above 7.
    pub fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        (device < 32 && function < 8).then_some(Self { domain, bus, device, function })
    }

    /// The PCI domain (segment).
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// The bus number.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// The device number on the bus, 0 to 31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// The function number, 0 to 7.
    pub fn function(self) -> u8 {
        self.function
    }
}

impl fmt::Display for PciAddress {
    /// Writes the address as the kernel does in /sys/bus/pci/devices: at least four hexadecimal digits of domain.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = ParseError;

    /// Reads the kernel's form (`0000:3b:00.0`), NVML's (`00000000:3B:00.0`) and the short one without a domain
    /// (`3b:00.0`, domain 0).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WHY: &str = "is not a PCI address (expected domain:bus:device.function, such as 0000:3b:00.0)";
        let hex = |part: &str, max_digits: usize| {
            let is_hex = (1..=max_digits).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let narrow = |part: &str| hex(part, 2).and_then(|n| u8::try_from(n).ok());
        let address = || {
            let (rest, function) = text.rsplit_once('.')?;
            let parts: Vec<&str> = rest.split(':').collect();
            let (domain, bus, device) = match parts[..] {
                [domain, bus, device] => (domain, bus, device),
                [bus, device] => ("0", bus, device),
                _ => return None,
            };
            Self::new(hex(domain, 8)?, narrow(bus)?, narrow(device)?, narrow(function)?)
        };
        address().ok_or_else(|| ParseError::new(text, WHY))
    }
}

/// A UUID as NVML prints it, which is also a device id for the kubelet. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid<const OF_MIG_DEVICE: bool>(Arc<str>);

/// A GPU's UUID, `GPU-...`.
pub type GpuUuid = Uuid<false>;

/// A MIG device's UUID, `MIG-...`. Drivers before R470 write
/// `MIG-GPU-<the GPU's UUID>/<GPU instance>/<compute instance>`.
pub type MigUuid = Uuid<true>;

impl GpuUuid {
    /// The longest device id that the kubelet's API allows, in characters.
    pub const MAX: usize = 63;

    /// Makes up a UUID for the GPU at an address, for sources that know no UUIDs. An address always gives the same
    /// UUID, and different addresses different ones. Its zeros show that it is made up.
    pub fn made_up(pci: PciAddress) -> Self {
        let PciAddress { domain, bus, device, function } = pci;
        Self(format!("GPU-00000000-0000-0000-000{function:x}-{domain:08x}{bus:02x}{device:02x}").into())
    }
}

impl Default for GpuUuid {
    fn default() -> Self {
        Self::made_up(PciAddress::default())
    }
}

impl MigUuid {
    /// Makes up a UUID for a MIG device by its index on the GPU at an address, like [`GpuUuid::made_up`].
    pub fn made_up(pci: PciAddress, index: u32) -> Self {
        let PciAddress { domain, bus, device, function } = pci;
        Self(format!("MIG-{index:08x}-0000-0000-000{function:x}-{domain:08x}{bus:02x}{device:02x}").into())
    }
}

impl<const OF_MIG_DEVICE: bool> Uuid<OF_MIG_DEVICE> {
    /// The UUID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UUID as text, shared and not copied.
    pub(crate) fn text(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }
}

impl<const OF_MIG_DEVICE: bool> fmt::Display for Uuid<OF_MIG_DEVICE> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<const OF_MIG_DEVICE: bool> FromStr for Uuid<OF_MIG_DEVICE> {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const OF_GPU: &str = "is not a GPU UUID (expected letters, digits and '-', 63 at most)";
        const OF_MIG: &str = "is not a MIG device's UUID (expected MIG- and letters, digits, '-' and '/', 63 at most)";
        let (rest, separators, why): (_, &[u8], _) =
            if OF_MIG_DEVICE { (text.strip_prefix("MIG-"), b"-/", OF_MIG) } else { (Some(text), b"-", OF_GPU) };
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || separators.contains(&b);
        let is_valid =
            rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(is_allowed)) && text.len() <= GpuUuid::MAX;
        if is_valid { Ok(Self(text.into())) } else { Err(ParseError::new(text, why)) }
    }
}

/// A NUMA node's number as the kernel gives it; the kernel's -1 is `None`, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NumaNodeId(pub u32);

/// A CPU package's (socket's) number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PackageId(pub u32);

/// The GUID of a card or a port. It is never 0, which means unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Guid(u64);

impl Guid {
    /// Makes a GUID from its number; `None` for 0.
    pub fn new(number: u64) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }

    /// Reads a GUID from the low half of a port's GID, as the kernel writes it: eight groups of four digits.
    pub fn of_gid(gid: &str) -> Option<Self> {
        let (at, _) = gid.match_indices(':').nth(3)?;
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
    type Err = ParseError;

    /// Reads the kernel's form.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WHY: &str = "is not a GUID (expected sixteen hexadecimal digits, such as b8ce:f603:00a1:b2c4, not all 0)";
        let groups: Vec<&str> = text.split(':').collect();
        let is_group = |group: &&str| group.len() == 4 && group.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_whole = groups.len() == 4 && groups.iter().all(is_group);
        let number = is_whole.then(|| u64::from_str_radix(&groups.concat(), 16).ok()).flatten();
        number.and_then(Self::new).ok_or_else(|| ParseError::new(text, WHY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_and_nvml_address_forms_parse() {
        let kernel: PciAddress = "0000:3b:00.0".parse().unwrap();
        assert_eq!(kernel, "00000000:3B:00.0".parse().unwrap());
        assert_eq!(kernel, "3b:00.0".parse().unwrap());
        assert_eq!(kernel.to_string(), "0000:3b:00.0");
        let far: PciAddress = "00010000:01:1f.7".parse().unwrap();
        assert_eq!((far.domain(), far.bus(), far.device(), far.function()), (0x10000, 1, 31, 7));
        assert_eq!(far.to_string(), "10000:01:1f.7");
    }

    #[test]
    fn invalid_address_is_refused_by_name() {
        for text in ["", "0000:3b:00", "0000:3b:20.0", "0000:3b:00.8", "+0:00.0", "g:00.0", "1:2:3:4.0"] {
            let error = text.parse::<PciAddress>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn made_up_uuids_differ_by_address() {
        let of = |pci: &str| GpuUuid::made_up(pci.parse().unwrap()).to_string();
        assert_eq!(of("0000:3b:00.0"), "GPU-00000000-0000-0000-0000-000000003b00");
        assert_eq!(of("ffffffff:ff:1f.7"), "GPU-00000000-0000-0000-0007-ffffffffff1f");
        assert!(of("ffffffff:ff:1f.7").parse::<GpuUuid>().is_ok());
    }

    #[test]
    fn invalid_gpu_uuids_are_refused() {
        assert!("GPU-0b1c".parse::<GpuUuid>().is_ok());
        for text in ["", "GPU 1", "a/b", &"x".repeat(64)] {
            assert!(text.parse::<GpuUuid>().is_err(), "{text}");
        }
    }

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
