//! What the parent sees of the driver without NVML: the PCI bus, the driver's version, the library's file.
//!
//! Called by `driver` once a round. All of it is files, and a file of a device in trouble may never answer: such work runs
//! beside, a piece at a time, and is not waited for longer than said.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::hwloc::PciBus;
use crate::state::NodeIdentity;
use crate::topology::PciAddress;

/// The kernel's name for this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Blocking work of one kind, of which there is never more than one piece.
#[derive(Debug)]
pub struct Slow<T> {
    running: Option<JoinHandle<T>>,
}

impl<T> Default for Slow<T> {
    fn default() -> Self {
        Self { running: None }
    }
}

impl<T: Send + 'static> Slow<T> {
    /// Starts the work, unless an earlier piece still runs.
    pub fn start(&mut self, work: impl FnOnce() -> T + Send + 'static) {
        self.running.get_or_insert_with(|| tokio::task::spawn_blocking(work));
    }

    /// Whether a piece runs, or has a result that was not taken.
    pub fn runs(&self) -> bool {
        self.running.is_some()
    }

    /// The result of what runs, once it ends; `None` where it broke off. Never, where nothing runs. Cancel safe.
    pub async fn ended(&mut self) -> Option<T> {
        let Some(running) = &mut self.running else { return std::future::pending().await };
        let done = running.await;
        self.running = None;
        // What broke off has no result; the next piece is a new one.
        done.ok()
    }

    /// Starts the work and waits for it; `None` when it takes too long. Where an earlier piece still runs, that one's result
    /// is taken, and not waited for again.
    pub async fn within(&mut self, limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let limit = if self.runs() { Duration::ZERO } else { limit };
        self.start(work);
        timeout(limit, self.ended()).await.ok().flatten()
    }

    /// The result of a piece that was not waited for to its end, once there is one.
    pub async fn late(&mut self) -> Option<T> {
        timeout(Duration::ZERO, self.ended()).await.ok().flatten()
    }
}

/// What there is to be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The NVIDIA GPUs on the PCI bus; `None` where the kernel does not list it here.
    pub bus: Option<BTreeSet<PciAddress>>,
    /// The kernel's driver, while it is loaded and says so here: its version, and which load of it this is.
    pub driver: Option<(String, u64)>,
    /// The library that a new child would load, as far as that is known.
    pub library: Option<Library>,
}

impl Outside {
    /// Whether the library is another one than it was: where it is only known by now where it lies, it is none.
    pub fn has_other_library(&self, before: &Self) -> bool {
        let other = |(now, before): (&Library, &Library)| now.path == before.path && now.file != before.file;
        self.library.as_ref().zip(before.library.as_ref()).is_some_and(other)
    }
}

/// The file of the driver's library, as far as it can be told from another one in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Where it lies.
    pub path: PathBuf,
    /// Device, inode, time and size.
    file: Option<(u64, u64, i64, i64, u64)>,
}

/// Looks: `child` is the process that has loaded the library, if one has, `library` its path where one is configured, `last`
/// where it lay for the child before.
pub fn look(
    bus: &mut PciBus,
    sysfs: &Path,
    child: Option<u32>,
    library: Option<&Path>,
    last: Option<PathBuf>,
) -> Outside {
    // A folder is a driver's root, in which the library has its usual name.
    let library = library.filter(|path| !path.is_dir());
    let maps = child.and_then(|child| line(Path::new(&format!("/proc/{child}/maps"))));
    let path = loadable(maps.as_deref().and_then(|maps| mapped(maps, library)), library).or(last);
    let library = path.map(|path| Library { file: file_id(&path), path });
    let driver = driver(sysfs).and_then(|(version, load)| Some((version?, load)));
    Outside { bus: bus.gpus(sysfs), driver, library }
}

/// Which boot and which load of the driver this is.
pub fn identity(sysfs: &Path) -> NodeIdentity {
    let driver = driver(sysfs)
        .map(|(version, load)| format!("{}, load {load}", version.unwrap_or_else(|| "unknown version".to_owned())));
    NodeIdentity { boot: line(Path::new(BOOT_ID)), driver }
}

/// The loaded driver: its version, where it says so, and which load of it this is. sysfs gives each folder it makes a new inode
/// number: another load, another number. Its times say when somebody looked first, and change.
fn driver(sysfs: &Path) -> Option<(Option<String>, u64)> {
    let module = sysfs.join("module/nvidia");
    let load = std::fs::metadata(&module).ok()?.ino();
    Some((line(&module.join("version")), load))
}

fn line(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The library's line in a process's memory map (proc_pid_maps(5)), by its path on.
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

/// What a new child would load: the configured path, or the usual name where the present one lies.
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
    fn finds_the_library_in_a_memory_map() {
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
    fn another_library_is_another_file_where_it_lay_before() {
        let outside = |library: Option<(&str, u64)>| {
            let library = library.map(|(path, inode)| Library { path: path.into(), file: Some((1, inode, 0, 0, 9)) });
            Outside { bus: None, driver: None, library }
        };
        let before = outside(Some(("/a", 1)));
        for (library, other) in
            [(Some(("/a", 1)), false), (Some(("/a", 2)), true), (Some(("/b", 2)), false), (None, false)]
        {
            assert_eq!(outside(library).has_other_library(&before), other, "{library:?}");
        }
        assert!(!before.has_other_library(&outside(None)));
    }

    #[tokio::test]
    async fn work_that_hangs_is_waited_for_once_and_its_late_result_is_taken() {
        let mut slow = Slow::default();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let hangs = move || {
            let _ = wait.recv();
            1
        };
        assert_eq!(slow.within(Duration::ZERO, hangs).await, None);
        let again = timeout(Duration::from_secs(20), slow.within(Duration::MAX, || 2));
        assert_eq!(again.await, Ok(None), "no second piece beside the first, and no second wait for it");
        assert_eq!(slow.late().await, None);
        assert!(slow.runs());
        drop(go_on);
        assert_eq!(timeout(Duration::from_secs(20), slow.ended()).await, Ok(Some(1)));
        assert!(!slow.runs() && timeout(Duration::ZERO, slow.ended()).await.is_err(), "it is taken");
        assert_eq!(slow.within(Duration::from_secs(60), || 2).await, Some(2));
    }
}
