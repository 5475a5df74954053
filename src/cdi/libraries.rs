//! The driver's libraries below the driver root, and the links that lead to them.
//!
//! Called by `scan` every 10 s. A library folder of a host has thousands of names, so it is read only when it changed:
//! the kernel gives a folder a new ctime whenever a name in it comes or goes.
//!
//! Which libraries: `pkg/nvcdi/driver-nvml.go` of NVIDIA/nvidia-container-toolkit.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::description::Library;
use super::driver::{entries, is_file};

/// Where distributions and installers put the driver's 64-bit libraries, relative to the driver root: Red Hat, Debian
/// and Ubuntu, Debian's alternatives, SUSE and Arch, Google's and Talos' installers.
pub(super) const FOLDERS: [&str; 12] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "glibc/lib",
    "usr/local/glibc/usr/lib",
];

/// The library without which there is no CUDA; the others are in the same folder.
pub(super) const LIBCUDA: &str = "libcuda.so.";

/// Libraries of the driver with version numbers of their own.
const OTHER_LIBRARIES: [&str; 2] = ["libnvidia-egl-gbm.so.", "libnvidia-egl-wayland.so."];

/// A folder that changed less than this before it was read is read again: file systems count time in ticks of up to 1
/// s, and a later change in the same tick would not show.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// The libraries of the driver; nothing where no folder has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The driver's version.
    pub version: String,
    /// The folder, relative to the driver root.
    pub folder: &'static str,
    /// The libraries, by name.
    pub libraries: Vec<Library>,
}

/// Finds the libraries, and remembers them until a folder changes.
#[derive(Debug)]
pub(super) struct LibraryFinder {
    root: PathBuf,
    settled_after: Duration,
    last: Option<(Key, Option<Found>)>,
    /// How often folders were read.
    reads: u64,
}

/// What the result depends on.
#[derive(Debug, PartialEq, Eq)]
struct Key {
    /// The version of the driver that is loaded.
    loaded: Option<String>,
    /// The state of each of [`FOLDERS`] that exists.
    folders: Vec<Option<FolderState>>,
}

/// Equal as long as no name in a folder came or went.
#[derive(Debug, PartialEq, Eq)]
struct FolderState {
    device: u64,
    inode: u64,
    /// The ctime, since the epoch. Unlike the mtime, no program sets it back.
    changed: Duration,
}

impl FolderState {
    fn of(folder: &Path) -> Option<Self> {
        let metadata = fs::metadata(folder).ok()?;
        let seconds = u64::try_from(metadata.ctime()).unwrap_or(0);
        let nanoseconds = u32::try_from(metadata.ctime_nsec()).unwrap_or(0);
        let changed = Duration::new(seconds, nanoseconds);
        Some(Self { device: metadata.dev(), inode: metadata.ino(), changed })
    }
}

impl LibraryFinder {
    /// Finds libraries below the driver root `root`, as this container has it.
    pub fn new(root: PathBuf) -> Self {
        Self { root, settled_after: SETTLED_AFTER, last: None, reads: 0 }
    }

    /// The libraries of the driver that is loaded, whose version is `loaded`; without one, those of the libcuda that is
    /// there.
    pub fn find(&mut self, loaded: Option<&str>) -> Option<&Found> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let folders = FOLDERS.iter().map(|folder| FolderState::of(&self.root.join(folder))).collect();
        let key = Key { loaded: loaded.map(str::to_owned), folders };
        let settled = |folder: &FolderState| now.saturating_sub(folder.changed) >= self.settled_after;
        let unchanged = self.last.as_ref().is_some_and(|(last, _)| *last == key);
        if !unchanged || !key.folders.iter().flatten().all(settled) {
            let found = self.read(loaded);
            self.last = Some((key, found));
        }
        self.last.as_ref().and_then(|(_, found)| found.as_ref())
    }

    fn read(&mut self, loaded: Option<&str>) -> Option<Found> {
        self.reads += 1;
        FOLDERS.into_iter().find_map(|folder| {
            let path = self.root.join(folder);
            let version = match loaded {
                Some(loaded) if is_file(&path.join(format!("{LIBCUDA}{loaded}"))) => loaded.to_owned(),
                Some(_) => return None,
                None => version_in(&path)?,
            };
            Some(Found { libraries: libraries(&path, &version), folder, version })
        })
    }
}

/// The version of the libcuda in a folder: the one that `libcuda.so.1` leads to, else the newest.
fn version_in(folder: &Path) -> Option<String> {
    let names = entries(folder);
    let versions: Vec<&str> = names
        .iter()
        .filter_map(|name| name.strip_prefix(LIBCUDA))
        .filter(|version| numbers(version).is_some())
        .collect();
    let target = fs::read_link(folder.join("libcuda.so.1")).ok();
    let linked = target.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()?.strip_prefix(LIBCUDA));
    let newest = versions.iter().max_by_key(|version| numbers(version)).copied();
    linked.filter(|linked| versions.contains(linked)).or(newest).map(str::to_owned)
}

/// The libraries of a version in a folder, with the links beside them that lead to them.
fn libraries(folder: &Path, version: &str) -> Vec<Library> {
    let names = entries(folder);
    let ending = format!(".so.{version}");
    let is_library = |name: &str| {
        let other = OTHER_LIBRARIES.iter().find_map(|other| name.strip_prefix(other)).and_then(numbers).is_some();
        (other || name.ends_with(&ending)) && is_file(&folder.join(name))
    };
    let mut found: BTreeMap<&str, Vec<(String, String)>> = BTreeMap::new();
    let mut links: BTreeMap<&str, String> = BTreeMap::new();
    for name in &names {
        if is_library(name) {
            found.insert(name, Vec::new());
        } else if let Some(target) = link_beside(&folder.join(name)) {
            links.insert(name, target);
        }
    }
    for (name, target) in &links {
        // libcuda.so says libcuda.so.1 says libcuda.so.550.54.15; a chain longer than that is no library's.
        let chain = std::iter::successors(Some(target), |name| links.get(name.as_str())).take(4);
        let mut libraries = chain.filter(|name| found.contains_key(name.as_str()));
        if let Some(leading) = libraries.next().and_then(|end| found.get_mut(end.as_str())) {
            leading.push(((*name).to_owned(), target.clone()));
        }
    }
    found.into_iter().map(|(name, links)| Library { name: name.to_owned(), links }).collect()
}

/// The target of a link, where that is a name in its own folder.
fn link_beside(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let target = target.to_str()?;
    (!target.contains('/')).then(|| target.to_owned())
}

/// The numbers of a version, two at least: of `550.54.15`, and not of the `1` of `libcuda.so.1`.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let numbers: Option<Vec<u64>> = version.split('.').map(|number| number.parse().ok()).collect();
    numbers.filter(|numbers| numbers.len() >= 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLDER: &str = "usr/lib/x86_64-linux-gnu";

    fn finder(root: &Path, settled_after: Duration) -> LibraryFinder {
        fs::create_dir_all(root.join(FOLDER)).unwrap();
        fs::write(root.join(FOLDER).join("libcuda.so.550.1"), "").unwrap();
        LibraryFinder { settled_after, ..LibraryFinder::new(root.to_owned()) }
    }

    fn names(finder: &mut LibraryFinder, loaded: Option<&str>) -> Vec<String> {
        finder.find(loaded).iter().flat_map(|found| &found.libraries).map(|library| library.name.clone()).collect()
    }

    /// Changes a folder, and its ctime too where both fall into one tick of the file system's clock.
    fn change(folder: &Path, change: impl FnOnce()) {
        let before = FolderState::of(folder);
        change();
        while FolderState::of(folder) == before {
            fs::set_permissions(folder, fs::metadata(folder).unwrap().permissions()).unwrap();
        }
    }

    #[test]
    fn unchanged_library_folder_is_read_once() {
        let root = tempfile::tempdir().unwrap();
        let mut finder = finder(root.path(), Duration::ZERO);
        for loaded in [None, Some("550.1")] {
            let before = finder.reads;
            for _ in 0..5 {
                assert_eq!(names(&mut finder, loaded), ["libcuda.so.550.1"]);
            }
            assert_eq!(finder.reads, before + 1, "once, whatever version is loaded: {loaded:?}");
        }
        // No library is a result too.
        assert_eq!((names(&mut finder, Some("560")), names(&mut finder, Some("560"))), (vec![], vec![]));
        assert_eq!(finder.reads, 3);
    }

    #[test]
    fn changed_library_folder_is_read_again() {
        let root = tempfile::tempdir().unwrap();
        let mut finder = finder(root.path(), Duration::ZERO);
        names(&mut finder, None);
        let (folder, more) = (root.path().join(FOLDER), root.path().join(FOLDER).join("libnvidia-ml.so.550.1"));
        change(&folder, || fs::write(&more, "").unwrap());
        assert_eq!(names(&mut finder, None), ["libcuda.so.550.1", "libnvidia-ml.so.550.1"]);
        change(&folder, || fs::remove_file(&more).unwrap());
        assert_eq!(names(&mut finder, None), ["libcuda.so.550.1"]);
        // A folder that comes before it in the order.
        fs::create_dir_all(root.path().join("usr/lib64")).unwrap();
        fs::write(root.path().join("usr/lib64/libcuda.so.560.1"), "").unwrap();
        assert_eq!(names(&mut finder, None), ["libcuda.so.560.1"]);
        assert_eq!(finder.reads, 4);
    }

    #[test]
    fn folder_that_just_changed_is_read_again() {
        let root = tempfile::tempdir().unwrap();
        let mut finder = finder(root.path(), Duration::from_secs(1 << 30));
        names(&mut finder, None);
        names(&mut finder, None);
        assert_eq!(finder.reads, 2, "a change in the same tick of the clock would not show");
    }
}
