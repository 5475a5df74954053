//! gRPC servers on Unix sockets: admitted connections that can be cut, and RPCs that are observed when they end.
//!
//! Used by `kubelet` and `dra` around their services, which it does not know. It starts no task and logs nothing; tonic
//! serves each connection in a task of its own.

mod connection;
mod layer;

use std::sync::Arc;
use std::time::Duration;

use crate::uds::Peer;

pub use connection::{Connection, accepted};
pub use layer::observed;

/// An RPC that ended.
#[derive(Clone, Debug)]
pub struct Rpc {
    /// The method's name without its service.
    pub method: String,
    /// gRPC's name of the code; `CANCELLED` when the caller disconnected.
    pub code: String,
    /// From the request's head to the end of the answer.
    pub elapsed: Duration,
}

/// A connection that was not served.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// Its user may not call.
    Caller(Peer),
    /// It could not be accepted, and why not.
    NotAccepted(String),
}

/// Receives what ended or was refused. Called while a caller waits: it must not block.
pub type Report<T> = Arc<dyn Fn(T) + Send + Sync>;
