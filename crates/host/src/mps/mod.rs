//! CUDA MPS: the control daemons that share a GPU among processes.
//!
//! An adapter with two sides that meet in the MPS root, a folder of the host that both have mounted. `supervise` keeps
//! one nvidia-cuda-mps-control running for each resource, and for GPUs of claims, as [`Orders`] tell it (`linkwise
//! mps-control-daemon`, which has the privileges for this and reads no configuration). [`readiness`] is the plugin's side, which starts no process
//! and asks no driver. `publish::injection` decides what a container gets. docs/mps.md describes the whole. Called by
//! the program; this module never spawns a task, and never touches a GPU that its resources do not name.

mod control;
mod daemon;
mod layout;
mod limits;
mod orders;
mod shm;
mod supervise;

pub use control::{Control, ControlError, ProgramError};
pub use daemon::{Daemon, MpsError, Pace, Programs, Settings, set_back, set_exclusive};
pub use layout::{HOST_ROOT, Layout, LayoutError};
pub use limits::{Limits, MemoryLimit};
pub use orders::{Orders, exclusive_gpus, prepare_orders};
pub use shm::{Shm, keeps_own_shm, mount_shm, unmount_own_shm, unmount_own_shms};
pub use supervise::{DaemonEvent, Marker, NotReady, readiness, shm_of_ready, supervise};
