//! The part of a plugin's life with the kubelet that the device plugin and the DRA plugin share: attempts, pauses,
//! binding, the end of a session, checks of the files.
//!
//! Used by `device_plugin` and `dra`, each of which adds its own [`Handshake`] and [`Session`]. This module depends on
//! neither, uses no wire type and starts no task. `machine` decides what to do next, [`Executor`] does it, `servers`
//! has the sockets (docs/life-cycle.md).

mod executor;
mod journal;
mod machine;
mod servers;
#[cfg(test)]
pub mod worlds;

pub use executor::{Executor, Life, Registrant, Session, Watching, random};
pub use journal::Journal;
pub use machine::{Action, Attempts, Handshake, Input, LifePhase, Limits, RegistrationMachine};
pub use servers::{BindError, BoxedFuture, Servers, bind, is_number, listen};
