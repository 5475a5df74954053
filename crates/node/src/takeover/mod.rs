//! The takeover: one of several linkwise processes on a node serves, and another takes over from it.
//!
//! The process that holds the lock is the owner: it registers, writes the node's files and prepares claims. A process
//! that dies gives up the lock. A takeover passes the lock over the takeover socket, and both processes hold it until
//! the owner's plugins have ended. `machine` decides, `executor` carries its actions out, and `condition` waits for
//! what a stage needs. docs/life-cycle.md has the protocol.

mod condition;
mod executor;
mod lock;
mod machine;
mod wire;

pub use executor::{Position, TakeoverMetrics};

/// The takeover socket's name in the state folder.
const SOCKET: &str = "takeover.sock";
const VERSION: &str = env!("CARGO_PKG_VERSION");
