//! The devices that a container gets: the part of the device manager's decision that needs no call.
//!
//! Called by `admission`, in two steps, because a GetPreferredAllocation call may lie between them. Pure, except for
//! the order in which sets are read: it comes from a seeded generator, and in a kubelet from Go's maps. Follows the
//! device manager as read at 1.33.

use std::collections::{BTreeMap, BTreeSet};

use super::rng::Rng;
use super::topology_manager::{NumaMask, TopologyHint};

/// Device ids.
pub(super) type Ids = BTreeSet<String>;

/// The devices of one resource from which a container gets its own.
#[derive(Debug)]
pub(super) struct Pool {
    /// The ids that are healthy and held by no container.
    pub(super) available: Ids,
    /// NUMA nodes of every advertised device, healthy or not, used or not.
    pub(super) numa: BTreeMap<String, BTreeSet<i64>>,
}

/// The first step's result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// The container gets these devices; there is no choice.
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
    /// The devices that make up for short advice, in this order.
    fallback: [Ids; 2],
}

/// The first step: finds the source of `needed` (at least one) devices; that many are available.
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
    /// The second step: the devices, given the advice (empty if there was none). Advice counts as a set; ids that were
    /// not offered are ignored.
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

/// The available devices as aligned, unaligned and without affinity. Without a mask, all devices are without affinity.
/// The same holds for a resource that names no NUMA nodes.
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

    fn ids(list: &str) -> Ids {
        list.split_whitespace().map(String::from).collect()
    }

    fn list(names: &str) -> Vec<String> {
        names.split_whitespace().map(String::from).collect()
    }

    /// `"a:0 b:0,1 c:"`: devices and their NUMA nodes, all available.
    fn pool(devices: &str) -> Pool {
        let numa: BTreeMap<String, BTreeSet<i64>> = devices
            .split_whitespace()
            .map(|device| {
                let (id, nodes) = device.split_once(':').unwrap();
                (id.into(), nodes.split(',').filter(|n| !n.is_empty()).map(|n| n.parse().unwrap()).collect())
            })
            .collect();
        Pool { available: numa.keys().cloned().collect(), numa }
    }

    fn question(plan: Plan) -> Question {
        match plan {
            Plan::Ask(question) => question,
            other => panic!("expected a question, got {other:?}"),
        }
    }

    #[test]
    fn no_hint_asks_plugin_even_for_exact_fit() {
        for size in [2, 3] {
            let question = question(plan(&pool("a:0 b:0 c:1"), size, None));
            assert_eq!((question.available, question.must_include, question.size), (ids("a b c"), ids(""), size));
        }
    }

    #[test]
    fn more_aligned_than_needed_are_all_that_is_offered() {
        let question = question(plan(&pool("a:0 b:0 c:1 d:"), 1, Some(TopologyHint::on([0]))));
        assert_eq!((&question.available, &question.must_include), (&ids("a b"), &ids("")));
        let taken = question.settle(&list("c d"), &mut Rng::new(1));
        assert!(taken.is_subset(&ids("a b")) && taken.len() == 1, "{taken:?}");
    }

    #[test]
    fn exact_aligned_fit_is_taken_unasked() {
        let plan = plan(&pool("a:0 b:0 c:1 d:"), 2, Some(TopologyHint::on([0])));
        assert_eq!(plan, Plan::Take(ids("a b")));
    }

    #[test]
    fn too_few_aligned_are_taken_first() {
        let question = question(plan(&pool("a:0 b:1 c:1 d:"), 3, Some(TopologyHint::on([0]))));
        assert_eq!((&question.available, &question.must_include), (&ids("a b c d"), &ids("a")));
        assert_eq!(question.settle(&list("d b"), &mut Rng::new(1)), ids("a b d"));
        assert_eq!(question.settle(&[], &mut Rng::new(1)), ids("a b c"), "unaligned come before without affinity");
    }

    #[test]
    fn one_node_of_several_in_the_mask_aligns_a_device() {
        let plan = plan(&pool("a:0,1 b:2"), 1, Some(TopologyHint::on([1])));
        assert_eq!(plan, Plan::Take(ids("a")));
    }

    #[test]
    fn resource_without_numa_nodes_ignores_hint() {
        let question = question(plan(&pool("a: b:"), 1, Some(TopologyHint::on([0]))));
        assert_eq!(question.available, ids("a b"));
    }

    #[test]
    fn device_without_nodes_is_never_aligned() {
        let mut pool = pool("a:0 b: c:");
        pool.available = ids("b c");
        let question = question(plan(&pool, 1, Some(TopologyHint::on([0]))));
        assert_eq!((question.available, question.must_include), (ids("b c"), ids("")));
    }

    #[test]
    fn strange_advice_is_cut_and_filled() {
        let question = question(plan(&pool("a: b: c: d:"), 2, None));
        assert!(question.settle(&list("x c y"), &mut Rng::new(3)).contains("c"));
        let long = question.settle(&list("a b c"), &mut Rng::new(3));
        assert!(long.is_subset(&ids("a b c")) && long.len() == 2, "{long:?}");
        assert_eq!(question.settle(&list("a a a d"), &mut Rng::new(3)), ids("a d"));
    }
}
