//! NVML, asked in a process of its own, the agent: a library that leaks, hangs or crashes costs that process only.
//!
//! `agent` is the agent's main and `child` the parent's end of it; `protocol` has their messages, `call` and `scan` the
//! values in them, `watchdog` judges how long the agent may be silent, `memory` looks at how much memory it has. In the agent, `probe` scans (`mig` for MIG
//! devices, which `mig_order` makes and destroys), `events` waits for events, `watch` polls, `poll` has one poll's questions to a GPU, `calls` reports each
//! call to the parent before it is made, and `raw` has the calls that nvml-wrapper lacks or has wrong. Only the agent
//! ever loads the library.
//!
//! Called by the composition roots: `child` by the runtime, `agent` by `main`. Nothing here decides what a fact means;
//! that is for `topology` and `state`.

pub mod agent;
pub mod call;
mod calls;
pub mod child;
mod events;
mod library;
mod memory;
mod mig;
mod mig_order;
mod poll;
mod probe;
pub mod protocol;
mod raw;
pub mod scan;
mod watch;
mod watchdog;

pub use call::{Answer, CallError, Fault, Reason};
pub use probe::{COUNT, HANDLE, REGISTER};
pub use watchdog::Limits;
