//! MIG: a GPU divided into devices of its own, as NVML describes them, the names of profiles, and the MIG devices that
//! a GPU in MIG mode could have ([`possible_mig`]).
//!
//! A possible MIG device has the name of a device with the whole GPU instance (`device_names`), so the name stays when
//! the instance is made or destroyed.

use crate::prelude::*;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use core::cmp::Reverse;
use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

use super::address::MigUuid;
use super::device_names::{device_name, slot_name};
use super::node::NodeTopology;
use super::observation::memory;
use crate::quote::ParseError;

/// The MIG facts of one GPU. A GPU or driver without MIG has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigObservation {
    /// The current mode (`nvmlDeviceGetMigMode`). While it is on, the GPU itself runs nothing.
    pub enabled: bool,
    /// The MIG devices, by index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<MigDeviceObservation>,
    /// The profiles of GPU instances that can be made, with their places; empty while MIG mode is off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<MigProfileObservation>,
}

/// A profile of GPU instances that a GPU has (`nvmlDeviceGetGpuInstanceProfileInfo`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigProfileObservation {
    /// The driver's id of the profile, such as 19.
    pub id: u32,
    /// NVML's number of the profile, `NVML_GPU_INSTANCE_PROFILE_*`.
    pub number: u32,
    /// Compute slices.
    pub gpu_slices: u32,
    /// Memory in MiB.
    #[serde(deserialize_with = "memory")]
    pub memory_mib: u64,
    /// The most instances of this profile that the GPU can have at once.
    pub instances: u32,
    /// The engines of an instance.
    pub engines: MigEngines,
    /// The places where an instance may be (`nvmlDeviceGetGpuInstancePossiblePlacements_v2`), taken ones included.
    pub placements: Vec<MigPlacement>,
}

impl MigProfileObservation {
    /// The profile of a MIG device that has a whole instance, on a GPU with this memory in MiB.
    pub fn profile(&self, gpu_memory_mib: Option<u64>) -> MigProfile {
        let (gpu_slices, gb) = (self.gpu_slices, name_gb(self.memory_mib, gpu_memory_mib));
        MigProfile { compute_slices: gpu_slices, gpu_slices, gb, extension: MigExtension::of_profile(self.number) }
    }
}

/// A GPU instance that exists or could exist: a profile at a place. No two instances of a GPU have the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigSlot {
    /// The driver's id of the profile.
    pub profile_id: u32,
    /// The place.
    pub placement: MigPlacement,
}

/// One MIG device: a compute instance of a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigDeviceObservation {
    /// The index on its GPU (`nvmlDeviceGetMigDeviceHandleByIndex`); there may be gaps.
    pub index: u32,
    /// NVML's UUID, `MIG-...`.
    pub uuid: MigUuid,
    /// The GPU instance's id.
    pub gpu_instance: u32,
    /// The compute instance's id within it.
    pub compute_instance: u32,
    /// Compute slices of the GPU instance: the number before `g` in a profile's name (`nvmlDeviceGetAttributes_v2`).
    pub gpu_slices: u32,
    /// Compute slices of the compute instance: the number before `c` in a profile's name.
    pub compute_slices: u32,
    /// The GPU instance's memory in MiB.
    #[serde(deserialize_with = "memory")]
    pub memory_mib: u64,
    /// The driver's id of the GPU instance's profile, such as 19 (`nvmlGpuInstanceGetInfo`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_id: Option<u32>,
    /// The memory slices of the GPU that the GPU instance has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<MigPlacement>,
    /// The extension of the GPU instance's profile; `None` where NVML does not report the profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extension: Option<MigExtension>,
    /// Its multiprocessors and engines; `None` in node files written before these were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<MigEngines>,
    /// The minors of its device nodes under /dev/nvidia-caps; `None` if the kernel does not list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<MigCapabilities>,
}

/// The place of a GPU instance on its GPU (`nvmlGpuInstancePlacement_t`), in memory slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigPlacement {
    /// Its first slice.
    pub start: u32,
    /// The number of its slices.
    pub size: u32,
}

impl MigPlacement {
    /// Returns true if both have a memory slice in common.
    pub fn overlaps(self, other: Self) -> bool {
        let ends = |placement: Self| placement.start.saturating_add(placement.size);
        self.start < ends(other) && other.start < ends(self)
    }

    /// The memory slices. No GPU has more than eight; a file from outside may have any number.
    pub(crate) fn slices(self) -> impl Iterator<Item = u32> {
        (self.start..self.start.saturating_add(self.size)).take(8)
    }
}

/// The engines of a MIG device (`nvmlDeviceGetAttributes_v2`, `nvmlDeviceAttributes_t`). The compute instances of a GPU
/// instance share its engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigEngines {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy: u32,
    /// Video decoders.
    pub decoder: u32,
    /// Video encoders.
    pub encoder: u32,
    /// JPEG decoders.
    pub jpeg: u32,
    /// Optical flow accelerators.
    pub ofa: u32,
}

/// The extension of a GPU instance's profile, beyond slices and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigExtension {
    /// No extension.
    None,
    /// Media engines (JPEG, OFA, decoders): `+me`.
    Media,
    /// All media engines of the GPU: `+me.all`.
    AllMedia,
    /// Graphics: `+gfx`.
    Graphics,
    /// The media engines of the plain profile are missing: `-me`.
    NoMedia,
}

impl MigExtension {
    /// Reads the number of a GPU instance profile: `NVML_GPU_INSTANCE_PROFILE_*` of nvml.h, NVML 13.
    pub fn of_profile(number: u32) -> Self {
        match number {
            // 1_SLICE_REV1, 2_SLICE_REV1
            7 | 8 => Self::Media,
            // 1_SLICE_GFX, 2_SLICE_GFX, 4_SLICE_GFX, 3_SLICE_GFX
            10..=12 | 17 => Self::Graphics,
            // 1_SLICE_NO_ME, 2_SLICE_NO_ME
            13 | 14 => Self::NoMedia,
            // 1_SLICE_ALL_ME, 2_SLICE_ALL_ME
            15 | 16 => Self::AllMedia,
            _ => Self::None,
        }
    }

    const ALL: [Self; 5] = [Self::None, Self::Media, Self::AllMedia, Self::Graphics, Self::NoMedia];

    /// The suffix with which nvidia-smi and go-nvlib end a profile's name.
    fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Media => "+me",
            Self::AllMedia => "+me.all",
            Self::Graphics => "+gfx",
            Self::NoMedia => "-me",
        }
    }
}

/// The minors of the device nodes of a MIG device: the N of /dev/nvidia-caps/nvidia-capN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigCapabilities {
    /// The minor for access to the GPU instance.
    pub gpu_instance: u32,
    /// The minor for access to the compute instance.
    pub compute_instance: u32,
}

impl MigCapabilities {
    /// Finds the minors in the kernel's list, /proc/driver/nvidia-caps/mig-minors, for a GPU by its minor number.
    ///
    /// A line is `gpuM/giG/access N` or `gpuM/giG/ciC/access N`, where M is the GPU's minor number (NVIDIA's MIG user
    /// guide, "Device Nodes and Capabilities"). Other lines, such as `config 1`, are about something else.
    pub fn find(list: &str, gpu_minor: u32, gpu_instance: u32, compute_instance: u32) -> Option<Self> {
        let minor = |path: &str| {
            let of_line = |line: &str| line.trim().strip_prefix(path)?.strip_prefix(' ')?.trim().parse().ok();
            list.lines().find_map(of_line)
        };
        let instance = format!("gpu{gpu_minor}/gi{gpu_instance}");
        Some(Self {
            gpu_instance: minor(&format!("{instance}/access"))?,
            compute_instance: minor(&format!("{instance}/ci{compute_instance}/access"))?,
        })
    }

    /// The device nodes, the GPU instance's first.
    pub fn device_nodes(self) -> [String; 2] {
        [self.gpu_instance, self.compute_instance].map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"))
    }
}

/// One MIG device of the graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MigDevice {
    /// The place of its GPU in the graph.
    pub parent: usize,
    /// The index on its GPU.
    pub index: u32,
    /// NVML's UUID, which is its device id.
    pub uuid: MigUuid,
    /// The GPU instance's id.
    pub gpu_instance: u32,
    /// The compute instance's id within it.
    pub compute_instance: u32,
    /// Its profile.
    pub profile: MigProfile,
    /// The observation of this device.
    #[serde(skip)]
    pub facts: Arc<MigDeviceObservation>,
}

impl MigDevice {
    /// Its GPU instance; `None` if the driver does not report both profile and place.
    pub fn slot(&self) -> Option<MigSlot> {
        let (profile_id, placement) = self.facts.profile_id.zip(self.facts.placement)?;
        Some(MigSlot { profile_id, placement })
    }
}

/// The kind of a MIG device; two MIG devices of one profile are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigProfile {
    /// Compute slices of the compute instance.
    pub compute_slices: u32,
    /// Compute slices of the GPU instance.
    pub gpu_slices: u32,
    /// The memory in the profile's name, in GB.
    pub gb: u64,
    /// The extension.
    pub extension: MigExtension,
}

impl MigProfile {
    /// Finds the profile of a device on a GPU with this memory in MiB.
    pub fn new(device: &MigDeviceObservation, gpu_memory_mib: Option<u64>) -> Self {
        let gb = name_gb(device.memory_mib, gpu_memory_mib);
        let extension = device.extension.unwrap_or(MigExtension::None);
        Self { compute_slices: device.compute_slices, gpu_slices: device.gpu_slices, gb, extension }
    }
}

/// The memory in a profile's name, in GB.
///
/// It is not the device's memory but its share of the GPU's memory, in eighths (go-nvlib,
/// pkg/nvlib/device/mig_profile.go): e × G / 8, rounded, where e is 8 × `memory_mib` / `gpu_memory_mib`, rounded up,
/// and G is the GPU's memory in GiB, rounded up. If G is unknown, the name has the device's memory in GiB, rounded up.
fn name_gb(memory_mib: u64, gpu_memory_mib: Option<u64>) -> u64 {
    match gpu_memory_mib {
        Some(total @ 1..) => {
            let eighths = memory_mib.saturating_mul(8).div_ceil(total);
            eighths.saturating_mul(total.div_ceil(1024)).saturating_add(4) / 8
        }
        _ => memory_mib.div_ceil(1024),
    }
}

impl fmt::Display for MigProfile {
    /// Writes the name as nvidia-smi does: `1g.10gb`, `1g.10gb+me`, `2c.3g.40gb`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compute_slices, gpu_slices, gb, extension } = self;
        if compute_slices != gpu_slices {
            write!(f, "{compute_slices}c.")?;
        }
        write!(f, "{gpu_slices}g.{gb}gb{}", extension.suffix())
    }
}

impl FromStr for MigProfile {
    type Err = ParseError;

    /// Reads a profile's name as it is displayed.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = || {
            let (slices, rest) = text.split_once("g.")?;
            let (gb, suffix) = rest.split_once("gb")?;
            let (compute, gpu) = slices.split_once("c.").unwrap_or((slices, slices));
            let extension = MigExtension::ALL.into_iter().find(|extension| extension.suffix() == suffix)?;
            let (compute_slices, gpu_slices) = (compute.parse().ok()?, gpu.parse().ok()?);
            Some(Self { compute_slices, gpu_slices, gb: gb.parse().ok()?, extension })
        };
        // Text that would be displayed differently is not a name: a sign, a leading zero.
        let is_same = |profile: &Self| profile.to_string() == text;
        let has_slices = |profile: &Self| (1..=profile.gpu_slices).contains(&profile.compute_slices);
        let profile = parts().filter(|profile| is_same(profile) && has_slices(profile));
        let why = "is not a MIG profile (expected a name such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb)";
        profile.ok_or_else(|| ParseError::new(text, why))
    }
}

/// The most memory slices of a GPU.
const MAX_SLICES: u32 = 8;

/// The most [`MigSlot`]s of one GPU that linkwise considers. An H200 has some 40; NVML could report any number.
const MAX_MIG_SLOTS: usize = 128;

/// The longest name, in bytes: a DNS label.
const MAX_NAME: usize = 63;

/// A MIG device that exists or could exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PossibleMig<'a> {
    /// Its name in DRA.
    pub name: String,
    /// The place of its GPU in the graph.
    pub gpu: usize,
    /// The profile's observed facts.
    pub kind: &'a MigProfileObservation,
    /// The profile's name.
    pub profile: MigProfile,
    /// The GPU instance.
    pub slot: MigSlot,
}

impl PossibleMig<'_> {
    /// Returns true if a MIG device is in this GPU instance.
    pub fn is(&self, device: &MigDevice) -> bool {
        device.parent == self.gpu && device.slot() == Some(self.slot)
    }

    /// Returns true if a MIG device blocks this GPU instance: they have a memory slice in common, or the device's
    /// slices are unknown.
    pub fn is_blocked_by(&self, device: &MigDevice) -> bool {
        device.parent == self.gpu && device.facts.placement.is_none_or(|there| there.overlaps(self.slot.placement))
    }
}

/// The MIG devices that the GPUs in MIG mode could have, GPU by GPU: the highest first memory slice comes first, then
/// the smaller size. A scheduler that takes the first device that fits thus leaves the low slices free, which are the
/// only places for a profile of 4 compute slices or more.
pub fn possible_mig(topology: &NodeTopology) -> Vec<PossibleMig<'_>> {
    let mut found = Vec::new();
    for (place, gpu) in topology.gpus().iter().enumerate().filter(|(_, gpu)| gpu.mig_enabled) {
        let Some(gpu_name) = device_name(topology, place, None) else { continue };
        let mut names = BTreeSet::new();
        let mut own = Vec::new();
        for kind in gpu.facts.mig.iter().flat_map(|mig| &mig.profiles) {
            let profile = kind.profile(gpu.facts.memory_mib);
            for placement in &kind.placements {
                let slot = MigSlot { profile_id: kind.id, placement: *placement };
                let name = slot_name(&gpu_name, profile, slot);
                let ends = placement.start.saturating_add(placement.size);
                let is_sane = placement.size > 0 && ends <= MAX_SLICES && name.len() <= MAX_NAME;
                if is_sane && own.len() < MAX_MIG_SLOTS && names.insert(name.clone()) {
                    own.push(PossibleMig { name, gpu: place, kind, profile, slot });
                }
            }
        }
        own.sort_by_key(|possible: &PossibleMig<'_>| {
            let placement = possible.slot.placement;
            (Reverse(placement.start), placement.size, possible.kind.number)
        });
        found.extend(own);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mig_profiles_have_nvidia_names() {
        // The GPU's memory as NVML gives it (A100 40 GB, A100 80 GB, H100 80 GB, H200 141 GB), the device, and
        // nvidia-smi's name for the device.
        let cases = [
            (40_536, 1, 1, 4_864, MigExtension::None, "1g.5gb"),
            (40_536, 1, 1, 4_864, MigExtension::Media, "1g.5gb+me"),
            (40_536, 2, 2, 9_984, MigExtension::None, "2g.10gb"),
            (40_536, 3, 3, 20_096, MigExtension::None, "3g.20gb"),
            (40_536, 3, 1, 20_096, MigExtension::None, "1c.3g.20gb"),
            (40_536, 7, 7, 40_192, MigExtension::None, "7g.40gb"),
            (81_920, 1, 1, 9_728, MigExtension::None, "1g.10gb"),
            (81_559, 1, 1, 20_096, MigExtension::None, "1g.20gb"),
            (81_559, 4, 4, 40_448, MigExtension::None, "4g.40gb"),
            (143_771, 1, 1, 16_384, MigExtension::NoMedia, "1g.18gb-me"),
            (143_771, 1, 1, 16_384, MigExtension::AllMedia, "1g.18gb+me.all"),
        ];
        for (total, gpu_slices, compute_slices, memory_mib, extension, name) in cases {
            let device = device(gpu_slices, compute_slices, memory_mib, Some(extension));
            assert_eq!(MigProfile::new(&device, Some(total)).to_string(), name);
        }
        assert_eq!(MigProfile::new(&device(1, 1, 9_728, None), None).to_string(), "1g.10gb");
        assert_eq!(MigProfile::new(&device(1, 1, u64::MAX, None), Some(0)).gb, u64::MAX.div_ceil(1024));
        assert_eq!(MigProfile::new(&device(1, 1, u64::MAX, None), Some(1)).gb, u64::MAX / 8);
    }

    #[test]
    fn mig_profiles_are_read_by_their_names() {
        for name in ["1g.5gb", "1g.10gb+me", "1g.18gb-me", "1g.18gb+me.all", "2g.20gb+gfx", "7g.80gb", "1c.3g.40gb"] {
            assert_eq!(name.parse::<MigProfile>().unwrap().to_string(), name);
        }
        let odd =
            ["", "1g", "1g.gb", "g.5gb", "1g.5", "1g.5gb+you", "01g.5gb", "+1g.5gb", "0g.5gb", "3c.3g.40gb", "all"];
        for text in odd.into_iter().chain(["4c.3g.40gb"]) {
            let error = text.parse::<MigProfile>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{text}' is not a MIG profile")), "{error}");
        }
    }

    fn device(
        gpu_slices: u32,
        compute_slices: u32,
        memory_mib: u64,
        extension: Option<MigExtension>,
    ) -> MigDeviceObservation {
        let device = serde_json::json!({"index": 0, "uuid": "MIG-1", "gpu_instance": 1, "compute_instance": 0,
            "gpu_slices": gpu_slices, "compute_slices": compute_slices, "memory_mib": 0});
        MigDeviceObservation { extension, memory_mib, ..serde_json::from_value(device).unwrap() }
    }

    #[test]
    fn mig_capabilities_are_read_from_kernel_list() {
        let list = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi1/ci1/access 14\n\
                    gpu10/gi1/access 99\ngpu1/gi1/access x\ngpu1/gi1/ci0/access 7\n";
        let found = MigCapabilities::find(list, 0, 1, 1);
        assert_eq!(found, Some(MigCapabilities { gpu_instance: 12, compute_instance: 14 }));
        assert_eq!(found.unwrap().device_nodes()[1], "/dev/nvidia-caps/nvidia-cap14");
        for (gpu, gi, ci) in [(0, 1, 2), (0, 2, 0), (10, 1, 0), (1, 1, 0)] {
            assert_eq!(MigCapabilities::find(list, gpu, gi, ci), None, "{gpu} {gi} {ci}");
        }
        assert_eq!(MigCapabilities::find("", 0, 1, 0), None);
    }

    #[test]
    fn invalid_mig_uuids_are_refused() {
        for uuid in ["MIG-b1028956-cfa2-0990-bf4a-5da9abb51763", "MIG-GPU-b1028956-cfa2-0990-bf4a-5da9abb51763/3/0"] {
            assert_eq!(uuid.parse::<MigUuid>().unwrap().as_str(), uuid);
        }
        for text in ["", "MIG-", "GPU-1", "MIG-a b", &format!("MIG-{}", "x".repeat(60))] {
            assert!(text.parse::<MigUuid>().is_err(), "{text}");
        }
    }
}
