//! [`GpuLayout`]: the order and the groups of the published GPUs, computed once for a topology.

use crate::prelude::*;
use alloc::sync::Arc;

use super::families::{self, Family, Group};
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
    /// The layout of some of the GPUs of `tables`; those in MIG mode are left out. It costs some hundred choices: see
    /// [`LayoutCache`].
    pub fn of(tables: &AllocationTables, gpus: GpuSet) -> Self {
        let topology = tables.topology();
        let is_whole = |place: &usize| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled);
        let places: Vec<usize> = gpus.places().filter(is_whole).collect();
        let nvlink_domains = nvlink_domains(topology, gpus);
        if places.len() == topology.gpus().len() {
            let (order, families) = (order::order(tables), families::families(tables));
            return Self { order, families, nvlink_domains };
        }
        let some = AllocationTables::new(Arc::new(topology.restricted(&places)));
        let (order, families) = (order::order(&some), families::families(&some));
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
    /// The layout as computed.
    computed: Option<Known>,
    /// The layout for the GPUs last asked for, which are fewer if some were lost since.
    shown: Option<Known>,
}

/// A layout with its inputs.
#[derive(Clone, Debug)]
struct Known {
    tables: Arc<AllocationTables>,
    gpus: GpuSet,
    layout: Arc<GpuLayout>,
}

impl LayoutCache {
    /// As [`GpuLayout::of`], computed where tables or GPUs are others than before. Where nothing happened but that
    /// GPUs were lost, the others keep their order and their groups.
    pub fn layout(&mut self, tables: &Arc<AllocationTables>, gpus: GpuSet) -> Arc<GpuLayout> {
        if let Some(known) = &self.shown
            && Arc::ptr_eq(&known.tables, tables)
            && known.gpus == gpus
        {
            return Arc::clone(&known.layout);
        }
        let known = |layout| Known { tables: Arc::clone(tables), gpus, layout };
        let kept = self.computed.as_ref().and_then(|known| known.kept(tables, gpus));
        let layout = kept.map(Arc::new).unwrap_or_else(|| {
            let layout = Arc::new(GpuLayout::of(tables, gpus));
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
