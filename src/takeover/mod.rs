//! Which of several linkwise on a node serves, and how one takes over from another: the lock, the words between them,
//! and the machine that decides.
//!
//! Whoever holds the lock owns the registrations, the health record, CDI specs, labels file, admin socket and claims. A
//! process that dies gives it up by dying; in a takeover it is passed over the takeover socket, and held by both until
//! the new one has all. The runtime carries out what the machine decides; nothing here knows a kubelet.
//! docs/life-cycle.md has the protocol.

mod lock;
mod machine;
mod wire;

pub use lock::{Lock, Owner};
pub use machine::{Action, Input, Limits, Machine, Outcome, Stage};
pub use wire::{Connection, Word};

/// The takeover socket's name in the state folder.
pub const SOCKET: &str = "takeover.sock";
