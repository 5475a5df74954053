//! GPUs shared by MPS: our supervisor and the plugin's side, with a nvidia-cuda-mps-control of our own as the driver's.
//! Every wait is for a state; the limits are there so that a failure ends.

mod claims;
mod command;
pub mod node;
mod shm;
mod supervised;
