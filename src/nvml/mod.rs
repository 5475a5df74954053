//! NVML, spoken to in a child process: what a library or a driver does wrong costs that child.
//!
//! `agent` is the child's main and `child` the parent's end of it; `protocol` is what they say
//! to each other, `watchdog` judges how long the child may be silent. In the child, `probe` observes, `links` does so for
//! NVLinks and `mig` for MIG devices, `events` waits, `watch` goes its rounds, `poll` is one round's questions to a GPU; `raw` has the calls that
//! nvml-wrapper lacks or has wrong, `call` the words for what comes back, and `calls` tells the parent of each call before
//! it is made. Only the child ever loads the library.
//!
//! Called by the composition roots: `child` by the runtime, `agent` by `main`. Nothing here
//! decides what a fact means; that is for `topology` and `snapshot`.

pub mod agent;
mod call;
mod calls;
pub mod child;
mod events;
mod library;
mod links;
mod mig;
mod poll;
mod probe;
pub mod protocol;
mod raw;
mod watch;
mod watchdog;

pub use call::{CallError, Reason};
pub use probe::COUNT;
pub use watchdog::Limits;
