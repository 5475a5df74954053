//! Pure readers of a snapshot: what the node's neighbours are given of it. [`injection`] is what a container gets with
//! its GPUs, [`mod@labels`] what schedulers are told of the node, [`dra`] the devices of its resource slices, [`placement`]
//! what people are shown: who holds what, and how good it is.
//!
//! Called by the adapters, on the path of an admission too. Nothing here changes the state.

pub mod dra;
pub mod injection;
pub mod labels;
mod mps_client;
pub mod placement;
mod rdma;

pub use mps_client::{MPS_CONTAINER_ROOT, MPS_PIPE, MPS_SHM, MpsClient};
pub use rdma::RdmaNodes;

use crate::prelude::*;

/// The path on the host of what a container, or the driver root, has at `path`: `path` below `root`.
pub fn below(root: &str, path: &str) -> String {
    format!("{}/{}", root.trim_end_matches('/'), path.trim_start_matches('/'))
}
