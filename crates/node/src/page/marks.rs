//! The pods of the page: letters and colours, which a pod keeps while others come and go, and the marks of GPUs in the
//! picture.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_core::publish::placement::Allocation;
use linkwise_core::publish::view::NodeView;
use linkwise_core::state::Availability;
use linkwise_host::picture::{COLOURS, Holder, Mark};

/// The letters and colours of pods: each pod has a number as long as it holds GPUs, the lowest that was free.
#[derive(Clone, Debug, Default)]
pub struct PodNumbers(BTreeMap<PodName, usize>);

/// A pod's namespace and name.
pub(super) type PodName = (String, String);

fn pod_of(allocation: &Allocation) -> PodName {
    (allocation.namespace.clone(), allocation.pod.clone())
}

impl PodNumbers {
    /// Gives new pods their numbers and takes back those of pods that have ended.
    pub(super) fn follow(&mut self, allocations: &[Allocation]) {
        let pods: BTreeSet<PodName> = allocations.iter().map(pod_of).collect();
        self.0.retain(|pod, _| pods.contains(pod));
        for pod in pods {
            let taken: BTreeSet<usize> = self.0.values().copied().collect();
            let free = (0..).find(|number| !taken.contains(number)).unwrap_or_default();
            self.0.entry(pod).or_insert(free);
        }
    }

    /// The number of a pod; 0 for a pod that holds no GPU.
    fn of(&self, pod: &PodName) -> PodNumber {
        PodNumber(self.0.get(pod).copied().unwrap_or_default())
    }
}

/// A pod's number, which gives the pod its letters and its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PodNumber(usize);

impl PodNumber {
    /// `A` to `Z`, then `AA`, as spreadsheets count columns.
    pub fn letters(self) -> String {
        let mut letters = Vec::new();
        let mut rest = Some(self.0);
        while let Some(number) = rest {
            letters.push(char::from(b'A'.saturating_add(u8::try_from(number % 26).unwrap_or(0))));
            rest = (number / 26).checked_sub(1);
        }
        letters.iter().rev().collect()
    }

    /// A number below [`COLOURS`].
    pub fn colour(self) -> u8 {
        u8::try_from(self.0 % usize::from(COLOURS)).unwrap_or(0)
    }
}

/// The pods of a view, with their numbers and GPUs.
pub(super) struct Holders<'a> {
    numbers: &'a PodNumbers,
    /// The pods that hold each GPU, by its UUID.
    by_gpu: BTreeMap<&'a str, BTreeSet<PodName>>,
}

impl<'a> Holders<'a> {
    pub fn of(view: &'a NodeView, numbers: &'a PodNumbers) -> Self {
        let mut by_gpu: BTreeMap<&str, BTreeSet<PodName>> = BTreeMap::new();
        for held in view.held() {
            for uuid in held.all_gpus() {
                by_gpu.entry(uuid).or_default().insert(pod_of(held));
            }
        }
        Self { numbers, by_gpu }
    }

    /// The number of pods that hold GPUs.
    pub fn pods(&self) -> usize {
        self.numbers.0.len()
    }

    pub fn number(&self, held: &Allocation) -> PodNumber {
        self.numbers.of(&pod_of(held))
    }

    /// The pods that hold a GPU, in the order of their numbers.
    pub fn of_gpu(&self, uuid: &str) -> Vec<(PodNumber, &PodName)> {
        let pods = self.by_gpu.get(uuid).into_iter().flatten();
        let mut pods: Vec<_> = pods.map(|pod| (self.numbers.of(pod), pod)).collect();
        pods.sort();
        pods
    }

    /// The mark of a GPU in the picture.
    pub fn mark(&self, view: &NodeView, uuid: &str) -> Mark {
        let gpu = view.gpu(uuid);
        let (holder, first) = match self.of_gpu(uuid).as_slice() {
            [] => match gpu.map(|gpu| gpu.availability) {
                None | Some(Availability::Withheld) => (Holder::Nobody, "not offered".to_owned()),
                Some(Availability::Held) => (Holder::Several, "held".to_owned()),
                Some(Availability::Mig) => (Holder::Nobody, "MIG, free".to_owned()),
                Some(Availability::Cordoned) => (Holder::Nobody, "cordoned".to_owned()),
                Some(Availability::Unknown) => (Holder::Nobody, "holder unknown".to_owned()),
                // An unhealthy GPU's mark shows the reason instead.
                Some(Availability::Free | Availability::Unhealthy) => (Holder::Nobody, "free".to_owned()),
            },
            [(number, (_, pod))] => (Holder::One(number.colour()), format!("{} {pod}", number.letters())),
            several => {
                let letters: Vec<String> = several.iter().map(|(number, _)| number.letters()).collect();
                (Holder::Several, format!("{} pods: {}", several.len(), letters.join(" ")))
            }
        };
        let sick = gpu.filter(|gpu| !gpu.healthy);
        let reason = sick.map(|gpu| gpu.reasons.first().map_or("unhealthy", |reason| reason.reason.as_str()));
        let is_unheld = holder == Holder::Nobody;
        let mut lines: Vec<String> = if sick.is_some() && is_unheld { Vec::new() } else { vec![first] };
        lines.extend(reason.map(|reason| format!("✗ {reason}")));
        Mark { holder, is_sick: sick.is_some(), lines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_keep_letters_as_others_come_and_go() {
        let mut numbers = PodNumbers::default();
        let mut letters = |pods: &[&str]| {
            let named = |pod: &&str| Allocation { pod: (*pod).to_owned(), ..Allocation::default() };
            let allocations: Vec<_> = pods.iter().map(named).collect();
            numbers.follow(&allocations);
            allocations.iter().map(|held| numbers.of(&pod_of(held)).letters()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(letters(&["b", "c"]), "A B");
        assert_eq!(letters(&["a", "b", "c"]), "C A B");
        assert_eq!(letters(&["a", "c"]), "C B");
        assert_eq!(letters(&["a", "c", "d"]), "C B A");
    }

    #[test]
    fn letters_go_on_after_z() {
        let all: Vec<String> = [0, 25, 26, 51, 52, 701, 702].map(|number| PodNumber(number).letters()).into();
        assert_eq!(all, ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
    }
}
