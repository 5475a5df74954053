//! A machine of more than 16 GPUs as a tree of clusters, from which a set's values are computed.
//!
//! Behind PCIe switches and NVSwitches, bandwidths and ranks are nested: the bandwidth between two GPUs is that of the
//! smallest cluster around both. A collective is then the width of the smallest cluster around a set, and the best
//! packing fills each cluster from within. Both are exact and need no row for each set. The code checks whether a
//! machine is such a tree. On another machine (a mesh of NVLinks) the tree gives only bounds, and the answers say so.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::collective;
use super::remaining::{self, GROUPS, WHOLE};
use super::report::Values;
use super::set::{GpuSet, components, subsets};
use super::tables::NearNics;
use crate::topology::{NodeTopology, Rank};

/// The most sets of one size that are all valued to find a machine's best, off the admission path, at a few
/// microseconds each. All sets of four of 27 GPUs are fewer.
const MAX_TOP_SETS: u64 = 20_000;

/// The clusters, classes and tables from which a set is valued.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub bandwidths: Forest,
    /// [`Rank::FARTHEST`] less the rank: more is closer.
    ranks: Forest,
    nvlinks: Peers,
    packages: Vec<GpuSet>,
    nics: NearNics,
    tops: [Top; 3],
    /// The value that each GPU of a whole group adds in each cluster of `bandwidths`, by group size:
    /// `1000 * width / top - 1000 * outer_width / top`, each quotient rounded down.
    shares: Vec<[u64; 3]>,
    /// Classes of GPUs that differ in nothing but their address.
    pub classes: Vec<GpuSet>,
    /// True if the values are exact and not bounds.
    pub exact: bool,
}

/// The best collective of any group of one size on the machine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Top {
    /// MB/s.
    pub mbps: u32,
    /// True if it is proven that no set is better.
    pub exact: bool,
}

/// GPUs that reach each other by hops of at least `width`, and no other GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cluster {
    pub members: GpuSet,
    pub width: u32,
    /// The width of the next larger cluster around it; 0 without one.
    outer_width: u32,
}

/// The other GPUs that each GPU reaches, by measure; those with measure 0 are left out.
#[derive(Clone, Debug)]
struct Peers(Vec<Vec<(u64, GpuSet)>>);

impl Peers {
    fn new(gpus: usize, measure: impl Fn(usize, usize) -> u32) -> Self {
        let peers = |a: usize| {
            let mut by_width: BTreeMap<u32, GpuSet> = BTreeMap::new();
            for b in (0..gpus).filter(|b| *b != a && measure(a, *b) > 0) {
                by_width.entry(measure(a, b)).or_default().insert(b);
            }
            by_width.into_iter().map(|(width, peers)| (u64::from(width), peers)).collect()
        };
        Self((0..gpus).map(peers).collect())
    }

    /// The sum of the measure from each GPU of a set to the set's other GPUs.
    fn sums(&self, set: GpuSet) -> impl Iterator<Item = u64> {
        let peers = set.places().filter_map(|gpu| self.0.get(gpu));
        peers.map(move |peers| peers.iter().map(|(width, peers)| width * peers.intersection(set).len() as u64).sum())
    }
}

/// The clusters of one measure.
#[derive(Clone, Debug)]
pub(super) struct Forest {
    /// The clusters, the widest first: a cluster comes before those around it.
    pub clusters: Vec<Cluster>,
    /// The measure of every pair; `None` if every pair has exactly the width of the smallest cluster around it.
    peers: Option<Peers>,
}

impl Forest {
    fn new(gpus: usize, measure: impl Fn(usize, usize) -> u32) -> Self {
        let pairs = |gpus: usize| (0..gpus).flat_map(move |a| (a + 1..gpus).map(move |b| (a, b)));
        let widths: BTreeSet<u32> = pairs(gpus).map(|(a, b)| measure(a, b)).collect();
        let mut clusters: Vec<Cluster> = Vec::new();
        for width in widths.into_iter().rev() {
            let parts = components(gpus, |a, b| measure(a, b) >= width);
            for members in parts.into_iter().filter(|part| part.len() > 1) {
                for inner in clusters.iter_mut().filter(|inner| inner.outer_width == 0 && inner.members != members) {
                    if inner.members.without(members).is_empty() {
                        inner.outer_width = width;
                    }
                }
                if clusters.iter().all(|known| known.members != members) {
                    clusters.push(Cluster { members, width, outer_width: 0 });
                }
            }
        }
        let mut forest = Self { clusters, peers: None };
        let shown = |(a, b): (usize, usize)| forest.width(GpuSet::of(a).union(GpuSet::of(b))) == measure(a, b);
        if !pairs(gpus).all(shown) {
            forest.peers = Some(Peers::new(gpus, measure));
        }
        forest
    }

    /// The width of the smallest cluster around a set.
    fn width(&self, set: GpuSet) -> u32 {
        let around = self.clusters.iter().find(|cluster| set.without(cluster.members).is_empty());
        around.map_or(0, |cluster| cluster.width)
    }

    /// The sum of the measure over the pairs of a set.
    fn pairs(&self, set: GpuSet) -> u64 {
        match &self.peers {
            Some(peers) => peers.sums(set).sum::<u64>() / 2,
            None => self.sum(|cluster| pairs_of(cluster.members.intersection(set))),
        }
    }

    /// The largest sum of the measure over disjoint pairs of a set, as many as fit.
    fn matched(&self, set: GpuSet) -> u64 {
        self.sum(|cluster| cluster.members.intersection(set).len() as u64 / 2)
    }

    /// Sums over pairs; `pairs` gives the number of pairs that each cluster holds.
    fn sum(&self, pairs: impl Fn(&Cluster) -> u64) -> u64 {
        self.clusters.iter().map(|cluster| u64::from(cluster.width - cluster.outer_width) * pairs(cluster)).sum()
    }
}

impl Tree {
    pub(super) fn new(topology: &NodeTopology) -> Self {
        let gpus = topology.gpus().len();
        let bandwidths = Forest::new(gpus, |a, b| topology.bandwidth(a, b));
        let ranks = Forest::new(gpus, |a, b| closeness(topology, a, b));
        let exact = bandwidths.peers.is_none() && ranks.peers.is_none() && has_plain_links(topology);
        let tops = GROUPS.map(|group| if exact { widest(&bandwidths, group) } else { best(topology, group) });
        let nics = NearNics::of(topology);
        let share = |width: u32, top: Top| u64::from(width) * WHOLE / u64::from(top.mbps.max(1));
        let shares = bandwidths.clusters.iter();
        let shares = shares.map(|cluster| tops.map(|top| share(cluster.width, top) - share(cluster.outer_width, top)));
        let shares = shares.collect();
        let nvlinks = Peers::new(gpus, |a, b| topology.nvlink(a, b));
        let classes = classes(topology, &nics);
        let packages = remaining::grouped(topology, |gpu| gpu.package).into_values().collect();
        Self { bandwidths, ranks, nvlinks, packages, nics, tops, shares, classes, exact }
    }

    /// The machine's best collective of `group` GPUs; 0 for a size that is not in [`GROUPS`].
    pub(super) fn top(&self, group: usize) -> Top {
        GROUPS.into_iter().zip(self.tops).find(|(size, _)| *size == group).map(|(_, top)| top).unwrap_or_default()
    }

    /// The values of a chosen set and of the GPUs that stay free. If the tree is not exact, `collective`, `remaining`
    /// and `remaining_closeness` are bounds.
    pub(super) fn values(&self, chosen: GpuSet, remains: GpuSet) -> Values {
        let farthest = u64::from(Rank::FARTHEST.number());
        let minus =
            |sum: u64, pairs: u64| i64::try_from(farthest * pairs - sum.min(farthest * pairs)).map_or(0, |sum| -sum);
        Values {
            collective: self.collective(chosen),
            remaining: self.remaining(remains),
            pairs: self.bandwidths.pairs(chosen),
            closeness: minus(self.ranks.pairs(chosen), pairs_of(chosen)),
            room: u64::from(remaining::room(&self.packages, remains)),
            remaining_closeness: minus(self.ranks.matched(remains), remains.len() as u64 / 2),
            nics: self.nics.rate(chosen),
            remaining_pairs: self.bandwidths.pairs(remains),
        }
    }

    /// Returns true if a set is worse than another by the first two values. Most sets are, and these two take the least
    /// time.
    pub(super) fn falls_behind(&self, chosen: GpuSet, remains: GpuSet, other: &Values) -> bool {
        let first = self.collective(chosen).cmp(&other.collective);
        first.then_with(|| self.remaining(remains).cmp(&other.remaining)).is_lt()
    }

    /// The width of the smallest cluster around a set; in a mesh the least that a GPU's links to the set carry, if
    /// every GPU has such links.
    fn collective(&self, set: GpuSet) -> u64 {
        if set.len() < 2 {
            return 0;
        }
        let links = if self.exact { None } else { self.nvlinks.sums(set).min().filter(|least| *least > 0) };
        links.unwrap_or_else(|| u64::from(self.bandwidths.width(set)))
    }

    /// The value of the GPUs that stay free: over clusters and group sizes, the sum of `shares` times the cluster's
    /// free GPUs in whole groups.
    fn remaining(&self, set: GpuSet) -> u64 {
        let of = |(cluster, shares): (&Cluster, &[u64; 3])| {
            let inside = cluster.members.intersection(set).len();
            let whole = GROUPS.map(|group| (inside / group * group) as u64);
            whole.into_iter().zip(shares).map(|(whole, share)| whole * share).sum::<u64>()
        };
        self.bandwidths.clusters.iter().zip(&self.shares).map(of).sum()
    }
}

/// The number of pairs in a set.
fn pairs_of(set: GpuSet) -> u64 {
    let gpus = set.len() as u64;
    gpus * gpus.saturating_sub(1) / 2
}

/// The closeness of two GPUs: more is closer.
fn closeness(topology: &NodeTopology, a: usize, b: usize) -> u32 {
    u32::from(Rank::FARTHEST.number().saturating_sub(topology.rank(a, b).number()))
}

/// Returns true if the bandwidths between pairs describe the NVLinks completely: each GPU has NVLinks to at most
/// one other GPU, or to the others of its NVSwitch plane through its port.
fn has_plain_links(topology: &NodeTopology) -> bool {
    let gpus = topology.gpus();
    let linked = |a: usize| (0..gpus.len()).filter(move |b| a != *b && topology.nvlink(a, *b) > 0);
    let by_port = |a: usize, b: usize| {
        let both = gpus.get(a).zip(gpus.get(b));
        both.is_some_and(|(one, other)| {
            one.nvswitch_plane.is_some()
                && one.nvswitch_plane == other.nvswitch_plane
                && topology.nvlink(a, b) == one.nvswitch_port.min(other.nvswitch_port)
        })
    };
    // Both ends of a pair see the same links. A GPU of a plane with a link elsewhere fails the check from either end.
    (0..gpus.len())
        .all(|a| linked(a).all(|b| by_port(a, b)) || linked(a).all(|b| linked(b).eq([a]) && linked(a).eq([b])))
}

/// The width of the widest cluster with room for a group.
fn widest(bandwidths: &Forest, group: usize) -> Top {
    let found = bandwidths.clusters.iter().find(|cluster| cluster.members.len() >= group);
    Top { mbps: found.map_or(0, |cluster| cluster.width), exact: true }
}

/// The best collective of any `group` GPUs. Values all sets if they are few, otherwise those that grow from each GPU
/// along its strongest links.
fn best(topology: &NodeTopology, group: usize) -> Top {
    let gpus = topology.gpus().len();
    let all: GpuSet = (0..gpus).collect();
    let few = (0..group as u64).fold(1, |sets: u64, taken| sets.saturating_mul(gpus as u64 - taken) / (taken + 1))
        <= MAX_TOP_SETS;
    let every = few.then(|| subsets(all, group)).into_iter().flatten();
    let some = (0..gpus).filter(|_| !few).map(|first| grown(topology, first, group));
    let mbps = every.chain(some).map(|set| collective_of(topology, set)).max().unwrap_or(0);
    Top { mbps, exact: few }
}

/// Grows a set from one GPU: each next GPU has the most bandwidth to those before; among equals the lowest is taken.
fn grown(topology: &NodeTopology, first: usize, size: usize) -> GpuSet {
    let all: GpuSet = (0..topology.gpus().len()).collect();
    let mut set = GpuSet::of(first);
    while set.len() < size {
        let mbps = |place: usize| set.places().map(|member| u64::from(topology.bandwidth(place, member))).sum::<u64>();
        let Some(next) = all.without(set).places().max_by_key(|place| (mbps(*place), usize::MAX - place)) else {
            break;
        };
        set = set.union(GpuSet::of(next));
    }
    set
}

/// The collective of one set of few GPUs (10 at most), from tables of these GPUs alone.
pub(super) fn collective_of(topology: &NodeTopology, set: GpuSet) -> u32 {
    let places: Vec<usize> = set.places().collect();
    collective::table(&topology.restricted(&places)).last().copied().unwrap_or(0)
}

/// The classes of GPUs that differ in nothing but their address: equal bandwidths, NVLinks and ranks to all
/// others, one package, the same NICs.
fn classes(topology: &NodeTopology, nics: &NearNics) -> Vec<GpuSet> {
    let gpus = topology.gpus();
    let alike = |a: usize, b: usize| {
        let package = |place: usize| gpus.get(place).map(|gpu| gpu.package);
        let others = (0..gpus.len()).filter(|other| *other != a && *other != b);
        package(a) == package(b)
            && nics.near.get(a) == nics.near.get(b)
            && others.into_iter().all(|other| {
                topology.bandwidth(a, other) == topology.bandwidth(b, other)
                    && topology.nvlink(a, other) == topology.nvlink(b, other)
                    && topology.rank(a, other) == topology.rank(b, other)
            })
    };
    // GPUs that are like a third one are alike, so the connected parts are the classes.
    components(gpus.len(), alike)
}
