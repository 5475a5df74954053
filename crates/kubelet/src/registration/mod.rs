//! A plugin's life with the kubelet, as far as it is the same for the device plugin and the DRA plugin: attempts,
//! pauses, binding, the end of a session, checks of the files.
//!
//! Used by `kubelet` and `dra`, each of which adds its own [`Handshake`] and [`Session`]; it knows neither, and no wire
//! type. `machine` decides what to do next, [`Executor`] does it, `servers` has the sockets. It starts no task
//! (docs/life-cycle.md).

mod executor;
mod journal;
mod machine;
mod servers;
#[cfg(test)]
pub mod worlds;

pub use executor::{Executor, Life, Registrant, Session, Watching, random};
pub use journal::Journal;
pub use machine::{Action, Attempts, Handshake, Input, LifePhase, Limits, RegistrationMachine};
pub use servers::{BindError, Held, Servers, bind, is_number, listen};
