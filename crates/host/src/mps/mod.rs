//! CUDA MPS: the control daemons that share a GPU among processes.
//!
//! Two programs meet in the MPS root, a folder of the host that both have mounted:
//!
//! - `linkwise mps-control-daemon` has the privileges to run control daemons, and reads no configuration. It calls
//!   [`supervise()`] for each resource, and for the GPUs of claims, that the plugin's [`Orders`] list.
//! - The plugin, `linkwise run`, writes the orders and calls [`readiness`]. It starts no control daemon.
//!
//! `publish::injection` decides what a container gets. docs/mps.md describes the whole. This module never spawns a
//! task, and touches only GPUs that the orders or its own records name.

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
