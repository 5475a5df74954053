//! gRPC servers on Unix sockets: admitted connections that can be cut, and RPCs that are observed when they end.
//!
//! Used by the device plugin and the DRA plugin around their services, which this module does not know. It starts
//! no task and logs nothing.

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
    /// The time from the request's head to the end of the answer.
    pub elapsed: Duration,
}

/// A connection that was not served.
#[derive(Clone, Debug)]
pub enum Refusal {
    /// The caller's user may not connect.
    Caller(Peer),
    /// The connection could not be accepted, with the reason.
    NotAccepted(String),
}

/// Receives ended RPCs or refused connections. Called while a caller waits: it must not block.
pub type Report<T> = Arc<dyn Fn(T) + Send + Sync>;
