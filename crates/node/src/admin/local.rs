//! An operator's orders over a Unix socket on this host: read the state, release the driver or use it again, clear,
//! cordon or uncordon a GPU, accept the hardware.
//!
//! Owns the socket and the routes; the node passes in the functions that carry the orders out, and owns the task.
//! The metrics port never serves these routes.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path as PathOf, State as StateOf};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use thiserror::Error;

use super::connections::{self, Protocol};
use linkwise_core::publish::view::NodeView;
use linkwise_core::state::Cordon;
use linkwise_core::topology::GpuUuid;
use linkwise_system::files;
use linkwise_system::uds::{self, Callers, Listener, SocketFile};

/// The longest time for one connection; an order to release the driver takes up to 10 s of it.
const DEADLINE: Duration = Duration::from_secs(30);

/// The longest body of an order, in bytes: a cordon's texts, with every byte escaped.
const MAX_BODY: usize = 2 * 6 * Cordon::MAX_TEXT + 1024;

/// The result of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Carried out (200).
    Done(String),
    /// The GPU does not exist (404).
    Unknown(String),
    /// The order is not carried out, or not to its end; the text has the reason (503).
    NotYet(String),
}

/// The answer to an order, which may take a while.
pub type Answer = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// The functions that carry the orders out.
#[derive(Clone)]
pub struct Orders {
    /// The view of the node now.
    pub state: Arc<dyn Fn() -> NodeView + Send + Sync>,
    /// Carries an order out.
    pub carry_out: Arc<dyn Fn(Order) -> Answer + Send + Sync>,
}

/// An operator's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Release the driver.
    Release,
    /// Use the driver again.
    Resume,
    /// End the reasons for which a GPU is unhealthy.
    Clear(GpuUuid),
    /// Give a GPU to no new pod; with `None`, give it to pods again.
    Cordon(GpuUuid, Option<Cordon>),
    /// Accept the hardware as it is.
    Accept,
}

/// The reason why the admin socket could not be bound.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LocalError {
    #[error("another process serves {0}")]
    Taken(PathBuf),
    #[error("cannot listen on {0} for operators")]
    Bind(PathBuf, #[source] io::Error),
}

/// A bound admin socket; its file is removed when this is dropped.
#[derive(Debug)]
pub struct Local {
    listener: Listener,
    _file: SocketFile,
}

impl Local {
    /// Binds the socket for these callers; makes its folder if it is missing. Replaces a socket whose process has
    /// ended, but never one that is served. Of two processes that bind at the same moment one gets `Taken`. Must be
    /// called within a tokio runtime.
    pub fn bind(path: &Path, callers: Callers) -> Result<Self, LocalError> {
        let failed = |source| LocalError::Bind(path.to_owned(), source);
        if uds::is_dead(path) {
            files::remove_for_this_boot(path).map_err(failed)?;
        } else if uds::FileId::of_socket(path).is_some() {
            return Err(LocalError::Taken(path.to_owned()));
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
            files::make_private(folder).map_err(failed)?;
        }
        let (file, listener) = uds::listen(path, callers).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists if uds::FileId::of_socket(path).is_some() => LocalError::Taken(path.to_owned()),
            _ => failed(error),
        })?;
        Ok(Self { listener, _file: file })
    }

    /// Serves for ever.
    pub async fn serve(self, orders: Orders) {
        let routes = routes(orders);
        let accept = || async {
            let caller = self.listener.accept().await?;
            Ok((caller.stream, if caller.is_admitted { routes.clone() } else { refusal(caller.peer.uid) }))
        };
        connections::serve(Protocol::Http1, DEADLINE, accept).await;
    }
}

fn routes(orders: Orders) -> Router {
    let order = |order| post(move |StateOf(orders): StateOf<Orders>| carry_out(orders, order));
    Router::new()
        .route("/state", get(state))
        .route("/driver/release", order(Order::Release))
        .route("/driver/resume", order(Order::Resume))
        .route("/hardware/accept", order(Order::Accept))
        .route("/gpus/{uuid}/clear", post(clear))
        .route("/gpus/{uuid}/cordon", post(cordon))
        .route("/gpus/{uuid}/uncordon", post(uncordon))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(orders)
}

/// The answer to any request of another user.
fn refusal(uid: u32) -> Router {
    let words = format!("uid {uid} may not use this socket: root and linkwise's own user may\n");
    Router::new().fallback(move || async move { (StatusCode::FORBIDDEN, words) })
}

async fn state(StateOf(orders): StateOf<Orders>) -> Response {
    match serde_json::to_string_pretty(&(orders.state)()) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the state\n").into_response(),
    }
}

async fn clear(orders: StateOf<Orders>, uuid: PathOf<String>) -> Response {
    for_gpu(orders, &uuid, Order::Clear).await
}

async fn cordon(orders: StateOf<Orders>, uuid: PathOf<String>, body: Bytes) -> Response {
    let is_short = |cordon: &Cordon| [&cordon.by, &cordon.why].iter().all(|text| text.len() <= Cordon::MAX_TEXT);
    match serde_json::from_slice::<Cordon>(&body) {
        Ok(cordon) if !is_short(&cordon) => refused(format!("name and reason: at most {} bytes", Cordon::MAX_TEXT)),
        Ok(cordon) if cordon.why.trim().is_empty() => refused("a cordon needs a reason"),
        Ok(cordon) => for_gpu(orders, &uuid, |gpu| Order::Cordon(gpu, Some(cordon))).await,
        Err(error) => refused(format!("cannot read the cordon: {error}")),
    }
}

async fn uncordon(orders: StateOf<Orders>, uuid: PathOf<String>) -> Response {
    for_gpu(orders, &uuid, |gpu| Order::Cordon(gpu, None)).await
}

async fn for_gpu(StateOf(orders): StateOf<Orders>, uuid: &str, order: impl FnOnce(GpuUuid) -> Order) -> Response {
    match uuid.parse::<GpuUuid>() {
        Ok(uuid) => carry_out(orders, order(uuid)).await,
        Err(error) => refused(error),
    }
}

fn refused(why: impl std::fmt::Display) -> Response {
    (StatusCode::BAD_REQUEST, format!("{why}\n")).into_response()
}

async fn carry_out(orders: Orders, order: Order) -> Response {
    let (status, words) = match (orders.carry_out)(order).await {
        Outcome::Done(words) => (StatusCode::OK, words),
        Outcome::Unknown(words) => (StatusCode::NOT_FOUND, words),
        Outcome::NotYet(words) => (StatusCode::SERVICE_UNAVAILABLE, words),
    };
    (status, words + "\n").into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Barrier;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    fn orders() -> Orders {
        Orders {
            state: Arc::new(NodeView::default),
            carry_out: Arc::new(|order| {
                Box::pin(async move {
                    match order {
                        Order::Clear(gpu) => Outcome::Unknown(format!("no {gpu}")),
                        order => Outcome::Done(format!("{order:?}")),
                    }
                })
            }),
        }
    }

    /// Returns the answer to a request with this first line.
    async fn ask(local: Local, path: &Path, line: &str) -> String {
        let asking = async {
            let mut stream = UnixStream::connect(path).await.unwrap();
            stream
                .write_all(format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
                .await
                .unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            text
        };
        tokio::select! {
            () = local.serve(orders()) => unreachable!("it serves for ever"),
            text = asking => text,
        }
    }

    #[tokio::test]
    async fn one_of_two_simultaneous_binds_gets_taken() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let (path, barrier) = (folder.path().join(format!("{round}/admin.sock")), Arc::new(Barrier::new(2)));
            let bind = || {
                let (path, barrier) = (path.clone(), Arc::clone(&barrier));
                tokio::task::spawn_blocking(move || {
                    barrier.wait();
                    Local::bind(&path, Callers::default())
                })
            };
            let (first, second) = tokio::join!(bind(), bind());
            let (first, second) = (first.unwrap(), second.unwrap());
            let bound = [&first, &second].map(|bound| match bound {
                Ok(_) => true,
                Err(LocalError::Taken(_)) => false,
                Err(error) => panic!("{error:?}"),
            });
            assert!(bound[0] != bound[1], "{bound:?}");
        }
    }

    #[tokio::test]
    async fn orders_have_routes_and_metrics_have_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/admin.sock");
        for (line, status, words) in [
            ("GET /state", 200, "\"gpus\": []"),
            ("POST /driver/release", 200, "Release"),
            ("POST /driver/resume", 200, "Resume"),
            ("POST /gpus/GPU-a/clear", 404, "no GPU-a"),
            ("POST /gpus/%00/clear", 400, "UUID"),
            ("GET /driver/release", 405, ""),
            ("GET /metrics", 404, ""),
        ] {
            let text = ask(Local::bind(&path, Callers::default()).unwrap(), &path, line).await;
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")) && text.contains(words), "{line}: {text}");
            assert!(!path.exists(), "the socket is gone and its file is left");
        }
    }

    #[tokio::test]
    async fn another_user_is_refused_by_uid() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        let own = fs::metadata(folder.path()).unwrap().uid();
        let local = Local::bind(&path, Callers::only(u32::MAX)).unwrap();
        let text = ask(local, &path, "POST /driver/release").await;
        let refused = text.starts_with("HTTP/1.1 403 ") && text.contains(&format!("uid {own} may not use this socket"));
        assert!(refused && !text.contains("Release"), "{text}");
    }

    #[tokio::test]
    async fn only_a_dead_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let local = Local::bind(&path, Callers::default()).unwrap();
        assert!(matches!(Local::bind(&path, Callers::default()), Err(LocalError::Taken(..))));
        drop(local);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert!(matches!(Local::bind(&path, Callers::default()), Err(LocalError::Bind(..))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
    }

    #[tokio::test]
    async fn made_folder_is_private_and_foreign_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/admin.sock");
        let local = Local::bind(&path, Callers::default()).unwrap();
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        fs::write(folder.path().join("file"), "another's").unwrap();
        fs::rename(folder.path().join("file"), &path).unwrap();
        drop(local);
        assert_eq!(fs::read_to_string(&path).unwrap(), "another's");
    }
}
