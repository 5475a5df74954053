//! Reads the host without NVML: the PCI bus, the driver's version, the library's file.
//!
//! Called by the executor (`driver`), once a poll, on a thread of its own: all facts come from files, and a file of a
//! device in trouble may never answer.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linkwise_core::state::NodeIdentity;
use linkwise_core::topology::PciAddress;
use linkwise_host::hwloc::{BusGpus, PciBus, held_by_others, is_tegra};

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The state of the host around the agents. A change may require another agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostFingerprint {
    /// The NVIDIA GPUs on the PCI bus; `None` if the kernel does not list the bus here.
    pub bus: Option<BusGpus>,
    /// The ids of this boot and of this load of the driver.
    pub identity: NodeIdentity,
    /// The library that a new agent would load, if it is known.
    pub library: Option<Library>,
    /// Set if the host is a Tegra, whose own GPU is on no PCI bus.
    pub is_tegra: bool,
}

impl HostFingerprint {
    /// Returns true if the library file changed. Learning its path for the first time is not a change.
    pub fn has_other_library(&self, before: &Self) -> bool {
        let changed = |(now, before): (&Library, &Library)| now.path == before.path && now.file != before.file;
        self.library.as_ref().zip(before.library.as_ref()).is_some_and(changed)
    }

    /// Returns true if the bus has other GPUs, or if another driver took or left one.
    pub fn has_other_bus(&self, before: &Self) -> bool {
        (self.gpus(), self.foreign()) != (before.gpus(), before.foreign())
    }

    /// The GPUs that another driver holds, with that driver: they are not served.
    pub fn foreign(&self) -> Vec<(PciAddress, String)> {
        let foreign = self.bus.iter().flat_map(held_by_others);
        foreign.map(|(pci, driver)| (pci, driver.to_owned())).collect()
    }

    /// The GPUs that can be served once NVIDIA's driver holds them.
    pub fn gpus(&self) -> Vec<PciAddress> {
        let foreign = self.foreign();
        let gpus = self.bus.iter().flat_map(BusGpus::keys).copied();
        gpus.filter(|pci| !foreign.iter().any(|(other, _)| other == pci)).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Library {
    path: PathBuf,
    /// Device, inode, time and size.
    file: Option<(u64, u64, i64, i64, u64)>,
}

#[derive(Debug)]
pub(super) struct HostProbe {
    sysfs: PathBuf,
    /// The library's path or the driver's root, if one is configured.
    configured: Option<PathBuf>,
    bus: PciBus,
    /// The library's path at the last probe.
    library: Option<PathBuf>,
}

impl HostProbe {
    /// A probe of the host with this /sys.
    pub fn new(sysfs: PathBuf, configured: Option<PathBuf>) -> Self {
        Self { sysfs, configured, bus: PciBus::default(), library: None }
    }

    /// Reads the host; `agent` is the process that has loaded the library, if there is one.
    pub fn look(&mut self, agent: Option<u32>) -> HostFingerprint {
        // A folder is a driver's root, in which the library has its usual name.
        let library = self.configured.as_deref().filter(|path| !path.is_dir());
        let maps = agent.and_then(|agent| line(Path::new(&format!("/proc/{agent}/maps"))));
        let path = loadable(maps.as_deref().and_then(|maps| mapped(maps, library)), library).or(self.library.take());
        self.library.clone_from(&path);
        let library = path.map(|path| Library { file: file_id(&path), path });
        let is_tegra = is_tegra(&self.sysfs);
        HostFingerprint { bus: self.bus.gpus(&self.sysfs), identity: identity(&self.sysfs), library, is_tegra }
    }
}

/// The ids of this boot and of this load of the driver: sysfs gives each folder it makes a new inode number. (The
/// folder's times change when a process first reads it.) It reads files, which may hang.
pub fn identity(sysfs: &Path) -> NodeIdentity {
    let module = sysfs.join("module/nvidia");
    let driver = std::fs::metadata(&module).ok().map(|folder| {
        let version = line(&module.join("version")).unwrap_or_else(|| "unknown version".to_owned());
        format!("{version}, load {}", folder.ino())
    });
    NodeIdentity { boot: line(Path::new(BOOT_ID)), driver }
}

/// Returns true if the PCI bus is listed and has no GPU that NVIDIA's driver could serve. It reads files, which may
/// hang.
pub fn has_no_gpu(sysfs: &Path) -> bool {
    let host = HostProbe::new(sysfs.to_owned(), None).look(None);
    host.bus.is_some() && host.gpus().is_empty()
}

fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The library's line in a process's memory map (proc_pid_maps(5)), from its path on.
fn mapped<'a>(maps: &'a str, library: Option<&Path>) -> Option<&'a str> {
    let configured = library.and_then(|path| path.canonicalize().ok());
    let name = configured.as_deref().or(library).and_then(Path::file_name);
    maps.lines().find_map(|line| {
        let path = line.get(line.find('/')?..)?;
        let file = Path::new(path.trim_end_matches(" (deleted)")).file_name()?;
        let usual = file.to_str().is_some_and(|file| file.starts_with("libnvidia-ml.so"));
        (name == Some(file) || (name.is_none() && usual)).then_some(path)
    })
}

/// The library that a new agent would load: the configured path, or the usual name in the folder of the mapped one.
fn loadable(mapped: Option<&str>, library: Option<&Path>) -> Option<PathBuf> {
    let usual = || Some(Path::new(mapped?).with_file_name("libnvidia-ml.so.1"));
    library.map(Path::to_owned).or_else(usual)
}

fn file_id(path: &Path) -> Option<(u64, u64, i64, i64, u64)> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino(), file.mtime(), file.mtime_nsec(), file.size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f1c2a000000-7f1c2a021000 rw-p 00000000 00:00 0
7f1c2b000000-7f1c2b200000 r-xp 00000000 fd:01 393  /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05
7f1c2b200000-7f1c2b400000 r--p 00200000 fd:01 393  /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05
7f1c2c000000-7f1c2c200000 r-xp 00000000 fd:01 394  /opt/my libs/lib.so (deleted)";

    #[test]
    fn library_is_found_in_a_memory_map() {
        let usual = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05";
        assert_eq!(mapped(MAPS, None), Some(usual));
        assert_eq!(mapped(MAPS, Some(Path::new("/opt/my libs/lib.so"))), Some("/opt/my libs/lib.so (deleted)"));
        assert_eq!(mapped(MAPS, Some(Path::new("/opt/other.so"))), None);
        assert_eq!(mapped("", None), None);
        let link = Some(PathBuf::from("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
        assert_eq!(loadable(Some(usual), None), link);
        assert_eq!(loadable(None, None), None);
    }

    #[test]
    fn library_changed_only_where_its_path_was_known() {
        let probed = |library: Option<(&str, u64)>| {
            let library = library.map(|(path, inode)| Library { path: path.into(), file: Some((1, inode, 0, 0, 9)) });
            HostFingerprint { bus: None, identity: NodeIdentity::default(), library, is_tegra: false }
        };
        let before = probed(Some(("/a", 1)));
        for (library, other) in
            [(Some(("/a", 1)), false), (Some(("/a", 2)), true), (Some(("/b", 2)), false), (None, false)]
        {
            assert_eq!(probed(library).has_other_library(&before), other, "{library:?}");
        }
        assert!(!before.has_other_library(&probed(None)));
    }
}
