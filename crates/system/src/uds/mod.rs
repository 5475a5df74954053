//! Unix sockets: those that linkwise listens on, those that it connects to, and the process at the other end.
//!
//! Used by all modules that serve or call over Unix sockets. This module knows neither their services nor the names of
//! the sockets. A socket of ours is listening before it appears under its name, and has mode 0600 from its first
//! moment. Its process removes its file; `remove_dead` removes dead ones. The module starts no task and logs nothing.

mod peer;

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use crate::files;
pub use peer::{Callers, Peer};

/// The longest path of a Unix socket, in bytes: sun_path of unix(7) less its closing zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// The most connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// The identity of a file: a new one at the same path differs, even if the inode is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
    /// The time of the file's birth, since the epoch, if the file system keeps it; otherwise of its last modification,
    /// which no change of mode or owner touches.
    born: Option<Duration>,
}

impl FileId {
    /// The file, folder or link at a path; `None` if there is none.
    pub fn of(path: &Path) -> Option<Self> {
        fs::symlink_metadata(path).ok().as_ref().map(Self::new)
    }

    /// The socket at a path; `None` if there is none, or another kind of file.
    pub fn of_socket(path: &Path) -> Option<Self> {
        let metadata = fs::symlink_metadata(path).ok();
        metadata.as_ref().filter(|found| found.file_type().is_socket()).map(Self::new)
    }

    /// A file that exists only in a test.
    pub fn numbered(inode: u64) -> Self {
        Self { device: 0, inode, born: None }
    }

    fn new(metadata: &Metadata) -> Self {
        let born = metadata.created().or_else(|_| metadata.modified());
        let born = born.ok().and_then(|born| born.duration_since(SystemTime::UNIX_EPOCH).ok());
        Self { device: metadata.dev(), inode: metadata.ino(), born }
    }

    /// Device and inode: both stay the same while a folder's content changes, on any file system.
    pub fn place(self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

/// The file of a socket of ours; removed when this is dropped, unless another file has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    id: Option<FileId>,
}

impl SocketFile {
    /// Makes another name of the same socket, which is removed when the returned value is dropped. Fails with
    /// `AlreadyExists` if there is a file.
    pub fn alias(&self, path: &Path) -> io::Result<Self> {
        fs::hard_link(&self.path, path)?;
        Ok(Self { path: path.to_owned(), id: FileId::of_socket(path) })
    }

    /// Leaves the file in its place: by the time of a removal another process may have bound the path, and its socket
    /// may have the inode of ours.
    pub fn leave(mut self) {
        self.id = None;
    }

    /// Returns true if the path still names the bound file.
    pub fn is_in_place(&self) -> bool {
        self.id.is_some() && FileId::of_socket(&self.path) == self.id
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A socket of ours that accepts connections.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    callers: Callers,
}

/// An accepted connection.
pub struct Caller {
    /// The connection.
    pub stream: UnixStream,
    /// The process that connected.
    pub peer: Peer,
    /// Set if the process may call; otherwise the connection must be closed, or answered with a refusal.
    pub is_admitted: bool,
}

impl Listener {
    /// Accepts the next connection. Cancel-safe. The uid is the kernel's, as of the connect: the file's mode, which may
    /// have been widened since it was made, does not count. After an error the caller pauses before the next call: file
    /// descriptors may be exhausted for a while.
    pub async fn accept(&self) -> io::Result<Caller> {
        let (stream, _) = self.listener.accept().await?;
        let peer = Peer::of(&stream)?;
        Ok(Caller { stream, peer, is_admitted: self.callers.admits(peer.uid, own_uid()) })
    }
}

/// Listens at `path`. Must be called within a tokio runtime. Fails with `AlreadyExists` if a file of any kind is there.
pub fn listen(path: &Path, callers: Callers) -> io::Result<(SocketFile, Listener)> {
    // The path that is bound below may be shorter: this refuses a `path` that no client could connect to.
    SockAddr::unix(path)?;
    // Between bind(2) and listen(2) a socket refuses connections, and `remove_dead` of another process would take it
    // for a dead one. So it gets its name once it listens.
    let bound = tempfile::Builder::new().prefix(".lw-").make_in(files::folder(path), listen_at)?;
    let listener = bound.persist_noclobber(path).map_err(|refused| refused.error)?;
    let file = SocketFile { path: path.to_owned(), id: FileId::of_socket(path) };
    Ok((file, Listener { listener: UnixListener::from_std(listener)?, callers }))
}

fn listen_at(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    // bind(2) makes the file with the socket's own mode.
    let unbound = File::from(OwnedFd::from(Socket::new(Domain::UNIX, Type::STREAM, None)?));
    unbound.set_permissions(Permissions::from_mode(0o600))?;
    let socket = Socket::from(OwnedFd::from(unbound));
    socket.set_nonblocking(true)?;
    socket.bind(&SockAddr::unix(path)?)?;
    socket.listen(BACKLOG)?;
    Ok(OwnedFd::from(socket).into())
}

/// Connects to a socket; also returns the process that listens there. Fails with `ConnectionRefused` if no process
/// listens any more, with `WouldBlock` if the backlog is full.
pub async fn connect(path: &Path) -> io::Result<(UnixStream, Peer)> {
    let stream = UnixStream::connect(path).await?;
    let peer = Peer::of(&stream)?;
    Ok((stream, peer))
}

/// Returns true if the path names a socket on which no process listens any more. The call does not wait for a process
/// that accepts no connection.
pub fn is_dead(path: &Path) -> bool {
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    FileId::of_socket(path).is_some()
        && connect().is_err_and(|error: io::Error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Removes the dead sockets in `folder` for whose file names `is_ours` is true.
pub fn remove_dead(folder: &Path, is_ours: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&is_ours) && is_dead(&entry.path()) {
            match fs::remove_file(entry.path()) {
                // A kubelet that starts may have removed the file.
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener as StdListener;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A socket that listens and has as many callers waiting as its backlog takes.
    fn busy(path: &Path) -> (Socket, Vec<Socket>) {
        let unix = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let (busy, address) = (unix(), SockAddr::unix(path).unwrap());
        busy.bind(&address).unwrap();
        busy.listen(0).unwrap();
        let callers = std::iter::repeat_with(unix).take_while(|caller| {
            caller.set_nonblocking(true).unwrap();
            caller.connect(&address).is_ok()
        });
        let waiting: Vec<Socket> = callers.collect();
        assert!(!waiting.is_empty());
        (busy, waiting)
    }

    #[tokio::test]
    async fn only_our_dead_sockets_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        drop(StdListener::bind(at("ours-dead.sock")).unwrap());
        let _alive = StdListener::bind(at("ours-alive.sock")).unwrap();
        let _busy = busy(&at("ours-busy.sock"));
        drop(StdListener::bind(at("other.sock")).unwrap());
        fs::write(at("ours-file.sock"), "").unwrap();
        remove_dead(folder.path(), |name| name.starts_with("ours-")).unwrap();
        assert_eq!(names(folder.path()), ["other.sock", "ours-alive.sock", "ours-busy.sock", "ours-file.sock"]);
    }

    #[tokio::test]
    async fn socket_gets_its_name_once_it_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.sock");
        let (_own, listener) = listen(&path, Callers::default()).unwrap();
        // The socket's address is the path of bind(2), a name that no sibling's `remove_dead` takes for one of ours.
        let bound = listener.listener.local_addr().unwrap();
        let bound = bound.as_pathname().unwrap();
        assert!(bound.parent() == path.parent() && bound != path, "{bound:?}");
        assert!(!bound.exists() && connect(&path).await.is_ok());
    }

    #[tokio::test]
    async fn socket_is_private_and_detects_its_replacement() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.sock");
        let (own, _listener) = listen(&path, Callers::default()).unwrap();
        assert_eq!((own.is_in_place(), mode(&path)), (true, 0o600));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(own.is_in_place(), "a change of mode counts as another socket");
        assert!(own.id.is_some_and(|id| id.born.is_some()), "the time of the file's birth is unknown");
        fs::remove_file(&path).unwrap();
        assert!(!own.is_in_place());
        fs::write(&path, "a file").unwrap();
        drop(own);
        assert!(path.exists(), "the file that replaced the socket was removed");
        assert_eq!(listen(&path, Callers::default()).unwrap_err().kind(), ErrorKind::AlreadyExists);
        fs::remove_file(&path).unwrap();
        let (own, _listener) = listen(&path, Callers::default()).unwrap();
        drop(own);
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[tokio::test]
    async fn caller_is_admitted_by_its_uid() {
        let folder = tempfile::tempdir().unwrap();
        for (name, callers, admitted) in [("own", Callers::default(), true), ("strict", Callers::only(u32::MAX), false)]
        {
            let path = folder.path().join(name);
            let (_file, listener) = listen(&path, callers).unwrap();
            let (caller, connected) = tokio::join!(listener.accept(), connect(&path));
            let (caller, (_, listens)) = (caller.unwrap(), connected.unwrap());
            assert_eq!((caller.is_admitted, caller.peer.uid), (admitted, own_uid()));
            assert_eq!(listens.pid, Some(i32::try_from(std::process::id()).unwrap()));
        }
    }
}
