//! The attributes, capacities and taints of a GPU or MIG device. docs/dra.md lists them.
//!
//! Taints keep an unhealthy device from being allocated. They end with the reasons why it is unhealthy.

use crate::prelude::*;

use super::families::Group;
use super::{
    Attribute, Capacity, DraDevice, DraFacts, DraProblem, RequestPolicy, SliceDevice, Taint, TaintEffect, ValidRange,
};
use crate::allocation::GpuSet;
use crate::quantity;
use crate::state::{GpuShares, UnhealthyReason};
use crate::topology::{
    ComputeCapability, FabricObservation, Gpu, MigDevice, MigEngines, MigPlacement, MigProfile, Nic, NicKind,
    NodeTopology, PciAddress, PossibleMig, Rank,
};

/// The longest text, in bytes (`DeviceAttributeMaxValueLength`).
const MAX_TEXT: usize = 64;

/// The largest PCI domain of `resource.kubernetes.io/pciBusID`: four hexadecimal digits.
const MAX_DOMAIN: u32 = 0xffff;

/// The domain of Kubernetes' own attributes.
const STANDARD: &str = "resource.kubernetes.io";

/// The type of a GPU that several claims may have. Classes and selectors for `gpu` do not match it, so that only a
/// claim that requests a share gets one. (`device.allowMultipleAllocations` in the classes would have the same effect,
/// but API servers without the gate DRAConsumableCapacity do not compile it.)
const SHARED: &str = "shared-gpu";

/// The domain of our attributes.
pub const OURS: &str = "linkwise.dev";

/// A device being made.
pub(super) struct Draft<'a> {
    pub device: SliceDevice,
    pub problems: &'a mut Vec<DraProblem>,
    pub facts: &'a DraFacts<'a>,
}

impl Draft<'_> {
    /// Adds a text, or reports that it is too long for the API server.
    fn text(&mut self, name: &str, value: Option<impl ToString>) {
        self.put_valid(name, value, |text| (text.len() <= MAX_TEXT).then(|| Attribute::String(text.to_owned())));
    }

    /// Adds a version as NVML or the driver writes it, or reports that it is not a version of at most three numbers.
    fn version(&mut self, name: &str, value: Option<impl ToString>) {
        self.put_valid(name, value, |text| version(text).map(Attribute::Version));
    }

    /// Adds the attribute that `valid` makes of a value, or reports the value.
    fn put_valid(&mut self, name: &str, value: Option<impl ToString>, valid: impl Fn(&str) -> Option<Attribute>) {
        let Some(value) = value.map(|value| value.to_string()) else { return };
        match valid(&value) {
            Some(valid) => self.put(name, valid),
            None => {
                let (device, attribute) = (self.device.name.clone(), name.to_owned());
                self.problems.push(DraProblem::Dropped { device, attribute, value });
            }
        }
    }

    fn number(&mut self, name: &str, value: Option<impl Into<i64>>) {
        if let Some(value) = value {
            self.put(name, Attribute::Int(value.into()));
        }
    }

    fn put(&mut self, name: &str, value: Attribute) {
        self.device.attributes.insert(name.to_owned(), value);
    }

    fn capacity(&mut self, name: &str, value: impl ToString) {
        self.device.capacity.insert(name.to_owned(), Capacity::whole(value));
    }

    /// Describes a GPU that is published as one device: for one claim, or for several.
    pub fn gpu(&mut self, device: &DraDevice<'_>) {
        let (gpu, topology) = (device.gpu, self.facts.topology);
        self.text("type", Some(if device.sharing.now.is_some() { SHARED } else { "gpu" }));
        self.text("uuid", Some(&gpu.uuid));
        self.of_gpu(gpu);
        match (device.sharing.now, gpu.facts.memory_mib) {
            (Some(shares), memory) => self.shares(shares, memory),
            (None, Some(memory)) => self.capacity("memory", quantity::of_mebibytes(memory)),
            (None, None) => {}
        }
        self.text(&ours("pcieSwitch"), device.place.and_then(|place| shared_switch(topology, place)));
        self.text(&ours("nvlinkFabric"), gpu.facts.fabric.as_ref().and_then(FabricObservation::shared));
        let nearest = nearest(topology, device.place, |_| true).and_then(|nic| nic.pci);
        self.text(&ours("nearestNic"), nearest);
        self.number(&ours("rail"), gpu.rail);
        self.near(device);
    }

    /// Describes a MIG device. With eight memory slices it has all 32 attributes and capacities that the API allows: 29
    /// of NVIDIA's driver and three others.
    pub fn mig(&mut self, device: &DraDevice<'_>, mig: &MigDevice) {
        self.text("uuid", Some(&mig.uuid));
        self.instance(device, mig.profile);
        self.parts(mig.facts.memory_mib, mig.facts.engines, mig.facts.placement);
    }

    /// Describes a MIG device that is made when a claim gets it: like an existing one, but without a UUID.
    pub fn possible_mig(&mut self, gpu: &DraDevice<'_>, possible: &PossibleMig<'_>) {
        self.instance(gpu, possible.profile);
        self.parts(possible.kind.memory_mib, Some(possible.kind.engines), Some(possible.slot.placement));
    }

    fn instance(&mut self, device: &DraDevice<'_>, profile: MigProfile) {
        self.text("type", Some("mig"));
        self.text("parentUUID", Some(&device.gpu.uuid));
        self.text("profile", Some(profile));
        self.of_gpu(device.gpu);
        self.near(device);
    }

    fn parts(&mut self, memory_mib: u64, engines: Option<MigEngines>, placement: Option<MigPlacement>) {
        self.capacity("memory", quantity::of_mebibytes(memory_mib));
        if let Some(engines) = engines {
            self.capacity("multiprocessors", engines.multiprocessors);
            self.capacity("copyEngines", engines.copy);
            self.capacity("decoders", engines.decoder);
            self.capacity("encoders", engines.encoder);
            self.capacity("jpegEngines", engines.jpeg);
            self.capacity("ofaEngines", engines.ofa);
        }
        if let Some(placement) = placement {
            for slice in placement.slices() {
                self.capacity(&format!("memorySlice{slice}"), 1);
            }
        }
    }

    /// Adds the capacities of a GPU that several claims may have. A claim that requests no amounts takes one share and
    /// `memory / shares` MiB of memory, rounded down, so that the scheduler counts the memory of all claims. A GPU
    /// whose memory is unknown, or less than 1 MiB for each share, has no memory capacity.
    fn shares(&mut self, GpuShares { shares, one_each }: GpuShares, memory_mib: Option<u64>) {
        self.device.allow_multiple_allocations = true;
        let one = || quantity::of_number(1);
        let valid_range = ValidRange { min: one(), max: one_each.then(one), step: one() };
        let policy = RequestPolicy { default: one(), valid_range };
        self.consumable("shares", quantity::of_number(shares.into()), policy);
        let part = memory_mib.map(|memory| (memory, memory / u64::from(shares.max(1)))).filter(|(_, part)| *part > 0);
        if let Some((memory, part)) = part {
            let [one, part] = [1, part].map(quantity::of_mebibytes);
            let valid_range = ValidRange { min: one.clone(), max: None, step: one };
            let policy = RequestPolicy { default: part, valid_range };
            self.consumable("memory", quantity::of_mebibytes(memory), policy);
        }
    }

    fn consumable(&mut self, name: &str, value: String, policy: RequestPolicy) {
        let capacity = Capacity { value, request_policy: Some(policy) };
        self.device.capacity.insert(name.to_owned(), capacity);
    }

    /// Adds the facts of a GPU that its MIG devices share. An unknown addressing mode is an empty text.
    fn of_gpu(&mut self, gpu: &Gpu) {
        let versions = self.facts.versions;
        self.text("productName", gpu.model.as_ref());
        self.text("brand", gpu.facts.brand.as_ref());
        let derived = gpu.facts.compute_capability.and_then(architecture);
        self.text("architecture", gpu.facts.architecture.as_deref().or(derived));
        self.version("cudaComputeCapability", gpu.facts.compute_capability.map(String::from));
        self.version("driverVersion", versions.driver.as_ref());
        self.version("cudaDriverVersion", versions.cuda.map(|cuda| format!("{}.{}", cuda.major, cuda.minor)));
        self.text("addressingMode", Some(&gpu.facts.addressing_mode.map_or(String::new(), |mode| mode.to_string())));
        self.text(&format!("{STANDARD}/pcieRoot"), gpu.pcie_root.as_ref());
        self.text(&format!("{STANDARD}/pciBusID"), Some(gpu.pci).filter(|pci| pci.domain() <= MAX_DOMAIN));
        // Claims want NICs and CPUs on this NUMA node too. If the GPU's own node has no CPUs, `cpu_node` is the only
        // node with CPUs of its package.
        let numa = gpu.cpu_node.or(gpu.numa).map(|numa| numa.0);
        self.number(&format!("{STANDARD}/numaNode"), numa);
        self.number("dra.net/numaNode", numa);
    }

    fn near(&mut self, device: &DraDevice<'_>) {
        let rdma = nearest(self.facts.topology, device.place, |nic| nic.kind == NicKind::Rdma)
            .and_then(|nic| nic.names.first());
        self.text(&ours("rdmaDevice"), rdma);
        self.number(&ours("socket"), device.gpu.package.map(|package| package.0));
    }

    /// Adds the groups of a GPU, and its NVLink domain, named by the least PCI address of the members. An unhealthy GPU
    /// gets its NVLink domain only. A group with too few healthy GPUs is left out; the other groups keep their values.
    pub fn groups(&mut self, place: Option<usize>, sick: GpuSet) {
        let (Some(place), topology, layout) = (place, self.facts.topology, self.facts.layout) else { return };
        let domain = layout.nvlink_domains.iter().find(|domain| domain.contains(place));
        let first = domain.and_then(|domain| topology.gpus().get(domain.places().next()?));
        self.text(&ours("nvlinkDomain"), first.map(|gpu| gpu.pci));
        for family in &layout.families {
            let group = family.groups.iter().find(|group| group.gpus.contains(place));
            let serves = |group: &&Group| !sick.contains(place) && group.gpus.without(sick).len() >= family.size;
            self.text(&ours(&family.name), group.filter(serves).map(|group| group.name));
        }
    }

    /// Adds the place in the published order.
    pub fn order(&mut self, at: usize) {
        self.number(&ours("order"), i64::try_from(at).ok());
    }
}

fn ours(name: &str) -> String {
    format!("{OURS}/{name}")
}

/// The nearest PCIe switch that is above this GPU and at least one other.
fn shared_switch(topology: &NodeTopology, place: usize) -> Option<PciAddress> {
    let others = || topology.gpus().iter().enumerate().filter(|(other, _)| *other != place).map(|(_, gpu)| gpu);
    let mut own = topology.gpus().get(place)?.switches.iter().copied();
    own.find(|switch| others().any(|other| other.switches.contains(switch)))
}

/// The first of the nearest NICs of a kind, no farther than a host bridge.
fn nearest(topology: &NodeTopology, place: Option<usize>, is_meant: impl Fn(&Nic) -> bool) -> Option<&Nic> {
    let place = place?;
    let rank = |nic: &Nic| nic.level.get(place).copied().unwrap_or(Rank::FARTHEST);
    let near = topology.nics().iter().filter(|nic| is_meant(nic) && rank(nic) <= Rank::HOST_BRIDGE);
    near.min_by_key(|nic| (rank(nic), nic.pci.is_none(), nic.pci, nic.names.first()))
}

/// The architecture of a compute capability, by NVML's names, from NVIDIA's lists of CUDA GPUs
/// (<https://developer.nvidia.com/cuda-gpus>, <https://developer.nvidia.com/cuda-legacy-gpus>). `None` for a capability
/// that is not in these lists, or for which NVML has no name.
fn architecture(ComputeCapability { major, minor }: ComputeCapability) -> Option<&'static str> {
    match (major, minor) {
        (3, _) => Some("Kepler"),
        (5, _) => Some("Maxwell"),
        (6, _) => Some("Pascal"),
        (7, 0 | 2) => Some("Volta"),
        (7, 5) => Some("Turing"),
        (8, 0 | 6) => Some("Ampere"),
        (8, 9) => Some("Ada Lovelace"),
        (9, 0) => Some("Hopper"),
        (10, 0 | 3) | (12, 0 | 1) => Some("Blackwell"),
        _ => None,
    }
}

/// A version of three numbers without leading zeros: `580.95.05` is 580.95.5, `13.0` is 13.0.0. `None` for anything
/// else.
fn version(text: &str) -> Option<String> {
    let mut parts: Vec<&str> = text.split('.').collect();
    parts.resize(parts.len().max(3), "0");
    let number = |part: &&str| {
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let digits = part.trim_start_matches('0');
        is_number.then(|| if digits.is_empty() { "0".to_owned() } else { digits.to_owned() })
    };
    let numbers: Vec<String> = parts.iter().map(number).collect::<Option<_>>()?;
    let version = numbers.join(".");
    (numbers.len() == 3 && version.len() <= MAX_TEXT).then_some(version)
}

/// NVIDIA's key for an XID, with its number as the value.
const XID: &str = "gpu.nvidia.com/xid";

/// NVIDIA's key for a GPU that is lost or gone.
const LOST: &str = "gpu.nvidia.com/gpu-lost";

/// The taints for these reasons: at most one for each key, from the first reason with that key.
pub(super) fn taints(reasons: &[UnhealthyReason], evict_from_lost: bool) -> Vec<Taint> {
    let plain = |key: &str, value: String| Taint { key: key.to_owned(), value, effect: TaintEffect::NoSchedule };
    let xid = reasons.iter().find_map(|reason| match reason {
        UnhealthyReason::Xid { code, .. } => Some(code.to_string()),
        _ => None,
    });
    let has_key = |reason: &UnhealthyReason| {
        reason.is_loss() || matches!(reason, UnhealthyReason::Xid { .. } | UnhealthyReason::Cordoned(_))
    };
    let other = reasons.iter().find(|reason| !has_key(reason));
    let cordon = reasons.iter().find_map(|reason| match reason {
        UnhealthyReason::Cordoned(cordon) => Some(cordon),
        _ => None,
    });
    let mut taints = Vec::new();
    let effect = |evict| if evict { TaintEffect::NoExecute } else { TaintEffect::NoSchedule };
    if reasons.iter().any(UnhealthyReason::is_loss) {
        taints.push(Taint { effect: effect(evict_from_lost), ..plain(LOST, String::new()) });
    }
    taints.extend(xid.map(|code| plain(XID, code)));
    taints.extend(other.map(|reason| plain(&ours("unhealthy"), reason.label().to_owned())));
    taints
        .extend(cordon.map(|cordon| Taint { effect: effect(cordon.evict), ..plain(&ours("cordoned"), String::new()) }));
    taints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_has_three_numbers_without_leading_zeros() {
        for (text, expected) in [
            ("580.95.05", Some("580.95.5")),
            ("13.0", Some("13.0.0")),
            ("9", Some("9.0.0")),
            ("000.00.007", Some("0.0.7")),
            ("535.54.03.01", None),
            ("580.95.05-rc", None),
            ("580..5", None),
            ("", None),
        ] {
            assert_eq!(version(text).as_deref(), expected, "{text}");
        }
        assert_eq!(version(&"9".repeat(70)), None);
    }
}
