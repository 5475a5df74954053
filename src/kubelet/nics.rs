//! The RDMA NICs nearest to the granted GPUs, for a container that is to get them too (`--expose-nics`).
//!
//! Called by `handover`, on the path of an admission. Pure: which NICs are near is the graph's knowledge, which nodes they
//! have was looked up before.

use std::collections::{BTreeMap, BTreeSet};

use super::handover::Answer;
use crate::state::Device;
use crate::topology::NodeTopology;

/// The variable in which a container finds the names of its NICs, as the kernel has them: `mlx5_0,mlx5_1`. Fit for NCCL_IB_HCA.
const NICS: &str = "LINKWISE_NICS";

/// The device nodes of the RDMA devices of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaNodes {
    /// By the device's name: `mlx5_0` has `/dev/infiniband/uverbs0`.
    pub devices: BTreeMap<String, String>,
    /// What all of them need: `/dev/infiniband/rdma_cm`.
    pub common: Vec<String>,
}

impl RdmaNodes {
    /// Adds the nearest NICs: to each GPU those of the smallest level, PHB or closer. Where none is near, the variable is
    /// empty: a container can tell that from not being told.
    pub(super) fn answer(&self, topology: &NodeTopology, devices: &[&Device], answer: &mut Answer) {
        let places = devices.iter().filter_map(|device| topology.position(&device.gpu.uuid));
        let near: BTreeSet<usize> = places.flat_map(|place| topology.nearest_nics(place)).collect();
        let nics = near.into_iter().filter_map(|nic| topology.nics().get(nic));
        // A NIC's other interfaces have no verbs, and are not in the map.
        let mut names: Vec<(&String, &String)> =
            nics.flat_map(|nic| &nic.names).filter_map(|name| self.devices.get_key_value(name)).collect();
        names.dedup();
        let list: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        answer.variables.insert(NICS.to_owned(), list.join(","));
        if !names.is_empty() {
            // They are the host's own, whatever the driver root.
            let nodes = names.into_iter().map(|(_, node)| node).chain(&self.common);
            answer.nodes.extend(nodes.map(|node| (node.clone(), node.clone())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines;
    use crate::state::{Event, NodeState, ResourceName};

    fn rdma() -> RdmaNodes {
        let node = |n: usize| (format!("mlx5_{n}"), format!("/dev/infiniband/uverbs{n}"));
        RdmaNodes { devices: (0..12).map(node).collect(), common: vec!["/dev/infiniband/rdma_cm".to_owned()] }
    }

    /// What a container gets with these GPUs, by index, of a built-in machine: its NICs and its nodes.
    fn answer(machine: &str, gpus: &[u32]) -> (String, Vec<String>) {
        let observed = machines::load(machine).unwrap().observed;
        let snapshot = NodeState::default().apply(Event::Observed(Box::new(observed)), std::time::Duration::ZERO).0;
        let devices = snapshot.offers().of(&ResourceName::gpu()).map(|(_, device)| device);
        let devices: Vec<&Device> = devices.filter(|device| gpus.contains(&device.gpu.index)).collect();
        let mut answer = Answer::default();
        rdma().answer(snapshot.topology(), &devices, &mut answer);
        assert!(answer.nodes.iter().all(|(host, container)| host == container));
        (answer.variables[NICS].clone(), answer.nodes.into_iter().map(|(host, _)| host).collect())
    }

    #[test]
    fn each_gpu_brings_the_nics_beside_it() {
        let verbs = |n: usize| format!("/dev/infiniband/uverbs{n}");
        let common = || "/dev/infiniband/rdma_cm".to_owned();
        assert_eq!(answer("dgx1-v100", &[0]), ("mlx5_0".to_owned(), vec![verbs(0), common()]));
        // Two GPUs of a board share a NIC.
        assert_eq!(answer("dgx1-v100", &[0, 1]), ("mlx5_0".to_owned(), vec![verbs(0), common()]));
        assert_eq!(answer("dgx1-v100", &[1, 7]), ("mlx5_0,mlx5_3".to_owned(), vec![verbs(0), verbs(3), common()]));
    }

    #[test]
    fn without_a_nic_near_the_container_is_told_so() {
        assert_eq!(answer("workstation-a6000", &[0]), (String::new(), vec![]));
    }
}
