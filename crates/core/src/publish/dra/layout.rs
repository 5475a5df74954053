//! [`GpuLayout`]: the order and the groups of the published GPUs, computed once for a topology.
//!
//! The scheduler takes the first GPUs that fit. The best sets are adjacent, the best first. A claim without constraints
//! for k GPUs gets the first k that are free; over all that may be free, it does at least as well as with the order of
//! PCI addresses. The order does not depend on what is free now: one that follows allocations is stale when it is read,
//! which is worse than none.

use crate::prelude::*;
use alloc::sync::Arc;

use super::families::{self, Family, Group};
use crate::allocation::{AllocationTables, GpuSet, components, subsets};
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
        let whole = whole(topology, gpus);
        let places: Vec<usize> = whole.places().collect();
        let is_all = places.len() == topology.gpus().len();
        let some = (!is_all).then(|| AllocationTables::new(Arc::new(topology.restricted(&places))));
        let some = some.as_ref().unwrap_or(tables);
        let (order, families) = (order(some), families::families(some));
        let outside = |place: usize| places.get(place).copied();
        let group = |group: Group| Group { gpus: group.gpus.places().filter_map(outside).collect(), ..group };
        let family = |family: Family| Family { groups: family.groups.into_iter().map(group).collect(), ..family };
        Self {
            order: order.into_iter().filter_map(outside).collect(),
            families: families.into_iter().map(family).collect(),
            nvlink_domains: nvlink_domains(topology, whole),
        }
    }

    /// GPUs by their places in the topology, from their places in the published order.
    pub(super) fn places(&self, published: GpuSet) -> GpuSet {
        published.places().filter_map(|place| self.order.get(place).copied()).collect()
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
        let whole = whole(now, gpus);
        let is_same = before.restricted(&left).without_mig_devices() == now.without_mig_devices();
        if !is_same || moved(self.layout.order.iter().copied().collect()) != whole {
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
            nvlink_domains: nvlink_domains(now, whole),
        })
    }
}

/// Those of some GPUs that are not in MIG mode.
fn whole(topology: &NodeTopology, gpus: GpuSet) -> GpuSet {
    gpus.places().filter(|place| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled)).collect()
}

/// Those of some GPUs that NVLink connects, over any number of hops; two at least.
fn nvlink_domains(topology: &NodeTopology, gpus: GpuSet) -> Vec<GpuSet> {
    let linked = |a: usize, b: usize| gpus.contains(a) && gpus.contains(b) && topology.nvlink(a, b) > 0;
    let mut domains = components(topology.gpus().len(), linked);
    domains.retain(|domain| domain.len() > 1);
    domains
}

/// The sizes of the best sets, the largest first.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// The sizes that an order is rated for: what jobs ask for.
const RATED: [usize; 3] = [2, 4, 8];

/// The most GPUs of which an order is rated: of more, all sets of eight are too many.
const MAX_RATED_GPUS: usize = AllocationTables::EXACT_GPUS;

/// The rate of a perfect order for one size, before which no set is worse than the machine's best.
const PERFECT: u64 = 1_000_000;

/// Rounds of exchanges: each makes the order better, and a machine has few kinds of sets.
const MAX_ROUNDS: usize = 16;

/// The GPUs of the machine in the order in which they are published.
pub fn order(tables: &AllocationTables) -> Vec<usize> {
    let by_address: Vec<usize> = (0..tables.topology().gpus().len()).collect();
    let mut parts = Vec::new();
    let nested = nest(tables, by_address.iter().copied().collect(), &mut parts);
    if by_address.len() > MAX_RATED_GPUS {
        return nested;
    }
    let rating = Rating::new(tables, &by_address);
    let mut best = Rated::new(&rating, nested);
    // The halves of a part may change places: groups stay together.
    best.improve(&rating, |order| parts.iter().map(|part| turned(order, *part)).collect());
    if best.lacks > 0 {
        best.improve(&rating, exchanges);
    }
    if best.lacks > 0 { by_address } else { best.order }
}

/// The best sets one behind the other, and inside of each its own best sets. Each part of the order has two halves,
/// which `parts` lists.
fn nest(tables: &AllocationTables, gpus: GpuSet, parts: &mut Vec<(GpuSet, GpuSet)>) -> Vec<usize> {
    let size = SIZES.into_iter().find(|size| *size < gpus.len());
    let best = size.map(|size| tables.best_of(gpus, size)).unwrap_or_default();
    if best.is_empty() {
        return gpus.places().collect();
    }
    let rest = gpus.without(best);
    parts.push((best, rest));
    let mut order = nest(tables, best, parts);
    order.extend(nest(tables, rest, parts));
    order
}

/// The order in which the two halves of a part have changed places.
fn turned(order: &[usize], (one, other): (GpuSet, GpuSet)) -> Vec<usize> {
    let of = |half: GpuSet| order.iter().copied().filter(move |gpu| half.contains(*gpu));
    let is_part = |gpu: &usize| one.contains(*gpu) || other.contains(*gpu);
    let begins = order.iter().copied().find(is_part);
    let (first, second) = if begins.is_some_and(|gpu| one.contains(gpu)) { (one, other) } else { (other, one) };
    let mut exchanged = of(second).chain(of(first));
    order.iter().map(|gpu| if is_part(gpu) { exchanged.next().unwrap_or(*gpu) } else { *gpu }).collect()
}

/// All orders in which two GPUs have changed places.
fn exchanges(order: &[usize]) -> Vec<Vec<usize>> {
    let pairs = (0..order.len()).flat_map(|a| (a + 1..order.len()).map(move |b| (a, b)));
    let exchanged = |(a, b)| {
        let mut order = order.to_vec();
        order.swap(a, b);
        order
    };
    pairs.map(exchanged).collect()
}

/// What orders are rated by.
struct Rating {
    /// For each size that is rated: its sets with what they carry, and what a perfect order would come to.
    sizes: Vec<(Vec<(GpuSet, u64)>, u64)>,
    /// The rates of the order by address.
    floor: Vec<u64>,
}

impl Rating {
    fn new(tables: &AllocationTables, by_address: &[usize]) -> Self {
        let all: GpuSet = by_address.iter().copied().collect();
        let size = |size: usize| {
            let sets: Vec<_> = subsets(all, size).map(|set| (set, tables.worth(set).collective)).collect();
            let top = sets.iter().map(|(_, carries)| *carries).max().unwrap_or(0);
            let perfect = sets.iter().map(|(set, _)| top << times(by_address, *set)).sum();
            (sets, perfect)
        };
        // All GPUs are one set, whatever the order.
        let sizes = RATED.into_iter().filter(|size| *size < all.len()).map(size).collect();
        let mut rating = Self { sizes, floor: Vec::new() };
        rating.floor = rating.rates(by_address);
        rating
    }

    /// For each size the mean of what its claims get, over all that may be free, in [`PERFECT`]s of the machine's best.
    fn rates(&self, order: &[usize]) -> Vec<u64> {
        let place = |gpu: usize| order.iter().position(|other| *other == gpu).unwrap_or(0);
        let places: Vec<usize> = (0..order.len()).map(place).collect();
        let rate = |(sets, perfect): &(Vec<(GpuSet, u64)>, u64)| {
            let sum: u64 = sets.iter().map(|(set, carries)| carries << times(&places, *set)).sum();
            u64::try_from(u128::from(sum) * u128::from(PERFECT) / u128::from((*perfect).max(1))).unwrap_or(u64::MAX)
        };
        self.sizes.iter().map(rate).collect()
    }
}

/// A set is taken while its members are free and no other GPU before its last one is: how many GPUs come after that,
/// each of them free or not, so that the set is taken two to the power of it times.
fn times(places: &[usize], set: GpuSet) -> usize {
    let last = set.places().filter_map(|gpu| places.get(gpu)).max().copied().unwrap_or(0);
    places.len().saturating_sub(last + 1)
}

/// An order and its rates.
struct Rated {
    order: Vec<usize>,
    /// By how much it is worse than the order by address, over the sizes.
    lacks: u64,
    total: u64,
}

impl Rated {
    fn new(rating: &Rating, order: Vec<usize>) -> Self {
        let rates = rating.rates(&order);
        let lacks = rating.floor.iter().zip(&rates).map(|(floor, rate)| floor.saturating_sub(*rate)).sum();
        Self { order, lacks, total: rates.iter().sum() }
    }

    /// Of two orders the better one has the lower key.
    fn key(&self) -> (u64, u64) {
        (self.lacks, u64::MAX - self.total)
    }

    /// Takes the best of the orders near this one, as long as one is better.
    fn improve(&mut self, rating: &Rating, near: impl Fn(&[usize]) -> Vec<Vec<usize>>) {
        for _ in 0..MAX_ROUNDS {
            let found = near(&self.order).into_iter().map(|order| Self::new(rating, order));
            // Of equals the first.
            match found.min_by_key(Self::key) {
                Some(best) if best.key() < self.key() => *self = best,
                _ => return,
            }
        }
    }
}
