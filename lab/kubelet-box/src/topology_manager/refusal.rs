//! The reason why the Topology Manager refused a pod, as text. A kubelet reports only `TopologyAffinityError`.

use std::fmt;

use super::Policy;
use super::hints::ResourceHints;

/// A refused pod or container: the policy, the requests, and the possible masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The pod.
    pub pod: String,
    /// The container, or `None` in scope pod.
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
    /// Returns the obstacles: the resources that cannot be satisfied alone, or else the preferences that conflict.
    pub fn why(&self) -> String {
        let obstacles: Vec<String> = self.resources.iter().filter_map(|hints| self.obstacle(hints)).collect();
        if !obstacles.is_empty() {
            return obstacles.join("; ");
        }
        let preferences: Vec<String> = self.resources.iter().map(preference).collect();
        format!("no set of NUMA nodes suits all: {}", preferences.join(", "))
    }

    /// Returns the reason why one resource alone cannot be satisfied, or `None` if it can.
    fn obstacle(&self, resource: &ResourceHints) -> Option<String> {
        let ResourceHints { requested, resource: name, fewest, .. } = resource;
        let request = format!("{requested} {name}");
        let hints = resource.hints.as_ref()?;
        let Some(narrowest) = hints.iter().filter_map(|hint| hint.mask).reduce(narrower) else {
            return Some(format!("{request}: on no set of NUMA nodes are so many free"));
        };
        let at_best = if *fewest == 1 { "1 NUMA node".to_owned() } else { format!("{fewest} NUMA nodes") };
        if !hints.iter().any(|hint| hint.preferred) {
            return Some(format!("{request} would fit {at_best}, but what is free needs {narrowest}"));
        }
        let too_wide = self.policy == Policy::SingleNumaNode && *fewest > 1;
        too_wide.then(|| format!("{request} need {at_best}, such as {narrowest}"))
    }
}

fn preference(resource: &ResourceHints) -> String {
    let preferred = resource.hints.iter().flatten().filter(|hint| hint.preferred).filter_map(|hint| hint.mask);
    let masks: Vec<String> = preferred.map(|mask| mask.to_string()).collect();
    let masks = if masks.is_empty() { "any".to_owned() } else { masks.join(" or ") };
    format!("{} {} on {masks}", resource.requested, resource.resource)
}

fn narrower(a: super::NumaMask, b: super::NumaMask) -> super::NumaMask {
    if b.is_narrower_than(a) { b } else { a }
}
