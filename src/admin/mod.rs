//! What people and probes ask over HTTP: /metrics, /livez, /readyz.
//!
//! Owns the listener and the routes; the runtime hands it functions to ask and owns its task. It
//! changes nothing and never will: what changes something goes over a Unix socket.

mod listen;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream::{FuturesUnordered, StreamExt};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What the endpoints answer from.
#[derive(Clone)]
pub struct Answers {
    /// The metrics' text; `None` when it could not be written.
    pub metrics: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    /// The content type of that text.
    pub metrics_type: &'static str,
    /// `Ok` with a word on it while the node serves, or has nothing to serve; else why it does not, a line each.
    pub ready: Arc<dyn Fn() -> Result<String, Vec<String>> + Send + Sync>,
}

/// Why the endpoints cannot be served.
#[derive(Debug, Error)]
pub enum AdminError {
    /// The address is taken, or not ours.
    #[error("cannot listen on {address} for metrics and probes")]
    Bind {
        /// The address asked for.
        address: SocketAddr,
        /// What the operating system said.
        source: io::Error,
    },
}

/// Connections served at once; further ones wait until one is closed. Each costs some 20 KB.
const MOST_CONNECTIONS: usize = 64;
/// How long a request's head may take, from the connection or from the last answer on. Who opens connections and says
/// nothing keeps nobody else out for longer.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after an accept that failed: file descriptors may be out for a while.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound listener.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
    head_timeout: Duration,
}

impl Admin {
    /// Binds the address; port 0 takes a free one, `[::]` serves IPv4 too and is 0.0.0.0 where IPv6 is off.
    pub async fn bind(address: SocketAddr) -> Result<Self, AdminError> {
        let bound = listen::listen(address).and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|source| AdminError::Bind { address, source })?;
        Ok(Self { listener, address, head_timeout: HEAD_TIMEOUT })
    }

    /// The address in fact bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`.
    pub async fn serve(self, answers: Answers, shutdown: CancellationToken) {
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/livez", get(|| async { "alive\n" }))
            .route("/readyz", get(ready))
            .with_state(answers);
        // A scraper that keeps its connection open does not hold up the end.
        shutdown.run_until_cancelled(self.accept(routes)).await;
    }

    /// All connections in one task: none outlives it.
    async fn accept(&self, routes: Router) {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.head_timeout);
        let mut open = FuturesUnordered::new();
        loop {
            tokio::select! {
                accepted = self.listener.accept(), if open.len() < MOST_CONNECTIONS => match accepted {
                    Ok((stream, _)) => {
                        let service = TowerToHyperService::new(routes.clone());
                        open.push(http.serve_connection(TokioIo::new(stream), service));
                    }
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                },
                // What a caller did wrong on its connection is its own affair.
                Some(_) = open.next(), if !open.is_empty() => {}
            }
        }
    }
}

async fn metrics(State(answers): State<Answers>) -> Response {
    match (answers.metrics)() {
        Some(text) => ([(header::CONTENT_TYPE, answers.metrics_type)], text).into_response(),
        None => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written\n").into_response(),
    }
}

async fn ready(State(answers): State<Answers>) -> Response {
    match (answers.ready)() {
        Ok(word) => (word + "\n").into_response(),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn get_livez(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn those_who_say_nothing_keep_nobody_out() {
        let mut admin = Admin::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        admin.head_timeout = Duration::from_millis(50);
        let address = admin.address();
        let answers = Answers {
            metrics: Arc::new(|| None),
            metrics_type: "text/plain",
            ready: Arc::new(|| Ok("ready".to_owned())),
        };
        let shutdown = CancellationToken::new();
        let ask = async {
            let mut silent = Vec::new();
            for _ in 0..MOST_CONNECTIONS * 2 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                stream.write_all(b"GET /livez HTTP/1.1\r\nHost: ").await.unwrap();
                silent.push(stream);
            }
            let answer = tokio::time::timeout(Duration::from_secs(20), get_livez(address)).await;
            shutdown.cancel();
            answer.expect("an answer beside the silent ones")
        };
        let ((), answer) = tokio::join!(admin.serve(answers, shutdown.clone()), ask);
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("alive\n"), "{answer}");
    }
}
