//! [`GpuLayout`]: what the published GPUs are to each other, computed once for a topology.

use crate::prelude::*;
use alloc::sync::Arc;

use super::families::{self, Family};
use super::order;
use super::sets::{RankedSet, sets};
use crate::allocation::{AllocationTables, GpuSet, components};

/// The order of the GPUs that are published whole, and their groups. Sets and places are those of the whole topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuLayout {
    /// The GPUs, the best sets first.
    pub order: Vec<usize>,
    /// The tiered groups.
    pub families: Vec<Family>,
    /// GPUs that NVLink connects, over any number of hops; two at least.
    pub nvlink_domains: Vec<GpuSet>,
    /// The sets that are devices: by size, the best first. None before [`Self::with_sets`].
    pub sets: Vec<RankedSet>,
}

impl GpuLayout {
    /// The layout of some of the GPUs that `tables` are of; those in MIG mode are left out. Costs some hundred
    /// choices: see [`LayoutCache`].
    pub fn of(tables: &AllocationTables, gpus: GpuSet) -> Self {
        let topology = tables.topology();
        let is_whole = |place: &usize| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled);
        let places: Vec<usize> = gpus.places().filter(is_whole).collect();
        if places.len() == topology.gpus().len() {
            return Self::of_all(tables);
        }
        let some = AllocationTables::new(Arc::new(topology.restricted(&places)));
        let layout = Self::of_all(&some);
        let back = |set: GpuSet| set.places().filter_map(|place| places.get(place).copied()).collect::<GpuSet>();
        let family = |Family { name, sets }: Family| Family { name, sets: sets.into_iter().map(back).collect() };
        Self {
            order: layout.order.into_iter().filter_map(|place| places.get(place).copied()).collect(),
            families: layout.families.into_iter().map(family).collect(),
            nvlink_domains: layout.nvlink_domains.into_iter().map(back).collect(),
            sets: Vec::new(),
        }
    }

    /// The same with `room` sets at most, of the GPUs that it is of.
    #[must_use]
    pub fn with_sets(self, tables: &AllocationTables, room: usize) -> Self {
        let sets = sets(tables, self.order.iter().copied().collect(), room);
        Self { sets, ..self }
    }

    fn of_all(tables: &AllocationTables) -> Self {
        let topology = tables.topology();
        let mut nvlink_domains = components(topology.gpus().len(), |a, b| topology.nvlink(a, b) > 0);
        nvlink_domains.retain(|domain| domain.len() > 1);
        Self { order: order::order(tables), families: families::families(tables), nvlink_domains, sets: Vec::new() }
    }
}

/// The layout that was computed last: snapshots share their tables until the topology changes.
#[derive(Clone, Debug, Default)]
pub struct LayoutCache {
    last: Option<(Arc<AllocationTables>, GpuSet, usize, Arc<GpuLayout>)>,
}

impl LayoutCache {
    /// As [`GpuLayout::of`] with `room` sets at most, computed where tables, GPUs or room are others than before.
    pub fn layout(&mut self, tables: &Arc<AllocationTables>, gpus: GpuSet, room: usize) -> Arc<GpuLayout> {
        if let Some((known, of, had_room, layout)) = &self.last
            && Arc::ptr_eq(known, tables)
            && (*of, *had_room) == (gpus, room)
        {
            return Arc::clone(layout);
        }
        let layout = Arc::new(GpuLayout::of(tables, gpus).with_sets(tables, room));
        self.last = Some((Arc::clone(tables), gpus, room, Arc::clone(&layout)));
        layout
    }
}
