//! The sockets and gRPC servers of one session, with what every plugin needs: dead sockets are removed before
//! a bind, callers are checked, RPCs are observed, connections are asked to close, then cut.
//!
//! All of it ends when [`Servers`] is dropped: sockets are removed, streams end, connections break.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tower::layer::layer_fn;
use tower::service_fn;

use super::executor::Life;
use linkwise_core::errors::chain;
use linkwise_system::files::folder;
use linkwise_system::grpc::{Refusal, Report, Rpc, accepted, observed};
use linkwise_system::uds::{self, Callers, Listener, SocketFile};

/// A future on the heap.
pub type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The cause of a failed bind: the operation that failed, such as `make the folder`, and its folder.
#[derive(Debug, Error)]
#[error("cannot {0} {folder}", folder = .1.display())]
pub struct BindError(pub &'static str, pub PathBuf, #[source] pub io::Error);

/// Returns true for the number in the name of a socket: eight hexadecimal digits.
pub fn is_number(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Listens at a path.
pub fn listen(path: &Path, callers: &Callers) -> Result<(SocketFile, Listener), BindError> {
    uds::listen(path, *callers).map_err(|source| BindError("bind a socket in", folder(path).to_owned(), source))
}

/// Removes the dead sockets in a path's folder that have one of the plugin's own names, then listens at the path.
pub fn bind(
    path: &Path,
    callers: &Callers,
    is_own: impl Fn(&str) -> bool,
) -> Result<(SocketFile, Listener), BindError> {
    let folder = folder(path);
    let failed = |source| BindError("remove dead sockets from", folder.to_owned(), source);
    uds::remove_dead(folder, is_own).map_err(failed)?;
    listen(path, callers)
}

/// The sockets of a session, and their servers.
pub struct Servers {
    refused: Report<Refusal>,
    ended: Report<Rpc>,
    sockets: Vec<SocketFile>,
    /// Another name of the first socket.
    alias: Option<SocketFile>,
    servers: FuturesUnordered<BoxedFuture<Result<(), tonic::transport::Error>>>,
    end: CancellationToken,
    cut: CancellationToken,
    _guards: [DropGuard; 2],
}

impl Servers {
    /// Starts without a server. The report receives refused connections and RPCs that ended.
    pub fn new<P: 'static>(report: Report<Life<P>>) -> Self {
        let (refused, ended) = (Arc::clone(&report), report);
        let refused: Report<Refusal> = Arc::new(move |refusal| refused(Life::Refused(refusal)));
        let ended: Report<Rpc> = Arc::new(move |rpc| ended(Life::Rpc(rpc)));
        let (end, cut) = (CancellationToken::new(), CancellationToken::new());
        let _guards = [end.clone().drop_guard(), cut.clone().drop_guard()];
        let (sockets, alias, servers) = (Vec::new(), None, FuturesUnordered::new());
        Self { refused, ended, sockets, alias, servers, end, cut, _guards }
    }

    /// The token that ends open streams: tonic's graceful shutdown waits for them.
    pub fn end_of_streams(&self) -> CancellationToken {
        self.end.clone()
    }

    /// Serves a socket; `open` counts the connections on which the caller has sent something.
    pub fn serve(&mut self, (socket, listener): (SocketFile, Listener), open: watch::Sender<usize>, routes: Routes) {
        let ended = Arc::clone(&self.ended);
        let layer = layer_fn(move |service: Routes| {
            let ended = Arc::clone(&ended);
            service_fn(move |request| observed(service.clone(), request, Arc::clone(&ended)))
        });
        let connections = accepted(listener, self.cut.clone(), open, Arc::clone(&self.refused));
        let server = tonic::transport::Server::builder()
            .layer(layer)
            .add_routes(routes)
            .serve_with_incoming_shutdown(connections, self.end.clone().cancelled_owned());
        self.sockets.push(socket);
        self.servers.push(Box::pin(server));
    }

    /// Gives the first socket a second name.
    pub fn add_alias(&mut self, path: &Path) -> io::Result<()> {
        let socket = self.sockets.first().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.alias = Some(socket.alias(path)?);
        Ok(())
    }

    /// Returns true if the sockets are still the files that were bound.
    pub fn has_sockets(&self) -> bool {
        !self.sockets.is_empty() && self.sockets.iter().all(SocketFile::is_in_place)
    }

    /// Removes the sockets, ends the streams, accepts no more connections and asks the open ones to close.
    pub fn end(&mut self) {
        self.sockets.clear();
        self.alias = None;
        self.end.cancel();
    }

    /// Breaks the connections that are still open.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// Waits for the end of a server, which follows the end of its last connection. Returns the cause, or `None` when
    /// all servers have ended. Cancel-safe. The servers accept connections only while this is awaited.
    pub async fn next(&mut self) -> Option<String> {
        let result = self.servers.next().await?;
        Some(result.map_or_else(|error| chain(&error), |()| "without an error".to_owned()))
    }
}
