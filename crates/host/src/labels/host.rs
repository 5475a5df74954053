//! Reads the machine's type and NVIDIA's PCI devices. The reads block, on /sys; a missing file gives no fact.

use std::fs;
use std::path::Path;

use super::vgpu::{self, Guest};
use linkwise_core::publish::labels::{HostFacts, Vgpu};
use linkwise_system::files;

/// The most bytes of the machine type file that are read; a label's value has 63 characters.
const MACHINE_TYPE: u64 = 4096;

const NVIDIA: &str = "0x10de";

/// The facts of this host. `sysfs` is the path of its /sys; an empty path stands for no machine type file.
pub fn host(machine_type_file: &Path, sysfs: &Path) -> HostFacts {
    let text = files::read(machine_type_file, MACHINE_TYPE).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    HostFacts { machine_type: text, vgpu: vgpu(&sysfs.join("bus/pci/devices")) }
}

/// The virtual GPU among NVIDIA's devices, if there is one. If a configuration space cannot be read whole, the result
/// is unknown.
fn vgpu(devices: &Path) -> Vgpu {
    let Ok(entries) = fs::read_dir(devices) else { return Vgpu::Unknown };
    let mut found = Vgpu::Absent;
    for device in entries.flatten().map(|entry| entry.path()) {
        if fs::read_to_string(device.join("vendor")).is_ok_and(|vendor| vendor.trim() == NVIDIA) {
            match files::read(&device.join("config"), vgpu::LONGEST).ok().and_then(|space| vgpu::guest(&space)) {
                Some(Guest::Virtual { driver_version, driver_branch }) => {
                    found = Vgpu::Present { driver_version, driver_branch };
                }
                Some(Guest::Physical) => {}
                None => return Vgpu::Unknown,
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sysfs: &Path, pci: &str, vendor: &str, config: &[u8]) {
        let folder = sysfs.join("bus/pci/devices").join(pci);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(folder.join("config"), config).unwrap();
    }

    #[test]
    fn host_without_nvidia_devices_has_no_vgpu() {
        let sysfs = tempfile::tempdir().unwrap();
        let vgpu = || host(Path::new(""), sysfs.path()).vgpu;
        assert_eq!(vgpu(), Vgpu::Unknown, "no bus at all");
        device(sysfs.path(), "0000:00:00.0", "0x8086", &[0; 64]);
        assert_eq!(vgpu(), Vgpu::Absent);
        device(sysfs.path(), "0000:01:00.0", NVIDIA, &[0; 256]);
        assert_eq!(vgpu(), Vgpu::Absent);
        device(sysfs.path(), "0000:02:00.0", NVIDIA, &vgpu::tests::space());
        let (driver_version, driver_branch) = (Some("460.16".to_owned()), Some("r460_00".to_owned()));
        assert_eq!(vgpu(), Vgpu::Present { driver_version, driver_branch });
        // An unprivileged process sees this part only.
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
