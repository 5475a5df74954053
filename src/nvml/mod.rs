//! NVML, spoken to in a child process: what a library or a driver does wrong costs that child.
//!
//! `agent` is the child's main and `child` the parent's end of it; `protocol` is what they say
//! to each other. In the child, `probe` observes, `links` does so for NVLinks and `mig` for MIG devices, `events` waits,
//! `watch` polls; `raw` has the calls that nvml-wrapper lacks or has wrong, and `call` the words
//! for what comes back. Only the child ever loads the library.
//!
//! Called by the composition roots: `child` by the runtime, `agent` by `main`. Nothing here
//! decides what a fact means; that is for `topology` and `inventory`.

pub mod agent;
mod call;
pub mod child;
mod events;
mod library;
mod links;
mod mig;
mod probe;
pub mod protocol;
mod raw;
mod watch;

pub use call::{CallError, Reason};
