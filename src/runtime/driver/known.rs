//! What is known of the node across children: who is suspected, what was seen, what was told.
//!
//! Called by `driver`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::away::Working;
use super::dying::Dying;
use super::facts::{self, Again};
use super::outside::{Outside, Slow};
use super::suspects::Suspects;
use crate::hwloc::PciBus;
use crate::nvml::protocol::{Missing, Place};
use crate::state::{HealthPoll, NodeIdentity, Reach};
use crate::topology::{GpuObservation, GpuUuid, HostObservation, NodeObservation, PciAddress, ProbeFailure};

/// What a look at the host has seen, and what it has not.
pub(super) type Host = (HostObservation, Vec<ProbeFailure>);

/// What is known across children.
pub(super) struct Known {
    pub(super) suspects: Suspects,
    /// The latest look through NVML, and how many GPUs NVML counted then.
    pub(super) looked: Option<(u32, Vec<GpuObservation>, Vec<ProbeFailure>)>,
    /// The latest look at the host.
    pub(super) host: Option<Host>,
    /// When to look again because the last look was not complete.
    pub(super) again: Again,
    /// What was told last.
    pub(super) told: Option<NodeObservation>,
    pub(super) hosts: Slow<Host>,
    /// Until when a look through NVML that was not told yet waits for the look at the host.
    pub(super) untold: Option<Instant>,
    pub(super) outsides: Slow<(Outside, PciBus)>,
    pub(super) buses: Slow<Vec<PciAddress>>,
    pub(super) identities: Slow<NodeIdentity>,
    /// Whether it was told, since the node was told last, which boot and which load of the driver this is.
    pub(super) identified: bool,
    pub(super) bus: PciBus,
    /// GPUs that the kernel has listed on the bus since we started.
    pub(super) once_on_bus: BTreeSet<PciAddress>,
    /// Where the library lay when it was last looked for.
    pub(super) library: Option<PathBuf>,
    pub(super) working: watch::Sender<Working>,
    /// Children that were killed and have not ended.
    pub(super) dying: Dying,
}

impl Known {
    /// Nothing; a GPU that is left out is tried again after `first_trial`.
    pub(super) fn new(first_trial: Duration, working: watch::Sender<Working>, dying: Dying) -> Self {
        Self {
            suspects: Suspects::new(first_trial),
            looked: None,
            host: None,
            again: Again::default(),
            told: None,
            hosts: Slow::default(),
            untold: None,
            outsides: Slow::default(),
            buses: Slow::default(),
            identities: Slow::default(),
            identified: true,
            bus: PciBus::default(),
            once_on_bus: BTreeSet::new(),
            library: None,
            working,
            dying,
        }
    }

    /// Whether a child has ever seen the GPUs, however it ended: then there are some, and a driver that is gone is waited for.
    pub(super) fn worked(&self) -> bool {
        *self.working.borrow() != Working::Never
    }

    /// What the look at the host has seen, once it ends; `None` where it takes too long, or broke off. Never, where none runs.
    /// What has taken too long already is as good as any when it comes. Cancel safe.
    pub(super) async fn host(&mut self) -> Option<Host> {
        match self.untold {
            Some(until) => timeout_at(until, self.hosts.ended()).await.ok().flatten(),
            None => self.hosts.ended().await,
        }
    }

    /// No child works any more.
    pub(super) fn away(&self, why: String) {
        // One that never worked is not missed.
        self.working.send_if_modified(|working| {
            let worked = *working == Working::Yes;
            if worked {
                *working = Working::No(why);
            }
            worked
        });
    }

    /// Takes a look through NVML. GPUs that NVML counts, and that were not asked or did not say who they are, stay as they
    /// were seen, and so do the facts of those that said nothing else because a call failed: neither the graph nor the ids change
    /// because one GPU is in trouble.
    pub(super) fn look(&mut self, count: Option<u32>, mut gpus: Vec<GpuObservation>, failures: Vec<ProbeFailure>) {
        facts::keep(&mut gpus, self.looked.as_ref().map_or(&[], |(_, before, _)| before), &failures);
        let Some(count) = count.or_else(|| self.looked.as_ref().map(|(count, ..)| *count)) else {
            self.looked = Some((0, gpus, failures));
            return;
        };
        for old in self.looked.iter().filter(|(of, ..)| *of == count).flat_map(|(_, gpus, _)| gpus) {
            if gpus.iter().any(|gpu| gpu.index == old.index || gpu.uuid == old.uuid) {
                continue;
            }
            for gpu in &mut gpus {
                if let Some(level) = old.common_ancestors.get(&gpu.index) {
                    gpu.common_ancestors.insert(old.index, *level);
                }
            }
            gpus.push(old.clone());
        }
        gpus.sort_by_key(|gpu| gpu.index);
        self.looked = Some((count, gpus, failures));
    }

    /// Takes a look at the host. One that failed leaves the host as it was seen before.
    pub(super) fn take_host(&mut self, (host, failures): Host) {
        let before = self.host.take().filter(|_| !failures.is_empty());
        self.host = Some((before.map_or(host, |(before, _)| before), failures));
    }

    /// What a round says of the GPUs that NVML counted and that it did not ask, but for those that are left out on purpose.
    pub(super) fn unpolled(
        &self,
        polled: &BTreeMap<GpuUuid, HealthPoll>,
        missing: &[Missing],
        skipped: &[Place],
    ) -> BTreeMap<GpuUuid, HealthPoll> {
        let unlisted = || Reach::Failed {
            call: "nvmlDeviceGetHandleByIndex_v2".to_owned(),
            error: "NVML does not list it".to_owned(),
        };
        let count = self.looked.as_ref().map_or(0, |(count, ..)| *count);
        let place = |gpu: &GpuObservation| Place { index: gpu.index, of: count };
        let reach = |place: Place| {
            let of_it = missing.iter().find(|missing| missing.place.is_none_or(|of| of == place));
            of_it.map_or_else(unlisted, |missing| missing.reach.clone())
        };
        let unpolled = self.gpus().filter(|gpu| !polled.contains_key(&gpu.uuid) && !skipped.contains(&place(gpu)));
        unpolled
            .map(|gpu| (gpu.uuid.clone(), HealthPoll { reach: reach(place(gpu)), ..HealthPoll::default() }))
            .collect()
    }

    /// A look at the node, where it is not as it was told last.
    pub(super) fn news(&mut self, observed: NodeObservation) -> Option<NodeObservation> {
        let news = self.told.as_ref() != Some(&observed);
        news.then(|| self.told.insert(observed).clone())
    }

    fn gpus(&self) -> impl Iterator<Item = &GpuObservation> {
        self.looked.iter().flat_map(|(_, gpus, _)| gpus)
    }

    /// The GPU at a place, as far as it was ever seen.
    pub(super) fn name(&self, place: Place) -> Option<GpuUuid> {
        let of = self.looked.as_ref().is_some_and(|(count, ..)| *count == place.of);
        self.gpus().find(|gpu| of && gpu.index == place.index).map(|gpu| gpu.uuid.clone())
    }

    pub(super) fn pci(&self, gpu: &GpuUuid) -> Option<PciAddress> {
        self.gpus().find(|seen| seen.uuid == *gpu).map(|gpu| gpu.pci)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::TopologyLevel;

    fn known() -> Known {
        Known::new(Duration::ZERO, watch::Sender::new(Working::Never), Dying::of_nobody())
    }

    fn uuid(number: u32) -> GpuUuid {
        format!("GPU-{number}").parse().unwrap()
    }

    /// A GPU that says which others it shares a host bridge with.
    fn gpu(index: u32, number: u32, others: &[u32]) -> GpuObservation {
        let text = format!("{{index: {index}, uuid: GPU-{number}, pci: '0000:0{number}:00.0'}}");
        let gpu: GpuObservation = serde_saphyr::from_str(&text).unwrap();
        let levels = others.iter().map(|other| (*other, TopologyLevel::HostBridge));
        GpuObservation { common_ancestors: levels.collect(), ..gpu }
    }

    fn seen(known: &Known) -> Vec<GpuObservation> {
        known.gpus().cloned().collect()
    }

    #[test]
    fn a_gpu_that_does_not_say_who_it_is_stays_as_it_was_seen() {
        let mut known = known();
        let all = vec![gpu(0, 0, &[1, 2]), gpu(1, 1, &[0, 2]), gpu(2, 2, &[0, 1])];
        known.look(Some(3), all.clone(), vec![]);
        // The others cannot say what they share with one that is not asked, and it is not forgotten.
        known.look(Some(3), vec![gpu(0, 0, &[2]), gpu(2, 2, &[0])], vec![]);
        assert_eq!(seen(&known), all);
        // Nor where nobody can be counted.
        known.look(None, vec![], vec![]);
        assert_eq!(seen(&known), all);
        // Another GPU in its place, and itself in another place.
        known.look(Some(3), vec![gpu(0, 0, &[]), gpu(1, 7, &[]), gpu(2, 2, &[])], vec![]);
        assert_eq!(seen(&known).iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(), [0, 7, 2].map(uuid));
        known.look(Some(3), vec![gpu(0, 2, &[]), gpu(1, 7, &[])], vec![]);
        assert_eq!(seen(&known).iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(), [2, 7].map(uuid));
    }

    #[test]
    fn an_index_names_a_gpu_of_its_number_only() {
        let mut known = known();
        known.look(Some(2), vec![gpu(0, 0, &[1]), gpu(1, 1, &[0])], vec![]);
        assert_eq!(known.name(Place { index: 1, of: 2 }), Some(uuid(1)));
        assert_eq!(known.pci(&uuid(1)), "0000:01:00.0".parse().ok());
        assert_eq!(known.name(Place { index: 1, of: 3 }), None);
        // Of another number of GPUs, nothing is known of who does not say who it is.
        known.look(Some(3), vec![gpu(0, 0, &[])], vec![]);
        assert_eq!((seen(&known), known.pci(&uuid(1))), (vec![gpu(0, 0, &[])], None));
        assert_eq!(
            (known.name(Place { index: 0, of: 3 }), known.name(Place { index: 1, of: 3 })),
            (Some(uuid(0)), None)
        );
    }

    #[test]
    fn what_was_told_last_is_not_told_again() {
        let mut known = known();
        let node = |gpus| NodeObservation { gpus, ..NodeObservation::default() };
        let (one, two) = (node(vec![gpu(0, 0, &[])]), node(vec![gpu(0, 0, &[]), gpu(1, 1, &[])]));
        assert_eq!(known.news(one.clone()), Some(one.clone()));
        assert_eq!(known.news(one.clone()), None);
        assert_eq!(known.news(two.clone()), Some(two.clone()));
        assert_eq!(known.news(one.clone()), Some(one));
    }

    #[test]
    fn a_child_that_never_worked_is_not_missed() {
        let known = known();
        known.away("it does not start".to_owned());
        assert!(!known.worked() && *known.working.borrow() == Working::Never);
        known.working.send_replace(Working::Yes);
        known.away("it died".to_owned());
        known.away("nor does the next one start".to_owned());
        assert!(known.worked() && *known.working.borrow() == Working::No("it died".to_owned()));
    }
}
