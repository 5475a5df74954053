//! CUDA MPS: the control daemons that share a GPU among processes.
//!
//! An adapter with two sides that meet in the MPS root, a folder of the host that both have mounted. `supervise` keeps
//! one nvidia-cuda-mps-control running for each resource, and for GPUs of claims, as [`Orders`] tell it (`linkwise
//! mps-control-daemon`, which has the privileges for this). [`readiness`] is the plugin's side, which starts no process
//! and asks no driver. `publish::injection` decides what a container gets. docs/mps.md describes the whole. Called by
//! the program; this module never spawns a task, and never touches a GPU that its resources do not name.

mod compute_mode;
mod control;
mod daemon;
mod layout;
mod limits;
mod marker;
mod orders;
mod program;
mod selinux;
mod shm;
mod supervise;

pub use compute_mode::{set_back, set_exclusive};
pub use control::{Control, ControlError};
pub use daemon::{Daemon, MpsError, Pace, Programs, Settings};
pub use layout::{HOST_ROOT, Layout, LayoutError};
pub use limits::{Limits, MemoryLimit};
pub use marker::{Marker, NotReady, readiness, shm_of_ready};
pub use orders::{Orders, exclusive_gpus, prepare_orders};
pub use program::ProgramError;
pub use shm::{Shm, keeps_own_shm, mount_shm, unmount_own_shm, unmount_own_shms};
pub use supervise::{DaemonEvent, supervise};
