//! NVLinks: direct links by pair, and ports by plane. A GPU's port is its active links to NVSwitches.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::address::PciAddress;
use super::bandwidth;
use super::level::LinkMatrix;
use super::observation::{FabricObservation, GpuObservation, NvLinkRemote};
use super::warning::TopologyWarning;

/// The NVLinks between two GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NvLinks {
    /// The number of direct links; for two GPUs on one plane, plus that of the narrower port.
    pub count: u32,
    /// Their bandwidth, MB/s.
    pub mbps: u32,
}

/// The NVLink side of a node.
pub(super) struct Connected {
    pub pairs: LinkMatrix<NvLinks>,
    /// Each GPU's NVSwitch plane and the bandwidth of its port, MB/s.
    pub ports: Vec<Option<(u32, u32)>>,
}

/// The counts of active links that one GPU reports.
#[derive(Default)]
struct ActiveLinks {
    /// Links to other GPUs, by their places.
    direct: BTreeMap<usize, u32>,
    /// Links to NVSwitches.
    switched: u32,
}

/// Finds the NVLinks between all GPUs, and their ports on NVSwitch planes.
pub(super) fn connect(gpus: &[&GpuObservation], warnings: &mut Vec<TopologyWarning>) -> Connected {
    let reports: Vec<Option<ActiveLinks>> = (0..gpus.len()).map(|index| report(gpus, index, warnings)).collect();
    let rate = |index: usize| gpus.get(index).map_or(0, |gpu| bandwidth::nvlink(gpu.compute_capability));
    let widths: Vec<u32> = reports.iter().map(|report| report.as_ref().map_or(0, |seen| seen.switched)).collect();
    let planes = planes(gpus, &widths, warnings).into_iter().zip(&widths).enumerate();
    let ports = planes.map(|(index, (plane, width))| Some((plane?, width.saturating_mul(rate(index)))));
    let ports: Vec<Option<(u32, u32)>> = ports.collect();
    let port = |index: usize| ports.get(index).copied().flatten();
    let mut pairs = LinkMatrix::zeros(gpus.len());
    let reported = |from: usize, to: usize| Some(reports.get(from)?.as_ref()?.direct.get(&to).copied().unwrap_or(0));
    for (a, b) in (0..gpus.len()).flat_map(|a| (a + 1..gpus.len()).map(move |b| (a, b))) {
        // The smaller count of both ends, or that of one end if the other is unknown.
        let direct = match (reported(a, b), reported(b, a)) {
            (Some(a_to_b), Some(b_to_a)) => {
                if a_to_b != b_to_a
                    && let (Some(a), Some(b)) = (gpus.get(a), gpus.get(b))
                {
                    warnings.push(TopologyWarning::NvLinkOneSided { a: a.pci, b: b.pci, a_to_b, b_to_a });
                }
                a_to_b.min(b_to_a)
            }
            (a_to_b, b_to_a) => a_to_b.or(b_to_a).unwrap_or(0),
        };
        let mut links = NvLinks { count: direct, mbps: direct.saturating_mul(rate(a).min(rate(b))) };
        if let (Some((plane_a, port_a)), Some((plane_b, port_b))) = (port(a), port(b))
            && plane_a == plane_b
        {
            let width = widths.get(a).min(widths.get(b)).copied().unwrap_or(0);
            links.count = links.count.saturating_add(width);
            links.mbps = links.mbps.saturating_add(port_a.min(port_b));
        }
        pairs.set(a, b, links);
    }
    Connected { pairs, ports }
}

/// Sorts the active links of one GPU by their far ends; `None` if NVML did not answer.
fn report(gpus: &[&GpuObservation], index: usize, warnings: &mut Vec<TopologyWarning>) -> Option<ActiveLinks> {
    let gpu = gpus.get(index)?;
    let mut seen = ActiveLinks::default();
    let mut numbers = BTreeSet::new();
    let mut unknown = 0;
    let mut nowhere: BTreeMap<PciAddress, u32> = BTreeMap::new();
    for group in gpu.nvlinks.as_ref()?.iter().filter(|group| group.active) {
        // A link number counts once, even if a file names it several times.
        let links = group.links.iter().filter(|number| numbers.insert(**number)).count();
        let links = u32::try_from(links).unwrap_or(u32::MAX);
        if links == 0 {
            continue;
        }
        match group.remote {
            NvLinkRemote::Switch(_) => seen.switched = seen.switched.saturating_add(links),
            // A link to the processor joins no GPUs.
            NvLinkRemote::Cpu => {}
            NvLinkRemote::Unknown => unknown += links,
            NvLinkRemote::Gpu(pci) => {
                let mut at = gpus.iter().enumerate().filter(|(_, other)| other.pci == pci).map(|(other, _)| other);
                match (at.next(), at.next()) {
                    (Some(other), None) => *seen.direct.entry(other).or_default() += links,
                    // Two GPUs claim the address; that has its own warning.
                    (Some(_), Some(_)) => {}
                    (None, _) => *nowhere.entry(pci).or_default() += links,
                }
            }
        }
    }
    if let Some(links) = seen.direct.remove(&index) {
        warnings.push(TopologyWarning::NvLinkToItself(gpu.pci, links));
    }
    for (remote, links) in nowhere {
        warnings.push(TopologyWarning::NvLinkToNowhere { pci: gpu.pci, links, remote });
    }
    if unknown > 0 {
        warnings.push(TopologyWarning::NvLinkUnknownRemote(gpu.pci, unknown));
    }
    if gpu.compute_capability.is_none() && (seen.switched > 0 || !seen.direct.is_empty()) {
        warnings.push(TopologyWarning::NvLinkUnknownRate(gpu.pci, bandwidth::UNKNOWN_NVLINK));
    }
    Some(seen)
}

/// The plane of each GPU that has links to an NVSwitch: one plane for each fabric clique that the driver reports.
///
/// A machine without a reported fabric (before Hopper, or in a VM) is one plane. If all GPUs that report a clique
/// report the same one, the other GPUs count as part of it.
fn planes(gpus: &[&GpuObservation], widths: &[u32], warnings: &mut Vec<TopologyWarning>) -> Vec<Option<u32>> {
    let switched = gpus.iter().zip(widths).filter(|(_, width)| **width > 0);
    let cliques: BTreeSet<&FabricObservation> = switched.filter_map(|(gpu, _)| gpu.fabric.as_ref()).collect();
    let only = if cliques.len() == 1 { cliques.first().copied() } else { None };
    let mut numbers: BTreeMap<Option<&FabricObservation>, u32> = BTreeMap::new();
    gpus.iter()
        .zip(widths)
        .map(|(gpu, width)| {
            if *width == 0 {
                return None;
            }
            let clique = gpu.fabric.as_ref().or(only);
            if gpu.fabric.is_none() && only.is_some() {
                warnings.push(TopologyWarning::FabricUnreported(gpu.pci));
            }
            let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
            Some(*numbers.entry(clique).or_insert(next))
        })
        .collect()
}
