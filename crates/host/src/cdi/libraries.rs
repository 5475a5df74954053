//! The driver's libraries below the driver root, and the links that lead to them.
//!
//! Called by `scan`, at least every 10 s. A host's library folder has thousands of names, so it is read only after a
//! change: the kernel gives a folder a new ctime whenever a name in it comes or goes.
//!
//! The libraries and links are those of `pkg/nvcdi/driver-nvml.go`, `internal/lookup/root/root.go`,
//! `internal/discover/graphics.go` and `internal/discover/symlinks.go` of NVIDIA/nvidia-container-toolkit v1.20.
//!
//! A library in no usual folder is found by the dynamic linker's cache of the host, `/etc/ld.so.cache`. Its format is
//! that of glibc since 2.2, alone or behind the older one (`sysdeps/generic/dl-cache.h` of glibc): a header of 48
//! bytes, entries of 24, and texts at offsets from the header.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::Link;
use super::driver::entries;
use linkwise_system::files;

/// The folders in which distributions and installers put the driver's 64-bit libraries, relative to the driver root:
/// Red Hat, Debian and Ubuntu, Debian's alternatives, SUSE and Arch, Google's and Talos' installers.
pub(super) const FOLDERS: [&str; 14] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu/nvidia/current",
    "lib/aarch64-linux-gnu/nvidia/current",
    "usr/local/nvidia/lib64",
    "glibc/lib",
    "usr/local/glibc/usr/lib",
];

/// The prefix of the library that CUDA cannot do without.
pub(super) const LIBCUDA: &str = "libcuda.so.";

/// Libraries of the driver with version numbers of their own, and the least number of parts of each version.
const OTHER_LIBRARIES: [(&str, usize); 4] = [
    ("libnvidia-egl-gbm.so.", 2),
    ("libnvidia-egl-wayland.so.", 2),
    ("libnvidia-egl-wayland2.so.", 2),
    ("libnvidia-nvvm70.so.", 1),
];

/// Links that programs expect, even if the host lacks them: the library, the link beside it, and its target if that is
/// not the library. `libGLX_indirect.so.0` is Mesa's on many hosts.
const EXPECTED_LINKS: [(&str, &str, Option<&str>); 5] = [
    ("libcuda.so", "libcuda.so", Some("libcuda.so.1")),
    ("libGLX_nvidia.so", "libGLX_indirect.so.0", None),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so", Some("libnvidia-opticalflow.so.1")),
    ("libnvidia-vulkan-producer.so", "libnvidia-vulkan-producer.so", None),
    ("libnvidia-allocator.so", "gbm/nvidia-drm_gbm.so", Some("../libnvidia-allocator.so.1")),
];

/// The age of a folder's last change below which the folder is read again: file systems count time in ticks of up to 1
/// s, and a later change in the same tick would not show.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// The libraries of the driver. Paths are absolute from the driver root, with all links resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The driver's version.
    pub version: String,
    pub libraries: BTreeSet<String>,
    /// The links, by their paths.
    pub links: BTreeMap<String, Link>,
}

/// Finds the libraries, and remembers them until its key changes.
#[derive(Debug)]
pub(super) struct LibraryFinder {
    root: PathBuf,
    settled_after: Duration,
    /// The state that the result depends on: the loaded version, and the state of each usual folder and of the
    /// linker's cache; `None` for one that is missing.
    key: (Option<String>, Vec<Option<Stamp>>),
    found: Option<Found>,
    reads: u64,
}

/// The state of a file or folder. It changes if a name in the folder comes or goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    device_and_inode: (u64, u64),
    /// The ctime, since the epoch. No program can set it back, unlike the mtime.
    changed: Duration,
}

impl Stamp {
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        let seconds = u64::try_from(metadata.ctime()).unwrap_or(0);
        let nanoseconds = u32::try_from(metadata.ctime_nsec()).unwrap_or(0);
        Some(Self { device_and_inode: (metadata.dev(), metadata.ino()), changed: Duration::new(seconds, nanoseconds) })
    }
}

impl LibraryFinder {
    /// A finder for libraries below the driver root `root`, by its path in this container.
    pub fn new(root: PathBuf) -> Self {
        Self { root, settled_after: SETTLED_AFTER, key: (None, Vec::new()), found: None, reads: 0 }
    }

    /// The libraries of the loaded driver, whose version is `loaded`; without a version, those of the libcuda that
    /// exists.
    pub fn find(&mut self, loaded: Option<&str>) -> Option<&Found> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let cache = self.root.join("etc/ld.so.cache");
        let stamps = usual_folders(&self.root).iter().chain([&cache]).map(|path| Stamp::of(path)).collect();
        let key = (loaded.map(str::to_owned), stamps);
        let settled = |stamp: &Stamp| now.saturating_sub(stamp.changed) >= self.settled_after;
        if key != self.key || !key.1.iter().flatten().all(settled) {
            self.reads += 1;
            self.found = read(&self.root, loaded);
            self.key = key;
        }
        self.found.as_ref()
    }
}

/// The folders that may hold the driver.
fn usual_folders(root: &Path) -> Vec<PathBuf> {
    with_vdpau(FOLDERS.iter().map(|folder| root.join(folder)))
}

/// These folders, with their subfolders of VDPAU's drivers.
fn with_vdpau(folders: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    folders.flat_map(|folder| [folder.join("vdpau"), folder]).collect()
}

fn read(root: &Path, loaded: Option<&str>) -> Option<Found> {
    let root = root.canonicalize().ok()?;
    let mut folders = usual_folders(&root);
    let version = version_in(&folders, loaded).or_else(|| {
        let unusual = folders_of(&root, "libcuda.so.1");
        folders = with_vdpau(unusual.iter().map(|folder| root.join(folder)));
        version_in(&folders, loaded)
    })?;
    let of_driver = format!(".so.{version}");
    let is_library = |name: &String| {
        let other = |(library, least): &(&str, usize)| {
            name.strip_prefix(library).and_then(numbers).is_some_and(|numbers| numbers.len() >= *least)
        };
        name.ends_with(&of_driver) || OTHER_LIBRARIES.iter().any(other)
    };
    let mut libraries = BTreeSet::new();
    for folder in &folders {
        let named = entries(folder).into_iter().filter(is_library);
        // Several folders may be one, and Debian's alternatives are links to the libraries.
        let files = named.filter_map(|name| folder.join(name).canonicalize().ok()).filter(|path| path.is_file());
        let paths = files.filter_map(|path| path.strip_prefix(&root).ok()?.to_str().map(|path| format!("/{path}")));
        libraries.extend(paths);
    }
    let links = links(&root, &libraries, &of_driver);
    Some(Found { version, libraries, links })
}

/// The links that lead to libraries: those in the libraries' folders, and those that programs expect.
fn links(root: &Path, libraries: &BTreeSet<String>, of_driver: &str) -> BTreeMap<String, Link> {
    let mut links = BTreeMap::new();
    let mut add = |folder: &str, name: &str, target: &str, library: &str| {
        let path = format!("{folder}/{name}");
        let (target, library) = (target.to_owned(), library.to_owned());
        links.insert(path.clone(), Link { path, target, library });
    };
    let split = || libraries.iter().filter_map(|path| Some((path.rsplit_once('/')?, path)));
    for folder in split().map(|((folder, _), _)| folder).collect::<BTreeSet<_>>() {
        let here = root.join(folder.trim_start_matches('/'));
        let targets = entries(&here).into_iter().filter_map(|name| Some((local_target(&here.join(&name))?, name)));
        let targets: BTreeMap<String, String> = targets.map(|(target, name)| (name, target)).collect();
        for (name, target) in &targets {
            // libcuda.so leads to libcuda.so.1, and that to libcuda.so.550.54.15. No library's chain has five links.
            let chain = std::iter::successors(Some(target), |name| targets.get(*name)).take(4);
            let mut ends = chain.filter_map(|name| libraries.get(&format!("{folder}/{name}")));
            ends.next().into_iter().for_each(|library| add(folder, name, target, library));
        }
    }
    for ((folder, name), path) in split() {
        for (library, link, target) in EXPECTED_LINKS {
            if name.strip_suffix(of_driver).is_some_and(|name| library.strip_suffix(".so") == Some(name)) {
                add(folder, link, target.unwrap_or(name), path);
            }
        }
    }
    links
}

/// The driver's version: `loaded`, if these folders have its libcuda. If `loaded` is `None`, the version in the first
/// folder with a libcuda.
fn version_in(folders: &[PathBuf], loaded: Option<&str>) -> Option<String> {
    let Some(loaded) = loaded else { return folders.iter().find_map(|folder| libcuda_version(folder)) };
    let name = format!("{LIBCUDA}{loaded}");
    folders.iter().any(|folder| folder.join(&name).is_file()).then(|| loaded.to_owned())
}

/// The version of the libcuda in a folder: the one that `libcuda.so.1` leads to, otherwise the newest.
fn libcuda_version(folder: &Path) -> Option<String> {
    let names = entries(folder);
    let versions = names.iter().filter_map(|name| name.strip_prefix(LIBCUDA));
    let versions: Vec<(Vec<u64>, &str)> = versions
        .filter_map(|version| Some((numbers(version).filter(|numbers| numbers.len() >= 2)?, version)))
        .collect();
    let target = fs::read_link(folder.join("libcuda.so.1")).ok();
    let linked = target.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()?.strip_prefix(LIBCUDA));
    let linked = versions.iter().find(|(_, version)| linked == Some(version));
    linked.or(versions.iter().max()).map(|(_, version)| (*version).to_owned())
}

/// The target of a link, if it is a name in the link's own folder.
fn local_target(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let target = target.to_str()?;
    (!target.contains('/')).then(|| target.to_owned())
}

/// The numbers of a version, such as `550.54.15`, or the `1` of `libcuda.so.1`; `None` for any other text.
fn numbers(version: &str) -> Option<Vec<u64>> {
    version.split('.').map(|number| number.parse().ok()).collect()
}

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";

/// The mask of the architecture in an entry's flags; for 32-bit x86 these bits are 0.
const ARCHITECTURE: usize = 0xff00;

/// The longest cache that is read, in bytes. That of a host with 10,000 libraries has 1 MiB.
const MAX_FILE: u64 = 16 << 20;

/// The folders from `root` that have the 64-bit library of this soname; empty if there is no cache of this format.
fn folders_of(root: &Path, soname: &str) -> BTreeSet<String> {
    let bytes = files::read(&root.join("etc/ld.so.cache"), MAX_FILE).unwrap_or_default();
    let start = bytes.windows(MAGIC.len()).position(|part| part == MAGIC);
    let cache = start.and_then(|start| bytes.get(start..)).unwrap_or_default();
    let number = |at: usize| -> Option<usize> {
        let bytes: [u8; 4] = cache.get(at..)?.first_chunk().copied()?;
        usize::try_from(u32::from_ne_bytes(bytes)).ok()
    };
    let text = |at: usize| {
        let mut texts = cache.get(at..)?.split(|byte| *byte == 0);
        str::from_utf8(texts.next()?).ok()
    };
    let entry = |at: usize| Some((number(at)?, text(number(at + 4)?)?, text(number(at + 8)?)?));
    let entries = (0..number(20).unwrap_or(0)).map_while(|place| entry(48 + 24 * place));
    let paths = entries.filter(|(flags, name, _)| flags & ARCHITECTURE != 0 && *name == soname);
    paths.filter_map(|(_, _, path)| Some(path.rsplit_once('/')?.0.trim_start_matches('/').to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with these entries: flags, soname, path.
    fn cache(entries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut texts = Vec::new();
        let mut place = |text: &str| {
            let at = 48 + 24 * entries.len() + texts.len();
            texts.extend(text.bytes().chain([0]));
            u32::try_from(at).unwrap()
        };
        let header = [u32::try_from(entries.len()).unwrap(), 0, 0, 0, 0, 0, 0];
        let numbers = entries.iter().flat_map(|(flags, name, path)| [*flags, place(name), place(path), 0, 0, 0]);
        let numbers: Vec<u8> = header.into_iter().chain(numbers).flat_map(u32::to_ne_bytes).collect();
        [MAGIC, &numbers, &texts].concat()
    }

    #[test]
    fn library_is_found_where_the_linker_finds_it() {
        let root = tempfile::tempdir().unwrap();
        let write = |bytes: &[u8]| {
            std::fs::create_dir_all(root.path().join("etc")).unwrap();
            std::fs::write(root.path().join("etc/ld.so.cache"), bytes).unwrap();
        };
        let found = || folders_of(root.path(), "libcuda.so.1").into_iter().collect::<Vec<_>>();
        assert_eq!(found(), [""; 0], "no cache");
        let new = cache(&[
            (0x0303, "libc.so.6", "/usr/lib/libc.so.6"),
            (0x0303, "libcuda.so.1", "/opt/nvidia/lib64/libcuda.so.1"),
            (0x0003, "libcuda.so.1", "/opt/nvidia/lib32/libcuda.so.1"),
        ]);
        write(&new);
        assert_eq!(found(), ["opt/nvidia/lib64"]);
        write(&[b"ld.so-1.7.0\0\0\0\0\0".as_slice(), &new].concat());
        assert_eq!(found(), ["opt/nvidia/lib64"], "behind the older format");
        // A cache that is cut anywhere, or has other bytes in it, causes no failure.
        for length in 0..new.len() {
            write(&new[..length]);
            found();
            let mut broken = new.clone();
            broken[length] = 0xff;
            write(&broken);
            found();
        }
    }

    #[test]
    fn cache_of_this_machine_is_read() {
        let text = std::process::Command::new("/sbin/ldconfig").arg("-p").output();
        let Ok(text) = text else {
            println!("skipped: no /sbin/ldconfig");
            return;
        };
        // `	libc.so.6 (libc6,x86-64, ...) => /lib/x86_64-linux-gnu/libc.so.6`
        let text = String::from_utf8(text.stdout).unwrap();
        let line = text.lines().find(|line| line.trim().starts_with("libc.so.6 (libc6,")).unwrap();
        let folder = line.rsplit_once(" => /").unwrap().1.rsplit_once('/').unwrap().0;
        assert!(folders_of(Path::new("/"), "libc.so.6").contains(folder), "{text}");
    }

    const FOLDER: &str = "usr/lib/x86_64-linux-gnu";

    fn finder(root: &Path, settled_after: Duration) -> LibraryFinder {
        fs::create_dir_all(root.join(FOLDER)).unwrap();
        fs::write(root.join(FOLDER).join("libcuda.so.550.1"), "").unwrap();
        LibraryFinder { settled_after, ..LibraryFinder::new(root.to_owned()) }
    }

    fn names(finder: &mut LibraryFinder, loaded: Option<&str>) -> Vec<String> {
        finder
            .find(loaded)
            .iter()
            .flat_map(|found| &found.libraries)
            .map(|path| path.rsplit("/").next().unwrap().to_owned())
            .collect()
    }

    /// Changes a folder, and makes its ctime differ from the last one even within one tick of the file system's clock.
    fn change(folder: &Path, change: impl FnOnce()) {
        let before = Stamp::of(folder);
        change();
        while Stamp::of(folder) == before {
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
        // The absence of libraries is a result too.
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
        // This folder comes before the other one in `FOLDERS`.
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

    #[test]
    fn unusual_library_folder_is_found_by_the_linkers_cache() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("opt/nvidia/lib");
        fs::create_dir_all(folder.join("vdpau")).unwrap();
        for name in ["libcuda.so.550.1", "libnvidia-ml.so.550.1", "vdpau/libvdpau_nvidia.so.550.1"] {
            fs::write(folder.join(name), "").unwrap();
        }
        let mut finder = LibraryFinder { settled_after: Duration::ZERO, ..LibraryFinder::new(root.path().to_owned()) };
        assert_eq!(names(&mut finder, Some("550.1")), [""; 0]);
        fs::create_dir_all(root.path().join("etc")).unwrap();
        let text = cache(&[(0x303, "libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1")]);
        fs::write(root.path().join("etc/ld.so.cache"), text).unwrap();
        let expected = ["libcuda.so.550.1", "libnvidia-ml.so.550.1", "libvdpau_nvidia.so.550.1"];
        assert_eq!(names(&mut finder, Some("550.1")), expected);
        assert_eq!(names(&mut finder, None), expected);
    }
}
