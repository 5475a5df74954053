//! The takeover: one of several linkwise on a node serves, and another takes over from it. This module has the lock,
//! the words between the processes, and the machine that decides.
//!
//! The process that holds the lock owns the registrations, the health record, CDI specs, labels file, admin socket and
//! claims. A process that dies gives up the lock. A takeover passes the lock over the takeover socket, and both
//! processes hold it until the new one has all. `executor` carries out what `machine` decides. docs/life-cycle.md has the protocol.

mod executor;
mod lock;
mod machine;
mod wire;

pub use executor::{Position, TakeoverMetrics};
use lock::{Lock, Owner};
use machine::{Action, Input, Limits, Outcome, Stage, TakeoverMachine};
use wire::{Connection, Word};

/// The takeover socket's name in the state folder.
const SOCKET: &str = "takeover.sock";
