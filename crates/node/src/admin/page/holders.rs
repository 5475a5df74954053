//! The holders of GPUs, with letters and colours that a pod keeps while others come and go.

use std::collections::{BTreeMap, BTreeSet};

use super::View;
use crate::admin::state::{AllocationState, GpuState};
use linkwise_core::state::Availability;
use linkwise_host::picture::{COLOURS, Holder, Mark};

/// The letters and colours of pods: each pod has a number as long as it holds GPUs, the lowest that was free.
#[derive(Clone, Debug, Default)]
pub struct Slots(BTreeMap<PodName, usize>);

pub(super) type PodName = (String, String);

pub(super) fn pod_of(allocation: &AllocationState) -> PodName {
    (allocation.namespace.clone(), allocation.pod.clone())
}

impl Slots {
    /// Gives new pods their numbers and takes back those of pods that have ended.
    pub(super) fn follow(&mut self, allocations: &[AllocationState]) {
        let pods: BTreeSet<PodName> = allocations.iter().map(pod_of).collect();
        self.0.retain(|pod, _| pods.contains(pod));
        for pod in pods {
            let taken: BTreeSet<usize> = self.0.values().copied().collect();
            let free = (0..).find(|number| !taken.contains(number)).unwrap_or_default();
            self.0.entry(pod).or_insert(free);
        }
    }

    /// The mark of a pod; a pod that holds nothing gets the first mark.
    pub(super) fn of(&self, pod: &PodName) -> Slot {
        Slot(self.0.get(pod).copied().unwrap_or_default())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(usize);

impl Slot {
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

/// The GPUs of a view by their UUIDs, each with its holders.
pub(super) struct Gpus<'a> {
    pub slots: &'a Slots,
    pub states: BTreeMap<&'a str, &'a GpuState>,
    /// The pods that hold each GPU.
    pub pods: BTreeMap<&'a str, BTreeSet<PodName>>,
}

impl<'a> Gpus<'a> {
    pub fn of(view: &'a View, slots: &'a Slots) -> Self {
        let mut pods: BTreeMap<&str, BTreeSet<PodName>> = BTreeMap::new();
        for allocation in view.allocations() {
            for gpu in &allocation.gpus {
                pods.entry(gpu.as_str()).or_default().insert(pod_of(allocation));
            }
        }
        let states = view.state.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu)).collect();
        Self { slots, states, pods }
    }

    /// NVML's index of a GPU, and true if it is healthy; `None` if the GPU is absent.
    pub fn index(&self, uuid: &str) -> Option<(u32, bool)> {
        self.states.get(uuid).map(|gpu| (gpu.index, gpu.healthy))
    }

    /// The holders of a GPU, by their letters.
    pub fn holders(&self, uuid: &str) -> Vec<(Slot, &PodName)> {
        let pods = self.pods.get(uuid).into_iter().flatten();
        let mut holders: Vec<_> = pods.map(|pod| (self.slots.of(pod), pod)).collect();
        holders.sort();
        holders
    }

    /// The marks of the picture for each GPU, by its place.
    pub fn marks(&self, view: &View) -> BTreeMap<usize, Mark> {
        let gpus = view.topology.gpus().iter().enumerate();
        gpus.map(|(place, gpu)| (place, self.mark(gpu.uuid.as_str()))).collect()
    }

    fn mark(&self, uuid: &str) -> Mark {
        let state = self.states.get(uuid);
        let holders = self.holders(uuid);
        let (holder, first) = match holders.as_slice() {
            [] => match state.map(|gpu| gpu.availability) {
                None => (Holder::Nobody, "not offered".to_owned()),
                Some(Availability::Held) => (Holder::Several, "held".to_owned()),
                Some(Availability::Mig) => (Holder::Nobody, "MIG, free".to_owned()),
                Some(Availability::Unknown) => (Holder::Nobody, "holder unknown".to_owned()),
                // The page shows the reason below.
                Some(Availability::Free | Availability::Unhealthy) => (Holder::Nobody, "free".to_owned()),
            },
            [(slot, (_, pod))] => (Holder::One(slot.colour()), format!("{} {pod}", slot.letters())),
            several => {
                let letters: Vec<String> = several.iter().map(|(slot, _)| slot.letters()).collect();
                (Holder::Several, format!("{} pods: {}", several.len(), letters.join(" ")))
            }
        };
        let sick = state.filter(|gpu| !gpu.healthy);
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

    fn allocation(pod: &str) -> AllocationState {
        AllocationState {
            namespace: "default".to_owned(),
            pod: pod.to_owned(),
            container: "main".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            door: "plugin".into(),
            gpus: Vec::new(),
            collective: None,
            nvls: None,
            best: None,
            best_at_admission: None,
            why: Vec::new(),
        }
    }

    #[test]
    fn pods_keep_letters_as_others_come_and_go() {
        let mut slots = Slots::default();
        let mut letters = |pods: &[&str]| {
            let allocations: Vec<_> = pods.iter().map(|pod| allocation(pod)).collect();
            slots.follow(&allocations);
            allocations.iter().map(|held| slots.of(&pod_of(held)).letters()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(letters(&["b", "c"]), "A B");
        assert_eq!(letters(&["a", "b", "c"]), "C A B");
        assert_eq!(letters(&["a", "c"]), "C B");
        assert_eq!(letters(&["a", "c", "d"]), "C B A");
    }

    #[test]
    fn letters_go_on_after_z() {
        let all: Vec<String> = [0, 25, 26, 51, 52, 701, 702].map(|number| Slot(number).letters()).into();
        assert_eq!(all, ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]);
    }
}
