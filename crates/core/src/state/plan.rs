//! [`ResourcePlan`]: what an operator wants made of the node's GPUs, as plain data.
//!
//! `config` makes it, `resources` carries it out. It names devices that may not be there; only what no machine could
//! satisfy is refused before.

use crate::prelude::*;
use alloc::collections::BTreeMap;
use core::fmt;
use core::str::FromStr;

use serde::Serialize;

use super::device::ResourceName;
use crate::allocation::AllocationPolicy;
use crate::topology::{Gpu, GpuUuid, MigDevice, PciAddress};

/// What becomes of the GPUs. The default: every GPU that no display is set up on, whole, as `nvidia.com/gpu`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourcePlan {
    /// What becomes of GPUs in MIG mode.
    pub mig_strategy: MigStrategy,
    /// Names for GPUs by their model, the first that matches; then `nvidia.com/gpu`.
    pub gpu_names: Vec<NamePattern>,
    /// Names for MIG devices by their profile, the first that matches; then the strategy's.
    pub mig_names: Vec<NamePattern>,
    /// How devices are shared.
    pub sharing: Option<Sharing>,
    /// Which GPUs are left out.
    pub filter: Filter,
    /// How devices of a resource, by the name under which it is offered, are chosen.
    pub policies: BTreeMap<ResourceName, AllocationPolicy>,
    /// How slots and MIG devices of other resources are chosen: distributed, unless said. Whole GPUs: best-effort.
    pub shared_policy: Option<AllocationPolicy>,
}

impl ResourcePlan {
    /// How devices of a resource are chosen; `has_parts` where they are slots or MIG devices.
    pub(super) fn policy(&self, resource: &ResourceName, has_parts: bool) -> AllocationPolicy {
        let usual = match self.shared_policy {
            _ if !has_parts => AllocationPolicy::BestEffort,
            Some(policy) => policy,
            None => AllocationPolicy::Distributed,
        };
        self.policies.get(resource).copied().unwrap_or(usual)
    }

    /// Whether a container is refused more than one slot.
    pub(super) fn one_slot(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.fail_requests_greater_than_one)
    }

    /// Whether devices are shared by MPS.
    pub(super) fn is_shared_by_mps(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.kind == SharingKind::Mps)
    }
}

/// What becomes of GPUs in MIG mode, as the NVIDIA plugin's `--mig-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// They are offered as whole GPUs, as if MIG were off.
    #[default]
    None,
    /// Their MIG devices are offered as `nvidia.com/gpu`: all of one profile, on a node whose GPUs are all in MIG mode.
    Single,
    /// Their MIG devices are offered by profile, as `nvidia.com/mig-1g.10gb`, beside GPUs that are whole.
    Mixed,
}

/// A name for what a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    /// What it matches.
    pub pattern: Pattern,
    /// The resource.
    pub name: ResourceName,
}

/// A wildcard pattern: `*` stands for anything. It matches wherever it is found, as in the NVIDIA plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Pattern(String);

impl Pattern {
    /// A pattern; any text is one.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether it is found in the text.
    pub fn matches(&self, text: &str) -> bool {
        let found = self.0.split('*').try_fold(text, |rest, literal| rest.split_once(literal).map(|(_, after)| after));
        found.is_some()
    }

    /// Whether it matches all that another one matches, as far as their texts tell.
    pub fn covers(&self, other: &Self) -> bool {
        self.matches(&other.0.replace('*', "\0"))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Devices that several containers use at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// How.
    pub kind: SharingKind,
    /// Offer what is shared under a name of its own, with `.shared` at its end, unless a resource has a `rename`.
    pub rename_by_default: bool,
    /// Refuse a container more than one slot. Time-slicing allows it by default, MPS does not.
    pub fail_requests_greater_than_one: bool,
    /// What is shared.
    pub resources: Vec<SharedResource>,
}

impl Sharing {
    /// Sharing with the NVIDIA plugin's defaults.
    pub fn new(kind: SharingKind, resources: Vec<SharedResource>) -> Self {
        let fail_requests_greater_than_one = kind == SharingKind::Mps;
        Self { kind, rename_by_default: false, fail_requests_greater_than_one, resources }
    }
}

/// The two ways to share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingKind {
    /// The GPU's scheduler takes turns.
    TimeSlicing,
    /// Through CUDA's Multi-Process Service: not for MIG devices.
    Mps,
}

/// One resource whose devices are shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedResource {
    /// The resource, by the name it would have unshared.
    pub name: ResourceName,
    /// The name for the shared devices, where it is another.
    pub rename: Option<ResourceName>,
    /// Which of its devices; the others are offered whole, under the name they have.
    pub devices: SharedDevices,
    /// Slots of each device, 2 at least.
    pub replicas: u32,
}

impl SharedResource {
    /// All devices of a resource under its own name.
    pub fn new(name: ResourceName, replicas: u32) -> Self {
        Self { name, rename: None, devices: SharedDevices::All, replicas }
    }
}

/// Which devices of a resource are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SharedDevices {
    /// Every one.
    #[default]
    All,
    /// So many, the first by PCI address and MIG index.
    Count(u32),
    /// These.
    List(Vec<DeviceSelector>),
}

/// A device, named by an operator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceSelector {
    /// A whole GPU by NVML's index.
    Index(u32),
    /// A MIG device by its GPU's index and its own, `0:1`.
    MigIndex(u32, u32),
    /// Either by its UUID.
    Uuid(String),
}

/// Why a text names no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' names no device (expected an index such as 0, a MIG device such as 0:1, or a UUID)")]
pub struct DeviceSelectorError {
    text: String,
}

impl DeviceSelector {
    /// Whether it names this device.
    pub fn is(&self, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
        match (self, mig) {
            (Self::Index(index), None) => gpu.index == *index,
            (Self::MigIndex(index, of), Some(mig)) => gpu.index == *index && mig.index == *of,
            (Self::Uuid(uuid), None) => gpu.uuid.as_str() == uuid,
            (Self::Uuid(uuid), Some(mig)) => mig.uuid.as_str() == uuid,
            (Self::Index(_), Some(_)) | (Self::MigIndex(..), None) => false,
        }
    }
}

impl FromStr for DeviceSelector {
    type Err = DeviceSelectorError;

    /// The forms that the NVIDIA plugin knows: an index, `GPU:MIG`, `GPU-<uuid>`, `MIG-<uuid>` and the older
    /// `MIG-GPU-<uuid>/<gi>/<ci>`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
        let mig = |(gpu, index)| Some(Self::MigIndex(number(gpu)?, number(index)?));
        let gpu = |text: &str| text.strip_prefix("GPU-").is_some_and(is_uuid);
        let old = |text: &str| {
            let parts: Vec<&str> = text.split('/').collect();
            matches!(parts.as_slice(), [parent, gi, ci] if gpu(parent) && number(gi).is_some() && number(ci).is_some())
        };
        let of_mig = |text: &str| text.strip_prefix("MIG-").is_some_and(|rest| is_uuid(rest) || old(rest));
        let uuid = || (gpu(text) || of_mig(text)).then(|| Self::Uuid(text.to_owned()));
        let named = number(text).map(Self::Index).or_else(|| text.split_once(':').and_then(mig)).or_else(uuid);
        named.ok_or_else(|| DeviceSelectorError { text: text.to_owned() })
    }
}

/// 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let hexadecimal = |group: &&str| group.bytes().all(|b| b.is_ascii_hexdigit());
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]) && groups.iter().all(hexadecimal)
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::MigIndex(gpu, index) => write!(f, "{gpu}:{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

/// Which GPUs are left out, with their MIG devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// These, by any of their names.
    pub exclude: Vec<GpuSelector>,
    /// Offer GPUs also that a display is set up on.
    pub keep_display: bool,
}

/// GPUs, named by an operator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuSelector {
    /// By NVML's index.
    Index(u32),
    /// By UUID.
    Uuid(GpuUuid),
    /// By PCI address.
    Pci(PciAddress),
    /// All of a model.
    Model(Pattern),
}

impl GpuSelector {
    /// Whether it names this GPU. One of unknown model is of no model.
    pub fn is(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Index(index) => gpu.index == *index,
            Self::Uuid(uuid) => gpu.uuid == *uuid,
            Self::Pci(pci) => gpu.pci == *pci,
            Self::Model(pattern) => gpu.model.as_deref().is_some_and(|model| pattern.matches(model)),
        }
    }
}

impl fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "GPU {index}"),
            Self::Uuid(uuid) => write!(f, "{uuid}"),
            Self::Pci(pci) => write!(f, "GPU {pci}"),
            Self::Model(pattern) => write!(f, "GPUs of model '{pattern}'"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_found_anywhere_and_stars_are_anything() {
        for (pattern, found, missed) in [
            ("*", "", ""),
            ("", "anything", ""),
            ("A100", "NVIDIA A100-SXM4-80GB", "NVIDIA H100"),
            ("A100*80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA 80GB A100"),
            ("*1g.5gb", "1c.1g.5gb", "1gx5gb"),
            ("a*a", "aa", "a"),
        ] {
            assert!(Pattern::new(pattern).matches(found), "{pattern} in {found}");
            assert!(missed.is_empty() || !Pattern::new(pattern).matches(missed), "{pattern} in {missed}");
        }
        assert!(Pattern::new("*A100*").covers(&Pattern::new("NVIDIA A100-*")));
        assert!(!Pattern::new("A100-SXM").covers(&Pattern::new("A100*SXM")));
    }

    #[test]
    fn devices_are_named_by_index_mig_index_or_uuid() {
        let uuid = "b1028956-cfa2-0990-bf4a-5da9abb51763";
        for (text, expected) in [
            ("0", DeviceSelector::Index(0)),
            ("0:1", DeviceSelector::MigIndex(0, 1)),
            (&format!("GPU-{uuid}"), DeviceSelector::Uuid(format!("GPU-{uuid}"))),
            (&format!("MIG-{uuid}"), DeviceSelector::Uuid(format!("MIG-{uuid}"))),
            (&format!("MIG-GPU-{uuid}/3/0"), DeviceSelector::Uuid(format!("MIG-GPU-{uuid}/3/0"))),
        ] {
            assert_eq!(text.parse(), Ok(expected.clone()));
            assert_eq!(expected.to_string(), text);
        }
        let odd = [format!("MIG-GPU-{uuid}"), format!("XPU-{uuid}")];
        for text in ["", "-1", "+1", "0:", ":1", "0:1:2", "all", "99999999999", "gpu-1", "GPU-1", "GPU"]
            .into_iter()
            .chain(odd.iter().map(String::as_str))
        {
            assert_eq!(text.parse::<DeviceSelector>(), Err(DeviceSelectorError { text: text.to_owned() }));
        }
    }
}
