//! What a look at the GPUs did not get because calls failed: taken from the look before, and asked for again later.
//!
//! Called by `known`. A failure names its GPU and its call, and costs the facts of that call; a call that is not offered is no
//! failure, and what it had said before is over. Pure: rounds are counted, no clock is read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::topology::{GpuObservation, MigObservation, NvLinkObservation, NvLinkRemote, ProbeFailure};

/// The most rounds from one look that was not complete to the next: about five minutes.
const LONGEST: u32 = 32;

/// Calls without which a MIG device is left out of a look.
const MIG_DEVICES: [&str; 6] = [
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes_v2",
];
/// Calls that tell the profile of a MIG device.
const MIG_PROFILES: [&str; 3] =
    ["nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo", "nvmlDeviceGetGpuInstanceProfileInfo"];
/// The call that tells N of /dev/nvidiaN, by which the kernel lists the capabilities of MIG devices.
const MINOR: &str = "nvmlDeviceGetMinorNumber";

/// When to look again because the last look was not complete.
#[derive(Debug, Default)]
pub(super) struct Again {
    failures: Vec<ProbeFailure>,
    pause: u32,
    /// Rounds until then; 0 where the last look was complete.
    left: u32,
}

impl Again {
    /// A look has been, with these failures: again after the next round, then after twice as many as long as they stay.
    pub(super) fn looked(&mut self, failures: Vec<ProbeFailure>) {
        self.pause = match () {
            () if failures.is_empty() => 0,
            () if failures == self.failures => (self.pause * 2).min(LONGEST),
            () => 1,
        };
        (self.failures, self.left) = (failures, self.pause);
    }

    /// A round has been; whether to look again.
    pub(super) fn is_due(&mut self) -> bool {
        let due = self.left == 1;
        self.left = self.left.saturating_sub(1);
        due
    }
}

/// Puts what was seen `before` in the place of what calls failed to say now.
pub(super) fn keep(gpus: &mut [GpuObservation], before: &[GpuObservation], failures: &[ProbeFailure]) {
    for gpu in gpus.iter_mut() {
        let Some(old) = before.iter().find(|old| (&old.uuid, old.pci) == (&gpu.uuid, gpu.pci)) else { continue };
        let subject = gpu.pci.to_string();
        let failed = |calls: &[&str]| {
            failures.iter().any(|failure| failure.subject == subject && calls.contains(&failure.call.as_str()))
        };
        keep_one(&mut gpu.model, &old.model, failed(&["nvmlDeviceGetName"]));
        keep_one(&mut gpu.minor, &old.minor, failed(&[MINOR]));
        let capability = failed(&["nvmlDeviceGetCudaComputeCapability"]);
        keep_one(&mut gpu.compute_capability, &old.compute_capability, capability);
        let memory = failed(&["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"]);
        keep_one(&mut gpu.memory_mib, &old.memory_mib, memory);
        keep_one(&mut gpu.numa, &old.numa, failed(&["nvmlDeviceGetMemoryAffinity"]));
        let pcie = failed(&["nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"]);
        keep_one(&mut gpu.pcie, &old.pcie, pcie);
        keep_one(&mut gpu.c2c, &old.c2c, failed(&["nvmlDeviceGetC2cModeInfoV"]));
        keep_one(&mut gpu.display, &old.display, failed(&["nvmlDeviceGetDisplayActive"]));
        keep_one(&mut gpu.fabric, &old.fabric, failed(&["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"]));
        if let Some(old) = &old.nvlinks {
            let remote = failed(&["nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2"]);
            keep_links(&mut gpu.nvlinks, old, failed(&["nvmlDeviceGetNvLinkState"]), remote);
        }
        keep_one(&mut gpu.mig, &old.mig, failed(&["nvmlDeviceGetMigMode"]));
        if let (Some(new), Some(old)) = (&mut gpu.mig, &old.mig) {
            keep_mig(new, old, failed(&MIG_DEVICES), failed(&MIG_PROFILES), failed(&[MINOR]));
        }
    }
    keep_ancestors(gpus, before, failures);
}

fn keep_one<T: Clone>(new: &mut Option<T>, old: &Option<T>, failed: bool) {
    if failed && new.is_none() {
        new.clone_from(old);
    }
}

/// Links whose state, or whose other end, was not said.
fn keep_links(new: &mut Option<Vec<NvLinkObservation>>, old: &[NvLinkObservation], state: bool, remote: bool) {
    if !state && !remote {
        return;
    }
    let each = |groups: &[NvLinkObservation]| -> BTreeMap<u32, (NvLinkRemote, bool)> {
        let links = |group: &NvLinkObservation| {
            let end = (group.remote, group.active);
            group.links.iter().map(|link| (*link, end)).collect::<Vec<_>>()
        };
        groups.iter().flat_map(links).collect()
    };
    let mut links = each(new.as_deref().unwrap_or_default());
    for (link, (end, active)) in each(old) {
        match links.entry(link) {
            Entry::Vacant(place) if state => drop(place.insert((end, active))),
            Entry::Occupied(mut known) if remote => {
                if let (unsaid @ (NvLinkRemote::Unknown | NvLinkRemote::Switch(None)), _) = known.get_mut() {
                    *unsaid = end;
                }
            }
            _ => {}
        }
    }
    // In the order of their first links, as a look groups them.
    let mut groups: Vec<NvLinkObservation> = Vec::new();
    for (link, (remote, active)) in links {
        match groups.iter_mut().find(|group| (group.remote, group.active) == (remote, active)) {
            Some(group) => group.links.push(link),
            None => groups.push(NvLinkObservation { links: vec![link], remote, active }),
        }
    }
    *new = Some(groups);
}

/// MIG devices that were left out, or whose profile or capabilities were not said.
fn keep_mig(new: &mut MigObservation, old: &MigObservation, devices: bool, profiles: bool, minor: bool) {
    if !new.enabled {
        return;
    }
    for old in &old.devices {
        match new.devices.iter_mut().find(|new| new.index == old.index || new.uuid == old.uuid) {
            Some(new) if new.uuid == old.uuid => {
                keep_one(&mut new.extension, &old.extension, profiles);
                keep_one(&mut new.capabilities, &old.capabilities, minor);
            }
            Some(_) => {}
            None if devices => new.devices.push(old.clone()),
            None => {}
        }
    }
    new.devices.sort_by_key(|device| device.index);
}

/// Levels between two GPUs; the failure is the one's that was asked, the fact both's.
fn keep_ancestors(gpus: &mut [GpuObservation], before: &[GpuObservation], failures: &[ProbeFailure]) {
    const CALL: &str = "nvmlDeviceGetTopologyCommonAncestor";
    let now = |gpus: &[GpuObservation], of: u32| {
        let uuid = &before.iter().find(|old| old.index == of)?.uuid;
        gpus.iter().position(|gpu| gpu.uuid == *uuid)
    };
    for old in before {
        let subject = old.pci.to_string();
        if !failures.iter().any(|failure| failure.subject == subject && failure.call == CALL) {
            continue;
        }
        for (other, level) in &old.common_ancestors {
            let (Some(one), Some(two)) = (now(gpus, old.index), now(gpus, *other)) else { continue };
            for (one, two) in [(one, two), (two, one)] {
                let Some(index) = gpus.get(two).map(|gpu| gpu.index) else { continue };
                if let Some(gpu) = gpus.get_mut(one) {
                    gpu.common_ancestors.entry(index).or_insert(*level);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> GpuObservation {
        let text = format!(
            "{{index: {index}, uuid: GPU-{index}, pci: '0000:0{index}:00.0', model: H100, minor: {index}, \
             compute_capability: '9.0', memory_mib: 81559, numa: 1, pcie: {{mts: 32000, width: 16}}, c2c: false, \
             display: false, nvlinks: [{{links: [0, 2], remote: {{switch: '0000:09:00.0'}}}}, {{links: [1], remote: {{gpu: '0000:08:00.0'}}}}], \
             mig: {{enabled: true, devices: [{{index: 0, uuid: MIG-0, gpu_instance: 1, compute_instance: 0, \
             gpu_slices: 1, compute_slices: 1, memory_mib: 1, extension: media, capabilities: {{gpu_instance: 1, compute_instance: 2}}}}]}}, \
             fabric: {{cluster: c, clique: 1}}, common_ancestors: {{{}: single}}}}",
            1 - index
        );
        serde_saphyr::from_str(&text).unwrap()
    }

    fn failure(call: &str) -> ProbeFailure {
        ProbeFailure { subject: "0000:00:00.0".to_owned(), call: call.to_owned(), error: "e".to_owned() }
    }

    fn mig(gpu: &mut GpuObservation) -> &mut MigObservation {
        gpu.mig.as_mut().unwrap()
    }

    #[test]
    fn what_a_failed_call_did_not_say_is_as_it_was_and_nothing_else_is() {
        type Lose = fn(&mut GpuObservation);
        let lost: [(&str, Lose); 22] = [
            ("nvmlDeviceGetName", |gpu| gpu.model = None),
            (MINOR, |gpu| {
                gpu.minor = None;
                mig(gpu).devices[0].capabilities = None;
            }),
            ("nvmlDeviceGetCudaComputeCapability", |gpu| gpu.compute_capability = None),
            ("nvmlDeviceGetMemoryInfo_v2", |gpu| gpu.memory_mib = None),
            ("nvmlDeviceGetMemoryAffinity", |gpu| gpu.numa = None),
            ("nvmlDeviceGetMaxPcieLinkGeneration", |gpu| gpu.pcie = None),
            ("nvmlDeviceGetMaxPcieLinkWidth", |gpu| gpu.pcie = None),
            ("nvmlDeviceGetC2cModeInfoV", |gpu| gpu.c2c = None),
            ("nvmlDeviceGetDisplayActive", |gpu| gpu.display = None),
            ("nvmlDeviceGetGpuFabricInfoV", |gpu| gpu.fabric = None),
            ("nvmlDeviceGetNvLinkState", |gpu| gpu.nvlinks = None),
            ("nvmlDeviceGetNvLinkState", |gpu| gpu.nvlinks.as_mut().unwrap()[0].links.truncate(1)),
            ("nvmlDeviceGetNvLinkRemoteDeviceType", |gpu| {
                gpu.nvlinks.as_mut().unwrap()[0].remote = NvLinkRemote::Unknown;
            }),
            ("nvmlDeviceGetNvLinkRemotePciInfo_v2", |gpu| {
                gpu.nvlinks.as_mut().unwrap()[0].remote = NvLinkRemote::Switch(None);
            }),
            ("nvmlDeviceGetMigMode", |gpu| gpu.mig = None),
            ("nvmlDeviceGetMaxMigDeviceCount", |gpu| mig(gpu).devices.clear()),
            ("nvmlDeviceGetMigDeviceHandleByIndex", |gpu| mig(gpu).devices.clear()),
            ("nvmlDeviceGetUUID", |gpu| mig(gpu).devices.clear()),
            ("nvmlDeviceGetAttributes_v2", |gpu| mig(gpu).devices.clear()),
            ("nvmlGpuInstanceGetInfo", |gpu| mig(gpu).devices[0].extension = None),
            ("nvmlDeviceGetGpuInstanceProfileInfo", |gpu| mig(gpu).devices[0].extension = None),
            ("nvmlDeviceGetTopologyCommonAncestor", |gpu| gpu.common_ancestors.clear()),
        ];
        let before = [gpu(0), gpu(1)];
        for (call, lose) in lost {
            let mut less = gpu(0);
            lose(&mut less);
            assert_ne!(less, before[0], "{call}");
            for (failed, kept) in [(call, true), ("nvmlDeviceGetPowerUsage", false)] {
                let mut now = [less.clone(), gpu(1)];
                if call == "nvmlDeviceGetTopologyCommonAncestor" {
                    now[1].common_ancestors.clear();
                }
                let wanted = if kept { before.clone() } else { now.clone() };
                keep(&mut now, &before, &[failure(failed)]);
                assert_eq!(now, wanted, "{call}");
            }
            // Another GPU in its place has nothing of it.
            let mut other = [GpuObservation { uuid: "GPU-7".parse().unwrap(), ..less.clone() }];
            keep(&mut other, &before, &[failure(call)]);
            assert_eq!(GpuObservation { uuid: before[0].uuid.clone(), ..other[0].clone() }, less, "{call}");
        }
    }

    #[test]
    fn what_was_said_counts_beside_what_failed() {
        let before = [gpu(0)];
        let mut now = [gpu(0)];
        // Link 1 went down, link 2 did not say how it is; a MIG device was made anew in the place of another.
        now[0].nvlinks = serde_saphyr::from_str(
            "[{links: [0], remote: {switch: '0000:09:00.0'}}, {links: [1], remote: {gpu: '0000:08:00.0'}, active: false}]",
        )
        .unwrap();
        mig(&mut now[0]).devices[0].uuid = "MIG-9".parse().unwrap();
        keep(&mut now, &before, &[failure("nvmlDeviceGetNvLinkState"), failure("nvmlDeviceGetAttributes_v2")]);
        let links = now[0].nvlinks.as_ref().unwrap();
        let seen: Vec<_> = links.iter().map(|group| (group.links.as_slice(), group.active)).collect();
        assert_eq!(seen, [(&[0, 2][..], true), (&[1], false)]);
        assert_eq!(mig(&mut now[0]).devices.len(), 1);
        // MIG that is off has no devices, whatever failed.
        let mut off = [gpu(0)];
        off[0].mig = Some(MigObservation::default());
        keep(&mut off, &before, &[failure("nvmlDeviceGetUUID")]);
        assert_eq!(off[0].mig, Some(MigObservation::default()));
    }

    #[test]
    fn an_incomplete_look_is_followed_by_others_ever_more_rarely() {
        let mut again = Again::default();
        assert!(!again.is_due());
        let mut rounds = Vec::new();
        for _ in 0..8 {
            again.looked(vec![failure("f")]);
            let mut waited = 1;
            while !again.is_due() {
                waited += 1;
            }
            rounds.push(waited);
        }
        assert_eq!(rounds, [1, 2, 4, 8, 16, 32, 32, 32]);
        again.looked(vec![failure("g")]);
        assert!(again.is_due(), "something else is tried soon");
        again.looked(Vec::new());
        assert!((0..100).all(|_| !again.is_due()));
    }
}
