//! [`TopologyWarning`]: oddities that the assembly noticed and worked around, among them P2P that the driver refuses.
//!
//! The choice of GPUs does not depend on refused P2P. NCCL wants P2P for reading and writing (`ncclTopoCheckP2p` in its
//! src/graph/paths.cc) if the path between two GPUs is NVLink or PCIe switches alone; farther apart it uses no P2P by
//! default. If P2P is refused over PCIe switches, the traffic goes through the host's memory; over NVLink, NCCL ends
//! with an error.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::address::{GpuUuid, MigUuid, NumaNodeId, PciAddress};
use super::level::{Rank, TopologyLevel};
use super::node::NodeTopology;
use super::observation::{GpuObservation, ProbeFailure};
use crate::quote::one_line;
use crate::words::list;

/// An oddity in the observations. The node keeps working.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyWarning {
    /// A call that failed.
    #[error("{}: {}: {}", one_line(&.0.subject), one_line(&.0.call), one_line(&.0.error))]
    Probe(ProbeFailure),
    /// Two GPUs have one UUID, which is one device id: the second one cannot be offered.
    #[error("GPU {pci}: left out, because its UUID {uuid} is also that of GPU {other}")]
    DuplicateUuid {
        /// The GPU left out.
        pci: PciAddress,
        /// The GPU kept.
        other: PciAddress,
        /// The UUID of both.
        uuid: GpuUuid,
    },
    /// Two MIG devices have one UUID, which is one device id: the second one cannot be offered.
    #[error("GPU {0}: one of its MIG devices is left out, because another MIG device has the same UUID, {1}")]
    DuplicateMigUuid(PciAddress, MigUuid),
    /// Two GPUs have one address. Both are kept; links to that address count for neither.
    #[error("GPUs {a} and {b} both claim PCI address {pci}; both are kept, links to it count for neither")]
    DuplicateAddress {
        /// The address.
        pci: PciAddress,
        /// One GPU.
        a: GpuUuid,
        /// The other.
        b: GpuUuid,
    },
    /// More GPUs than a set can hold.
    #[error("{0} GPUs were seen, but a node can have at most {max}; the rest is left out", max = u64::BITS)]
    TooManyGpus(usize),
    /// A GPU that the host's PCI tree lacks.
    #[error("GPU {0}: not in the host's PCI tree; its levels come from NVML")]
    NotInHostTree(PciAddress),
    /// A pair whose level is unknown.
    #[error("GPUs {0} and {1}: neither the host's PCI tree nor NVML says how far apart they are; taken as SYS")]
    UnknownLevel(PciAddress, PciAddress),
    /// Two sources report different levels. The host's PCI tree is believed.
    #[error("GPUs {a} and {b}: the host's PCI tree says {}, NVML says {}; the tree is believed",
        .host.symbol(), .nvml.symbol())]
    LevelDisagreement {
        /// One GPU.
        a: PciAddress,
        /// The other.
        b: PciAddress,
        /// The level from the PCI tree.
        host: TopologyLevel,
        /// The level from NVML.
        nvml: TopologyLevel,
    },
    /// Two sources report different NUMA nodes. The kernel is believed.
    #[error("GPU {pci}: the kernel says NUMA node {}, NVML says {nvml}; the kernel is believed",
        .host.map_or("-1".to_owned(), |n| n.to_string()))]
    NumaDisagreement {
        /// The GPU.
        pci: PciAddress,
        /// The node from the kernel.
        host: Option<NumaNodeId>,
        /// The node from NVML.
        nvml: NumaNodeId,
    },
    /// An NVLink whose other end is not a GPU of this node.
    #[error("GPU {pci}: {links} NVLink(s) lead to {remote}, where no GPU of this node is; not counted")]
    NvLinkToNowhere {
        /// The GPU.
        pci: PciAddress,
        /// The number of links.
        links: u32,
        /// The address at the other end.
        remote: PciAddress,
    },
    /// An NVLink from a GPU to itself.
    #[error("GPU {0}: {1} NVLink(s) lead to itself; not counted")]
    NvLinkToItself(PciAddress, u32),
    /// An active NVLink whose other end NVML does not report.
    #[error("GPU {0}: the other end of {1} NVLink(s) is unknown; not counted")]
    NvLinkUnknownRemote(PciAddress, u32),
    /// The two ends of a pair report different numbers of NVLinks. The smaller is believed.
    #[error("GPUs {a} and {b}: {a_to_b} NVLink(s) seen from one end, {b_to_a} from the other; {} counted",
        .a_to_b.min(.b_to_a))]
    NvLinkOneSided {
        /// One GPU.
        a: PciAddress,
        /// The other.
        b: PciAddress,
        /// Links that `a` reports to `b`.
        a_to_b: u32,
        /// Links that `b` reports to `a`.
        b_to_a: u32,
    },
    /// A GPU with NVLinks of unknown generation.
    #[error("GPU {0}: its compute capability is unknown, each of its NVLinks is taken as {1} MB/s")]
    NvLinkUnknownRate(PciAddress, u32),
    /// A GPU behind an NVSwitch that reports no fabric, while all GPUs that report one report the same.
    #[error("GPU {0}: behind an NVSwitch but reports no fabric; taken to be in the fabric that the other GPUs report")]
    FabricUnreported(PciAddress),
    /// Pairs of GPUs between which the driver refuses P2P, where NCCL would use it.
    #[error("{}: no P2P, {refusal}: NCCL {}", named_pairs(pairs),
        if *by_nvlink { "ends with an error there, although NVLink joins them" }
        else { "goes through the host's memory" })]
    P2pRefused {
        /// The driver's reason.
        refusal: P2pRefusal,
        /// True if NVLink joins the pairs, directly or through switches.
        by_nvlink: bool,
        /// The pairs.
        pairs: Vec<(PciAddress, PciAddress)>,
    },
    /// GPUs whose NVLinks are unknown.
    #[error("GPUs {}: their NVLinks are unknown, and taken as none: bandwidths are those of PCIe", list(.0))]
    NvLinksUnknown(Vec<PciAddress>),
    /// One GPU that differs from all others of its model.
    #[error("GPU {pci} is the odd one of {of} GPUs of its model: {oddity}")]
    OddGpu {
        /// The GPU.
        pci: PciAddress,
        /// Its UUID.
        uuid: GpuUuid,
        /// The number of GPUs of its model, itself included.
        of: usize,
        /// The difference.
        oddity: Oddity,
    },
    /// Two functions of the host's PCI tree at one address.
    #[error("the host's PCI tree lists {0} twice; the first place is used")]
    DuplicateFunction(PciAddress),
}

/// The difference between one GPU and all others of its model. If the estimated bandwidths show it, a request for one
/// GPU takes that GPU first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Oddity {
    /// Fewer NVLinks are up.
    #[error("{} of its NVLinks are up, {} on every other GPU; sets without it have full bandwidth", .0.own, .0.others)]
    NvLinks(Compared),
    /// The PCIe link has fewer lanes.
    #[error("its PCIe link has {} lanes, {} on every other GPU; sets without it have full bandwidth",
        .0.own, .0.others)]
    PcieWidth(Compared),
    /// The PCIe link has a lower rate, MT/s a lane.
    #[error("its PCIe link can do {} MT/s, {} on every other GPU; sets without it have full bandwidth",
        .0.own, .0.others)]
    PcieRate(Compared),
    /// The driver refuses P2P between it and every other GPU.
    #[error("the driver refuses P2P between it and every other GPU; sets without it have P2P")]
    NoP2p,
    /// Its host bridge has no RDMA NIC, unlike that of every other GPU.
    #[error("no RDMA NIC is at its host bridge; its traffic to other hosts goes through the processor")]
    NoNic,
}

/// A value of the odd GPU, and the one that every other GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// The odd GPU's value.
    pub own: u32,
    /// The value of every other GPU.
    pub others: u32,
}

impl Oddity {
    /// The difference as a metric's label.
    pub fn label(self) -> &'static str {
        match self {
            Self::NvLinks(_) => "nvlinks",
            Self::PcieWidth(_) => "pcie_width",
            Self::PcieRate(_) => "pcie_rate",
            Self::NoP2p => "p2p",
            Self::NoNic => "nic",
        }
    }
}

/// The fewest GPUs of a model among which one can be odd: of two, neither is.
const MIN_OF_MODEL: usize = 3;

/// Finds the GPUs of unknown NVLinks, and for each kind of difference the one GPU that differs from all others of its
/// model.
pub(super) fn odd_gpus(
    topology: &NodeTopology,
    seen: &[&GpuObservation],
    in_tree: impl Fn(usize) -> bool,
) -> Vec<TopologyWarning> {
    let mut warnings = Vec::new();
    if !topology.knows_nvlinks() {
        let unknown = topology.gpus().iter().filter(|gpu| !gpu.nvlinks_known);
        warnings.push(TopologyWarning::NvLinksUnknown(unknown.map(|gpu| gpu.pci).collect()));
    }
    let mut models: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, gpu) in seen.iter().enumerate() {
        models.entry(gpu.model.as_deref().unwrap_or_default()).or_default().push(place);
    }
    models.remove("");
    let observed = |place: usize| seen.get(place).copied();
    let nvlinks = |place: usize| {
        let up = observed(place)?.nvlinks.as_ref()?.iter().filter(|group| group.active);
        u32::try_from(up.map(|group| group.links.len()).sum::<usize>()).ok()
    };
    let width = |place: usize| Some(observed(place)?.pcie?.width);
    let rate = |place: usize| Some(observed(place)?.pcie?.mts);
    let is_refused = |a: usize, b: usize| {
        let (one, two) = (observed(a)?, observed(b)?);
        Some(one.p2p_refused.contains_key(&two.index) || two.p2p_refused.contains_key(&one.index))
    };
    for places in models.into_values().filter(|places| places.len() >= MIN_OF_MODEL) {
        let has_p2p = |place: usize| {
            let mut others = places.iter().filter(|other| **other != place);
            Some(u32::from(!others.all(|other| is_refused(place, *other) == Some(true))))
        };
        let has_nic = |place: usize| {
            topology.gpus().get(place).filter(|_| in_tree(place)).map(|gpu| u32::from(gpu.rail.is_some()))
        };
        let odd = [
            odd_one(&places, nvlinks).map(|(place, compared)| (place, Oddity::NvLinks(compared))),
            odd_one(&places, width).map(|(place, compared)| (place, Oddity::PcieWidth(compared))),
            odd_one(&places, rate).map(|(place, compared)| (place, Oddity::PcieRate(compared))),
            odd_one(&places, has_p2p).map(|(place, ..)| (place, Oddity::NoP2p)),
            odd_one(&places, has_nic).map(|(place, ..)| (place, Oddity::NoNic)),
        ];
        warnings.extend(odd.into_iter().flatten().filter_map(|(place, oddity)| {
            let GpuObservation { pci, uuid, .. } = observed(place)?;
            Some(TopologyWarning::OddGpu { pci: *pci, uuid: uuid.clone(), of: places.len(), oddity })
        }));
    }
    warnings
}

/// Finds the one place whose value is below that of all other places, if these have the same value. `None` also if a
/// value is unknown.
fn odd_one(places: &[usize], value: impl Fn(usize) -> Option<u32>) -> Option<(usize, Compared)> {
    let values: Vec<(usize, u32)> = places.iter().map(|place| Some((*place, value(*place)?))).collect::<Option<_>>()?;
    let &(place, own) = values.iter().min_by_key(|(_, value)| *value)?;
    let mut rest = values.iter().filter(|(other, _)| *other != place).map(|(_, value)| *value);
    let others = rest.next()?;
    (own < others && rest.all(|value| value == others)).then_some((place, Compared { own, others }))
}

/// Names the pairs, but only the first few, because the driver may refuse P2P between all GPUs of a node.
fn named_pairs(pairs: &[(PciAddress, PciAddress)]) -> String {
    /// The most pairs that are named.
    const MAX_NAMED: usize = 4;
    let named = list(pairs.iter().take(MAX_NAMED).map(|(one, two)| format!("{one} and {two}")));
    let more = match pairs.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        1 => ", and 1 more pair".to_owned(),
        more => format!(", and {more} more pairs"),
    };
    format!("GPUs {named}{more}")
}

/// Finds the refusals that NCCL would notice, by path (NVLink or PCIe) and reason. GPUs in MIG mode need no P2P.
pub(super) fn p2p_refused(topology: &NodeTopology, seen: &[&GpuObservation]) -> Vec<TopologyWarning> {
    let mut found: BTreeMap<(bool, P2pRefusal), Vec<_>> = BTreeMap::new();
    for (a, (one, first)) in seen.iter().zip(topology.gpus()).enumerate() {
        for (b, (two, second)) in seen.iter().zip(topology.gpus()).enumerate().skip(a + 1) {
            let refusal = one.p2p_refused.get(&two.index).or_else(|| two.p2p_refused.get(&one.index));
            let Some(refusal) = refusal.filter(|_| !first.mig_enabled && !second.mig_enabled) else { continue };
            let by_nvlink = topology.nvlink_count(a, b) > 0;
            if by_nvlink || topology.rank(a, b) <= Rank::PCIE_SWITCHES {
                found.entry((by_nvlink, *refusal)).or_default().push((one.pci, two.pci));
            }
        }
    }
    let warning = |((by_nvlink, refusal), pairs)| TopologyWarning::P2pRefused { refusal, by_nvlink, pairs };
    found.into_iter().map(warning).collect()
}

/// The driver's reason for refusing P2P, `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pRefusal {
    /// NVML 1.
    #[error("the chipset does not support it")]
    Chipset,
    /// NVML 2.
    #[error("a GPU does not support it")]
    Gpu,
    /// NVML 3.
    #[error("the way between their root ports does not support it")]
    Topology,
    /// NVML 4.
    #[error("a setting of the driver disables it")]
    Setting,
    /// NVML 5.
    #[error("it is not supported")]
    NotSupported,
    /// NVML 6, which NCCL takes for a refusal too.
    #[error("its status is unknown")]
    Unknown,
}

impl P2pRefusal {
    /// Reads NVML's number of a status: `None` for OK, and for a number that NVML does not define.
    pub fn from_nvml(number: u32) -> Option<Self> {
        let refusals = [Self::Chipset, Self::Gpu, Self::Topology, Self::Setting, Self::NotSupported, Self::Unknown];
        refusals.get(usize::try_from(number.checked_sub(1)?).ok()?).copied()
    }
}
