//! The ring bandwidth of every set of GPUs by NCCL's model, in MB/s: over NVLink the narrowest cut, otherwise the
//! slowest hop of the best ring. NVLink SHARP may reach more ([`NodeTopology::nvls`]). It is left out because it
//! changes neither the order of sets of one size behind one NVSwitch plane nor any choice.

use crate::prelude::*;

use super::remaining::grouped;
use super::set::{GpuSet, neighbours};
use crate::topology::NodeTopology;

/// Computes a table with one row for each set of GPUs.
pub(super) fn table(topology: &NodeTopology) -> Vec<u32> {
    let gpus = topology.gpus().len();
    let mut collective = rings(topology);
    let links = Links::of(topology);
    let neighbours = neighbours(gpus, |a, b| topology.nvlink(a, b) > 0);
    for (set, best) in (0..).map(GpuSet).zip(&mut collective) {
        if set.len() > 1 && is_connected(set, &neighbours) {
            let port = smallest_port(topology, set).filter(|_| at(&links.direct, set) == 0);
            *best = port.unwrap_or_else(|| narrowest_cut(set, &links));
        }
    }
    collective
}

/// The bandwidth of the NVLinks within each set, MB/s.
struct Links {
    /// The links from GPU to GPU, summed over the pairs of each set.
    direct: Vec<u64>,
    /// The sum of each set's ports, for each NVSwitch plane that joins GPUs.
    planes: Vec<Vec<u64>>,
}

impl Links {
    fn of(topology: &NodeTopology) -> Self {
        let gpus = topology.gpus();
        let port = |place: usize| gpus.get(place).map_or(0, |gpu| gpu.nvswitch_port);
        let mut planes: Vec<GpuSet> = grouped(topology, |gpu| gpu.nvswitch_plane).into_values().collect();
        let direct = |a, b| {
            let on_plane = planes.iter().any(|plane| plane.contains(a) && plane.contains(b));
            topology.nvlink(a, b).saturating_sub(if on_plane { port(a).min(port(b)) } else { 0 })
        };
        let direct = pair_sums(gpus.len(), direct);
        planes.retain(|plane| plane.len() > 1);
        let ports = |plane: GpuSet| {
            let members = (0..1_u64 << gpus.len()).map(move |row| GpuSet(row).intersection(plane));
            members.map(|members| members.places().map(|place| u64::from(port(place))).sum()).collect()
        };
        Self { direct, planes: planes.into_iter().map(ports).collect() }
    }
}

/// Sums a weight over the pairs of every set.
pub(super) fn pair_sums(gpus: usize, weight: impl Fn(usize, usize) -> u32) -> Vec<u64> {
    by_set(gpus, |set, sums| {
        let lowest = set.lowest();
        let rest = set.without(lowest);
        let first = lowest.places().next().unwrap_or(0);
        at(sums, rest) + rest.places().map(|other| u64::from(weight(first, other))).sum::<u64>()
    })
}

/// Builds a table with a row for each set of `gpus` GPUs. `value` makes a row from the rows before it, which include
/// those of all its subsets.
pub(super) fn by_set<T: Default>(gpus: usize, value: impl Fn(GpuSet, &[T]) -> T) -> Vec<T> {
    let mut rows = Vec::with_capacity(1 << gpus);
    rows.push(T::default());
    for row in 1..1_u64 << gpus {
        rows.push(value(GpuSet(row), &rows));
    }
    rows
}

/// Reads a set's row of a table; the default where the table has none.
pub(super) fn at<T: Copy + Default>(table: &[T], set: GpuSet) -> T {
    row(table, set.0)
}

/// Reads a row of a table by its number.
pub(super) fn row<T: Copy + Default>(table: &[T], number: u64) -> T {
    usize::try_from(number).ok().and_then(|number| table.get(number)).copied().unwrap_or_default()
}

/// The smallest port in a set whose GPUs are all on one NVSwitch plane; `None` for other sets.
fn smallest_port(topology: &NodeTopology, set: GpuSet) -> Option<u32> {
    let members = || set.places().filter_map(|place| topology.gpus().get(place));
    let plane = members().next()?.nvswitch_plane?;
    let on_one = members().all(|gpu| gpu.nvswitch_plane == Some(plane));
    members().map(|gpu| gpu.nvswitch_port).min().filter(|_| on_one)
}

/// Returns true if NVLinks alone connect all GPUs of a set.
fn is_connected(set: GpuSet, neighbours: &[GpuSet]) -> bool {
    let mut reached = set.lowest();
    loop {
        let next = reached.places().fold(reached, |next, place| {
            next.union(neighbours.get(place).copied().unwrap_or_default().intersection(set))
        });
        if next == reached {
            return reached == set;
        }
        reached = next;
    }
}

/// The narrowest NVLink bandwidth between two parts of a set, over all ways to divide it.
///
/// Parts A and B have `direct(set) - direct(A) - direct(B)` from GPU to GPU, and `min(ports(A), ports(B))` over each
/// NVSwitch plane. Traffic over a plane leaves A by A's ports and enters B by B's ports, so the narrower side counts
/// once, not for each pair.
fn narrowest_cut(set: GpuSet, links: &Links) -> u32 {
    let others = set.without(set.lowest()).0;
    let whole = at(&links.direct, set);
    let mut narrowest = u64::MAX;
    // All non-empty subsets of the others: the part without the lowest member.
    let mut part = others;
    while part != 0 {
        let (one, other) = (GpuSet(part), set.without(GpuSet(part)));
        let within = at(&links.direct, one) + at(&links.direct, other);
        let through = links.planes.iter().map(|ports| at(ports, one).min(at(ports, other))).sum::<u64>();
        narrowest = narrowest.min(whole - within.min(whole) + through);
        part = (part - 1) & others;
    }
    u32::try_from(narrowest).unwrap_or(u32::MAX)
}

/// The slowest hop of the best ring through every set, by bandwidth.
///
/// Tries the bandwidths from the widest down. A set's value is the first bandwidth at which hops of at least that
/// bandwidth join its GPUs in a ring. Paths grow from each set's lowest member: `ends` holds, for each set, the GPUs at
/// which a path through all of the set may end (Held and Karp's subsets).
fn rings(topology: &NodeTopology) -> Vec<u32> {
    let gpus = topology.gpus().len();
    let mut widths: Vec<u32> = (0..gpus).flat_map(|a| (a + 1..gpus).map(move |b| topology.bandwidth(a, b))).collect();
    widths.sort_unstable_by(|a, b| b.cmp(a));
    widths.dedup();
    let mut rings: Vec<u32> = vec![0; 1 << gpus];
    let mut ends: Vec<GpuSet> = vec![GpuSet::default(); rings.len()];
    for width in widths {
        let reach = neighbours(gpus, |a, b| topology.bandwidth(a, b) >= width);
        let joins = |gpu: usize, ends: GpuSet| reach.get(gpu).is_some_and(|near| !near.intersection(ends).is_empty());
        for row in 1..rings.len() {
            let set = GpuSet(row as u64);
            let lowest = set.lowest();
            let first = lowest.0.trailing_zeros() as usize;
            let found: GpuSet = if set == lowest {
                lowest
            } else {
                let may_end = |last: &usize| joins(*last, at(&ends, set.without(GpuSet::of(*last))));
                set.without(lowest).places().filter(may_end).collect()
            };
            if let Some(cell) = ends.get_mut(row) {
                *cell = found;
            }
            // A ring of two is its one pair, there and back.
            if joins(first, found)
                && let Some(ring) = rings.get_mut(row).filter(|ring| **ring == 0)
            {
                *ring = width;
            }
        }
        if (0..).map(GpuSet).zip(&rings).all(|(set, ring)| set.len() < 2 || *ring > 0) {
            break;
        }
    }
    rings
}
