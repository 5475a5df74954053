//! Reads the machine's type and NVIDIA's PCI devices. The reads block, on /sys; a missing file gives no fact.
//!
//! A virtual GPU has NVIDIA's vendor-specific capability in its PCI configuration space, which names the host's driver.
//! The capability list is that of the PCI Local Bus Specification 3.0, section 6.7. The records are read as NVIDIA's
//! GPU Feature Discovery reads them (internal/vgpu).

use std::fs;
use std::path::Path;

use linkwise_core::publish::labels::{HostFacts, Vgpu};
use linkwise_system::files;

/// The largest machine type file that is read, in bytes; a label's value has at most 63 characters.
const MAX_MACHINE_TYPE: u64 = 4096;

const NVIDIA: &str = "0x10de";

/// The facts of this host. `sysfs` is the path of its /sys; an empty `machine_type_file` stands for none.
pub fn host(machine_type_file: &Path, sysfs: &Path) -> HostFacts {
    let text = files::read(machine_type_file, MAX_MACHINE_TYPE).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    HostFacts { machine_type: text, vgpu: vgpu(&sysfs.join("bus/pci/devices")) }
}

/// The virtual GPU among NVIDIA's devices, if there is one. If less than `STANDARD_SPACE` of a
/// configuration space can be read, the result is unknown.
fn vgpu(devices: &Path) -> Vgpu {
    let Ok(entries) = fs::read_dir(devices) else { return Vgpu::Unknown };
    let mut found = Vgpu::Absent;
    for device in entries.flatten().map(|entry| entry.path()) {
        if fs::read_to_string(device.join("vendor")).is_ok_and(|vendor| vendor.trim() == NVIDIA) {
            let space = files::read(&device.join("config"), MAX_CONFIGURATION_SPACE);
            match space.map_or(Vgpu::Unknown, |space| vgpu_in(&space)) {
                Vgpu::Absent => {}
                Vgpu::Unknown => return Vgpu::Unknown,
                present => found = present,
            }
        }
    }
    found
}

/// The whole configuration space of a PCI Express device, in bytes.
const MAX_CONFIGURATION_SPACE: u64 = 4096;

/// The size of the part that every device has, in bytes. A process without privileges reads 64 bytes of this part.
const STANDARD_SPACE: usize = 256;

/// The offset of the status register's low byte, and the bit that shows a capability list.
const STATUS: (usize, u8) = (0x06, 0x10);

/// The offset of the byte with the offset of the list's first entry.
const CAPABILITIES_POINTER: usize = 0x34;

/// The most capabilities: 48 of 4 bytes fit behind the header.
const MAX_CAPABILITIES: usize = 48;

/// The id of a vendor-specific capability: id, next, length, content.
const VENDOR_SPECIFIC: u8 = 0x09;

/// The first bytes of the content of a virtual GPU's capability.
const VGPU_SIGNATURE: &[u8] = b"VF";

/// The virtual GPU that a device is, by its configuration space; unknown if less than `STANDARD_SPACE` could be read.
fn vgpu_in(space: &[u8]) -> Vgpu {
    let Some(space) = space.get(..STANDARD_SPACE) else { return Vgpu::Unknown };
    match capability(space).and_then(|capability| Some((capability, capability.get(3..5)?))) {
        Some((capability, VGPU_SIGNATURE)) => {
            let driver = host_driver(capability);
            let text = |at: usize| {
                let bytes = driver?.get(at..at + TEXT_LENGTH)?;
                let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(TEXT_LENGTH);
                String::from_utf8(bytes.get(..end)?.to_vec()).ok()
            };
            Vgpu::Present { driver_version: text(2), driver_branch: text(2 + TEXT_LENGTH) }
        }
        _ => Vgpu::Absent,
    }
}

fn capability(space: &[u8]) -> Option<&[u8]> {
    let (status, has_list) = STATUS;
    if space.get(status)? & has_list == 0 {
        return None;
    }
    let mut at = usize::from(space.get(CAPABILITIES_POINTER)? & !3);
    for _ in 0..MAX_CAPABILITIES {
        let [id, next, length] = space.get(at..at + 3)?.try_into().ok()?;
        if at == 0 {
            return None;
        }
        if id == VENDOR_SPECIFIC {
            // A capability that claims more bytes than there are ends with the space.
            return space.get(at..(at + usize::from(length)).min(space.len()));
        }
        at = usize::from(next & !3);
    }
    None
}

/// The length of a text of the host driver's record, NUL-padded.
const TEXT_LENGTH: usize = 10;

/// The record with id 0, the host driver's: id, length, version, branch. Records begin behind the signature.
fn host_driver(capability: &[u8]) -> Option<&[u8]> {
    let mut at = 5;
    loop {
        let record = capability.get(at..)?;
        let [id, length] = record.get(..2)?.try_into().ok()?;
        if id == 0 {
            return Some(record);
        }
        // A record without a length would repeat for ever.
        at += usize::from(length).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The capability of GPU Feature Discovery's own test.
    const CAPABILITY: [u8; 27] = [
        0x09, 0x68, 0x1b, 0x56, 0x46, 0x00, 0x16, 0x34, 0x36, 0x30, 0x2e, 0x31, 0x36, 0x00, 0x00, 0x00, 0x00, 0x72,
        0x34, 0x36, 0x30, 0x5f, 0x30, 0x30, 0x00, 0x00, 0x00,
    ];

    /// A configuration space with a power management capability, and a capability of these bytes.
    fn with(capability: &[u8]) -> Vec<u8> {
        let mut space = vec![0; 256];
        space[STATUS.0] = STATUS.1;
        space[CAPABILITIES_POINTER] = 0x60;
        space[0x60..0x63].copy_from_slice(&[0x01, 0x80, 0x08]);
        space[0x80..0x80 + capability.len()].copy_from_slice(capability);
        space
    }

    fn vgpu_space() -> Vec<u8> {
        with(&CAPABILITY)
    }

    fn virtual_gpu(version: &str, branch: &str) -> Vgpu {
        Vgpu::Present { driver_version: Some(version.to_owned()), driver_branch: Some(branch.to_owned()) }
    }

    #[test]
    fn vgpu_capability_has_the_hosts_driver() {
        assert_eq!(vgpu_in(&vgpu_space()), virtual_gpu("460.16", "r460_00"));
        let long = *b"\x09\x00\x20VF\x07\x05xyz\x00\x16550.54.161r550_40\x00\x00\x00";
        assert_eq!(vgpu_in(&with(&long)), virtual_gpu("550.54.161", "r550_40"));
    }

    #[test]
    fn vgpu_is_absent_or_unknown_without_capability() {
        assert_eq!(vgpu_in(&[0; 256]), Vgpu::Absent);
        assert_eq!(vgpu_in(&with(&[0x09, 0x00, 0x1b, b'N', b'V'])), Vgpu::Absent);
        assert_eq!(vgpu_in(&with(&[0x10, 0x00, 0x02])), Vgpu::Absent);
        assert_eq!(vgpu_in(&with(&[0x10, 0x80, 0x02])), Vgpu::Absent, "a list without end");
        assert_eq!(vgpu_in(&[0; 64]), Vgpu::Unknown, "read without privileges");
        assert_eq!(vgpu_in(&[]), Vgpu::Unknown);
    }

    #[test]
    fn torn_capability_is_virtual_without_driver() {
        let torn = Vgpu::Present { driver_version: None, driver_branch: None };
        assert_eq!(vgpu_in(&with(&[0x09, 0x00, 0x05, b'V', b'F'])), torn);
        assert_eq!(vgpu_in(&with(&[0x09, 0x00, 0x09, b'V', b'F', 0x01, 0x00, 0x01, 0x00])), torn, "no length");
        // Spaces of any bytes give a result.
        for seed in 0..=255_u8 {
            let bytes: Vec<u8> = (0..=255_u8).map(|at| at.wrapping_mul(seed).wrapping_add(seed ^ 0x35)).collect();
            assert_ne!(vgpu_in(&bytes), Vgpu::Unknown);
        }
    }

    fn device(sysfs: &Path, pci: &str, vendor: &str, config: &[u8]) {
        let folder = sysfs.join("bus/pci/devices").join(pci);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(folder.join("config"), config).unwrap();
    }

    #[test]
    fn host_vgpu_comes_from_nvidia_devices() {
        let sysfs = tempfile::tempdir().unwrap();
        let vgpu = || host(Path::new(""), sysfs.path()).vgpu;
        assert_eq!(vgpu(), Vgpu::Unknown, "no bus at all");
        device(sysfs.path(), "0000:00:00.0", "0x8086", &[0; 64]);
        assert_eq!(vgpu(), Vgpu::Absent);
        device(sysfs.path(), "0000:01:00.0", NVIDIA, &[0; 256]);
        assert_eq!(vgpu(), Vgpu::Absent);
        device(sysfs.path(), "0000:02:00.0", NVIDIA, &vgpu_space());
        assert_eq!(vgpu(), virtual_gpu("460.16", "r460_00"));
        // An unprivileged process reads only 64 bytes.
        device(sysfs.path(), "0000:01:00.0", NVIDIA, &[0; 64]);
        assert_eq!(vgpu(), Vgpu::Unknown);
    }

    #[test]
    fn machine_type_is_a_short_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("product_name");
        let read = || host(&path, folder.path()).machine_type;
        assert_eq!(read(), None);
        for (content, expected) in
            [(b"DGX H100\n".to_vec(), Some("DGX H100\n")), (vec![b'x'; 5000], None), (vec![0xff], None)]
        {
            fs::write(&path, content).unwrap();
            assert_eq!(read().as_deref(), expected);
        }
    }
}
