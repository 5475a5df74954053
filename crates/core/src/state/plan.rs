//! [`ResourcePlan`]: the resources that the operator wants made of the node's GPUs, as plain data.
//!
//! `config` reads it from the configuration, `resources` carries it out. A plan may name devices that the node does not
//! have; `config` refuses only what no machine could satisfy. The serialised forms are those of the configuration file.

use crate::prelude::*;
use core::fmt;
use core::str::FromStr;

use serde::{Serialize, Serializer};

use super::resource_name::ResourceName;
use crate::allocation::AllocationPolicy;
use crate::quote::ParseError;
use crate::topology::{Gpu, GpuUuid, MigDevice, MigProfile, PciAddress};

/// The most slots of one resource. The kubelet accepts a list of at most 4 MiB (gRPC's default), and a device on it
/// takes up to 63 bytes of id and some dozens for health and NUMA nodes.
pub const MAX_SLOTS: u32 = 1 << 14;

/// The resources to make of the GPUs. The default offers every GPU that computes, whole, as `nvidia.com/gpu`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourcePlan {
    /// The strategy for GPUs in MIG mode.
    pub mig_strategy: MigStrategy,
    /// Names for GPUs by their model. The first match counts; without a match the name is `nvidia.com/gpu`.
    pub gpu_names: Vec<NamePattern>,
    /// Names for MIG devices by their profile. The first match counts; without a match the strategy gives the name.
    pub mig_names: Vec<NamePattern>,
    /// The devices that several containers share.
    pub sharing: Option<Sharing>,
    /// The GPUs that are not offered.
    pub filter: Filter,
    /// The API through which the other GPUs are offered.
    pub door: Door,
    /// The allocation policy for slots and MIG devices; `None` means distributed. Whole GPUs always use best-effort.
    pub shared_policy: Option<AllocationPolicy>,
}

impl ResourcePlan {
    /// Returns true if the plan offers a GPU through DRA.
    pub(crate) fn offers_through_dra(&self, gpu: &Gpu) -> bool {
        self.door == Door::Dra && self.filter.offers(gpu)
    }

    /// The resource that a whole GPU belongs to, before it is shared.
    pub(crate) fn name_of_gpu(&self, gpu: &Gpu) -> ResourceName {
        first_match(&self.gpu_names, gpu.model.as_deref().unwrap_or_default()).unwrap_or_else(ResourceName::gpu)
    }

    /// The resource that MIG devices of a profile belong to, before they are shared.
    pub(crate) fn name_of_mig(&self, profile: &MigProfile) -> ResourceName {
        match (first_match(&self.mig_names, &profile.to_string()), self.mig_strategy) {
            (Some(name), _) => name,
            (None, MigStrategy::Mixed) => ResourceName::mig(profile),
            (None, _) => ResourceName::gpu(),
        }
    }

    /// The policy by which devices of a resource are chosen. `has_parts` is true if they are slots or MIG devices.
    pub(super) fn policy(&self, has_parts: bool) -> AllocationPolicy {
        match self.shared_policy {
            _ if !has_parts => AllocationPolicy::BestEffort,
            Some(policy) => policy,
            None => AllocationPolicy::Distributed,
        }
    }

    /// Returns true if a container may have one slot only.
    pub(super) fn allows_only_one_slot(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.fail_requests_greater_than_one)
    }

    /// Returns true if devices are shared by MPS.
    pub(super) fn is_shared_by_mps(&self) -> bool {
        self.sharing.as_ref().is_some_and(|sharing| sharing.kind == SharingKind::Mps)
    }
}

/// The strategy for GPUs in MIG mode, as the NVIDIA plugin's `--mig-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigStrategy {
    /// They are offered as whole GPUs, as if MIG were off.
    #[default]
    None,
    /// Their MIG devices are offered as `nvidia.com/gpu`: all of one profile, on a node whose GPUs are all in MIG mode.
    Single,
    /// Their MIG devices are offered by profile, as `nvidia.com/mig-1g.10gb`, beside whole GPUs.
    Mixed,
}

/// A resource name for the devices that a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NamePattern {
    /// The pattern: of a GPU's model (`NVIDIA A100-SXM4-40GB`) or of a MIG profile (`1g.5gb`).
    pub pattern: Pattern,
    /// The resource.
    pub name: ResourceName,
}

fn first_match(patterns: &[NamePattern], text: &str) -> Option<ResourceName> {
    patterns.iter().find(|pattern| pattern.pattern.matches(text)).map(|pattern| pattern.name.clone())
}

/// A wildcard pattern: `*` stands for any text. The pattern matches anywhere in a name, as in the NVIDIA plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Pattern(String);

impl Pattern {
    /// Makes a pattern; any text is one.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns true if the text contains it.
    pub fn matches(&self, text: &str) -> bool {
        let found = self.0.split('*').try_fold(text, |rest, literal| rest.split_once(literal).map(|(_, after)| after));
        found.is_some()
    }

    /// Returns true only if it matches everything that another pattern matches. False proves nothing.
    pub fn covers(&self, other: &Self) -> bool {
        self.matches(&other.0.replace('*', "\0"))
    }
}

/// Devices that several containers use at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sharing {
    /// Time-slicing or MPS.
    #[serde(skip)]
    pub kind: SharingKind,
    /// True if shared devices are offered as `NAME.shared`, unless the resource has a `rename`.
    pub rename_by_default: bool,
    /// True if a container is refused more than one slot. Time-slicing allows more by default, MPS does not.
    pub fail_requests_greater_than_one: bool,
    /// The resources whose devices are shared.
    pub resources: Vec<SharedResource>,
}

impl Sharing {
    /// Makes sharing with the NVIDIA plugin's defaults.
    pub fn new(kind: SharingKind, resources: Vec<SharedResource>) -> Self {
        let fail_requests_greater_than_one = kind == SharingKind::Mps;
        Self { kind, rename_by_default: false, fail_requests_greater_than_one, resources }
    }
}

/// The two ways to share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingKind {
    /// The GPU's scheduler switches between the containers.
    TimeSlicing,
    /// CUDA's Multi-Process Service; not for MIG devices.
    Mps,
}

/// One resource whose devices are shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SharedResource {
    /// The resource, by the name it has without sharing.
    pub name: ResourceName,
    /// Another name for the shared devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rename: Option<ResourceName>,
    /// The devices that are shared; the others are offered unshared under `name`.
    pub devices: SharedDevices,
    /// The number of slots of each device; fewer than 2 are a [`super::PlanProblem`].
    pub replicas: u32,
}

impl SharedResource {
    /// Shares all devices of a resource, under its own name.
    pub fn new(name: ResourceName, replicas: u32) -> Self {
        Self { name, rename: None, devices: SharedDevices::All, replicas }
    }
}

/// The devices of a resource that are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SharedDevices {
    /// All devices.
    #[default]
    All,
    /// This many, the first ones by PCI address and MIG index.
    Count(u32),
    /// These devices.
    List(Vec<DeviceSelector>),
}

impl Serialize for SharedDevices {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::Count(count) => serializer.serialize_u32(*count),
            Self::List(devices) => serializer.collect_seq(devices.iter().map(ToString::to_string)),
        }
    }
}

/// A GPU or MIG device as an operator names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceSelector {
    /// A whole GPU by NVML's index.
    Index(u32),
    /// A MIG device by its GPU's index and its own: `0:1`.
    MigIndex(u32, u32),
    /// A GPU or MIG device by its UUID.
    Uuid(String),
}

impl DeviceSelector {
    /// Returns true if it can name a MIG device only.
    pub fn is_mig(&self) -> bool {
        match self {
            Self::Index(_) => false,
            Self::MigIndex(..) => true,
            Self::Uuid(uuid) => uuid.starts_with("MIG-"),
        }
    }

    /// Returns true if it names this device: the MIG device if there is one, otherwise the whole GPU.
    pub fn is(&self, gpu: &Gpu, mig: Option<&MigDevice>) -> bool {
        match (self, mig) {
            (Self::Index(index), None) => gpu.index == *index,
            (Self::MigIndex(of, index), Some(mig)) => gpu.index == *of && mig.index == *index,
            (Self::Uuid(uuid), None) => gpu.uuid.as_str() == uuid,
            (Self::Uuid(uuid), Some(mig)) => mig.uuid.as_str() == uuid,
            (Self::Index(_), Some(_)) | (Self::MigIndex(..), None) => false,
        }
    }
}

const NO_DEVICE: &str = "names no device (expected an index such as 0, a MIG device such as 0:1, or a UUID)";

impl FromStr for DeviceSelector {
    type Err = ParseError;

    /// Reads the forms that the NVIDIA plugin takes: an index, `GPU:MIG`, `GPU-<uuid>`, `MIG-<uuid>` and the older
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
        named.ok_or_else(|| ParseError::new(text, NO_DEVICE))
    }
}

/// Returns true for 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12.
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

/// The GPUs that are not offered, neither whole nor as MIG devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// GPUs that the operator names.
    pub exclude: Vec<GpuSelector>,
    /// True if GPUs with an active display are not offered.
    pub exclude_displays: bool,
}

impl Filter {
    /// Returns true if the operator excludes this GPU.
    pub(crate) fn excludes(&self, gpu: &Gpu) -> bool {
        self.exclude.iter().any(|selector| selector.is(gpu))
    }

    /// Returns true if the operator excludes this GPU because of its display.
    pub(crate) fn excludes_display_of(&self, gpu: &Gpu) -> bool {
        gpu.facts.display == Some(true) && self.exclude_displays
    }

    /// Returns true if this GPU, or its MIG devices, may be offered.
    pub(crate) fn offers(&self, gpu: &Gpu) -> bool {
        let is_adapter = gpu.model.as_deref().is_some_and(is_display_adapter);
        !self.excludes(gpu) && !self.excludes_display_of(gpu) && !is_adapter
    }
}

/// The API through which a node's GPUs are offered. The serialised values are those of `linkwise.dra.gpus`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Door {
    /// The device plugin.
    #[default]
    #[serde(rename = "none")]
    Plugin,
    /// Dynamic Resource Allocation.
    #[serde(rename = "all")]
    Dra,
}

impl Door {
    /// The label in metrics and messages.
    pub fn label(self) -> &'static str {
        match self {
            Self::Plugin => "plugin",
            Self::Dra => "dra",
        }
    }
}

/// Returns true for the model of a DGX Station's adapter that drives a display and computes nothing. The NVIDIA plugin
/// leaves it out too.
pub(crate) fn is_display_adapter(model: &str) -> bool {
    ["DGX Display", "NVIDIA DGX Display"].contains(&model)
}

/// One GPU, or all of a model, as an operator names them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuSelector {
    /// One GPU, by NVML's index.
    Index(u32),
    /// One GPU, by UUID.
    Uuid(GpuUuid),
    /// One GPU, by PCI address.
    Pci(PciAddress),
    /// All GPUs of a model.
    Model(Pattern),
}

impl GpuSelector {
    /// Returns true if it names this GPU. A model pattern never names a GPU of unknown model.
    pub fn is(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Index(index) => gpu.index == *index,
            Self::Uuid(uuid) => gpu.uuid == *uuid,
            Self::Pci(pci) => gpu.pci == *pci,
            Self::Model(pattern) => gpu.model.as_deref().is_some_and(|model| pattern.matches(model)),
        }
    }
}

/// Reads any text. A text that is not an index, UUID or PCI address is a pattern of the model.
impl From<&str> for GpuSelector {
    fn from(text: &str) -> Self {
        let index = || text.parse().ok().map(Self::Index);
        let uuid = || text.parse().ok().filter(|_| text.starts_with("GPU-")).map(Self::Uuid);
        let pci = || text.parse().ok().map(Self::Pci);
        index().or_else(uuid).or_else(pci).unwrap_or_else(|| Self::Model(Pattern::new(text)))
    }
}

impl fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Pci(pci) => pci.fmt(f),
            Self::Model(pattern) => pattern.fmt(f),
        }
    }
}

impl Serialize for GpuSelector {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_matches_anywhere_and_star_any_text() {
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
    fn device_is_named_by_index_mig_index_or_uuid() {
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
            assert_eq!(text.parse::<DeviceSelector>(), Err(ParseError::new(text, NO_DEVICE)));
        }
    }

    #[test]
    fn gpu_is_named_by_index_uuid_address_or_model() {
        assert_eq!(GpuSelector::from("3"), GpuSelector::Index(3));
        assert!(matches!(GpuSelector::from("GPU-00000001-0000-4000-8000-000000000000"), GpuSelector::Uuid(_)));
        assert!(matches!(GpuSelector::from("0000:3b:00.0"), GpuSelector::Pci(_)));
        assert_eq!(GpuSelector::from("*T400*"), GpuSelector::Model(Pattern::new("*T400*")));
    }
}
