//! Merges the hints of all resources into one mask, by the rules of the policy.
//!
//! Called by `affinity`. Pure. The result does not depend on the order of the resources.

use super::hints::{ResourceHints, TopologyHint};
use super::mask::NumaMask;
use super::{Policy, TopologyManager};

/// The Topology Manager's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settled {
    pub(crate) hint: TopologyHint,
    pub(crate) admitted: bool,
}

/// The result of a combination of hints: a hint that always has a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    mask: NumaMask,
    preferred: bool,
}

/// Merges the hints of all resources under the manager's policy. Policy none makes no decision.
pub(crate) fn settle(manager: &TopologyManager, resources: &[ResourceHints]) -> Settled {
    let (policy, all) = (manager.policy, manager.nodes());
    if policy == Policy::None {
        return Settled { hint: TopologyHint { mask: None, preferred: true }, admitted: true };
    }
    let mut lists: Vec<Vec<TopologyHint>> = resources.iter().map(list).collect();
    let single = policy == Policy::SingleNumaNode;
    if single {
        let fits_one = |hint: &TopologyHint| hint.preferred && hint.mask.is_none_or(|mask| mask.count() == 1);
        lists.iter_mut().for_each(|list| list.retain(fits_one));
    }
    let Candidate { mask, preferred } = merge(all, &lists);
    // Under single-numa-node, a mask of all nodes counts as no preference: the devices are not aligned at all.
    let mask = (!single || mask != all).then_some(mask);
    Settled { hint: TopologyHint { mask, preferred }, admitted: preferred || policy == Policy::BestEffort }
}

/// The hints of one resource as input of the merge. A resource without preference accepts any mask as preferred. A
/// resource that cannot be satisfied accepts any mask, but not as preferred.
fn list(resource: &ResourceHints) -> Vec<TopologyHint> {
    let any = |preferred| vec![TopologyHint { mask: None, preferred }];
    match &resource.hints {
        None => any(true),
        Some(hints) if hints.is_empty() => any(false),
        Some(hints) => hints.clone(),
    }
}

/// The best of all combinations of one hint from each list, or all nodes, not preferred, if no combination has a common
/// node.
fn merge(all: NumaMask, lists: &[Vec<TopologyHint>]) -> Candidate {
    // If no combination is preferred, the goal is the largest number of nodes that any resource needs alone.
    let narrowest = |list: &Vec<TopologyHint>| list.iter().filter_map(|hint| hint.mask).map(NumaMask::count).min();
    let enough = lists.iter().filter_map(narrowest).max().unwrap_or(0);
    let mut best: Option<Candidate> = None;
    combinations(all, lists, &mut |candidate| {
        if candidate.mask != NumaMask::default() {
            best = Some(best.map_or(candidate, |best| better(best, candidate, enough)));
        }
    });
    best.unwrap_or(Candidate { mask: all, preferred: false })
}

/// Calls `each` with the result of every combination: the nodes that all its hints share. The result is preferred if
/// all hints are preferred and all masks are equal.
fn combinations(all: NumaMask, lists: &[Vec<TopologyHint>], each: &mut impl FnMut(Candidate)) {
    fn go(lists: &[Vec<TopologyHint>], so_far: Candidate, first: Option<NumaMask>, each: &mut impl FnMut(Candidate)) {
        let Some((list, rest)) = lists.split_first() else { return each(so_far) };
        for hint in list {
            let same = hint.mask.is_none() || first.is_none() || first == hint.mask;
            let mask = hint.mask.map_or(so_far.mask, |mask| so_far.mask.and(mask));
            let preferred = so_far.preferred && hint.preferred && same;
            go(rest, Candidate { mask, preferred }, first.or(hint.mask), each);
        }
    }
    go(lists, Candidate { mask: all, preferred: true }, None, each);
}

/// The better of two candidates. A preferred one is better than one that is not. Of two preferred ones the narrower is
/// better. Of two that are not preferred, the better is not wider than `enough` and nearest to it. If both are wider,
/// the narrower is better.
fn better(current: Candidate, other: Candidate, enough: u32) -> Candidate {
    let narrower = if other.mask.is_narrower_than(current.mask) { other } else { current };
    match (current.preferred, other.preferred) {
        (true, false) => current,
        (false, true) => other,
        (true, true) => narrower,
        (false, false) => {
            let (have, offered) = (current.mask.count(), other.mask.count());
            match () {
                () if have == offered || have > enough => narrower,
                () if offered > have && offered <= enough => other,
                () => current,
            }
        }
    }
}
