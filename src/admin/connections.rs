//! Connections of HTTP/1, however they come: how many at once, and how long one may say nothing.

use std::io;
use std::time::Duration;

use axum::Router;
use futures_util::stream::{FuturesUnordered, StreamExt};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};

/// Connections served at once; further ones wait until one is closed. Each costs some 20 KB.
pub(super) const MOST_CONNECTIONS: usize = 64;
/// How long a request's head may take, from the connection or from the last answer on. Who opens connections and says
/// nothing keeps nobody else out for longer.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after an accept that failed: file descriptors may be out for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves what `accept` gives, each connection with its routes, for ever. All in one task: none outlives it.
pub(super) async fn serve<S, F>(head_timeout: Duration, accept: impl Fn() -> F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = io::Result<(S, Router)>>,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    let mut open = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = accept(), if open.len() < MOST_CONNECTIONS => match accepted {
                Ok((stream, routes)) => {
                    open.push(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes)));
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            // What a caller did wrong on its connection is its own affair.
            Some(_) = open.next(), if !open.is_empty() => {}
        }
    }
}
