//! Unix sockets as files: which one it is, whether it is still that one, who left one behind.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a socket may take to accept before it counts as alive but busy.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);

/// The least time from one look at a folder to the next in a storm of changes: whoever waits beside it (streams,
/// deadlines) has its turn meanwhile, and the storm costs little.
const GAP: Duration = Duration::from_millis(2);

/// So many changes in a row, each less than [`GAP`] after the one before, are no storm yet: a kubelet that starts makes a few,
/// and whoever looks late at its socket registers twice.
const RUSH: u32 = 8;

/// Which file a path names: a new one at the same path differs, even where the inode is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
    /// Since the epoch. The file's birth, where the file system keeps it; else its last modification, which no change
    /// of mode or owner touches.
    made: Option<Duration>,
}

impl FileId {
    fn new(metadata: &Metadata) -> Self {
        let made = metadata.created().or_else(|_| metadata.modified());
        let made = made.ok().and_then(|made| made.duration_since(SystemTime::UNIX_EPOCH).ok());
        Self { device: metadata.dev(), inode: metadata.ino(), made }
    }

    /// The part that a change of a folder's content leaves alone on any file system.
    fn place(self) -> (u64, u64) {
        (self.device, self.inode)
    }

    /// A file of a test's own.
    #[cfg(test)]
    pub fn numbered(inode: u64) -> Self {
        Self { device: 0, inode, made: None }
    }

    fn of(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().as_ref().map(Self::new)
    }
}

/// The socket at a path; `None` if there is none, or something else.
pub(super) fn identify(path: &Path) -> Option<FileId> {
    let metadata = std::fs::symlink_metadata(path).ok();
    metadata.as_ref().filter(|found| found.file_type().is_socket()).map(FileId::new)
}

/// A socket of ours; the file goes when this does.
pub(super) struct OwnSocket {
    pub path: PathBuf,
    pub id: Option<FileId>,
}

impl OwnSocket {
    /// Binds a socket that only our own user (and root) may open.
    pub fn bind(path: PathBuf) -> io::Result<(Self, UnixListener)> {
        let listener = UnixListener::bind(&path)?;
        let mut own = Self { path, id: None };
        std::fs::set_permissions(&own.path, std::fs::Permissions::from_mode(0o600))?;
        own.id = identify(&own.path);
        Ok((own, listener))
    }

    /// Whether the file is still the one that was bound.
    pub fn stands(&self) -> bool {
        self.id.is_some() && identify(&self.path) == self.id
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        // What somebody else put in our place is not ours to remove.
        if self.stands() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes sockets in `folder` that begin with `prefix` and that nobody listens on any more.
pub(super) async fn remove_dead(folder: &Path, prefix: &str) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let ours = path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix));
        if !ours || identify(&path).is_none() {
            continue;
        }
        let answer = tokio::time::timeout(PROBE_TIMEOUT, UnixStream::connect(&path)).await;
        if matches!(&answer, Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused) {
            match std::fs::remove_file(&path) {
                // A kubelet that starts removes them too.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Tells when to look at a folder again: at once where inotify works, else at the latest after a while.
pub(super) struct Changes {
    folder: Option<FileId>,
    changed: watch::Receiver<u64>,
    poll: Duration,
    gap: Duration,
    /// When a change is none of a storm.
    opens: Instant,
    /// Changes in a row that came before that.
    rushed: u32,
    due: Instant,
    watcher: Option<RecommendedWatcher>,
}

impl Changes {
    /// Follows a folder. inotify is an optimisation: where it is not to be had, polling remains.
    pub fn of(folder: &Path, poll: Duration, inotify: bool) -> Self {
        let (sender, changed) = watch::channel(0);
        let told = move |_: notify::Result<notify::Event>| {
            sender.send_modify(|count: &mut u64| *count = count.wrapping_add(1))
        };
        let watcher = inotify.then(|| {
            notify::recommended_watcher(told).and_then(|mut watcher| {
                watcher.watch(folder, RecursiveMode::NonRecursive)?;
                Ok(watcher)
            })
        });
        let watcher = watcher.and_then(Result::ok);
        let now = Instant::now();
        Self { folder: FileId::of(folder), changed, poll, gap: GAP, opens: now, rushed: 0, due: now + poll, watcher }
    }

    /// Whether the path still names the folder that is followed: inotify follows the folder itself.
    pub fn follows(&self, folder: &Path) -> bool {
        self.folder.is_some() && FileId::of(folder).map(FileId::place) == self.folder.map(FileId::place)
    }

    /// Whether inotify tells of changes.
    pub fn is_told(&self) -> bool {
        self.watcher.is_some()
    }

    /// Waits until something may have changed. Dropped and asked again, it is due when it was.
    pub async fn next(&mut self) {
        let told = async {
            if self.rushed >= RUSH {
                tokio::time::sleep_until(self.opens).await;
            }
            if self.changed.changed().await.is_err() {
                // No watcher: nobody will tell.
                std::future::pending::<()>().await;
            }
        };
        let _ = tokio::time::timeout_at(self.due, told).await;
        let now = Instant::now();
        self.rushed = if now < self.opens { self.rushed.saturating_add(1) } else { 0 };
        (self.opens, self.due) = (now + self.gap, now + self.poll);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, SockAddr, Socket, Type};

    #[tokio::test]
    async fn dead_sockets_go_and_live_ones_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        drop(std::os::unix::net::UnixListener::bind(at("linkwise-dead.sock")).unwrap());
        let _alive = std::os::unix::net::UnixListener::bind(at("linkwise-alive.sock")).unwrap();
        // One whose listener has as many callers waiting as it takes.
        let unix = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let (busy, address) = (unix(), SockAddr::unix(at("linkwise-busy.sock")).unwrap());
        busy.bind(&address).unwrap();
        busy.listen(0).unwrap();
        let waiting: Vec<Socket> = std::iter::repeat_with(unix)
            .take_while(|caller| {
                caller.set_nonblocking(true).unwrap();
                caller.connect(&address).is_ok()
            })
            .collect();
        assert!(!waiting.is_empty());
        drop(std::os::unix::net::UnixListener::bind(at("somebody.sock")).unwrap());
        std::fs::write(at("linkwise-file.sock"), "").unwrap();
        remove_dead(folder.path(), "linkwise-").await.unwrap();
        let mut left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["linkwise-alive.sock", "linkwise-busy.sock", "linkwise-file.sock", "somebody.sock"]);
    }

    #[tokio::test]
    async fn our_socket_is_ours_alone_and_knows_when_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.sock");
        let (own, _listener) = OwnSocket::bind(path.clone()).unwrap();
        assert!(own.stands());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(own.stands(), "a change of mode makes no other socket");
        assert!(own.id.is_some_and(|id| id.made.is_some()), "an inode is used again");
        std::fs::remove_file(&path).unwrap();
        assert!(!own.stands());
        std::fs::write(&path, "a file").unwrap();
        drop(own);
        assert!(path.exists(), "what replaced it is not ours");
        std::fs::remove_file(&path).unwrap();
        let (own, _listener) = OwnSocket::bind(path.clone()).unwrap();
        drop(own);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn changes_without_end_leave_room_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let mut changes = Changes::of(folder.path(), Duration::from_secs(3600), false);
        let (storm, changed) = watch::channel(0);
        (changes.changed, changes.gap) = (changed, Duration::from_secs(3600));
        for change in 0..=RUSH {
            storm.send_replace(change.into());
            changes.next().await;
        }
        // One more before anybody else had a turn: as in `life`, where this is asked first.
        storm.send_replace(u64::MAX);
        tokio::select! {
            biased;
            () = changes.next() => panic!("nobody else has a turn"),
            () = std::future::ready(()) => {}
        }
        // It is not lost, and comes when it may.
        changes.opens = Instant::now();
        changes.next().await;
    }

    #[tokio::test]
    async fn a_change_is_told_by_inotify_or_by_the_clock() {
        let folder = tempfile::tempdir().unwrap();
        let mut changes = Changes::of(folder.path(), Duration::from_secs(3600), true);
        std::fs::write(folder.path().join("new"), "").unwrap();
        let limit = Duration::from_secs(20);
        tokio::time::timeout(limit, changes.next()).await.unwrap();
        let mut polled = Changes::of(&folder.path().join("missing"), Duration::from_millis(1), true);
        tokio::time::timeout(limit, polled.next()).await.unwrap();
        let mut polled = Changes::of(folder.path(), Duration::from_millis(1), false);
        tokio::time::timeout(limit, polled.next()).await.unwrap();
    }
}
