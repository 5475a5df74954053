//! A brute force for the choice among whole GPUs, straight from its definition: all sets, all partitions, all rings.
//!
//! It shares no code with the implementation and reads only the public items of a topology. Results are cached,
//! because the same sets come up again and again.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::allocation::{Value, Values};
use linkwise_core::topology::NodeTopology;

/// A set of GPUs: a bit for each place in the topology.
pub type Set = u32;

/// The brute force's answer to one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Expected {
    pub chosen: Set,
    pub values: Values,
    pub runner_up: Option<(Set, Values, Value)>,
    pub compared: u64,
}

/// A machine and the cached results about it.
pub struct Oracle<'a> {
    node: &'a NodeTopology,
    /// The NVLink bandwidth between two GPUs without the part through their common plane.
    direct: Vec<Vec<u64>>,
    collectives: RefCell<BTreeMap<Set, u64>>,
    packings: RefCell<BTreeMap<(Set, u32), u64>>,
    pairings: RefCell<BTreeMap<Set, i64>>,
    tops: RefCell<BTreeMap<u32, u64>>,
}

impl<'a> Oracle<'a> {
    pub fn new(node: &'a NodeTopology) -> Self {
        let (gpus, count) = (node.gpus(), node.gpus().len());
        let over_plane = |a: usize, b: usize| {
            let same = gpus[a].nvswitch_plane.is_some() && gpus[a].nvswitch_plane == gpus[b].nvswitch_plane;
            if same { gpus[a].nvswitch_port.min(gpus[b].nvswitch_port) } else { 0 }
        };
        let direct = |a, b| if a == b { 0 } else { u64::from(node.nvlink(a, b) - over_plane(a, b)) };
        Self {
            node,
            direct: (0..count).map(|a| (0..count).map(|b| direct(a, b)).collect()).collect(),
            collectives: RefCell::default(),
            packings: RefCell::default(),
            pairings: RefCell::default(),
            tops: RefCell::default(),
        }
    }

    /// The best set and the second best; `None` if there is no set of that size.
    pub fn choose(&self, available: Set, must_include: Set, size: u32) -> Option<Expected> {
        let sets = subsets(available | must_include)
            .filter(|set| set.count_ones() == size && set & must_include == must_include);
        // The sets are ordered by their eight values, then by the smaller list of addresses.
        let key = |set: Set, values: &Values| {
            let mut names: Vec<_> =
                places(set).map(|gpu| &self.node.gpus()[gpu]).map(|gpu| (gpu.pci, &gpu.uuid)).collect();
            names.sort();
            (ORDER.map(|(_, number)| number(values)), Reverse(names))
        };
        let mut ranked: Vec<_> = sets
            .map(|set| (set, self.values(available, set)))
            .map(|(set, values)| (key(set, &values), set, values))
            .collect();
        ranked.sort_by(|a, b| b.0.cmp(&a.0));
        let compared = ranked.len() as u64;
        let mut ranked = ranked.into_iter().map(|(_, set, values)| (set, values));
        let (chosen, values) = ranked.next()?;
        let runner_up = ranked.next().map(|(set, second)| {
            let lost_at = ORDER.into_iter().find(|(_, number)| number(&values) != number(&second));
            (set, second, lost_at.map_or(Value::PciAddresses, |(value, _)| value))
        });
        Some(Expected { chosen, values, runner_up, compared })
    }

    /// The values of a set that is taken from the available GPUs.
    pub fn values(&self, available: Set, set: Set) -> Values {
        let left = available & !set;
        Values {
            collective: self.collective(set),
            remaining: self.remaining(left),
            pairs: pairs(set).map(|(a, b)| u64::from(self.node.bandwidth(a, b))).sum(),
            closeness: pairs(set).map(|(a, b)| -self.rank(a, b)).sum(),
            room: self.room(left),
            remaining_closeness: self.remaining_closeness(left),
            nics: self.nics(set),
            remaining_pairs: pairs(left).map(|(a, b)| u64::from(self.node.bandwidth(a, b))).sum(),
        }
    }

    fn rank(&self, a: usize, b: usize) -> i64 {
        i64::from(self.node.rank(a, b).number())
    }

    /// The ring bandwidth of the set.
    pub fn collective(&self, set: Set) -> u64 {
        if set.count_ones() < 2 {
            return 0;
        }
        cached(&self.collectives, set, || match self.narrowest_cut(set) {
            0 => self.best_ring(set, 0),
            cut => cut,
        })
    }

    /// The smallest NVLink bandwidth between two parts of the set, among all partitions in two.
    fn narrowest_cut(&self, set: Set) -> u64 {
        let first = lowest(set);
        let parts = subsets(set).filter(|part| part & first != 0 && *part != set);
        let planes: BTreeSet<u32> = places(set).filter_map(|gpu| self.node.gpus()[gpu].nvswitch_plane).collect();
        let cuts = parts.map(|part| {
            let rest = set & !part;
            let direct: u64 = places(part).flat_map(|a| places(rest).map(move |b| self.direct[a][b])).sum();
            // Traffic through a plane leaves one part and enters the other: the narrower side counts.
            let through = |plane: &u32| self.ports(part, *plane).min(self.ports(rest, *plane));
            direct + planes.iter().map(through).sum::<u64>()
        });
        cuts.min().expect("a set of two GPUs has a partition")
    }

    /// The total bandwidth of a set's ports on a plane.
    fn ports(&self, set: Set, plane: u32) -> u64 {
        let gpus = places(set).map(|gpu| &self.node.gpus()[gpu]);
        gpus.filter(|gpu| gpu.nvswitch_plane == Some(plane)).map(|gpu| u64::from(gpu.nvswitch_port)).sum()
    }

    /// The slowest hop of the best ring; `floor` if no ring is better.
    fn best_ring(&self, set: Set, floor: u64) -> u64 {
        let first = lowest(set).trailing_zeros() as usize;
        self.best_completion(first, first, set & !lowest(set), u64::MAX, floor)
    }

    /// The slowest hop of the best ring from `last` through all GPUs in `open` back to `first`.
    fn best_completion(&self, first: usize, last: usize, open: Set, slowest: u64, floor: u64) -> u64 {
        let hop = |to| slowest.min(u64::from(self.node.bandwidth(last, to)));
        if open == 0 {
            return hop(first).max(floor);
        }
        let mut best = floor;
        for next in places(open) {
            // With a hop that is no faster than `best`, no ring is better.
            if hop(next) > best {
                best = self.best_completion(first, next, open & !(1 << next), hop(next), best);
            }
        }
        best
    }

    /// The best collective of any `size` GPUs of the machine.
    fn top(&self, size: u32) -> u64 {
        let machine = (0..self.node.gpus().len()).fold(0, |set, gpu| set | 1 << gpu);
        let sets = subsets(machine).filter(|set| set.count_ones() == size);
        let best = |top: u64, set| match self.narrowest_cut(set) {
            0 => self.best_ring(set, top),
            cut => top.max(cut),
        };
        cached(&self.tops, size, || sets.fold(0, best))
    }

    /// The value of the GPUs that stay free: the packings of groups of 2, 4 and 8, each times its size.
    fn remaining(&self, left: Set) -> u64 {
        let sizes = [2, 4, 8].into_iter().filter(|size| *size <= left.count_ones());
        sizes.map(|size| u64::from(size) * self.packing(left, size)).sum()
    }

    /// The largest total of disjoint groups, each in per mille of the best collective of its size.
    fn packing(&self, left: Set, size: u32) -> u64 {
        if left.count_ones() < size {
            return 0;
        }
        cached(&self.packings, (left, size), || {
            let first = lowest(left);
            let groups = subsets(left).filter(|group| group & first != 0 && group.count_ones() == size);
            let with = |group: Set| {
                // If the best collective is 0, a group has no share of it.
                let share = (self.collective(group) * 1000).checked_div(self.top(size)).unwrap_or(0);
                share + self.packing(left & !group, size)
            };
            groups.map(with).max().unwrap_or(0).max(self.packing(left & !first, size))
        })
    }

    /// The GPUs in whole groups within a package, summed over groups of 2, 4 and 8.
    fn room(&self, left: Set) -> u64 {
        let mut inside: BTreeMap<_, u64> = BTreeMap::new();
        for package in places(left).filter_map(|gpu| self.node.gpus()[gpu].package) {
            *inside.entry(package).or_default() += 1;
        }
        [2, 4, 8].into_iter().flat_map(|size| inside.values().map(move |gpus| size * (gpus / size))).sum()
    }

    /// The largest total of negated ranks over all pairings of the GPUs.
    fn remaining_closeness(&self, left: Set) -> i64 {
        if left.count_ones() < 2 {
            return 0;
        }
        cached(&self.pairings, left, || {
            let first = lowest(left).trailing_zeros() as usize;
            let others = left & !lowest(left);
            let with = |other: usize| self.remaining_closeness(others & !(1 << other)) - self.rank(first, other);
            let without = (left.count_ones() % 2 == 1).then(|| self.remaining_closeness(others));
            places(others).map(with).chain(without).max().expect("two GPUs have a pairing")
        })
    }

    /// The total rate, in Mbit/s, of the members' nearest NICs at PHB or closer. Each NIC counts once, with 10 Gbit/s
    /// if its rate is unknown. Of equally near NICs a slower one does not count.
    fn nics(&self, set: Set) -> u64 {
        let level = |nic: usize, gpu: usize| self.node.nics()[nic].level[gpu].number();
        let all = 0..self.node.nics().len();
        let mut distinct = BTreeSet::new();
        for gpu in places(set) {
            let nearest = all.clone().map(|nic| level(nic, gpu)).min();
            let near = nearest.filter(|level| *level <= 2);
            let near: Vec<usize> = all.clone().filter(|nic| near == Some(level(*nic, gpu))).collect();
            let rate = |nic: &usize| self.node.nics()[*nic].mbps;
            let slower = |nic: &usize| rate(nic).is_some_and(|own| near.iter().any(|other| rate(other) > Some(own)));
            distinct.extend(near.iter().copied().filter(|nic| !slower(nic)));
        }
        distinct.into_iter().map(|nic: usize| u64::from(self.node.nics()[nic].mbps.unwrap_or(10_000))).sum()
    }
}

/// A value, and the function that reads it as a number.
type NumberOf = (Value, fn(&Values) -> i128);

/// The values in the order in which they decide.
const ORDER: [NumberOf; 8] = [
    (Value::Collective, |values| values.collective.into()),
    (Value::Remaining, |values| values.remaining.into()),
    (Value::Pairs, |values| values.pairs.into()),
    (Value::Closeness, |values| values.closeness.into()),
    (Value::Room, |values| values.room.into()),
    (Value::RemainingCloseness, |values| values.remaining_closeness.into()),
    (Value::Nics, |values| values.nics.into()),
    (Value::RemainingPairs, |values| values.remaining_pairs.into()),
];

/// The cached value of a key, which is computed first if it is missing.
fn cached<K: Copy + Ord, V: Copy>(cache: &RefCell<BTreeMap<K, V>>, key: K, compute: impl FnOnce() -> V) -> V {
    let known = cache.borrow().get(&key).copied();
    known.unwrap_or_else(|| {
        let value = compute();
        cache.borrow_mut().insert(key, value);
        value
    })
}

/// All subsets, with the empty set and the set itself.
pub fn subsets(of: Set) -> impl Iterator<Item = Set> {
    // This counts up in the members' bits. The other bits are set, so that a carry runs through them.
    std::iter::successors(Some(0), move |set| (*set != of).then(|| ((set | !of) + 1) & of))
}

/// The places of the members, ascending.
pub fn places(mut set: Set) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= !lowest(set);
        place
    })
}

fn lowest(set: Set) -> Set {
    set & set.wrapping_neg()
}

/// All pairs, each once.
fn pairs(set: Set) -> impl Iterator<Item = (usize, usize)> {
    places(set).flat_map(move |a| places(set).filter(move |b| a < *b).map(move |b| (a, b)))
}
