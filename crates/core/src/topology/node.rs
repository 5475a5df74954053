//! [`NodeTopology`]: the immutable graph of a node, and its assembly from observations.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use serde::Serialize;

use super::address::{GpuUuid, Guid, NumaNodeId, PackageId, PciAddress};
use super::device_names::{self, Hardware};
use super::level::{LinkMatrix, Rank, TopologyLevel};
use super::mig::{MigDevice, MigObservation, MigProfile};
use super::nvlink::{self, NvLinks};
use super::observation::{DisplayClass, GpuObservation, NicKind, NicObservation, NodeObservation, PcieLink};
use super::pcie::{Function, PciTree, Place};
use super::rails;
use super::warning::{self, TopologyWarning};

/// The GPUs of a node and their connections. It never changes; a new observation makes a new one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeTopology {
    gpus: Vec<Gpu>,
    pairs: LinkMatrix<Pair>,
    mig_devices: Vec<MigDevice>,
    nics: Vec<Nic>,
    cpu_nodes: BTreeMap<NumaNodeId, Option<PackageId>>,
    /// The hardware by its DRA name, as [`device_names::names`] finds it. Kept because every change of the node's state
    /// looks up the device of each claim.
    pub(super) names: BTreeMap<String, Hardware>,
}

/// The connection between two GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pair {
    rank: Rank,
    nvlinks: NvLinks,
    /// MB/s.
    pcie: u32,
}

/// One GPU of the graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// NVML's index.
    pub index: u32,
    /// NVML's UUID, which is the GPU's device id.
    pub uuid: GpuUuid,
    /// Its PCI address.
    pub pci: PciAddress,
    /// The product name.
    pub model: Option<String>,
    /// The NUMA node, which may have memory only.
    pub numa: Option<NumaNodeId>,
    /// The NUMA node to which the kubelet may align the GPU: its own if that has CPUs, otherwise the only node of its
    /// package with CPUs.
    #[serde(skip)]
    pub cpu_node: Option<NumaNodeId>,
    /// The CPU package.
    pub package: Option<PackageId>,
    /// The NVSwitch plane that it has a port on: a number that linkwise gives, from 0.
    pub nvswitch_plane: Option<u32>,
    /// Its rail, from 0: the place of its nearest RDMA NIC among the NICs that serve GPUs.
    pub rail: Option<u32>,
    /// True if NVML or the node file says which NVLinks it has.
    #[serde(skip)]
    pub nvlinks_known: bool,
    /// The bandwidth of its port on the NVSwitch plane, MB/s; 0 without a port.
    #[serde(skip)]
    pub nvswitch_port: u32,
    /// The observation of this GPU, without its NVLinks, its MIG devices and the facts about pairs of GPUs.
    #[serde(skip)]
    pub facts: Arc<GpuObservation>,
    /// The PCIe root above it, by the kernel's name, such as `pci0000:17`.
    #[serde(skip)]
    pub pcie_root: Option<String>,
    /// The PCIe switches above it, the nearest first, by the addresses of their upstream ports; those of unknown
    /// address are left out.
    #[serde(skip)]
    pub switches: Vec<PciAddress>,
    /// True if MIG mode is on. Then the GPU itself runs nothing; its MIG devices do.
    #[serde(skip)]
    pub mig_enabled: bool,
    /// Its PCI class, if the host shows it.
    #[serde(skip)]
    pub class: Option<DisplayClass>,
}

/// One NIC: a PCI function with its network interfaces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// The interfaces' names, RDMA devices first.
    pub names: Vec<String>,
    /// RDMA if any of its interfaces is.
    pub kind: NicKind,
    /// Its PCI address.
    pub pci: Option<PciAddress>,
    /// The rate of its RDMA ports together, or of its Ethernet ports if it has no RDMA port, Mbit/s.
    pub mbps: Option<u32>,
    /// The GUID of its card, if it has RDMA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_guid: Option<Guid>,
    /// The GUIDs of its InfiniBand ports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port_guids: Vec<Guid>,
    /// The NUMA node.
    pub numa: Option<NumaNodeId>,
    /// The PCIe root above it, as [`Gpu::pcie_root`].
    #[serde(skip)]
    pub pcie_root: Option<String>,
    /// Its rank to each GPU, in the order of the GPUs.
    pub level: Vec<Rank>,
}

impl NodeTopology {
    /// The most GPUs that a node can have: a set of them is a `u64`.
    pub const MAX_GPUS: usize = 64;

    /// Builds the graph. Any observation makes a graph, and each oddity in it a warning.
    pub fn assemble(observed: &NodeObservation) -> (Self, Vec<TopologyWarning>) {
        let mut warnings: Vec<TopologyWarning> =
            observed.failures.iter().cloned().map(TopologyWarning::Probe).collect();
        let seen = accept(&observed.gpus, &mut warnings);
        let mut tree = PciTree::new(&observed.host, &mut warnings);
        let places: Vec<Place> = seen.iter().map(|gpu| place(gpu, &mut tree, &mut warnings)).collect();
        let links = nvlink::connect(&seen, &mut warnings);
        let nics = nics(&tree, &places);
        let rails = rails::rails(seen.len(), &nics);
        let parts = seen.iter().zip(&places).zip(&links.ports).zip(rails);
        let gpus = parts.map(|(((gpu, place), port), rail)| Gpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci,
            model: gpu.model.clone(),
            numa: place.numa,
            cpu_node: tree.cpu_node(*place),
            package: place.package,
            nvswitch_plane: port.map(|(plane, _)| plane),
            rail,
            nvlinks_known: gpu.nvlinks.is_some(),
            nvswitch_port: port.map_or(0, |(_, carries)| carries),
            facts: Arc::new(facts(gpu)),
            pcie_root: tree.root(*place),
            switches: tree.switches(*place),
            mig_enabled: gpu.mig.as_ref().is_some_and(|mig| mig.enabled),
            class: tree.class(*place),
        });
        let cpu_nodes = observed.host.numa_nodes.iter().filter(|node| !node.cpus.is_empty());
        let mut topology = Self {
            gpus: gpus.collect(),
            pairs: LinkMatrix::zeros(seen.len()),
            mig_devices: mig_devices(&seen, &mut warnings),
            nics,
            cpu_nodes: cpu_nodes.map(|node| (node.id, node.package)).collect(),
            names: BTreeMap::new(),
        };
        for (a, (first, &from)) in seen.iter().zip(&places).enumerate() {
            for (b, (second, &to)) in seen.iter().zip(&places).enumerate().skip(a + 1) {
                let level = level(&tree, (first, from), (second, to), &mut warnings);
                let rank = Rank::new(level, from.shares_package(to));
                let hops = tree.path(from, to).unwrap_or_else(|| narrower(first.pcie, second.pcie));
                let pair = Pair { rank, nvlinks: links.pairs.get(a, b), pcie: tree.pair_bandwidth(hops, rank) };
                topology.pairs.set(a, b, pair);
            }
        }
        warnings.extend(warning::p2p_refused(&topology, &seen));
        let in_tree = |place: usize| places.get(place).is_some_and(|place: &Place| place.function.is_some());
        warnings.extend(warning::odd_gpus(&topology, &seen, in_tree));
        (topology.with_names(), warnings)
    }

    /// Computes the names in DRA.
    fn with_names(self) -> Self {
        Self { names: device_names::names(&self.gpus, &self.mig_devices), ..self }
    }

    /// The GPUs, by PCI address. The other functions take places in this list.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The place of a GPU.
    pub fn position(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid == *uuid)
    }

    /// The distance between two GPUs on the PCIe side; nearest for a GPU and itself.
    pub fn rank(&self, a: usize, b: usize) -> Rank {
        self.pairs.get(a, b).rank
    }

    /// The number of direct NVLinks between two GPUs; on one NVSwitch plane, plus that of the narrower port.
    pub fn nvlink_count(&self, a: usize, b: usize) -> u32 {
        self.pairs.get(a, b).nvlinks.count
    }

    /// The bandwidth of the NVLinks between two GPUs, MB/s.
    pub fn nvlink(&self, a: usize, b: usize) -> u32 {
        self.pairs.get(a, b).nvlinks.mbps
    }

    /// The bandwidth of the PCIe path between two GPUs, MB/s.
    pub fn pcie(&self, a: usize, b: usize) -> u32 {
        self.pairs.get(a, b).pcie
    }

    /// The bandwidth between two GPUs, MB/s: over NVLink if there is any, otherwise over PCIe.
    pub fn bandwidth(&self, a: usize, b: usize) -> u32 {
        match self.nvlink(a, b) {
            0 => self.pcie(a, b),
            nvlink => nvlink,
        }
    }

    /// The bus bandwidth of an all-reduce with NVLink SHARP over some GPUs, MB/s, by NCCL's model. `None` where NCCL
    /// has no NVLink SHARP: for fewer than two GPUs, GPUs that are not all behind one NVSwitch plane, a GPU older than
    /// Hopper or of unknown capability, or one in MIG mode.
    pub fn nvls(&self, gpus: impl Iterator<Item = usize>) -> Option<u64> {
        let gpus: Vec<&Gpu> = gpus.map(|place| self.gpus.get(place)).collect::<Option<_>>()?;
        let plane = gpus.first()?.nvswitch_plane?;
        let fits = |gpu: &&Gpu| gpu.nvswitch_plane == Some(plane) && !gpu.mig_enabled;
        let capabilities: Vec<_> = gpus.iter().map(|gpu| gpu.facts.compute_capability).collect::<Option<_>>()?;
        let port = gpus.iter().map(|gpu| gpu.nvswitch_port).min()?;
        let lowest = capabilities.into_iter().min_by_key(|capability| (capability.major, capability.minor))?;
        if gpus.iter().all(fits) { super::bandwidth::nvls(lowest, port, gpus.len()) } else { None }
    }

    /// Returns true if the NVLinks of all GPUs are known, or there are fewer than two GPUs.
    pub fn knows_nvlinks(&self) -> bool {
        self.gpus.len() < 2 || self.gpus.iter().all(|gpu| gpu.nvlinks_known)
    }

    /// Returns true if the NVLinks of all GPUs and the rates of their links are known, or there are fewer than two
    /// GPUs. A GPU's model or compute capability gives the rates; for a GPU without NVLinks its PCIe link is enough.
    pub fn knows_rates(&self) -> bool {
        let has_none = |place: usize| (0..self.gpus.len()).all(|other| self.nvlink_count(place, other) == 0);
        let has_rate = |(place, gpu): (usize, &Gpu)| {
            gpu.model.is_some() || gpu.facts.compute_capability.is_some() || gpu.facts.pcie.is_some() && has_none(place)
        };
        self.knows_nvlinks() && (self.gpus.len() < 2 || self.gpus.iter().enumerate().all(has_rate))
    }

    /// The MIG devices of all GPUs in MIG mode, by the places of their GPUs and then by index.
    pub fn mig_devices(&self) -> &[MigDevice] {
        &self.mig_devices
    }

    /// The NICs.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// The NICs nearest to a GPU, as places in [`Self::nics`]: those of the smallest rank, if that is PHB or closer,
    /// and of these the fastest ones and those of unknown rate.
    pub fn nearest_nics(&self, gpu: usize) -> Vec<usize> {
        nearest(self.nics.iter().enumerate(), gpu, |_| ())
    }

    /// The NUMA nodes that have CPUs, with their package. Only these are reported to the kubelet.
    pub fn cpu_nodes(&self) -> &BTreeMap<NumaNodeId, Option<PackageId>> {
        &self.cpu_nodes
    }

    /// The graph of some of the GPUs, in the order given, with the same connections. Unknown places are left out.
    pub fn restricted(&self, places: &[usize]) -> Self {
        let places: Vec<usize> = places.iter().copied().filter(|place| *place < self.gpus.len()).collect();
        let nics = self.nics.iter().map(|nic| {
            let level = places.iter().filter_map(|place| nic.level.get(*place).copied()).collect();
            Nic { level, ..nic.clone() }
        });
        let mig_devices = places.iter().enumerate().flat_map(|(parent, place)| {
            let own = self.mig_devices.iter().filter(move |device| device.parent == *place);
            own.map(move |device| MigDevice { parent, ..device.clone() })
        });
        Self {
            gpus: places.iter().filter_map(|place| self.gpus.get(*place).cloned()).collect(),
            pairs: self.pairs.restricted(&places),
            mig_devices: mig_devices.collect(),
            nics: nics.collect(),
            cpu_nodes: self.cpu_nodes.clone(),
            names: BTreeMap::new(),
        }
        .with_names()
    }

    /// The same graph without MIG devices: GPUs in MIG mode stay in it.
    #[must_use]
    pub fn without_mig_devices(&self) -> Self {
        Self { mig_devices: Vec::new(), ..self.clone() }.with_names()
    }

    /// The level of a pair as nvidia-smi prints it: `NV4`, `PIX`, `SYS` ...; `X` for a GPU and itself.
    pub fn symbol(&self, a: usize, b: usize) -> String {
        match self.nvlink_count(a, b) {
            _ if a == b => "X".to_owned(),
            0 => self.rank(a, b).symbol().to_owned(),
            links => format!("NV{links}"),
        }
    }
}

/// The numbers of the NICs nearest to a GPU: of those at the smallest rank, if that is PHB or closer, the ones with the
/// least `then`, and of these the fastest ones and those of unknown rate.
pub(super) fn nearest<'a, D: Ord>(
    nics: impl Iterator<Item = (usize, &'a Nic)> + Clone,
    gpu: usize,
    then: impl Fn(&Nic) -> D,
) -> Vec<usize> {
    let distance = |nic: &Nic| (nic.level.get(gpu).copied().unwrap_or(Rank::FARTHEST), then(nic));
    let least = nics.clone().map(|(_, nic)| distance(nic)).min().filter(|(rank, _)| *rank <= Rank::HOST_BRIDGE);
    let near = nics.filter(|(_, nic)| least.as_ref() == Some(&distance(nic)));
    let fastest = near.clone().filter_map(|(_, nic)| nic.mbps).max();
    near.filter(|(_, nic)| nic.mbps.is_none() || nic.mbps == fastest).map(|(number, _)| number).collect()
}

/// At most 64 GPUs with distinct UUIDs, by PCI address.
fn accept<'a>(observed: &'a [GpuObservation], warnings: &mut Vec<TopologyWarning>) -> Vec<&'a GpuObservation> {
    let mut gpus: Vec<&GpuObservation> = observed.iter().collect();
    gpus.sort_by(|a, b| (a.pci, &a.uuid, a.index).cmp(&(b.pci, &b.uuid, b.index)));
    let mut uuids: BTreeMap<&GpuUuid, PciAddress> = BTreeMap::new();
    gpus.retain(|gpu| match uuids.get(&gpu.uuid) {
        Some(&other) => {
            warnings.push(TopologyWarning::DuplicateUuid { pci: gpu.pci, other, uuid: gpu.uuid.clone() });
            false
        }
        None => uuids.insert(&gpu.uuid, gpu.pci).is_none(),
    });
    if gpus.len() > NodeTopology::MAX_GPUS {
        warnings.push(TopologyWarning::TooManyGpus(gpus.len()));
        gpus.truncate(NodeTopology::MAX_GPUS);
    }
    for (a, b) in gpus.iter().zip(gpus.iter().skip(1)).filter(|(a, b)| a.pci == b.pci) {
        warnings.push(TopologyWarning::DuplicateAddress { pci: a.pci, a: a.uuid.clone(), b: b.uuid.clone() });
    }
    gpus
}

/// The observation of a GPU, as [`Gpu::facts`] has it.
fn facts(gpu: &GpuObservation) -> GpuObservation {
    let (common_ancestors, p2p_refused) = (BTreeMap::new(), BTreeMap::new());
    let mig = gpu.mig.clone().map(|mig| MigObservation { devices: Vec::new(), ..mig });
    GpuObservation { nvlinks: None, mig, common_ancestors, p2p_refused, ..gpu.clone() }
}

/// Finds a GPU in the host's tree; if it is not there, NVML's values count.
fn place(gpu: &GpuObservation, tree: &mut PciTree<'_>, warnings: &mut Vec<TopologyWarning>) -> Place {
    let Some(place) = tree.find(gpu.pci) else {
        warnings.push(TopologyWarning::NotInHostTree(gpu.pci));
        let package = gpu.numa.and_then(|numa| tree.package_of(numa));
        return Place { function: None, numa: gpu.numa, package };
    };
    tree.fill_link(place, gpu.pcie);
    // On a machine with one NUMA node, NVML names that node even if the kernel says -1. If the GPU's own memory is a
    // NUMA node, NVML may name the node with CPUs instead. Neither is a disagreement.
    if let Some(nvml) = gpu.numa
        && place.numa != Some(nvml)
        && tree.cpu_node(place) != Some(nvml)
        && tree.has_cpus.len() > 1
    {
        warnings.push(TopologyWarning::NumaDisagreement { pci: gpu.pci, host: place.numa, nvml });
    }
    place
}

/// The level of a pair of GPUs: from the host's tree if both are in it, otherwise NVML's common ancestor.
fn level(
    tree: &PciTree<'_>,
    (a, from): (&GpuObservation, Place),
    (b, to): (&GpuObservation, Place),
    warnings: &mut Vec<TopologyWarning>,
) -> TopologyLevel {
    let nvml = a.common_ancestors.get(&b.index).or_else(|| b.common_ancestors.get(&a.index)).copied();
    let host = tree.level(from, to);
    if let (Some(host), Some(nvml)) = (host, nvml)
        && host.symbol() != nvml.symbol()
    {
        warnings.push(TopologyWarning::LevelDisagreement { a: a.pci, b: b.pci, host, nvml });
    }
    host.or(nvml).unwrap_or_else(|| {
        warnings.push(TopologyWarning::UnknownLevel(a.pci, b.pci));
        TopologyLevel::System
    })
}

/// The MIG devices of the GPUs in MIG mode. The second of two with one UUID is left out, because a UUID is one device
/// id.
fn mig_devices(gpus: &[&GpuObservation], warnings: &mut Vec<TopologyWarning>) -> Vec<MigDevice> {
    let mut uuids = BTreeSet::new();
    let mut devices = Vec::new();
    for (parent, gpu) in gpus.iter().enumerate() {
        let mut own: Vec<_> = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.devices).collect();
        own.sort_by_key(|device| device.index);
        for device in own {
            if !uuids.insert(&device.uuid) {
                warnings.push(TopologyWarning::DuplicateMigUuid(gpu.pci, device.uuid.clone()));
                continue;
            }
            devices.push(MigDevice {
                parent,
                index: device.index,
                uuid: device.uuid.clone(),
                gpu_instance: device.gpu_instance,
                compute_instance: device.compute_instance,
                profile: MigProfile::new(device, gpu.memory_mib),
                facts: Arc::new(device.clone()),
            });
        }
    }
    devices
}

/// The bandwidth of the narrower of two links by NVML's maxima, MB/s.
fn narrower(a: Option<PcieLink>, b: Option<PcieLink>) -> u32 {
    let carries =
        |link: Option<PcieLink>| link.and_then(super::bandwidth::pcie).unwrap_or(super::bandwidth::UNKNOWN_HOP);
    carries(a).min(carries(b))
}

/// The NICs with their ranks to the GPUs: the interfaces of one PCI function are one NIC.
fn nics(tree: &PciTree<'_>, gpus: &[Place]) -> Vec<Nic> {
    let mut nics = Vec::new();
    for Function { seen, place, .. } in &tree.functions {
        let place = *place;
        let mut ports: Vec<&NicObservation> = seen.nics.iter().collect();
        ports.sort_by_key(|port| (port.kind, &port.name));
        let Some(first) = ports.first() else { continue };
        // One port is often both mlx5_0 and eth0: its rate counts once, as RDMA if it has RDMA.
        let rates = ports.iter().filter(|port| port.kind == first.kind).filter_map(|port| port.mbps);
        let mbps = rates.reduce(u32::saturating_add);
        let rank = |gpu: &Place| {
            let apart = || if tree.share_node(*gpu, place) { TopologyLevel::Node } else { TopologyLevel::System };
            Rank::new(tree.level(place, *gpu).unwrap_or_else(apart), place.shares_package(*gpu))
        };
        nics.push(Nic {
            names: ports.iter().map(|port| port.name.clone()).collect(),
            kind: first.kind,
            pci: seen.pci,
            mbps,
            system_guid: ports.iter().find_map(|port| port.system_guid),
            port_guids: ports.iter().flat_map(|port| port.port_guids.iter().copied()).collect(),
            numa: place.numa,
            pcie_root: tree.root(place),
            level: gpus.iter().map(rank).collect(),
        });
    }
    nics
}
