//! The names of GPUs and MIG devices in DRA, which are those of NVIDIA's DRA driver, and the hardware behind each name.
//!
//! A GPU is `gpu-<minor>`, a MIG device `gpu-<minor>-mig-<profile>-<profile id>-<first memory slice>`. If a part of
//! such a name is unknown, another device has the name, or a MIG device has only a part of its GPU instance, linkwise
//! gives a stable name of its own (a DNS label too): `gpu-pci-<address>` for a GPU,
//! `...-mig-<profile>-gi<GPU instance>-ci<compute instance>` for a MIG device.
//!
//! `publish::dra` publishes the names; the ledger and the DRA plugin find the hardware behind them.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::mig::{MigDevice, MigProfile, MigSlot};
use super::node::{Gpu, NodeTopology};

/// A GPU by its place, or a MIG device on it by its place in [`NodeTopology::mig_devices`].
pub type Hardware = (usize, Option<usize>);

/// The name of a GPU, or with `mig` (a place in [`NodeTopology::mig_devices`]) of a MIG device on it. `None` for places
/// that the graph does not have, and for the second of two devices that nothing distinguishes.
pub fn device_name(topology: &NodeTopology, gpu: usize, mig: Option<usize>) -> Option<String> {
    topology.names.iter().find(|(_, hardware)| **hardware == (gpu, mig)).map(|(name, _)| name.clone())
}

/// The names of all GPUs and MIG devices, by the places that [`device_name`] takes.
pub fn device_names(topology: &NodeTopology) -> BTreeMap<Hardware, String> {
    topology.names.iter().map(|(name, hardware)| (*hardware, name.clone())).collect()
}

/// The GPU or MIG device behind a name.
pub fn hardware_of(topology: &NodeTopology, name: &str) -> Option<Hardware> {
    topology.names.get(name).copied()
}

/// Returns true if a name is that of a MIG device.
pub fn is_mig(name: &str) -> bool {
    name.contains("-mig-")
}

/// Returns true if a claim's device is a set of GPUs, such as `gpus-2-0-3`. Only builds before 0.1.0 published sets;
/// claims that have one keep it until their pods end.
pub fn is_set(name: &str) -> bool {
    name.starts_with("gpus-")
}

/// The hardware behind each name. The second of two devices that nothing distinguishes has no name.
pub(crate) fn names(gpus: &[Gpu], mig_devices: &[MigDevice]) -> BTreeMap<String, Hardware> {
    let mut names = BTreeMap::new();
    let mut gpu_names: Vec<Option<String>> = Vec::new();
    for (place, gpu) in gpus.iter().enumerate() {
        let by_minor = gpu.facts.minor.map(|minor| format!("gpu-{minor}"));
        let by_address = format!("gpu-pci-{}", gpu.pci.to_string().replace([':', '.'], "-"));
        gpu_names.push(take(&mut names, [by_minor, Some(by_address)], (place, None)));
    }
    for (place, mig) in mig_devices.iter().enumerate() {
        let Some(Some(gpu)) = gpu_names.get(mig.parent) else { continue };
        // NVIDIA names a GPU instance, so a device with only a part of it has no such name.
        let slot = mig.slot().filter(|_| mig.profile.compute_slices == mig.profile.gpu_slices);
        let by_placement = slot.map(|slot| slot_name(gpu, mig.profile, slot));
        let MigDevice { gpu_instance, compute_instance, .. } = mig;
        let by_instance = format!("{gpu}-mig-{}-gi{gpu_instance}-ci{compute_instance}", label(mig.profile));
        take(&mut names, [by_placement, Some(by_instance)], (mig.parent, Some(place)));
    }
    names
}

/// Gives the hardware the first candidate that is free; `None` if none is.
fn take(names: &mut BTreeMap<String, Hardware>, candidates: [Option<String>; 2], hardware: Hardware) -> Option<String> {
    let name = candidates.into_iter().flatten().find(|name| !names.contains_key(name))?;
    names.insert(name.clone(), hardware);
    Some(name)
}

/// The name of the MIG device that has a whole GPU instance, on the GPU called `gpu`.
pub(super) fn slot_name(gpu: &str, profile: MigProfile, slot: MigSlot) -> String {
    format!("{gpu}-mig-{}-{}-{}", label(profile), slot.profile_id, slot.placement.start)
}

/// Makes a profile fit for a name: no dots, lower case, '-' for characters that are neither letter nor digit.
fn label(profile: MigProfile) -> String {
    let profile = profile.to_string();
    let kept = profile.chars().filter(|c| *c != '.').map(|c| c.to_ascii_lowercase());
    kept.map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{GpuObservation, NodeObservation};

    fn node(gpus: &str) -> NodeTopology {
        let gpus: Vec<GpuObservation> = serde_json::from_str(gpus).unwrap();
        NodeTopology::assemble(&NodeObservation { gpus, ..NodeObservation::default() }).0
    }

    fn all(topology: &NodeTopology) -> Vec<String> {
        let mig = topology.mig_devices().iter().enumerate().map(|(at, mig)| (mig.parent, Some(at)));
        let hardware = (0..topology.gpus().len()).map(|place| (place, None)).chain(mig);
        hardware
            .map(|(gpu, mig)| {
                let name = device_name(topology, gpu, mig).unwrap();
                assert_eq!(hardware_of(topology, &name), Some((gpu, mig)), "{name}");
                name
            })
            .collect()
    }

    #[test]
    fn names_are_nvidias_where_facts_are_known() {
        let mig = |index: u32, name: &str, more: &str| {
            let (slices, extension) = name.split_once(' ').unwrap();
            let (compute, gpu) = slices.split_once('/').unwrap();
            format!(
                "{{\"index\": {index}, \"uuid\": \"MIG-{index}\", \"gpu_instance\": {gi}, \"compute_instance\": {ci}, \
                 \"gpu_slices\": {gpu}, \"compute_slices\": {compute}, \"memory_mib\": 9728, \
                 \"extension\": \"{extension}\"{more}}}",
                gi = index / 2 + 1,
                ci = index % 2,
            )
        };
        let devices = [
            mig(0, "1/1 none", ", \"profile_id\": 19, \"placement\": {\"start\": 4, \"size\": 1}"),
            mig(2, "1/1 media", ", \"profile_id\": 20, \"placement\": {\"start\": 0, \"size\": 1}"),
            mig(4, "2/2 none", ""),
            mig(6, "1/2 none", ", \"profile_id\": 14, \"placement\": {\"start\": 2, \"size\": 2}"),
            mig(7, "1/2 none", ", \"profile_id\": 14, \"placement\": {\"start\": 2, \"size\": 2}"),
        ];
        let topology = node(&format!(
            "[{{\"index\": 0, \"uuid\": \"GPU-0\", \"pci\": \"0000:3b:00.0\", \"minor\": 7, \"memory_mib\": 81920, \
             \"mig\": {{\"enabled\": true, \"devices\": [{}]}}}}]",
            devices.join(", ")
        ));
        let expected = "gpu-7 gpu-7-mig-1g10gb-19-4 gpu-7-mig-1g10gb-me-20-0 gpu-7-mig-2g10gb-gi3-ci0 \
                        gpu-7-mig-1c2g10gb-gi4-ci0 gpu-7-mig-1c2g10gb-gi4-ci1";
        assert_eq!(all(&topology).join(" "), expected);
        assert_eq!(hardware_of(&topology, "gpu-0"), None);
    }

    #[test]
    fn gpu_without_own_minor_is_named_by_address() {
        let topology = node(
            "[{\"index\": 0, \"uuid\": \"GPU-0\", \"pci\": \"0000:3b:00.0\", \"minor\": 1}, \
              {\"index\": 1, \"uuid\": \"GPU-1\", \"pci\": \"0000:5e:00.0\", \"minor\": 1}, \
              {\"index\": 2, \"uuid\": \"GPU-2\", \"pci\": \"10000:86:1f.7\"}, \
              {\"index\": 3, \"uuid\": \"GPU-3\", \"pci\": \"10000:86:1f.7\"}]",
        );
        let names: Vec<_> = (0..4).map(|place| device_name(&topology, place, None)).collect();
        let named = ["gpu-1", "gpu-pci-0000-5e-00-0", "gpu-pci-10000-86-1f-7"].map(|name| Some(name.to_owned()));
        assert_eq!(names, [named.as_slice(), &[None]].concat());
    }
}
