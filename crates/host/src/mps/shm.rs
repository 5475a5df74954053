//! The folders that daemons and clients share as /dev/shm: file systems in memory, on the host. The daemons of
//! resources share one; each daemon of claims has its own.
//!
//! `linkwise mps-control-daemon mount-shm` mounts the common folder. It runs once, privileged, before the daemon. The
//! command, its options and the size are those of the NVIDIA plugin (`cmd/mps-control-daemon/mount/mount-shm.go`).
//! Unlike that plugin, linkwise keeps an existing mount, because running pods use it, and makes it larger if it is too
//! small.
//!
//! `supervise` mounts the folder of a daemon of claims. The mount stays as long as the daemon is ordered, even if the
//! daemon or this process is started again, because containers use it. Later claims of the GPU get a new mount.
//!
//! Containers under SELinux may use files with the type of their own files, and no other files of the host's /run. So
//! the pipe directory and the folder of orders get the NVIDIA plugin's label with that type
//! (`cmd/mps-control-daemon/mps/daemon.go`) before a control daemon starts: sockets get the type of their folder.

use std::ffi::CString;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use rustix::fs::{XattrFlags, lsetxattr, statfs};
use rustix::mount::{MountFlags, UnmountFlags};
use tokio::process::Command;

use super::control;
use super::daemon::MpsError;
use super::layout::Layout;
use linkwise_core::claims::CLAIMS_DOMAIN;
use linkwise_core::state::ResourceName;
use linkwise_system::files;

/// The size if the host's memory is unknown, in KiB: 64 MiB, as container runtimes give a /dev/shm.
const FALLBACK_KIB: u64 = 64 << 10;

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// The time limit for `mount`.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);

/// The flags of a daemon's own mount; `mount_shm` gives the common mount the same ones, as text.
const FLAGS: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC).union(MountFlags::RELATIME);

/// The result of [`mount_shm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shm {
    /// The shared memory was mounted.
    Mounted,
    /// The shared memory was mounted already, and is larger now.
    Grown,
    /// The shared memory was mounted already, and is large enough or not a tmpfs.
    Kept,
}

/// Mounts the shared memory, of half the host's memory; `meminfo` is /proc/meminfo, `mount` the program mount(8).
pub async fn mount_shm(layout: &Layout, meminfo: &Path, mount: &Path) -> Result<Shm, MpsError> {
    let path = layout.shm();
    let wanted = size_kib(meminfo);
    let there = fs::create_dir_all(&path).and_then(|()| Ok(is_mounted(&path)?.then_some(statfs(&path)?)));
    let (done, remount) = match there.map_err(|source| MpsError::Write(path.clone(), source))? {
        None => (Shm::Mounted, ""),
        Some(there) => {
            let is_tmpfs = u64::try_from(there.f_type) == Ok(TMPFS);
            let bytes = u64::try_from(there.f_bsize).unwrap_or(0).saturating_mul(there.f_blocks);
            // The kernel rounds up to whole pages; 0 blocks stand for no limit.
            if !is_tmpfs || bytes == 0 || bytes / 1024 >= wanted {
                return Ok(Shm::Kept);
            }
            (Shm::Grown, "remount,")
        }
    };
    let mut mount = Command::new(mount);
    let options = format!("{remount}rw,nosuid,nodev,noexec,relatime,size={wanted}k");
    mount.args(["-t", "tmpfs", "-o", options.as_str(), "shm"]).arg(&path);
    let mounted = control::run(&mut mount, "", MOUNT_TIMEOUT).await;
    mounted.map(|_| done).map_err(|source| MpsError::Mount(path, source.into()))
}

/// Mounts the shared memory of a claim's daemon, of half the host's memory; one that is mounted stays.
pub(super) fn mount_own_shm(layout: &Layout, resource: &ResourceName) -> Result<(), MpsError> {
    if !is_seen_by_the_host(layout.root()) {
        return Err(MpsError::NotShared(layout.root().to_owned()));
    }
    let path = layout.own_shm(resource);
    let mount = || {
        fs::create_dir_all(&path)?;
        fs::write(layout.own_shm_record(resource), "")?;
        if is_mounted(&path)? {
            return Ok(());
        }
        let size = CString::new(format!("size={}k", size_kib(Path::new("/proc/meminfo"))))?;
        Ok(rustix::mount::mount("shm", &path, "tmpfs", FLAGS, &*size)?)
    };
    mount().map_err(|source: io::Error| MpsError::Mount(path.clone(), source.into()))
}

/// Unmounts the shared memory of a claim's daemon. Processes that have it keep it until they end.
pub fn unmount_own_shm(layout: &Layout, resource: &ResourceName) -> io::Result<()> {
    let path = layout.own_shm(resource);
    match is_mounted(&path) {
        Ok(true) => rustix::mount::unmount(&path, UnmountFlags::DETACH)?,
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    files::remove_for_this_boot(&layout.own_shm_record(resource)).map(drop)
}

/// Returns true if the shared memory of a daemon's earlier claims is still mounted, even if the daemon's process has
/// died. The plugin's container does not see the mount, so this looks for the record of it.
pub fn keeps_own_shm(layout: &Layout, resource: &ResourceName) -> bool {
    layout.own_shm_record(resource).exists()
}

/// Unmounts the shared memory of all daemons of claims, except for those that are wanted.
pub fn unmount_own_shms(layout: &Layout, is_wanted: impl Fn(&ResourceName) -> bool) -> io::Result<()> {
    let folders = fs::read_dir(layout.root().join(CLAIMS_DOMAIN)).into_iter().flatten().flatten();
    let names = folders.filter_map(|folder| folder.file_name().into_string().ok());
    let names = names.filter_map(|name| format!("{CLAIMS_DOMAIN}/{name}").parse().ok());
    names.filter(|name| !is_wanted(name)).try_for_each(|name| unmount_own_shm(layout, &name))
}

/// Returns true if a file system is mounted at a path: it is on another device than the folder's parent.
fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(fs::metadata(path)?.dev() != fs::metadata(path.join(".."))?.dev())
}

/// Returns true if a mount of this process below a path appears on the host: the process has the host's mounts, or
/// shares its own.
fn is_seen_by_the_host(path: &Path) -> bool {
    let [first, own] = ["1", "self"].map(|process| fs::read_link(format!("/proc/{process}/ns/mnt")).ok());
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    first.is_some() && first == own || is_shared(&mounts(), path)
}

/// Returns true if the mount that has a path is shared, by a text such as /proc/self/mountinfo.
fn is_shared(mounts: &str, path: &Path) -> bool {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(4);
        let point = Path::new(words.next()?);
        let is_shared = words.skip(1).take_while(|word| *word != "-").any(|word| word.starts_with("shared:"));
        path.starts_with(point).then(|| (point.components().count(), is_shared))
    });
    // Of several mounts at one point the last is on top.
    mounts.max_by_key(|(depth, _)| *depth).is_some_and(|(_, is_shared)| is_shared)
}

/// The size of shared memory, in KiB; `meminfo` is /proc/meminfo.
fn size_kib(meminfo: &Path) -> u64 {
    fs::read_to_string(meminfo).ok().and_then(|text| half_of_memory(&text)).unwrap_or(FALLBACK_KIB)
}

/// Half of `MemTotal` in a text such as /proc/meminfo, in KiB.
fn half_of_memory(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib / 2)
}

/// The label of files that every container may read and write. It has no categories, because containers of all pods use
/// these files.
const LABEL: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a folder and its files, if SELinux is enabled: the kernel shows it at `selinuxfs`. Fails at the first path
/// that cannot be labelled.
pub(super) fn label(folder: &Path, selinuxfs: &Path) -> Result<(), MpsError> {
    if !selinuxfs.exists() {
        return Ok(());
    }
    let failed = |path: &Path, source: io::Error| MpsError::Label(path.to_owned(), source);
    let inside: io::Result<Vec<PathBuf>> =
        fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    for path in inside.map_err(|source| failed(folder, source))?.into_iter().chain([folder.to_owned()]) {
        let set = lsetxattr(&path, c"security.selinux", LABEL, XattrFlags::empty());
        set.map_err(|error| failed(&path, error.into()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_sees_what_is_below_a_shared_mount() {
        let mounts = "22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
            30 22 0:25 / /mps rw master:4 - tmpfs tmpfs rw\n\
            31 22 0:25 / /run/mps rw,nosuid shared:9 master:4 - tmpfs tmpfs rw\n\
            32 22 0:26 / /own rw - tmpfs shared:x rw\n\
            33 22 0:27 / /twice rw - tmpfs tmpfs rw\n\
            34 33 0:28 / /twice rw shared:7 - tmpfs tmpfs rw\n";
        let shared = |path: &str| is_shared(mounts, Path::new(path));
        assert_eq!(["/mps", "/run/mps/a", "/own", "/twice", "/other"].map(shared), [false, true, false, true, true]);
        assert!(!is_shared("", Path::new("/mps")) && !is_shared("garbage", Path::new("/")));
    }

    #[test]
    fn shared_memory_is_half_of_the_hosts() {
        assert_eq!(half_of_memory("MemTotal:       263856640 kB\nMemFree: 1 kB\n"), Some(131_928_320));
        for text in ["", "MemTotal:", "MemTotal: many kB", "MemTotal: 1", "MemFree: 2 kB"] {
            assert_eq!(half_of_memory(text), None, "{text}");
        }
    }
}
