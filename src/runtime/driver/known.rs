//! What is known of the node across children: who is suspected, what was seen, what was told.
//!
//! Called by `driver`.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;

use super::away::Working;
use super::facts::{self, Again};
use super::outside::{Outside, Slow};
use super::suspects::Suspects;
use crate::hwloc::PciBus;
use crate::inventory::{HealthPoll, Reach};
use crate::nvml::protocol::{Missing, Place};
use crate::topology::{GpuObservation, GpuUuid, HostObservation, NodeObservation, PciAddress, ProbeFailure};

/// What is known across children.
pub(super) struct Known {
    pub(super) suspects: Suspects,
    /// The latest look through NVML, and how many GPUs NVML counted then.
    pub(super) looked: Option<(u32, Vec<GpuObservation>, Vec<ProbeFailure>)>,
    /// The latest look at the host.
    pub(super) host: Option<(HostObservation, Vec<ProbeFailure>)>,
    /// When to look again because the last look was not complete.
    pub(super) again: Again,
    /// What was told last.
    pub(super) told: Option<NodeObservation>,
    pub(super) hosts: Slow<(HostObservation, Vec<ProbeFailure>)>,
    pub(super) outsides: Slow<(Outside, PciBus)>,
    pub(super) buses: Slow<Vec<PciAddress>>,
    pub(super) bus: PciBus,
    /// GPUs that the kernel has listed on the bus since we started.
    pub(super) once_on_bus: BTreeSet<PciAddress>,
    pub(super) working: watch::Sender<Working>,
}

impl Known {
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
    pub(super) fn look_at_host(&mut self, (host, failures): (HostObservation, Vec<ProbeFailure>)) {
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
