//! The choice of the devices that a container gets: the part of the device manager that makes no call.
//!
//! Called by `admission` in two steps, because a GetPreferredAllocation call may lie between them. Pure, except that a
//! seeded generator gives the order in which sets are read. In a kubelet, Go's maps give it. Follows the device
//! manager of 1.33.

use std::collections::{BTreeMap, BTreeSet};

use super::rng::Rng;
use super::topology_manager::{NumaMask, TopologyHint};

/// A set of device ids.
pub(super) type Ids = BTreeSet<String>;

/// The devices of one resource from which a container gets its own.
#[derive(Debug)]
pub(super) struct Pool {
    /// The ids that are healthy and held by no container.
    pub(super) available: Ids,
    /// The NUMA nodes of every advertised device, healthy or not, used or not.
    pub(super) numa: BTreeMap<String, BTreeSet<i64>>,
}

/// The result of the first step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// The container gets these devices, because there is no choice.
    Take(Ids),
    /// The kubelet asks the plugin, if the plugin offers advice, and then calls [`Question::settle`].
    Ask(Question),
}

/// A pending GetPreferredAllocation call, and the rule for its answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Question {
    /// The devices from which the plugin may choose.
    pub(super) available: Ids,
    /// The devices that the kubelet has taken already.
    pub(super) must_include: Ids,
    /// The number of devices that the container gets in all.
    pub(super) size: usize,
    /// The devices that fill up advice with too few devices: first those of the first set.
    fallback: [Ids; 2],
}

/// The first step: finds the devices to choose `needed` from. `needed` is 1 to the number of available devices.
pub(super) fn plan(pool: &Pool, needed: usize, hint: Option<TopologyHint>) -> Plan {
    let [aligned, unaligned, without] = by_affinity(pool, hint);
    if needed < aligned.len() {
        let fallback = [aligned.clone(), Ids::new()];
        return Plan::Ask(Question { available: aligned, must_include: Ids::new(), size: needed, fallback });
    }
    if needed == aligned.len() {
        return Plan::Take(aligned);
    }
    let available = pool.available.clone();
    Plan::Ask(Question { available, must_include: aligned, size: needed, fallback: [unaligned, without] })
}

impl Question {
    /// The second step: chooses the devices by the plugin's advice, which may be empty. The order of the advice does
    /// not matter, and ids that were not offered are ignored.
    pub(super) fn settle(&self, preferred: &[String], rng: &mut Rng) -> Ids {
        let mut taken = self.must_include.clone();
        let preferred: Ids = preferred.iter().filter(|id| self.available.contains(*id)).cloned().collect();
        for source in [&preferred, &self.fallback[0], &self.fallback[1]] {
            let rest: Vec<String> = source.difference(&taken).cloned().collect();
            let missing = self.size.saturating_sub(taken.len());
            taken.extend(rng.shuffled(rest).into_iter().take(missing));
        }
        taken
    }
}

/// The available devices in three sets: aligned, unaligned, and without affinity. Without a mask all devices are
/// without affinity. So are devices that name no NUMA nodes.
fn by_affinity(pool: &Pool, hint: Option<TopologyHint>) -> [Ids; 3] {
    let Some(mask) = hint.and_then(|hint| hint.mask) else {
        return [Ids::new(), Ids::new(), pool.available.clone()];
    };
    let mut split = [Ids::new(), Ids::new(), Ids::new()];
    for id in &pool.available {
        let kind = match pool.numa.get(id) {
            Some(nodes) if mask.meets(NumaMask::new(nodes.iter().copied())) => 0,
            Some(nodes) if !nodes.is_empty() => 1,
            _ => 2,
        };
        split[kind].insert(id.clone());
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &str) -> Vec<String> {
        names.split_whitespace().map(String::from).collect()
    }

    fn ids(names: &str) -> Ids {
        list(names).into_iter().collect()
    }

    /// A pool from `"a:0 b:0,1 c: d!:1"`: devices and their NUMA nodes. `!` marks devices that are not available.
    fn pool(devices: &str) -> Pool {
        let mut pool = Pool { available: Ids::new(), numa: BTreeMap::new() };
        for (name, nodes) in devices.split_whitespace().map(|device| device.split_once(':').unwrap()) {
            let id = name.trim_end_matches('!').to_owned();
            if !name.ends_with('!') {
                pool.available.insert(id.clone());
            }
            pool.numa.insert(id, nodes.split(',').filter_map(|node| node.parse().ok()).collect());
        }
        pool
    }

    fn planned(devices: &str, needed: usize, node: Option<i64>) -> Plan {
        plan(&pool(devices), needed, node.map(|node| TopologyHint::on([node])))
    }

    #[test]
    fn mask_decides_what_is_offered_and_taken() {
        for (devices, needed, node, available, must_include) in [
            // Without a mask the plugin is asked even about an exact fit.
            ("a:0 b:0 c:1", 2, None, "a b c", ""),
            ("a:0 b:0 c:1", 3, None, "a b c", ""),
            ("a:0 b:0 c:1 d:", 1, Some(0), "a b", ""),
            ("a:0 b:1 c:1 d:", 3, Some(0), "a b c d", "a"),
            // A resource without NUMA nodes ignores the mask. A device without NUMA nodes is never aligned.
            ("a: b:", 1, Some(0), "a b", ""),
            ("a!:0 b: c:", 1, Some(0), "b c", ""),
        ] {
            let Plan::Ask(asked) = planned(devices, needed, node) else { panic!("{devices}: the plugin is not asked") };
            assert_eq!((asked.available, asked.must_include), (ids(available), ids(must_include)), "{devices}");
            assert_eq!(asked.size, needed, "{devices}");
        }
        assert_eq!(planned("a:0 b:0 c:1 d:", 2, Some(0)), Plan::Take(ids("a b")));
        // A device is aligned if one of its nodes is in the mask.
        assert_eq!(planned("a:0,1 b:2", 1, Some(1)), Plan::Take(ids("a")));
    }

    #[test]
    fn advice_is_cut_to_the_offer_and_filled_up() {
        for (devices, needed, node, advice, certain, possible) in [
            ("a:0 b:0 c:1 d:", 1, Some(0), "c d", "", "a b"),
            ("a:0 b:1 c:1 d:", 3, Some(0), "d b", "a b d", "a b d"),
            // Unaligned devices are taken before devices without affinity.
            ("a:0 b:1 c:1 d:", 3, Some(0), "", "a b c", "a b c"),
            ("a: b: c: d:", 2, None, "x c y", "c", "a b c d"),
            ("a: b: c: d:", 2, None, "a b c", "", "a b c"),
            ("a: b: c: d:", 2, None, "a a a d", "a d", "a d"),
        ] {
            let Plan::Ask(question) = planned(devices, needed, node) else {
                panic!("{devices}: the plugin is not asked")
            };
            let taken = question.settle(&list(advice), &mut Rng::new(3));
            assert!(ids(certain).is_subset(&taken) && taken.is_subset(&ids(possible)), "{advice}: {taken:?}");
            assert_eq!(taken.len(), needed, "{advice}");
        }
    }
}
