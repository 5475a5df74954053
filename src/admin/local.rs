//! What an operator says over a Unix socket on this host: look at the state, let go of the driver, take it up again,
//! vouch for a GPU.
//!
//! Owns the socket, who may speak on it, and the routes. The runtime hands it what to do, and owns its task. Nothing of
//! this is ever served over the metrics port.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path as PathOf, State as StateOf};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use socket2::{Domain, SockAddr, Socket, Type};
use thiserror::Error;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use super::connections;
use super::state::State;
use crate::topology::GpuUuid;

/// How long one connection may last; an order to release the driver takes up to 10 s of it.
const DEADLINE: Duration = Duration::from_secs(30);

/// What came of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is so now (200).
    Done(String),
    /// There is no such thing (404).
    Unknown(String),
    /// Not now; the words say whether it is still under way (503).
    NotYet(String),
}

/// The answer to an order, once there is one.
pub type Answer = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// What the runtime does when it is told to.
#[derive(Clone)]
pub struct Orders {
    /// What is so now.
    pub state: Arc<dyn Fn() -> State + Send + Sync>,
    /// Lets go of the driver (`true`), or takes it up again.
    pub release: Arc<dyn Fn(bool) -> Answer + Send + Sync>,
    /// Ends what is held against a GPU.
    pub clear: Arc<dyn Fn(GpuUuid) -> Answer + Send + Sync>,
}

/// Why there is no socket for operators.
#[derive(Debug, Error)]
pub enum LocalError {
    /// Another process listens there.
    #[error("another process serves {path}: two linkwise cannot share an admin socket")]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// It cannot be made.
    #[error("cannot listen on {path} for operators")]
    Bind {
        /// The socket.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// A bound socket for operators; its file goes when this does.
#[derive(Debug)]
pub struct Local {
    listener: Arc<UnixListener>,
    /// Whose connections are served: root's, and those of our own user.
    admitted: [u32; 2],
    _file: SocketFile,
}

#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode: what somebody else put in its place is not ours to remove.
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Local {
    /// Binds the socket, for our own user and root alone; makes its folder where that is missing. A socket that nobody
    /// serves any more is replaced, a live one never.
    ///
    /// # Errors
    ///
    /// See [`LocalError`]. Must be called within a tokio runtime.
    pub fn bind(path: &Path) -> Result<Self, LocalError> {
        let failed = |source| LocalError::Bind { path: path.to_owned(), source };
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            match connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(failed)?,
                _ => return Err(LocalError::Taken { path: path.to_owned() }),
            }
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
            DirBuilder::new().mode(0o700).create(folder).map_err(failed)?;
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
        let made = fs::symlink_metadata(path).map_err(failed)?;
        let file = SocketFile { path: path.to_owned(), id: (made.dev(), made.ino()) };
        // Who made the file is who we are.
        Ok(Self { listener: Arc::new(listener), admitted: [0, made.uid()], _file: file })
    }

    /// Serves until `shutdown`.
    pub async fn serve(self, orders: Orders, shutdown: CancellationToken) {
        let routes = routes(orders);
        let accept = || {
            let (listener, routes, admitted) = (Arc::clone(&self.listener), routes.clone(), self.admitted);
            async move {
                let (stream, _) = listener.accept().await?;
                // The kernel's word, as of the connect; the file's mode may have been widened since we made it.
                let uid = stream.peer_cred()?.uid();
                Ok((stream, if admitted.contains(&uid) { routes } else { refusal(uid) }))
            }
        };
        shutdown.run_until_cancelled(connections::serve(DEADLINE, accept)).await;
    }
}

/// Connects, or says at once why not: a listener that accepts nobody would be waited for without end.
fn connect(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)
}

fn routes(orders: Orders) -> Router {
    let release = |release: bool| {
        post(move |StateOf(orders): StateOf<Orders>| async move { answer((orders.release)(release).await) })
    };
    Router::new()
        .route("/state", get(state))
        .route("/driver/release", release(true))
        .route("/driver/resume", release(false))
        .route("/gpus/{uuid}/clear", post(clear))
        .with_state(orders)
}

/// All that somebody else gets to hear.
fn refusal(uid: u32) -> Router {
    let words = format!("uid {uid} may not speak here: root and linkwise's own user may\n");
    Router::new().fallback(move || async move { (StatusCode::FORBIDDEN, words) })
}

async fn state(StateOf(orders): StateOf<Orders>) -> Response {
    match serde_json::to_string_pretty(&(orders.state)()) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the state could not be written\n").into_response(),
    }
}

async fn clear(StateOf(orders): StateOf<Orders>, PathOf(uuid): PathOf<String>) -> Response {
    match uuid.parse::<GpuUuid>() {
        Ok(uuid) => answer((orders.clear)(uuid).await),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

fn answer(outcome: Outcome) -> Response {
    let (status, words) = match outcome {
        Outcome::Done(words) => (StatusCode::OK, words),
        Outcome::Unknown(words) => (StatusCode::NOT_FOUND, words),
        Outcome::NotYet(words) => (StatusCode::SERVICE_UNAVAILABLE, words),
    };
    (status, words + "\n").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    fn orders() -> Orders {
        Orders {
            state: Arc::new(State::default),
            release: Arc::new(|release| Box::pin(async move { Outcome::Done(format!("released: {release}")) })),
            clear: Arc::new(|gpu| Box::pin(async move { Outcome::Unknown(format!("no {gpu}")) })),
        }
    }

    /// What a request's first line is answered with.
    async fn ask(local: Local, path: &Path, line: &str) -> String {
        let shutdown = CancellationToken::new();
        let asking = async {
            let mut stream = UnixStream::connect(path).await.unwrap();
            stream
                .write_all(format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
                .await
                .unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            shutdown.cancel();
            text
        };
        tokio::join!(local.serve(orders(), shutdown.clone()), asking).1
    }

    #[tokio::test]
    async fn each_order_has_its_way_in() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/admin.sock");
        for (line, status, words) in [
            ("GET /state", 200, "\"gpus\": []"),
            ("POST /driver/release", 200, "released: true"),
            ("POST /driver/resume", 200, "released: false"),
            ("POST /gpus/GPU-a/clear", 404, "no GPU-a"),
            ("POST /gpus/%00/clear", 400, "UUID"),
            ("GET /driver/release", 405, ""),
            ("GET /metrics", 404, ""),
        ] {
            let text = ask(Local::bind(&path).unwrap(), &path, line).await;
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")) && text.contains(words), "{line}: {text}");
            assert!(!path.exists(), "the file goes with the socket");
        }
    }

    #[tokio::test]
    async fn another_user_is_refused_by_name_whatever_the_files_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let own = fs::metadata(folder.path()).unwrap().uid();
        let mut local = Local::bind(&path).unwrap();
        assert_eq!((local.admitted, fs::metadata(&path).unwrap().mode() & 0o777), ([0, own], 0o600));
        local.admitted = [u32::MAX; 2];
        let text = ask(local, &path, "POST /driver/release").await;
        let refused = text.starts_with("HTTP/1.1 403 ") && text.contains(&format!("uid {own} may not speak here"));
        assert!(refused && !text.contains("released"), "{text}");
    }

    #[test]
    fn a_live_one_that_accepts_nobody_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let silent = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        silent.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        silent.listen(0).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            let caller = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            caller.set_nonblocking(true).unwrap();
            match caller.connect(&SockAddr::unix(&path).unwrap()) {
                Ok(()) => waiting.push(caller),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock, "no room for another caller");
        let (said, hear) = std::sync::mpsc::channel();
        // On a thread of its own: one that waits for ever would hold up the test's end.
        std::thread::spawn(move || said.send(matches!(Local::bind(&path), Err(LocalError::Taken { .. }))));
        assert_eq!(hear.recv_timeout(std::time::Duration::from_secs(20)), Ok(true));
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_live_one_or_a_file_never() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let local = Local::bind(&path).unwrap();
        assert!(matches!(Local::bind(&path), Err(LocalError::Taken { .. })));
        drop(local);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(matches!(Local::bind(&path), Err(LocalError::Bind { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
    }

    #[tokio::test]
    async fn the_folder_that_is_made_is_ours_alone_and_what_stands_in_our_place_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/admin.sock");
        let local = Local::bind(&path).unwrap();
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        fs::write(folder.path().join("file"), "somebody's").unwrap();
        fs::rename(folder.path().join("file"), &path).unwrap();
        drop(local);
        assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's");
    }
}
