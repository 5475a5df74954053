//! Pure readers of a snapshot. Each makes one thing that linkwise publishes:
//!
//! - [`injection`]: what a container gets for its GPUs
//! - [`mod@labels`]: the node's labels
//! - [`dra`]: the devices of the node's resource slices
//! - [`placement`]: the holders of GPUs, and the quality of their sets
//! - [`view`]: everything that people see of the node
//! - [`Condition`]: the node's condition
//! - [`PodEvent`]: the event about a pod whose GPUs are linked far worse than possible
//!
//! The other crates call them, on the path of an admission too. Nothing here changes the state.

mod condition;
pub mod dra;
pub mod injection;
pub mod labels;
pub mod placement;
mod pod_event;
pub mod view;

pub use condition::Condition;
pub use injection::{MPS_CONTAINER_ROOT, MPS_PIPE, MPS_SHM, MpsClient, MpsShm, RdmaNodes, below};
pub use pod_event::PodEvent;
