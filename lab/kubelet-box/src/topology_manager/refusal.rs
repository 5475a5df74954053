//! The reasons for which the Topology Manager refused a pod, in words. A kubelet reports only `TopologyAffinityError`.

use std::fmt;

use super::Policy;
use super::hints::ResourceHints;

/// A refused pod or container: the policy, the requests, and the possible masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The pod.
    pub pod: String,
    /// The container; `None` in scope pod.
    pub container: Option<String>,
    /// The policy that refused.
    pub policy: Policy,
    /// The hints of each resource.
    pub resources: Vec<ResourceHints>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {}", self.pod)?;
        if let Some(container) = &self.container {
            write!(f, ", container {container}")?;
        }
        write!(f, ": TopologyAffinityError under policy {}; {}", self.policy, self.why())
    }
}

impl Refusal {
    /// Returns the obstacle: each resource that cannot have its own preference, or else the preferences that conflict.
    pub fn why(&self) -> String {
        let unhappy: Vec<String> = self.resources.iter().filter_map(|hints| self.unhappy(hints)).collect();
        if !unhappy.is_empty() {
            return unhappy.join("; ");
        }
        let wishes: Vec<String> = self.resources.iter().map(wish).collect();
        format!("no set of NUMA nodes suits all: {}", wishes.join(", "))
    }

    /// Returns the reason why one resource alone cannot be satisfied; `None` if it can.
    fn unhappy(&self, of: &ResourceHints) -> Option<String> {
        let what = format!("{} {}", of.requested, of.resource);
        let hints = of.hints.as_ref()?;
        let Some(narrowest) = hints.iter().filter_map(|hint| hint.mask).reduce(narrower) else {
            return Some(format!("{what}: on no set of NUMA nodes are so many free"));
        };
        let at_best = if of.fewest == 1 { "1 NUMA node".to_owned() } else { format!("{} NUMA nodes", of.fewest) };
        if !hints.iter().any(|hint| hint.preferred) {
            return Some(format!("{what} would fit {at_best}, but what is free needs {narrowest}"));
        }
        let too_wide = self.policy == Policy::SingleNumaNode && of.fewest > 1;
        too_wide.then(|| format!("{what} need {at_best}, such as {narrowest}"))
    }
}

/// The masks that a resource prefers.
fn wish(of: &ResourceHints) -> String {
    let preferred = of.hints.iter().flatten().filter(|hint| hint.preferred).filter_map(|hint| hint.mask);
    let masks: Vec<String> = preferred.map(|mask| mask.to_string()).collect();
    let masks = if masks.is_empty() { "any".to_owned() } else { masks.join(" or ") };
    format!("{} {} on {masks}", of.requested, of.resource)
}

fn narrower(a: super::NumaMask, b: super::NumaMask) -> super::NumaMask {
    if b.is_narrower_than(a) { b } else { a }
}
