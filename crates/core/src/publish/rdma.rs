//! The RDMA NICs nearest to a container's GPUs (`--expose-nics`).
//!
//! `injection` calls it. The graph tells which NICs are near; the host scan found their device nodes before.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::injection::{ChosenDevice, DeviceNode, Injection};
use crate::topology::NodeTopology;

/// The variable with the kernel's names of the container's NICs, `mlx5_0,mlx5_1`: fit for NCCL_IB_HCA.
const LINKWISE_NICS: &str = "LINKWISE_NICS";

/// The device nodes of the host's RDMA devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaNodes {
    /// The nodes by the device's name: `mlx5_0` has `/dev/infiniband/uverbs0`.
    pub devices: BTreeMap<String, String>,
    /// The nodes that all of them need: `/dev/infiniband/rdma_cm`.
    pub common: Vec<String>,
}

impl RdmaNodes {
    /// Adds the nearest NICs of each GPU: those of the smallest level, if that is PHB or closer. Without such a NIC the
    /// variable is set and empty, so that a container can tell "none near" from "not asked for".
    pub(super) fn inject(&self, topology: &NodeTopology, devices: &[ChosenDevice<'_>], injection: &mut Injection) {
        let positions = devices.iter().filter_map(|device| topology.position(&device.gpu.uuid));
        let nearest: BTreeSet<usize> = positions.flat_map(|position| topology.nearest_nics(position)).collect();
        let nics = nearest.into_iter().filter_map(|nic| topology.nics().get(nic));
        // A NIC's network interfaces have no verbs and are not in the map.
        let mut rdma: Vec<_> =
            nics.flat_map(|nic| &nic.names).filter_map(|name| self.devices.get_key_value(name)).collect();
        rdma.dedup();
        let names: Vec<&str> = rdma.iter().map(|(name, _)| name.as_str()).collect();
        injection.env.insert(LINKWISE_NICS.to_owned(), names.join(","));
        if !rdma.is_empty() {
            // The host's own /dev, whatever the driver root is.
            let paths = rdma.into_iter().map(|(_, path)| path).chain(&self.common);
            injection.device_nodes.extend(paths.map(|path| DeviceNode { host: path.clone(), container: path.clone() }));
        }
    }
}
