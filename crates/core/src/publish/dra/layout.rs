//! [`GpuLayout`]: what the published GPUs are to each other, computed once for a topology.

use crate::prelude::*;
use alloc::sync::Arc;

use super::families::{self, Family, Group};
use super::group_size::GroupSizes;
use super::order;
use crate::allocation::{AllocationTables, GpuSet, components};
use crate::topology::NodeTopology;

/// The order of the GPUs that are published whole, and their groups. Sets and places are those of the whole topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuLayout {
    /// The GPUs, the best sets first.
    pub order: Vec<usize>,
    /// The tiered groups.
    pub families: Vec<Family>,
    /// GPUs that NVLink connects, over any number of hops; two at least.
    pub nvlink_domains: Vec<GpuSet>,
}

impl GpuLayout {
    /// The layout of some of the GPUs that `tables` are of; those in MIG mode are left out. Costs some hundred
    /// choices: see [`LayoutCache`].
    pub fn of(tables: &AllocationTables, gpus: GpuSet, sizes: &GroupSizes) -> Self {
        let topology = tables.topology();
        let is_whole = |place: &usize| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled);
        let places: Vec<usize> = gpus.places().filter(is_whole).collect();
        let nvlink_domains = nvlink_domains(topology, gpus);
        if places.len() == topology.gpus().len() {
            let (order, families) = (order::order(tables), families::families(tables, sizes));
            return Self { order, families, nvlink_domains };
        }
        let some = AllocationTables::new(Arc::new(topology.restricted(&places)));
        let (order, families) = (order::order(&some), families::families(&some, sizes));
        let back = |set: GpuSet| set.places().filter_map(|place| places.get(place).copied()).collect::<GpuSet>();
        let group = |group: Group| Group { gpus: back(group.gpus), ..group };
        let family = |family: Family| Family { groups: family.groups.into_iter().map(group).collect(), ..family };
        Self {
            order: order.into_iter().filter_map(|place| places.get(place).copied()).collect(),
            families: families.into_iter().map(family).collect(),
            nvlink_domains,
        }
    }
}

/// The layout that was computed last: snapshots share their tables until the topology changes.
#[derive(Clone, Debug, Default)]
pub struct LayoutCache {
    /// As it was computed.
    computed: Option<Known>,
    /// The same, with which GPUs it was last asked for: fewer where some were lost since.
    shown: Option<Known>,
}

/// A layout and what it is of.
#[derive(Clone, Debug)]
struct Known {
    tables: Arc<AllocationTables>,
    gpus: GpuSet,
    sizes: GroupSizes,
    layout: Arc<GpuLayout>,
}

impl LayoutCache {
    /// As [`GpuLayout::of`], computed where tables, GPUs or sizes are others than before. Where nothing happened but that
    /// GPUs were lost, the others keep their order and their groups.
    pub fn layout(&mut self, tables: &Arc<AllocationTables>, gpus: GpuSet, sizes: &GroupSizes) -> Arc<GpuLayout> {
        if let Some(known) = &self.shown
            && Arc::ptr_eq(&known.tables, tables)
            && known.gpus == gpus
            && known.sizes == *sizes
        {
            return Arc::clone(&known.layout);
        }
        let known = |layout| Known { tables: Arc::clone(tables), gpus, sizes: sizes.clone(), layout };
        let kept =
            self.computed.as_ref().filter(|known| known.sizes == *sizes).and_then(|known| known.kept(tables, gpus));
        let layout = kept.map(Arc::new).unwrap_or_else(|| {
            let layout = Arc::new(GpuLayout::of(tables, gpus, sizes));
            self.computed = Some(known(Arc::clone(&layout)));
            layout
        });
        self.shown = Some(known(Arc::clone(&layout)));
        layout
    }
}

impl Known {
    /// The layout without the GPUs that `tables` lack; `None` where that is not all that changed, but for MIG devices.
    fn kept(&self, tables: &AllocationTables, gpus: GpuSet) -> Option<GpuLayout> {
        let (before, now) = (self.tables.topology(), tables.topology());
        let left: Vec<usize> = now.gpus().iter().map(|gpu| before.position(&gpu.uuid)).collect::<Option<_>>()?;
        let place_now = |place: usize| left.iter().position(|before| *before == place);
        let moved = |set: GpuSet| set.places().filter_map(place_now).collect::<GpuSet>();
        let whole = gpus.places().filter(|place| now.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled));
        let is_same = before.restricted(&left).without_mig_devices() == now.without_mig_devices();
        if !is_same || moved(self.layout.order.iter().copied().collect()) != whole.collect() {
            return None;
        }
        let families = self.layout.families.iter().map(|family| {
            let groups = family.groups.iter().map(|group| Group { gpus: moved(group.gpus), ..*group });
            let groups = groups.filter(|group| group.gpus.len() >= family.size);
            Family { groups: groups.collect(), ..family.clone() }
        });
        Some(GpuLayout {
            order: self.layout.order.iter().filter_map(|place| place_now(*place)).collect(),
            families: families.filter(|family| !family.groups.is_empty()).collect(),
            // GPUs may have been connected through the lost one.
            nvlink_domains: nvlink_domains(now, gpus),
        })
    }
}

/// GPUs of these that NVLink connects, over any number of hops; two at least. Those in MIG mode are left out.
fn nvlink_domains(topology: &NodeTopology, gpus: GpuSet) -> Vec<GpuSet> {
    let is_whole = |place: &usize| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled);
    let places: Vec<usize> = gpus.places().filter(is_whole).collect();
    let linked = |a: usize, b: usize| match (places.get(a), places.get(b)) {
        (Some(a), Some(b)) => topology.nvlink(*a, *b) > 0,
        _ => false,
    };
    let back = |set: GpuSet| set.places().filter_map(|place| places.get(place).copied()).collect::<GpuSet>();
    let mut domains = components(places.len(), linked);
    domains.retain(|domain| domain.len() > 1);
    domains.into_iter().map(back).collect()
}
