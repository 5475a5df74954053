//! Pure readers of a snapshot: what the node's neighbours are given of it. [`injection`] is what a container gets with
//! its GPUs, [`mod@labels`] what schedulers are told of the node, [`dra`] the devices of its resource slices, [`placement`]
//! what people are shown: who holds what, and how good it is, [`PodEvent`] what a pod is told whose GPUs are linked far
//! worse than they could be.
//!
//! Called by the adapters, on the path of an admission too. Nothing here changes the state.

pub mod dra;
pub mod injection;
pub mod labels;
mod mps_client;
mod path;
pub mod placement;
mod pod_event;
mod rdma;

pub use mps_client::{MPS_CONTAINER_ROOT, MPS_PIPE, MPS_SHM, MpsClient};
pub use path::below;
pub use pod_event::PodEvent;
pub use rdma::RdmaNodes;
