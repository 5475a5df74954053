//! What depends on the topology alone, computed once and asked at every admission.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::set::GpuSet;
use super::{collective, remaining};
use crate::topology::{NodeTopology, PackageId, bandwidth};

/// The tables of one topology. Off the admission path to build, read-only afterwards, swapped in whole.
///
/// Up to [`Self::EXACT_GPUS`] GPUs they hold a row for each of the 2^n sets: 1.6 MiB for 16 GPUs, 6 KiB for 8.
#[derive(Clone, Debug)]
pub struct AllocationTables {
    topology: Arc<NodeTopology>,
    packages: Vec<GpuSet>,
    nearest_nics: Vec<u64>,
    nic_mbps: Vec<u64>,
    sets: Option<SetTables>,
}

/// One row for each set of GPUs.
#[derive(Clone, Debug)]
pub(super) struct SetTables {
    /// MB/s.
    pub collective: Vec<u32>,
    pub remaining: Vec<u32>,
    /// MB/s.
    pub pairs: Vec<u64>,
    /// The sum of ranks over the pairs: closeness without its minus.
    pub distance: Vec<u64>,
    /// `remaining_closeness` without its minus.
    pub remaining_distance: Vec<u8>,
}

impl AllocationTables {
    /// The most GPUs for which every set has its row, and every choice is exact.
    pub const EXACT_GPUS: usize = 16;

    /// Computes the tables of a topology.
    pub fn new(topology: Arc<NodeTopology>) -> Self {
        let gpus = topology.gpus().len();
        let sets = (gpus <= Self::EXACT_GPUS).then(|| {
            let collective = collective::table(&topology);
            SetTables {
                remaining: remaining::table(gpus, &collective),
                pairs: collective::inside(gpus, |a, b| topology.bandwidth(a, b)),
                distance: collective::inside(gpus, |a, b| u32::from(topology.rank(a, b).number())),
                remaining_distance: remaining::closeness_table(&topology),
                collective,
            }
        });
        let (nearest_nics, nic_mbps) = nearest_nics(&topology);
        Self { packages: packages(&topology), nearest_nics, nic_mbps, sets, topology }
    }

    /// The topology they were computed from.
    pub fn topology(&self) -> &Arc<NodeTopology> {
        &self.topology
    }

    /// The tables with a row for each set; `None` beyond [`Self::EXACT_GPUS`].
    pub(super) fn sets(&self) -> Option<&SetTables> {
        self.sets.as_ref()
    }

    /// `room` of what remains: whole groups that still fit a package.
    pub(super) fn room(&self, remains: GpuSet) -> u64 {
        let groups = remaining::GROUPS.iter();
        groups
            .map(|group| {
                let fit = |package: &GpuSet| (package.intersection(remains).len() / group) as u64;
                *group as u64 * self.packages.iter().map(fit).sum::<u64>()
            })
            .sum()
    }

    /// `nics` of a set: the summed rates of the distinct NICs nearest to its members, Mbit/s.
    pub(super) fn nics(&self, set: GpuSet) -> u64 {
        let nearest = set.places().filter_map(|place| self.nearest_nics.get(place));
        let nics = nearest.fold(0, |nics, nearest| nics | nearest);
        GpuSet(nics).places().filter_map(|nic| self.nic_mbps.get(nic)).sum()
    }
}

/// The GPUs of each known package.
fn packages(topology: &NodeTopology) -> Vec<GpuSet> {
    let mut packages: BTreeMap<PackageId, GpuSet> = BTreeMap::new();
    for (place, gpu) in topology.gpus().iter().enumerate() {
        if let Some(package) = gpu.package {
            let members = packages.entry(package).or_default();
            *members = members.union(GpuSet::of(place));
        }
    }
    packages.into_values().collect()
}

/// For each GPU its nearest NICs as bits, and the rate of each such NIC.
///
/// Nearest are all NICs of the smallest rank, if that is PHB or closer. Only NICs that are nearest to some
/// GPU have a bit; the 65th such (no machine has it) would count for none.
fn nearest_nics(topology: &NodeTopology) -> (Vec<u64>, Vec<u64>) {
    let mut bits: BTreeMap<usize, u64> = BTreeMap::new();
    let mut rates = Vec::new();
    let mut nearest = Vec::new();
    for place in 0..topology.gpus().len() {
        let mut near = 0;
        for nic in topology.nearest_nics(place) {
            let bit = *bits.entry(nic).or_insert_with(|| {
                let mbps = topology.nics().get(nic).and_then(|nic| nic.mbps).unwrap_or(bandwidth::UNKNOWN_NIC);
                rates.push(u64::from(mbps));
                GpuSet::of(rates.len() - 1).0
            });
            near |= bit;
        }
        nearest.push(near);
    }
    (nearest, rates)
}
