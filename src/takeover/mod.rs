//! The takeover: one of several linkwise on a node serves, and another takes over from it. This module has the lock,
//! the words between the processes, and the machine that decides.
//!
//! The process that holds the lock owns the registrations, the health record, CDI specs, labels file, admin socket and
//! claims. A process that dies gives up the lock. A takeover passes the lock over the takeover socket, and both
//! processes hold it until the new one has all. The runtime carries out the machine's decisions; nothing here knows a
//! kubelet. docs/life-cycle.md has the protocol.

mod lock;
mod machine;
mod wire;

pub use lock::{Lock, Owner};
pub use machine::{Action, Input, Limits, Outcome, Stage, TakeoverMachine};
pub use wire::{Connection, Word};

/// The takeover socket's name in the state folder.
pub const SOCKET: &str = "takeover.sock";
