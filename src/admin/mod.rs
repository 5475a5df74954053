//! What people and probes ask over HTTP: /metrics, /livez, /readyz.
//!
//! Owns the listener and the routes; the runtime hands it functions to ask and owns its task. It
//! changes nothing and never will: what changes something goes over a Unix socket.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
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
    /// `Ok` while the node serves; else why it does not, a line each.
    pub ready: Arc<dyn Fn() -> Result<(), Vec<String>> + Send + Sync>,
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
    /// The server ended.
    #[error("the server for metrics and probes ended")]
    Serve(#[source] io::Error),
}

/// A bound listener.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    address: SocketAddr,
}

impl Admin {
    /// Binds the address; port 0 takes a free one.
    pub async fn bind(address: SocketAddr) -> Result<Self, AdminError> {
        let bound = TcpListener::bind(address).await.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|source| AdminError::Bind { address, source })?;
        Ok(Self { listener, address })
    }

    /// The address in fact bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`.
    pub async fn serve(self, answers: Answers, shutdown: CancellationToken) -> Result<(), AdminError> {
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .route("/livez", get(|| async { "alive\n" }))
            .route("/readyz", get(ready))
            .with_state(answers);
        let serving = axum::serve(self.listener, routes);
        // A scraper that keeps its connection open does not hold up the end.
        match shutdown.run_until_cancelled(serving.into_future()).await {
            Some(ended) => ended.map_err(AdminError::Serve),
            None => Ok(()),
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
        Ok(()) => "ready\n".into_response(),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}
