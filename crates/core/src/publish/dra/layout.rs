//! [`GpuLayout`]: the order and the groups of the published GPUs, computed once for a topology.
//!
//! The scheduler takes the first GPUs that fit, so the best sets are adjacent, the best first. A claim without
//! constraints for k GPUs gets the first k that are free. If k is 2, 4 or 8, it gets at least as much bandwidth as with
//! the order of PCI addresses, on average over all states of a node of up to 16 GPUs. The order does not depend on the
//! GPUs that are free now: an order that follows allocations is stale when the scheduler reads it.

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
    /// The sets of at least two GPUs that NVLink connects, over any number of hops.
    pub nvlink_domains: Vec<GpuSet>,
}

impl GpuLayout {
    /// Computes the layout of some GPUs of `tables`, without those in MIG mode. It takes some hundred choices of GPUs:
    /// use a [`LayoutCache`].
    pub fn of(tables: &AllocationTables, gpus: GpuSet) -> Self {
        let topology = tables.topology();
        let whole = whole(topology, gpus);
        let places: Vec<usize> = whole.places().collect();
        let is_all = places.len() == topology.gpus().len();
        let some = (!is_all).then(|| AllocationTables::new(Arc::new(topology.restricted(&places))));
        let some = some.as_ref().unwrap_or(tables);
        let (order, families) = (order(some), families::families(some));
        let in_topology = |place: usize| places.get(place).copied();
        let group = |group: Group| Group { gpus: group.gpus.places().filter_map(in_topology).collect(), ..group };
        let family = |family: Family| Family { groups: family.groups.into_iter().map(group).collect(), ..family };
        Self {
            order: order.into_iter().filter_map(in_topology).collect(),
            families: families.into_iter().map(family).collect(),
            nvlink_domains: nvlink_domains(topology, whole),
        }
    }

    /// Turns places in the published order into places in the topology.
    pub(super) fn places(&self, published: GpuSet) -> GpuSet {
        published.places().filter_map(|place| self.order.get(place).copied()).collect()
    }
}

/// The layout that was computed last: snapshots share their tables until the topology changes.
#[derive(Clone, Debug, Default)]
pub struct LayoutCache {
    /// The layout as computed.
    computed: Option<CachedLayout>,
    /// The layout that was returned last. It has fewer GPUs than `computed` if some were lost since.
    shown: Option<CachedLayout>,
}

/// A layout with its inputs.
#[derive(Clone, Debug)]
struct CachedLayout {
    tables: Arc<AllocationTables>,
    gpus: GpuSet,
    layout: Arc<GpuLayout>,
}

impl LayoutCache {
    /// Returns [`GpuLayout::of`], and computes it only if the tables or the GPUs changed. If the only change is that
    /// GPUs were lost, the other GPUs keep their order and their groups.
    pub fn layout(&mut self, tables: &Arc<AllocationTables>, gpus: GpuSet) -> Arc<GpuLayout> {
        if let Some(known) = &self.shown
            && Arc::ptr_eq(&known.tables, tables)
            && known.gpus == gpus
        {
            return Arc::clone(&known.layout);
        }
        let cached = |layout| CachedLayout { tables: Arc::clone(tables), gpus, layout };
        let kept = self.computed.as_ref().and_then(|known| known.kept(tables, gpus));
        let layout = kept.map(Arc::new).unwrap_or_else(|| {
            let layout = Arc::new(GpuLayout::of(tables, gpus));
            self.computed = Some(cached(Arc::clone(&layout)));
            layout
        });
        self.shown = Some(cached(Arc::clone(&layout)));
        layout
    }
}

impl CachedLayout {
    /// The layout without the GPUs that `tables` lack; `None` if anything else changed, apart from MIG devices.
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
            // Computed again, because GPUs may have been connected through the lost one.
            nvlink_domains: nvlink_domains(now, whole),
        })
    }
}

/// The GPUs of a set that are not in MIG mode.
fn whole(topology: &NodeTopology, gpus: GpuSet) -> GpuSet {
    gpus.places().filter(|place| topology.gpus().get(*place).is_some_and(|gpu| !gpu.mig_enabled)).collect()
}

/// The subsets of at least two GPUs that NVLink connects, over any number of hops.
fn nvlink_domains(topology: &NodeTopology, gpus: GpuSet) -> Vec<GpuSet> {
    let linked = |a: usize, b: usize| gpus.contains(a) && gpus.contains(b) && topology.nvlink(a, b) > 0;
    let mut domains = components(topology.gpus().len(), linked);
    domains.retain(|domain| domain.len() > 1);
    domains
}

/// The sizes of the best sets, the largest first.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// The sizes for which an order is rated: those that jobs request.
const RATED: [usize; 3] = [2, 4, 8];

/// The most GPUs whose order is rated: more GPUs have too many sets of eight.
const MAX_RATED_GPUS: usize = AllocationTables::EXACT_GPUS;

/// The rate of a perfect order, in which every claim gets a set as good as the machine's best.
const PERFECT: u64 = 1_000_000;

/// The most rounds of exchanges. Each round makes the order better, and few are needed, because a machine has few kinds
/// of sets.
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
    // Exchanging the two halves of a part keeps groups together, so this is tried first.
    best.improve(&rating, |order| parts.iter().map(|part| with_halves_exchanged(order, part)).collect());
    if best.loss > 0 {
        best.improve(&rating, exchanges);
    }
    if best.loss > 0 { by_address } else { best.order }
}

/// A part of an order, in two halves.
struct Part {
    best: GpuSet,
    rest: GpuSet,
}

/// Orders GPUs so that the best sets are adjacent, and within each set its own best sets. Adds the parts of the order
/// to `parts`.
fn nest(tables: &AllocationTables, gpus: GpuSet, parts: &mut Vec<Part>) -> Vec<usize> {
    let size = SIZES.into_iter().find(|size| *size < gpus.len());
    let best = size.map(|size| tables.best_of(gpus, size)).unwrap_or_default();
    if best.is_empty() {
        return gpus.places().collect();
    }
    let rest = gpus.without(best);
    parts.push(Part { best, rest });
    let mut order = nest(tables, best, parts);
    order.extend(nest(tables, rest, parts));
    order
}

/// The order, with the two halves of a part exchanged.
fn with_halves_exchanged(order: &[usize], Part { best, rest }: &Part) -> Vec<usize> {
    let of = |half: GpuSet| order.iter().copied().filter(move |gpu| half.contains(*gpu));
    let is_part = |gpu: &usize| best.contains(*gpu) || rest.contains(*gpu);
    let begins = order.iter().copied().find(is_part);
    let (first, second) = if begins.is_some_and(|gpu| best.contains(gpu)) { (best, rest) } else { (rest, best) };
    let mut exchanged = of(*second).chain(of(*first));
    order.iter().map(|gpu| if is_part(gpu) { exchanged.next().unwrap_or(*gpu) } else { *gpu }).collect()
}

/// The orders that an exchange of two GPUs makes of this one.
fn exchanges(order: &[usize]) -> Vec<Vec<usize>> {
    let pairs = (0..order.len()).flat_map(|a| (a + 1..order.len()).map(move |b| (a, b)));
    let exchanged = |(a, b)| {
        let mut order = order.to_vec();
        order.swap(a, b);
        order
    };
    pairs.map(exchanged).collect()
}

/// The values by which orders are rated.
struct Rating {
    sizes: Vec<RatedSize>,
    /// The rates of the order by address.
    floor: Vec<u64>,
}

/// The sets of one size.
struct RatedSize {
    /// Each set with its collective, MB/s.
    sets: Vec<(GpuSet, u64)>,
    /// The sum of a perfect order; see [`Rating::rates`].
    perfect: u64,
}

impl Rating {
    fn new(tables: &AllocationTables, by_address: &[usize]) -> Self {
        let all: GpuSet = by_address.iter().copied().collect();
        let size = |size: usize| {
            let sets: Vec<_> = subsets(all, size).map(|set| (set, tables.worth(set).collective)).collect();
            let top = sets.iter().map(|(_, collective)| *collective).max().unwrap_or(0);
            let perfect = sets.iter().map(|(set, _)| top << gpus_behind(by_address, *set)).sum();
            RatedSize { sets, perfect }
        };
        // All GPUs are one set, whatever the order.
        let sizes = RATED.into_iter().filter(|size| *size < all.len()).map(size).collect();
        let mut rating = Self { sizes, floor: Vec::new() };
        rating.floor = rating.rates(by_address);
        rating
    }

    /// The rate of an order for each size: `PERFECT * sum / perfect`, rounded down. `sum` is the sum over all sets of
    /// `collective * 2^n`, where 2^n is the number of states in which a claim gets the set ([`gpus_behind`]). `perfect`
    /// is the same sum with the machine's best collective for every set.
    fn rates(&self, order: &[usize]) -> Vec<u64> {
        let place = |gpu: usize| order.iter().position(|other| *other == gpu).unwrap_or(0);
        let places: Vec<usize> = (0..order.len()).map(place).collect();
        let rate = |RatedSize { sets, perfect }: &RatedSize| {
            let sum: u64 = sets.iter().map(|(set, collective)| collective << gpus_behind(&places, *set)).sum();
            u64::try_from(u128::from(sum) * u128::from(PERFECT) / u128::from((*perfect).max(1))).unwrap_or(u64::MAX)
        };
        self.sizes.iter().map(rate).collect()
    }
}

/// The number n of GPUs behind a set's last member in an order. A claim gets the set if its members are free and no
/// other GPU before the last member is free. The n GPUs behind may be free or not, so the claim gets the set in 2^n
/// states.
fn gpus_behind(places: &[usize], set: GpuSet) -> usize {
    let last = set.places().filter_map(|gpu| places.get(gpu)).max().copied().unwrap_or(0);
    places.len().saturating_sub(last + 1)
}

/// An order and its rates.
struct Rated {
    order: Vec<usize>,
    /// The loss against the order by address: over the sizes, the sum of `max(floor - rate, 0)`.
    loss: u64,
    /// The sum of its rates.
    total: u64,
}

impl Rated {
    fn new(rating: &Rating, order: Vec<usize>) -> Self {
        let rates = rating.rates(&order);
        let loss = rating.floor.iter().zip(&rates).map(|(floor, rate)| floor.saturating_sub(*rate)).sum();
        Self { order, loss, total: rates.iter().sum() }
    }

    /// The sort key: the better of two orders has the lower key.
    fn key(&self) -> (u64, u64) {
        (self.loss, u64::MAX - self.total)
    }

    /// Takes the best of the orders that `near` makes of this one, again and again while it is better.
    fn improve(&mut self, rating: &Rating, near: impl Fn(&[usize]) -> Vec<Vec<usize>>) {
        for _ in 0..MAX_ROUNDS {
            let found = near(&self.order).into_iter().map(|order| Self::new(rating, order));
            // `min_by_key` takes the first of equals.
            match found.min_by_key(Self::key) {
                Some(best) if best.key() < self.key() => *self = best,
                _ => return,
            }
        }
    }
}
