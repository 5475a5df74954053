//! CUDA MPS: the control daemons that share a GPU among processes, and what a container needs to reach one.
//!
//! An adapter with two sides that meet in the MPS root, a folder of the host that both have mounted. `supervise` keeps
//! one nvidia-cuda-mps-control for each resource (`linkwise mps-control-daemon`, which has the privileges that this
//! takes); `ready` is the plugin's side, which starts nothing and asks no driver. docs/mps.md has the whole.
//! Called by the runtime; it never spawns a task, and never touches a GPU that its resources do not name.

mod control;
mod daemon;
mod layout;
mod limits;
mod marker;
mod ready;
mod shm;
mod supervise;

pub use control::{Control, ControlError};
pub use daemon::{Daemon, Pace, Programs, Settings, StartError};
pub use layout::{HOST_ROOT, Layout, LayoutError};
pub use limits::{Limits, MemoryLimit};
pub use marker::Marker;
pub use ready::{Readiness, look};
pub use shm::{Shm, ShmError, mount_shm};
pub use supervise::{Occurrence, supervise};
