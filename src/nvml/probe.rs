//! What NVML says of each GPU, as observations; what it does not say, as failures.
//!
//! Called by `agent` at its start and whenever it is asked to look again. One call that fails
//! costs one fact; only a GPU without UUID or PCI address is left out, with a failure that names
//! it. It must not panic, and it must not wait for anything but NVML.

use std::collections::BTreeMap;
use std::ffi::c_ulong;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, answer};
use super::links::{self, Errors};
use super::{mig, raw};
use crate::topology::{
    ComputeCapability, FabricObservation, GpuObservation, GpuUuid, NumaNodeId, PciAddress, PcieLink, ProbeFailure,
    TopologyLevel,
};

/// A GPU whose name and place are known.
pub struct Gpu<'nvml> {
    /// NVML's index.
    pub index: u32,
    /// NVML's UUID.
    pub uuid: GpuUuid,
    /// Where it sits on the PCI bus.
    pub pci: PciAddress,
    /// NVML's handle.
    pub device: Device<'nvml>,
}

/// Finds the GPUs, in NVML's order, by their names and places.
pub fn list(nvml: &Nvml) -> (Vec<Gpu<'_>>, Vec<ProbeFailure>) {
    let mut failures = Vec::new();
    let count = Findings::new("driver", &mut failures).required("nvmlDeviceGetCount_v2", nvml.device_count());
    let gpus = (0..count.unwrap_or(0)).filter_map(|index| identify(nvml, index, &mut failures)).collect();
    (gpus, failures)
}

fn identify<'nvml>(nvml: &'nvml Nvml, index: u32, failures: &mut Vec<ProbeFailure>) -> Option<Gpu<'nvml>> {
    let mut findings = Findings::new(format!("GPU {index}"), failures);
    let device = findings.required("nvmlDeviceGetHandleByIndex_v2", nvml.device_by_index(index))?;
    const PCI: &str = "nvmlDeviceGetPciInfo_v3";
    let pci = findings.required(PCI, device.pci_info())?;
    let pci: PciAddress = findings.parsed(PCI, pci.bus_id.parse())?;
    findings.subject = pci.to_string();
    const UUID: &str = "nvmlDeviceGetUUID";
    let uuid = findings.required(UUID, device.uuid())?;
    let uuid = findings.parsed(UUID, uuid.parse())?;
    Some(Gpu { index, uuid, pci, device })
}

/// Asks the GPUs for everything else: what was seen, and what was not answered.
pub fn observe(gpus: &[Gpu<'_>]) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
    let mut failures = Vec::new();
    let ancestors = common_ancestors(gpus, &mut failures);
    let observe = |(gpu, common_ancestors): (&Gpu<'_>, _)| {
        let device = &gpu.device;
        let mut findings = Findings::new(gpu.pci.to_string(), &mut failures);
        let minor = findings.fact(answer("nvmlDeviceGetMinorNumber", device.minor_number()));
        GpuObservation {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci,
            model: findings.fact(answer("nvmlDeviceGetName", device.name())),
            minor,
            compute_capability: compute_capability(device, &mut findings),
            memory_mib: memory(device, &mut findings),
            numa: numa(device, &mut findings),
            pcie: pcie(device, &mut findings),
            nvlinks: links::observe(device, |pci| gpus.iter().any(|gpu| gpu.pci == pci), &mut findings),
            c2c: findings.fact(raw::c2c(device)),
            display: findings.fact(answer("nvmlDeviceGetDisplayActive", device.is_display_active())),
            mig: mig::observe(device, minor, &mut findings),
            fabric: fabric(device, &mut findings),
            common_ancestors,
        }
    };
    let observations = gpus.iter().zip(ancestors).map(observe).collect();
    (observations, failures)
}

fn compute_capability(device: &Device<'_>, findings: &mut Findings<'_>) -> Option<ComputeCapability> {
    let capability = answer("nvmlDeviceGetCudaComputeCapability", device.cuda_compute_capability());
    let capability = findings.fact(capability)?;
    Some(ComputeCapability { major: capability.major.try_into().ok()?, minor: capability.minor.try_into().ok()? })
}

/// In MiB.
fn memory(device: &Device<'_>, findings: &mut Findings<'_>) -> Option<u64> {
    let memory = match answer("nvmlDeviceGetMemoryInfo_v2", device.memory_info()) {
        Ok(None) => raw::memory_total(device),
        other => other.map(|memory| memory.map(|memory| memory.total)),
    };
    findings.fact(memory).map(|bytes| bytes >> 20)
}

/// The one NUMA node of the memory affinity; several or none is unknown.
fn numa(device: &Device<'_>, findings: &mut Findings<'_>) -> Option<NumaNodeId> {
    /// Room for the 1024 nodes that Linux can have (CONFIG_NODES_SHIFT is at most 10).
    const WORDS: usize = 1024 / c_ulong::BITS as usize;
    let nodes = device.memory_affinity(WORDS, sys::NVML_AFFINITY_SCOPE_NODE);
    only_node(&findings.fact(answer("nvmlDeviceGetMemoryAffinity", nodes))?)
}

fn only_node(words: &[c_ulong]) -> Option<NumaNodeId> {
    let mut set = words.iter().zip(0u32..).filter(|(word, _)| **word != 0);
    let (word, number) = set.next()?;
    let one = set.next().is_none() && word.is_power_of_two();
    one.then(|| NumaNodeId(number * c_ulong::BITS + word.trailing_zeros()))
}

/// What the link can do: the lesser of GPU and slot.
fn pcie(device: &Device<'_>, findings: &mut Findings<'_>) -> Option<PcieLink> {
    let generation = findings.fact(answer("nvmlDeviceGetMaxPcieLinkGeneration", device.max_pcie_link_gen()));
    let width = findings.fact(answer("nvmlDeviceGetMaxPcieLinkWidth", device.max_pcie_link_width()));
    pcie_link(generation?, width?)
}

/// A generation and a width as a link. 2.5 GT/s x1 is what virtual switches claim, and unknown.
fn pcie_link(generation: u32, width: u32) -> Option<PcieLink> {
    let mts = match generation {
        1 if width == 1 => return None,
        1 => 2500,
        2 => 5000,
        3 => 8000,
        4 => 16000,
        5 => 32000,
        6 => 64000,
        _ => return None,
    };
    (width > 0).then_some(PcieLink { mts, width })
}

/// The fabric, once the GPU has joined it.
fn fabric(device: &Device<'_>, findings: &mut Findings<'_>) -> Option<FabricObservation> {
    let fabric = findings.fact(raw::fabric(device))?;
    let joined =
        fabric.state == sys::NVML_GPU_FABRIC_STATE_COMPLETED && fabric.status == sys::nvmlReturn_enum_NVML_SUCCESS;
    joined.then(|| FabricObservation { cluster: hyphenated(fabric.cluster), clique: fabric.clique })
}

/// A UUID in its usual writing.
fn hyphenated(uuid: [u8; 16]) -> String {
    let mut text = format!("{:032x}", u128::from_be_bytes(uuid));
    for at in [20, 16, 12, 8] {
        text.insert(at, '-');
    }
    text
}

/// Each GPU's common ancestors with the others; NVML is asked once for a pair.
fn common_ancestors(gpus: &[Gpu<'_>], failures: &mut Vec<ProbeFailure>) -> Vec<BTreeMap<u32, TopologyLevel>> {
    let mut ancestors = BTreeMap::new();
    for (at, one) in gpus.iter().enumerate() {
        let mut errors = Errors::default();
        for two in gpus.iter().skip(at + 1) {
            match common_ancestor(one, two) {
                Ok(Some(level)) => {
                    ancestors.insert((one.index, two.index), level);
                    ancestors.insert((two.index, one.index), level);
                }
                Ok(None) => {}
                Err(error) => errors.add(two.index, error),
            }
        }
        errors.report("with GPU", &mut Findings::new(one.pci.to_string(), failures));
    }
    let of = |gpu: &Gpu<'_>| {
        let own = ancestors.range((gpu.index, 0)..=(gpu.index, u32::MAX));
        own.map(|((_, other), level)| (*other, *level)).collect()
    };
    gpus.iter().map(of).collect()
}

fn common_ancestor(one: &Gpu<'_>, two: &Gpu<'_>) -> Answer<TopologyLevel> {
    let Some(number) = raw::common_ancestor(&one.device, &two.device)? else { return Ok(None) };
    let unknown = || CallError::unreadable("nvmlDeviceGetTopologyCommonAncestor", format!("unknown level {number}"));
    TopologyLevel::from_nvml(number).map(Some).ok_or_else(unknown)
}

/// Takes answers about one subject and keeps what failed.
pub struct Findings<'a> {
    subject: String,
    failures: &'a mut Vec<ProbeFailure>,
}

impl<'a> Findings<'a> {
    /// Findings about a subject: a PCI address, `GPU 3`, `driver`.
    pub fn new(subject: impl Into<String>, failures: &'a mut Vec<ProbeFailure>) -> Self {
        Self { subject: subject.into(), failures }
    }

    /// The fact, where there is one; no answer is no failure.
    pub fn fact<T>(&mut self, answer: Answer<T>) -> Option<T> {
        answer.unwrap_or_else(|error| {
            self.fail_with(&error, error.reason.to_string());
            None
        })
    }

    /// Notes a failed call, in these words.
    pub fn fail_with(&mut self, error: &CallError, words: String) {
        self.failures.push(ProbeFailure { subject: self.subject.clone(), call: error.call.to_owned(), error: words });
    }

    /// A fact without which there is no GPU: no answer is a failure too.
    fn required<T>(&mut self, call: &'static str, result: Result<T, nvml_wrapper::error::NvmlError>) -> Option<T> {
        let missing = || CallError::unreadable(call, "NVML does not offer this call here");
        let found = answer(call, result).and_then(|value| value.ok_or_else(missing));
        self.fact(found.map(Some))
    }

    fn parsed<T, E: std::fmt::Display>(&mut self, call: &'static str, parsed: Result<T, E>) -> Option<T> {
        self.fact(parsed.map(Some).map_err(|error| CallError::unreadable(call, error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_is_a_node_and_everything_else_is_unknown() {
        assert_eq!(only_node(&[0b100, 0]), Some(NumaNodeId(2)));
        assert_eq!(only_node(&[0, 1]), Some(NumaNodeId(c_ulong::BITS)));
        for words in [&[0, 0][..], &[0b11, 0], &[1, 1], &[]] {
            assert_eq!(only_node(words), None, "{words:?}");
        }
    }

    #[test]
    fn links_come_from_generation_and_width() {
        for (generation, mts) in [(1, 2500), (2, 5000), (3, 8000), (4, 16000), (5, 32000), (6, 64000)] {
            assert_eq!(pcie_link(generation, 8), Some(PcieLink { mts, width: 8 }));
        }
        assert_eq!(pcie_link(3, 1), Some(PcieLink { mts: 8000, width: 1 }));
        for unknown in [(1, 1), (0, 16), (7, 16), (5, 0)] {
            assert_eq!(pcie_link(unknown.0, unknown.1), None, "{unknown:?}");
        }
    }

    #[test]
    fn a_cluster_is_written_as_a_uuid() {
        let uuid = 0x1234_5678_9abc_def0_1234_5678_9abc_def0_u128.to_be_bytes();
        assert_eq!(hyphenated(uuid), "12345678-9abc-def0-1234-56789abcdef0");
    }
}
