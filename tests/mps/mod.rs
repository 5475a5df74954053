//! GPUs shared by MPS: our supervisor and the plugin's side, with a nvidia-cuda-mps-control of our own as the driver's.
//! Every wait is for a state; the limits are there so that a failure ends.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

mod claims;
mod command;
pub mod node;
mod shm;
mod supervised;
