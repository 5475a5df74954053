//! The order in which GPUs are published: the scheduler takes the first ones that fit.
//!
//! The best sets are adjacent, the best first. A claim without constraints for k GPUs gets the first k that are free;
//! over all that may be free, it does at least as well as with the order of PCI addresses. Independent of what is
//! free now: an order that follows allocations is stale when it is read, which is worse than none.

use crate::prelude::*;

use crate::allocation::{AllocationTables, GpuSet, subsets};

/// The sizes of the best sets, the largest first.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// The sizes that an order is rated for: what jobs ask for.
const RATED: [usize; 3] = [2, 4, 8];

/// The most GPUs of which an order is rated: of more, all sets of eight are too many.
const MOST_RATED: usize = AllocationTables::EXACT_GPUS;

/// The rate of a perfect order for one size, before which no set is worse than the machine's best.
const PERFECT: u64 = 1_000_000;

/// Rounds of exchanges: each makes the order better, and a machine has few kinds of sets.
const MOST_ROUNDS: usize = 16;

/// The GPUs of the machine in the order in which they are published.
pub fn order(tables: &AllocationTables) -> Vec<usize> {
    let by_address: Vec<usize> = (0..tables.topology().gpus().len()).collect();
    let mut parts = Vec::new();
    let nested = nest(tables, by_address.iter().copied().collect(), &mut parts);
    if by_address.len() > MOST_RATED {
        return nested;
    }
    let rating = Rating::new(tables);
    let floor = rating.rates(&by_address);
    let mut best = Rated::new(&rating, &floor, nested);
    // The halves of a part may change places: groups stay together.
    best.improve(&rating, &floor, |order| parts.iter().map(|part| turned(order, *part)).collect());
    if best.lacks > 0 {
        best.improve(&rating, &floor, exchanges);
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
    gpus: usize,
    /// For each size that is rated: its sets with what they carry, and what a perfect order would come to.
    sizes: Vec<(Vec<(GpuSet, u64)>, u64)>,
}

impl Rating {
    fn new(tables: &AllocationTables) -> Self {
        let gpus = tables.topology().gpus().len();
        let all: GpuSet = (0..gpus).collect();
        let in_order: Vec<usize> = (0..gpus).collect();
        let size = |size: usize| {
            let sets: Vec<_> = subsets(all, size).map(|set| (set, tables.worth(set).collective)).collect();
            let top = sets.iter().map(|(_, carries)| *carries).max().unwrap_or(0);
            let perfect = sets.iter().map(|(set, _)| top << times(&in_order, *set)).sum();
            (sets, perfect)
        };
        // All GPUs are one set, whatever the order.
        Self { gpus, sizes: RATED.into_iter().filter(|size| *size < gpus).map(size).collect() }
    }

    /// For each size the mean of what its claims get, over all that may be free, in [`PERFECT`]s of the machine's best.
    fn rates(&self, order: &[usize]) -> Vec<u64> {
        let mut places = vec![0; self.gpus];
        for (at, gpu) in order.iter().enumerate() {
            if let Some(place) = places.get_mut(*gpu) {
                *place = at;
            }
        }
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
    fn new(rating: &Rating, floor: &[u64], order: Vec<usize>) -> Self {
        let rates = rating.rates(&order);
        let lacks = floor.iter().zip(&rates).map(|(floor, rate)| floor.saturating_sub(*rate)).sum();
        Self { order, lacks, total: rates.iter().sum() }
    }

    /// Takes the best of the orders near this one, as long as one is better.
    fn improve(&mut self, rating: &Rating, floor: &[u64], near: impl Fn(&[usize]) -> Vec<Vec<usize>>) {
        for _ in 0..MOST_ROUNDS {
            let found = near(&self.order).into_iter().map(|order| Self::new(rating, floor, order));
            // Of equals the first.
            let better = |best: Option<Self>, next: Self| match best {
                Some(best) if (best.lacks, u64::MAX - best.total) <= (next.lacks, u64::MAX - next.total) => Some(best),
                _ => Some(next),
            };
            match found.fold(None, better) {
                Some(best) if (best.lacks, u64::MAX - best.total) < (self.lacks, u64::MAX - self.total) => *self = best,
                _ => return,
            }
        }
    }
}
