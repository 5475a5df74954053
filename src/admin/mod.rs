//! What people and probes ask over HTTP: /metrics, /livez, /readyz on a port; and, on a Unix socket, what an operator
//! orders (`local`).
//!
//! Owns the listeners and the routes; the runtime hands it functions to call and owns its tasks. Over the port nothing can be
//! changed, and never will: what changes something goes over the Unix socket.

mod connections;
mod listen;
mod local;
mod state;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State as StateOf;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use connections::HEAD_TIMEOUT;
pub use local::{Answer, Local, LocalError, Orders, Outcome};
pub use state::{GpuState, ReasonState, ResourceState, State};

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

/// A bound listener.
#[derive(Debug)]
pub struct Admin {
    listener: Arc<TcpListener>,
    address: SocketAddr,
    head_timeout: Duration,
}

impl Admin {
    /// Binds the address; port 0 takes a free one, `[::]` serves IPv4 too and is 0.0.0.0 where IPv6 is off.
    pub async fn bind(address: SocketAddr) -> Result<Self, AdminError> {
        let bound = listen::listen(address).and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|source| AdminError::Bind { address, source })?;
        Ok(Self { listener: Arc::new(listener), address, head_timeout: HEAD_TIMEOUT })
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
        let accept = || {
            let (listener, routes) = (Arc::clone(&self.listener), routes.clone());
            async move { Ok((listener.accept().await?.0, routes)) }
        };
        // A scraper that keeps its connection open does not hold up the end.
        shutdown.run_until_cancelled(connections::serve(self.head_timeout, accept)).await;
    }
}

async fn metrics(StateOf(answers): StateOf<Answers>) -> Response {
    match (answers.metrics)() {
        Some(text) => ([(header::CONTENT_TYPE, answers.metrics_type)], text).into_response(),
        None => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written\n").into_response(),
    }
}

async fn ready(StateOf(answers): StateOf<Answers>) -> Response {
    match (answers.ready)() {
        Ok(word) => (word + "\n").into_response(),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::connections::MOST_CONNECTIONS;
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

    /// Asks on a connection that stays open, and gives what comes.
    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        while !answer.ends_with("alive\n") {
            answer.push(char::from(stream.read_u8().await.unwrap()));
        }
        answer
    }

    #[tokio::test]
    async fn one_connection_too_many_waits_until_another_is_closed() {
        let admin = Admin::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = admin.address();
        let answers = Answers {
            metrics: Arc::new(|| None),
            metrics_type: "text/plain",
            ready: Arc::new(|| Ok("ready".to_owned())),
        };
        let shutdown = CancellationToken::new();
        let asking = async {
            let mut open = Vec::new();
            for _ in 0..MOST_CONNECTIONS {
                let mut stream = TcpStream::connect(address).await.unwrap();
                ask(&mut stream).await;
                open.push(stream);
            }
            let mut further = TcpStream::connect(address).await.unwrap();
            further.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            // One task serves them all: whoever is let in would have been answered between two of these.
            for stream in &mut open {
                ask(stream).await;
            }
            let early = further.try_read(&mut [0; 16]);
            assert_eq!(early.unwrap_err().kind(), io::ErrorKind::WouldBlock);
            open.pop();
            let first = tokio::time::timeout(Duration::from_secs(20), further.read_u8()).await;
            shutdown.cancel();
            assert_eq!(first.expect("an answer once there is room").unwrap(), b'H');
        };
        tokio::join!(admin.serve(answers, shutdown.clone()), asking);
    }
}
