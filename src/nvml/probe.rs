//! What NVML says of each GPU, as observations; what it does not say, as failures.
//!
//! Called by `agent` at its start and whenever it is asked to look again. One call that fails
//! costs one fact; only a GPU without UUID or PCI address is left out, with a failure that names
//! it, and is reported as missing. It must not panic, and it must not wait for anything but NVML.

use std::collections::BTreeMap;
use std::ffi::c_ulong;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError};
use super::calls::Calls;
use super::links::{self, Errors};
use super::poll::unreached;
use super::protocol::{Missing, Place};
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
    /// Tells the parent of calls about it.
    pub calls: Calls,
}

/// The GPUs that were found, and how many there are.
pub struct Listed<'nvml> {
    /// NVML's count; `None` where it does not say.
    pub count: Option<u32>,
    /// Those that said who and where they are, in NVML's order.
    pub gpus: Vec<Gpu<'nvml>>,
    /// Those that did not.
    pub missing: Vec<Missing>,
    /// What was asked and not answered.
    pub failures: Vec<ProbeFailure>,
}

/// Finds the GPUs by their names and places. Those to `skip` are not touched.
pub fn list<'nvml>(nvml: &'nvml Nvml, calls: &Calls, skip: &[Place]) -> Listed<'nvml> {
    let (mut gpus, mut missing, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    let count = required(calls, COUNT, || nvml.device_count());
    if let Err(error) = &count {
        missing.push(Missing { place: None, reach: unreached(error) });
    }
    let count = Findings::new("driver", &mut failures).fact(count.map(Some));
    let of = count.unwrap_or(0);
    for place in (0..of).map(|index| Place { index, of }).filter(|place| !skip.contains(place)) {
        let mut subject = format!("GPU {}", place.index);
        match identify(nvml, calls, place, &mut subject) {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => {
                missing.push(Missing { place: Some(place), reach: unreached(&error) });
                Findings::new(subject, &mut failures).fail(&error);
            }
        }
    }
    Listed { count, gpus, missing, failures }
}

/// The call that counts the GPUs.
pub const COUNT: &str = "nvmlDeviceGetCount_v2";
/// The call that gives a GPU's handle, and may have to start the GPU for it.
pub const HANDLE: &str = "nvmlDeviceGetHandleByIndex_v2";
/// The call that gives a GPU's UUID.
pub const UUID: &str = "nvmlDeviceGetUUID";

/// The GPU at a place; `subject` becomes its PCI address once that is known.
fn identify<'nvml>(
    nvml: &'nvml Nvml,
    calls: &Calls,
    place: Place,
    subject: &mut String,
) -> Result<Gpu<'nvml>, CallError> {
    let index = place.index;
    let calls = calls.about(place, None);
    let device = required(&calls, HANDLE, || nvml.device_by_index(index))?;
    let pci = place_on_bus(&device, &calls)?;
    *subject = pci.to_string();
    let uuid = name(&device, &calls)?;
    let calls = calls.about(place, Some(uuid.clone()));
    Ok(Gpu { index, uuid, pci, device, calls })
}

/// A GPU's name.
pub fn name(device: &Device<'_>, calls: &Calls) -> Result<GpuUuid, CallError> {
    required(calls, UUID, || device.uuid())?.parse().map_err(|error| CallError::unreadable(UUID, error))
}

/// Where a GPU sits. One that does not say so is not taken for a GPU.
pub fn place_on_bus(device: &Device<'_>, calls: &Calls) -> Result<PciAddress, CallError> {
    const CALL: &str = "nvmlDeviceGetPciInfo_v3";
    let info = required(calls, CALL, || device.pci_info())?;
    info.bus_id.parse().map_err(|error| CallError::unreadable(CALL, error))
}

/// A fact without which there is no GPU: no answer is an error too.
pub fn required<T>(
    calls: &Calls,
    call: &'static str,
    made: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, CallError> {
    let missing = || CallError::unreadable(call, "NVML does not offer this call here");
    calls.ask(call, made)?.ok_or_else(missing)
}

/// Asks the GPUs, and the kernel under `procfs`, for everything else: what was seen, and what was not answered.
pub fn observe(gpus: &[Gpu<'_>], procfs: &Path) -> (Vec<GpuObservation>, Vec<ProbeFailure>) {
    let mut failures = Vec::new();
    let ancestors = common_ancestors(gpus, &mut failures);
    let observe = |(gpu, common_ancestors): (&Gpu<'_>, _)| {
        let (device, calls) = (&gpu.device, &gpu.calls);
        let mut findings = Findings::new(gpu.pci.to_string(), &mut failures);
        let minor = findings.fact(calls.ask("nvmlDeviceGetMinorNumber", || device.minor_number()));
        GpuObservation {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci,
            model: findings.fact(calls.ask("nvmlDeviceGetName", || device.name())),
            minor,
            compute_capability: compute_capability(device, calls, &mut findings),
            memory_mib: memory(device, calls, &mut findings),
            numa: numa(device, calls, &mut findings),
            pcie: pcie(device, calls, &mut findings),
            nvlinks: links::observe(device, calls, |pci| gpus.iter().any(|gpu| gpu.pci == pci), &mut findings),
            c2c: findings.fact(calls.raw("nvmlDeviceGetC2cModeInfoV", || raw::c2c(device))),
            display: findings.fact(calls.ask("nvmlDeviceGetDisplayActive", || device.is_display_active())),
            mig: mig::observe(device, calls, minor, procfs, &mut findings),
            fabric: fabric(device, calls, &mut findings),
            common_ancestors,
        }
    };
    let observations = gpus.iter().zip(ancestors).map(observe).collect();
    (observations, failures)
}

fn compute_capability(device: &Device<'_>, calls: &Calls, findings: &mut Findings<'_>) -> Option<ComputeCapability> {
    let capability = calls.ask("nvmlDeviceGetCudaComputeCapability", || device.cuda_compute_capability());
    let capability = findings.fact(capability)?;
    Some(ComputeCapability { major: capability.major.try_into().ok()?, minor: capability.minor.try_into().ok()? })
}

/// In MiB.
fn memory(device: &Device<'_>, calls: &Calls, findings: &mut Findings<'_>) -> Option<u64> {
    let memory = match calls.ask("nvmlDeviceGetMemoryInfo_v2", || device.memory_info()) {
        Ok(None) => calls.raw("nvmlDeviceGetMemoryInfo", || raw::memory_total(device)),
        other => other.map(|memory| memory.map(|memory| memory.total)),
    };
    findings.fact(memory).map(|bytes| bytes >> 20)
}

/// The one NUMA node of the memory affinity; several or none is unknown.
fn numa(device: &Device<'_>, calls: &Calls, findings: &mut Findings<'_>) -> Option<NumaNodeId> {
    /// Room for the 1024 nodes that Linux can have (CONFIG_NODES_SHIFT is at most 10).
    const WORDS: usize = 1024 / c_ulong::BITS as usize;
    let nodes = || device.memory_affinity(WORDS, sys::NVML_AFFINITY_SCOPE_NODE);
    only_node(&findings.fact(calls.ask("nvmlDeviceGetMemoryAffinity", nodes))?)
}

fn only_node(words: &[c_ulong]) -> Option<NumaNodeId> {
    let mut set = words.iter().zip(0u32..).filter(|(word, _)| **word != 0);
    let (word, number) = set.next()?;
    let one = set.next().is_none() && word.is_power_of_two();
    one.then(|| NumaNodeId(number * c_ulong::BITS + word.trailing_zeros()))
}

/// What the link can do: the lesser of GPU and slot.
fn pcie(device: &Device<'_>, calls: &Calls, findings: &mut Findings<'_>) -> Option<PcieLink> {
    let generation = findings.fact(calls.ask("nvmlDeviceGetMaxPcieLinkGeneration", || device.max_pcie_link_gen()));
    let width = findings.fact(calls.ask("nvmlDeviceGetMaxPcieLinkWidth", || device.max_pcie_link_width()));
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

/// The call that tells of the NVLink fabric.
pub const FABRIC: &str = "nvmlDeviceGetGpuFabricInfoV";

/// The fabric, once the GPU has joined it.
fn fabric(device: &Device<'_>, calls: &Calls, findings: &mut Findings<'_>) -> Option<FabricObservation> {
    let fabric = findings.fact(calls.raw(FABRIC, || raw::fabric(device)))?;
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
    const CALL: &str = "nvmlDeviceGetTopologyCommonAncestor";
    let level = one.calls.raw(CALL, || raw::common_ancestor(&one.device, &two.device))?;
    let Some(number) = level else { return Ok(None) };
    let unknown = || CallError::unreadable(CALL, format!("unknown level {number}"));
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
            self.fail(&error);
            None
        })
    }

    /// Notes a failed call.
    pub fn fail(&mut self, error: &CallError) {
        self.fail_with(error, error.reason.to_string());
    }

    /// Notes a failed call, in these words.
    pub fn fail_with(&mut self, error: &CallError, words: String) {
        self.failures.push(ProbeFailure { subject: self.subject.clone(), call: error.call.to_owned(), error: words });
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
