//! Tests of GPUs shared by MPS: the supervisors of control daemons and the plugin's side, with stand-ins for
//! nvidia-cuda-mps-control and nvidia-smi. Every wait is for a state; time limits only end a test that fails.

mod claims;
mod command;
pub mod node;
mod shm;
mod supervised;
