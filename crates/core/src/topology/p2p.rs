//! P2P that the driver refuses between two GPUs, for warnings. The choice does not use it.
//!
//! NCCL asks for reading and writing (`ncclTopoCheckP2p` in its src/graph/paths.cc) where its path of two GPUs is NVLink
//! or PCIe switches alone; farther apart it takes no P2P by default. Over switches a refusal sends the traffic through
//! the host's memory; over NVLink NCCL ends with an error.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::level::Rank;
use super::node::NodeTopology;
use super::observation::GpuObservation;
use super::p2p_refusal::P2pRefusal;
use super::warning::TopologyWarning;

/// Finds the refusals that NCCL would notice, gathered by their reason. A GPU in MIG mode has no P2P, and needs none.
pub(super) fn refused(topology: &NodeTopology, seen: &[&GpuObservation]) -> Vec<TopologyWarning> {
    let mut found: BTreeMap<(bool, P2pRefusal), Vec<_>> = BTreeMap::new();
    for (a, (one, first)) in seen.iter().zip(topology.gpus()).enumerate() {
        for (b, (two, second)) in seen.iter().zip(topology.gpus()).enumerate().skip(a + 1) {
            let refusal = one.p2p_refused.get(&two.index).or_else(|| two.p2p_refused.get(&one.index));
            let Some(refusal) = refusal.filter(|_| !first.mig_enabled && !second.mig_enabled) else { continue };
            let by_nvlink = topology.nvlink_count(a, b) > 0;
            if by_nvlink || topology.rank(a, b) <= Rank::PCIE_SWITCHES {
                found.entry((by_nvlink, *refusal)).or_default().push((one.pci, two.pci));
            }
        }
    }
    let warning = |((by_nvlink, refusal), pairs)| TopologyWarning::P2pRefused { refusal, by_nvlink, pairs };
    found.into_iter().map(warning).collect()
}
