//! NVML, called in a process of its own, the agent: a library that leaks, hangs or crashes harms only that process.
//!
//! `agent` is the agent's main and `child` the parent's end of it; `protocol` has their messages, `call` and `scan` the
//! values in them. `watchdog` limits the time without a message from the agent, and `memory` measures its memory. In
//! the agent, `full_scan` reads every fact of each GPU (`mig` the facts of MIG devices, which `mig_order` makes and
//! destroys), `events` waits for events, `watch` polls, `poll` makes one poll's calls to a GPU, `calls` reports each
//! call to the parent before it is made, and `raw` has the calls that nvml-wrapper lacks or has wrong. Only the agent
//! loads the library.
//!
//! The program calls `supervisor`, `child` and `gate`, its hidden subcommand `agent`. Nothing here decides the meaning
//! of a fact: the core's `topology` and `state` do.

pub mod agent;
pub mod call;
mod calls;
pub mod child;
mod events;
mod full_scan;
pub mod gate;
mod library;
mod links;
mod memory;
mod mig;
mod mig_order;
mod poll;
pub mod protocol;
mod raw;
mod scan;
pub mod supervisor;
mod watch;
mod watchdog;

pub use call::{Answer, CallError, Fault, Reason};
pub use full_scan::{COUNT, HANDLE, REGISTER};
pub use scan::{CallFailure, NodeScan, known};
pub use watchdog::Limits;
