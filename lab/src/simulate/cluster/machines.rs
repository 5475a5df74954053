//! The kinds of machine in the cluster, the slices that each publishes, and the kind of each node.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use linkwise_core::allocation::{AllocationTables, GpuSet};
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::dra::{DraFacts, DraSettings, GpuLayout, SliceDevice, devices, offered_now};
use linkwise_core::state::{Door, NodeState, ResourcePlan};
use linkwise_host::machines;
use serde_json::Value;

use crate::simulate::{ClusterArgs, MachineWeight};
use linkwise_cluster::published;

pub(super) struct Machine {
    /// The name from the command line.
    pub name: String,
    pub tables: Arc<AllocationTables>,
    /// The GPUs that are published as whole GPUs: all but those in MIG mode.
    pub whole: GpuSet,
    /// The GPU of each device, by the device's name.
    pub gpus_of: BTreeMap<String, GpuSet>,
    published: Vec<SliceDevice>,
}

impl Machine {
    pub fn load(name: &str) -> Result<Self> {
        let observed = machines::load(name)?.observed;
        let state = NodeState::of_machine(observed, ResourcePlan { door: Door::Dra, ..ResourcePlan::default() });
        let layout = GpuLayout::of(state.tables(), offered_now(&state));
        let facts = DraFacts::of_state(&state, &layout, DraSettings::default());
        let whole = facts.devices.iter().filter(|device| device.mig.is_none());
        let gpus_of: BTreeMap<String, GpuSet> =
            whole.filter_map(|device| Some((device.name.clone()?, GpuSet::of(device.place?)))).collect();
        ensure!(!gpus_of.is_empty(), "machine '{name}' has no whole GPU");
        let whole = gpus_of.values().fold(GpuSet::default(), |all, gpu| all.union(*gpu));
        let (published, _) = devices(&facts);
        let tables = Arc::clone(state.tables());
        Ok(Self { name: name.to_owned(), tables, whole, gpus_of, published })
    }

    /// The ResourceSlices of a node, as linkwise writes them.
    pub fn slices(&self, node: &str) -> Vec<Value> {
        published(&Pool::new(node, self.published.clone()))
    }

    /// The rails of GPUs, sorted. A GPU without a rail has `None`.
    pub fn rails(&self, gpus: GpuSet) -> Vec<Option<u32>> {
        let known = gpus.places().filter_map(|place| self.tables.topology().gpus().get(place));
        let mut rails: Vec<_> = known.map(|gpu| gpu.rail).collect();
        rails.sort_unstable();
        rails
    }

    /// The names of the devices of a set of GPUs.
    pub fn devices_of(&self, gpus: GpuSet) -> impl Iterator<Item = &str> {
        let devices = self.gpus_of.iter().filter(move |(_, own)| !own.intersection(gpus).is_empty());
        devices.map(|(name, _)| name.as_str())
    }
}

/// The machines from the command line, with their weights.
pub(super) fn load(node: Option<&str>, cluster: &ClusterArgs) -> Result<(Vec<Machine>, Vec<u64>)> {
    let one = node.map(|name| vec![MachineWeight { machine: name.to_owned(), weight: 1 }]);
    let mix = one.as_ref().unwrap_or(&cluster.mix);
    for (at, named) in mix.iter().enumerate() {
        let is_twice = mix.iter().take(at).any(|other| other.machine == named.machine);
        ensure!(!is_twice, "--mix names {} twice", named.machine);
    }
    let machines = mix.iter().map(|named| Machine::load(&named.machine)).collect::<Result<_>>()?;
    Ok((machines, mix.iter().map(|named| u64::from(named.weight)).collect()))
}

/// The kind of each node, as an index in `weights`. Kinds are mixed evenly, so that any sequence of nodes has about the
/// mix of the whole cluster.
pub(super) fn kinds(nodes: usize, weights: &[u64]) -> Result<Vec<usize>> {
    let total: u64 = weights.iter().sum();
    let mut made = vec![0_u64; weights.len()];
    let kind = |node: u64| {
        // The next node is of the kind that lacks the most nodes of its share so far.
        let lacking = |(kind, weight): (usize, &u64)| {
            let has = made.get(kind).copied().unwrap_or(0);
            (i128::from(*weight) * i128::from(node) - i128::from(has) * i128::from(total), std::cmp::Reverse(kind))
        };
        let (_, std::cmp::Reverse(kind)) = weights.iter().enumerate().map(lacking).max().context("no machines")?;
        if let Some(made) = made.get_mut(kind) {
            *made += 1;
        }
        Ok(kind)
    };
    (1..).take(nodes).map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::kinds;

    #[test]
    fn nodes_are_mixed_by_weight() {
        assert_eq!(kinds(7, &[2, 1]).unwrap(), [0, 1, 0, 0, 1, 0, 0]);
        assert_eq!(kinds(2, &[5, 3, 1]).unwrap(), [0, 1]);
        let many = kinds(1000, &[4, 2, 2, 1, 1]).unwrap();
        assert_eq!(
            [0, 1, 2, 3, 4].map(|kind| many.iter().filter(|one| **one == kind).count()),
            [400, 200, 200, 100, 100]
        );
        assert!(kinds(1, &[]).is_err());
    }
}
