//! The choice among whole GPUs, straight from its definition: all sets, all partitions, all rings.
//!
//! Shares no code with the implementation and knows only what a topology shows in public. Slow and
//! obvious; what was worked out for a set is kept, because the same sets come up again and again.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::allocation::{Value, Values};
use linkwise_core::topology::NodeTopology;

/// GPUs by their places in the topology, a bit each.
pub type Set = u32;

/// What the brute force finds for one request.
#[derive(Debug, PartialEq, Eq)]
pub struct Expected {
    pub chosen: Set,
    pub values: Values,
    pub runner_up: Option<(Set, Values, Value)>,
    pub compared: u64,
}

/// A machine and what was worked out about it so far.
pub struct Oracle<'a> {
    node: &'a NodeTopology,
    /// NVLink between two GPUs without what goes over their common plane.
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

    /// The best set and the second best; `None` when there is no set of that size.
    pub fn choose(&self, available: Set, must_include: Set, size: u32) -> Option<Expected> {
        let sets = subsets(available | must_include)
            .filter(|set| set.count_ones() == size && set & must_include == must_include);
        // The whole order as one key: the eight values, then the smaller list of addresses.
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

    /// What a set is worth when it is taken out of what is available.
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
        kept(&self.collectives, set, || match self.narrowest_cut(set) {
            0 => self.best_ring(set, 0),
            cut => cut,
        })
    }

    /// The least that NVLink carries between two parts of the set, over all ways to part it.
    fn narrowest_cut(&self, set: Set) -> u64 {
        let first = lowest(set);
        let parts = subsets(set).filter(|part| part & first != 0 && *part != set);
        let planes: BTreeSet<u32> = places(set).filter_map(|gpu| self.node.gpus()[gpu].nvswitch_plane).collect();
        let cuts = parts.map(|part| {
            let rest = set & !part;
            let direct: u64 = places(part).flat_map(|a| places(rest).map(move |b| self.direct[a][b])).sum();
            // What leaves one part for a plane enters the other from it: the narrower side counts.
            let through = |plane: &u32| self.ports(part, *plane).min(self.ports(rest, *plane));
            direct + planes.iter().map(through).sum::<u64>()
        });
        cuts.min().expect("two GPUs can be parted")
    }

    /// What all the ports of a set on a plane carry.
    fn ports(&self, set: Set, plane: u32) -> u64 {
        let gpus = places(set).map(|gpu| &self.node.gpus()[gpu]);
        gpus.filter(|gpu| gpu.nvswitch_plane == Some(plane)).map(|gpu| u64::from(gpu.nvswitch_port)).sum()
    }

    /// The slowest hop of the best ring, of all rings; `floor` if none is better than that.
    fn best_ring(&self, set: Set, floor: u64) -> u64 {
        let first = lowest(set).trailing_zeros() as usize;
        self.rings(first, first, set & !lowest(set), u64::MAX, floor)
    }

    /// Goes on from `last` through all of `open` and home to `first`.
    fn rings(&self, first: usize, last: usize, open: Set, slowest: u64, floor: u64) -> u64 {
        let hop = |to| slowest.min(u64::from(self.node.bandwidth(last, to)));
        if open == 0 {
            return hop(first).max(floor);
        }
        let mut best = floor;
        for next in places(open) {
            // A ring with this hop is no better than what is known already.
            if hop(next) > best {
                best = self.rings(first, next, open & !(1 << next), hop(next), best);
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
        kept(&self.tops, size, || sets.fold(0, best))
    }

    /// What the GPUs that stay free still offer.
    fn remaining(&self, left: Set) -> u64 {
        let sizes = [2, 4, 8].into_iter().filter(|size| *size <= left.count_ones());
        sizes.map(|size| u64::from(size) * self.packing(left, size)).sum()
    }

    /// The largest total over disjoint groups: the first GPU is in one of the groups, or in none.
    fn packing(&self, left: Set, size: u32) -> u64 {
        if left.count_ones() < size {
            return 0;
        }
        kept(&self.packings, (left, size), || {
            let first = lowest(left);
            let groups = subsets(left).filter(|group| group & first != 0 && group.count_ones() == size);
            let with = |group: Set| {
                // Where the best is nothing, every group offers all of it and none: nothing.
                let share = (self.collective(group) * 1000).checked_div(self.top(size)).unwrap_or(0);
                share + self.packing(left & !group, size)
            };
            groups.map(with).max().unwrap_or(0).max(self.packing(left & !first, size))
        })
    }

    /// Whole groups that still fit a package; a GPU whose package is unknown is in none.
    fn room(&self, left: Set) -> u64 {
        let mut inside: BTreeMap<_, u64> = BTreeMap::new();
        for package in places(left).filter_map(|gpu| self.node.gpus()[gpu].package) {
            *inside.entry(package).or_default() += 1;
        }
        [2, 4, 8].into_iter().flat_map(|size| inside.values().map(move |gpus| size * (gpus / size))).sum()
    }

    /// The largest total of minus ranks, the GPUs taken two by two.
    fn remaining_closeness(&self, left: Set) -> i64 {
        if left.count_ones() < 2 {
            return 0;
        }
        kept(&self.pairings, left, || {
            let first = lowest(left).trailing_zeros() as usize;
            let others = left & !lowest(left);
            let with = |other: usize| self.remaining_closeness(others & !(1 << other)) - self.rank(first, other);
            let without = (left.count_ones() % 2 == 1).then(|| self.remaining_closeness(others));
            places(others).map(with).chain(without).max().expect("two GPUs make a pair")
        })
    }

    /// The rates of the distinct NICs nearest to the members, 10 Gbit/s where unknown: at one distance a slower one does
    /// not count.
    fn nics(&self, set: Set) -> u64 {
        let level = |nic: usize, gpu: usize| self.node.nics()[nic].level[gpu].number();
        let all = 0..self.node.nics().len();
        let mut distinct = BTreeSet::new();
        for gpu in places(set) {
            let least = all.clone().map(|nic| level(nic, gpu)).min();
            let near = least.filter(|least| *least <= 2);
            let near: Vec<usize> = all.clone().filter(|nic| near == Some(level(*nic, gpu))).collect();
            let rate = |nic: &usize| self.node.nics()[*nic].mbps;
            let slower = |nic: &usize| rate(nic).is_some_and(|own| near.iter().any(|other| rate(other) > Some(own)));
            distinct.extend(near.iter().copied().filter(|nic| !slower(nic)));
        }
        distinct.into_iter().map(|nic: usize| u64::from(self.node.nics()[nic].mbps.unwrap_or(10_000))).sum()
    }
}

/// A value's name, and the value as a number.
type Named = (Value, fn(&Values) -> i128);

/// The order of the values.
const ORDER: [Named; 8] = [
    (Value::Collective, |values| values.collective.into()),
    (Value::Remaining, |values| values.remaining.into()),
    (Value::Pairs, |values| values.pairs.into()),
    (Value::Closeness, |values| values.closeness.into()),
    (Value::Room, |values| values.room.into()),
    (Value::RemainingCloseness, |values| values.remaining_closeness.into()),
    (Value::Nics, |values| values.nics.into()),
    (Value::RemainingPairs, |values| values.remaining_pairs.into()),
];

/// What was worked out for a key before, or is now.
fn kept<K: Copy + Ord, V: Copy>(known: &RefCell<BTreeMap<K, V>>, key: K, work_out: impl FnOnce() -> V) -> V {
    let before = known.borrow().get(&key).copied();
    before.unwrap_or_else(|| {
        let value = work_out();
        known.borrow_mut().insert(key, value);
        value
    })
}

/// All subsets, the empty one and the whole included.
pub fn subsets(of: Set) -> impl Iterator<Item = Set> {
    // Counting up in the members' bits: the others are filled, so that a carry runs through them.
    std::iter::successors(Some(0), move |set| (*set != of).then(|| ((set | !of) + 1) & of))
}

/// The members, ascending.
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
