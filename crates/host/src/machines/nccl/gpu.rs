//! `gpu`, `nvlink`: the GPUs by NVML's index, their capability and their NVLinks.

use std::collections::BTreeSet;

use super::Notes;
use crate::machines::unnamed_gpu;
use crate::machines::xml::{Element, below, name};
use linkwise_core::quote::excerpt;
use linkwise_core::topology::{
    ComputeCapability, GpuObservation, NvLinkObservation, NvLinkRemote, PciAddress, PcieLink,
};

/// The most NVLinks that are accepted for one GPU. Real GPUs have at most 18.
const MAX_LINKS: u32 = 64;

pub(super) struct Candidate<'d> {
    pub pci: PciAddress,
    pub link: Option<PcieLink>,
    /// Its `pci` element.
    pub function: Element<'d>,
    /// Its `gpu` element, which hand-made files leave out.
    pub element: Option<Element<'d>>,
}

/// The GPUs in the order of their indices.
pub(super) fn observe(mut candidates: Vec<Candidate<'_>>, notes: &mut Notes) -> Vec<GpuObservation> {
    // NVML numbers GPUs by PCI address: this is the order of GPUs without an index.
    candidates.sort_by_key(|gpu| (gpu.pci, gpu.function.range().start));
    let mut addresses = BTreeSet::new();
    candidates.retain(|gpu| {
        let first = addresses.insert(gpu.pci);
        if !first {
            notes.add(gpu.function, "another GPU at this PCI address; the first is kept");
        }
        first
    });
    let indices = indices(&candidates, notes);
    let mut gpus: Vec<GpuObservation> = candidates
        .iter()
        .zip(indices)
        .map(|(gpu, index)| GpuObservation {
            compute_capability: gpu.element.and_then(|element| capability(element, notes)),
            pcie: gpu.link,
            nvlinks: gpu.element.map(|element| nvlinks(element, &addresses, notes)),
            // NCCL writes c2c if it found such links; an older NCCL never checks.
            c2c: gpu.element.and_then(|element| below(element).any(|child| name(child) == "c2c").then_some(true)),
            ..unnamed_gpu(index, gpu.pci)
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.index);
    gpus
}

/// An index for each GPU: its own if no GPU before it has the same, otherwise the next free one.
fn indices(candidates: &[Candidate<'_>], notes: &mut Notes) -> Vec<u32> {
    let mut taken = BTreeSet::new();
    let mut claimed = |gpu: &Candidate<'_>| {
        let element = gpu.element?;
        let index = notes.number(element, "dev");
        match index {
            None => notes.add(element, "without a dev; it gets the next free index"),
            Some(index) if !taken.insert(index) => {
                notes.add(element, format!("dev {index} is also that of another GPU; it gets the next free index"));
                return None;
            }
            Some(_) => {}
        }
        index
    };
    let claimed: Vec<Option<u32>> = candidates.iter().map(&mut claimed).collect();
    let mut free = (0..u32::MAX).filter(|index| !taken.contains(index));
    claimed.into_iter().map(|index| index.or_else(|| free.next()).unwrap_or(u32::MAX)).collect()
}

/// `sm` is the compute capability without its dot: 80, 103.
fn capability(gpu: Element<'_>, notes: &mut Notes) -> Option<ComputeCapability> {
    let sm = notes.number(gpu, "sm")?;
    Some(ComputeCapability { major: sm / 10, minor: sm % 10 })
}

/// The links, in the order of the file.
fn nvlinks(gpu: Element<'_>, gpus: &BTreeSet<PciAddress>, notes: &mut Notes) -> Vec<NvLinkObservation> {
    let mut next: u32 = 0;
    let mut seen = Vec::new();
    for element in below(gpu) {
        match name(element) {
            "nvlink" => {}
            // This is the link to the processor of a superchip. It does not lead to another GPU.
            "c2c" => continue,
            _ => {
                notes.add(element, "not expected below <gpu>; left out");
                continue;
            }
        }
        let count = notes.number(element, "count").unwrap_or(0);
        let Some(end) = next.checked_add(count).filter(|end| count > 0 && *end <= MAX_LINKS) else {
            let count = element.attribute("count").map_or("none".to_owned(), excerpt);
            notes.add(element, format!("{count} is no number of links (1 to {MAX_LINKS} for a GPU); left out"));
            continue;
        };
        let remote = remote(element, gpus, notes);
        seen.push(NvLinkObservation { links: (next..end).collect(), remote, active: true });
        next = end;
    }
    seen
}

/// The other end of a link, by its PCI class (`tclass`) and address (`target`).
fn remote(link: Element<'_>, gpus: &BTreeSet<PciAddress>, notes: &mut Notes) -> NvLinkRemote {
    // In VMs a switch has no address: NVML reports FFFFFFFF:FF:FF.0.
    let target: Option<PciAddress> = link.attribute("target").and_then(|target| target.parse().ok());
    let class = link.attribute("tclass").unwrap_or_default().to_ascii_lowercase();
    match (class.as_str(), target) {
        // The bridge of a POWER processor.
        (class, _) if class.starts_with("0x068001") => NvLinkRemote::Cpu,
        (class, target) if class.starts_with("0x0680") => NvLinkRemote::Switch(target),
        (class, Some(target)) if class.starts_with("0x03") => NvLinkRemote::Gpu(target),
        ("", Some(target)) if gpus.contains(&target) => NvLinkRemote::Gpu(target),
        (class, _) => {
            let target = link.attribute("target").map_or("nowhere".to_owned(), excerpt);
            let class = if class.is_empty() { "unknown".to_owned() } else { excerpt(class) };
            notes.add(link, format!("leads to {target}, of class {class}: neither GPU, NVSwitch nor processor"));
            NvLinkRemote::Unknown
        }
    }
}
