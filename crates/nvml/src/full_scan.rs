//! The full scan: every fact that NVML offers about each GPU, answer by answer.
//!
//! Called by `watch`, and by `agent` for the first list. A call that fails costs one fact. A GPU without UUID or PCI
//! address is not listed; it is reported as missing, with a failure that names it. The scan must not panic, and it must
//! not wait for anything except NVML and the kernel.

use std::ffi::c_ulong;
use std::path::Path;
use std::sync::Arc;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, offered};
use super::calls::Calls;
use super::poll::reach_after;
use super::protocol::{Missing, Place};
use super::scan::{CallFailure, GpuScan, NvLinkScan};
use super::{links, mig, raw};
use linkwise_core::topology::{
    AddressingMode, ComputeCapability, CudaVersion, FabricObservation, GpuUuid, NumaNodeId, PciAddress, PcieLink,
    TopologyLevel,
};

/// A GPU whose UUID and PCI address NVML reported.
pub struct Gpu<'nvml> {
    pub index: u32,
    pub uuid: GpuUuid,
    pub pci: PciAddress,
    pub device: Device<'nvml>,
    /// Reports calls about it to the parent.
    pub calls: Calls,
}

/// The GPUs found, and NVML's count of GPUs.
pub struct Listed<'nvml> {
    /// NVML's count; `None` where that call failed.
    pub count: Option<u32>,
    /// The GPUs whose UUID and PCI address NVML reported, in NVML's order.
    pub gpus: Arc<Vec<Gpu<'nvml>>>,
    /// The GPUs that NVML counts but that did not report both UUID and PCI address. If the count failed, one entry
    /// without a place stands for all.
    pub missing: Vec<Missing>,
    pub failures: Vec<CallFailure>,
}

/// Finds the GPUs, each by its UUID and PCI address. No call is made about the GPUs to `skip`.
pub fn list<'nvml>(nvml: &'nvml Nvml, calls: &Calls, skip: &[Place]) -> Listed<'nvml> {
    let (mut gpus, mut missing, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    let count = required(calls, COUNT, || nvml.device_count()).map_err(|error| {
        missing.push(Missing { place: None, reach: reach_after(&error) });
        failures.push(CallFailure::new("driver", error));
    });
    let of = count.unwrap_or(0);
    for place in (0..of).map(|index| Place { index, of }).filter(|place| !skip.contains(place)) {
        let mut subject = format!("GPU {}", place.index);
        match identify(nvml, calls, place, &mut subject) {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => {
                missing.push(Missing { place: Some(place), reach: reach_after(&error) });
                failures.push(CallFailure::new(subject, error));
            }
        }
    }
    Listed { count: count.ok(), gpus: Arc::new(gpus), missing, failures }
}

/// The call that gives the CUDA version. It reads libcuda if there is one, but does not need it, unlike its version 2.
const CUDA: &str = "nvmlSystemGetCudaDriverVersion";
/// The call that counts the GPUs.
pub const COUNT: &str = "nvmlDeviceGetCount_v2";
/// The call that gives a GPU's handle. The driver may have to start the GPU for it.
pub const HANDLE: &str = "nvmlDeviceGetHandleByIndex_v2";
/// The call that registers a GPU's events.
pub const REGISTER: &str = "nvmlDeviceRegisterEvents";
/// The call that gives a GPU's UUID.
pub const UUID: &str = "nvmlDeviceGetUUID";

/// The GPU at a place; `subject` becomes its PCI address once that is known.
fn identify<'nvml>(
    nvml: &'nvml Nvml,
    calls: &Calls,
    place: Place,
    subject: &mut String,
) -> Result<Gpu<'nvml>, CallError> {
    const PCI: &str = "nvmlDeviceGetPciInfo_v3";
    let index = place.index;
    let calls = calls.about(place, None);
    let device = required(&calls, HANDLE, || nvml.device_by_index(index))?;
    let info = required(&calls, PCI, || device.pci_info())?;
    let pci: PciAddress = info.bus_id.parse().map_err(|error| CallError::in_words(PCI, error))?;
    *subject = pci.to_string();
    let uuid = required(&calls, UUID, || device.uuid())?;
    let uuid: GpuUuid = uuid.parse().map_err(|error| CallError::in_words(UUID, error))?;
    let calls = calls.about(place, Some(uuid.clone()));
    Ok(Gpu { index, uuid, pci, device, calls })
}

/// Makes a call that must answer: "not offered" is an error too.
fn required<T>(calls: &Calls, call: &'static str, make: impl FnOnce() -> Result<T, NvmlError>) -> Result<T, CallError> {
    let not_offered = || CallError::in_words(call, "NVML does not offer this call here");
    calls.ask(call, make)?.ok_or_else(not_offered)
}

/// Asks the GPUs, and the kernel under `procfs`, for all other facts.
pub fn scan(gpus: &[Gpu<'_>], procfs: &Path) -> Vec<GpuScan> {
    let scan = |gpu: &Gpu<'_>| {
        let (device, calls) = (&gpu.device, &gpu.calls);
        let others = || gpus.iter().filter(|other| other.pci > gpu.pci);
        let ancestors = others().map(|other| (other.uuid.clone(), common_ancestor(gpu, other))).collect();
        let p2p = others().map(|other| (other.uuid.clone(), p2p(gpu, other))).collect();
        let minor = calls.ask("nvmlDeviceGetMinorNumber", || device.minor_number());
        GpuScan {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            pci: gpu.pci,
            model: calls.ask("nvmlDeviceGetName", || device.name()),
            serial: calls.ask("nvmlDeviceGetSerial", || device.serial()),
            compute_capability: compute_capability(device, calls),
            brand: brand(device, calls),
            architecture: architecture(device, calls),
            addressing_mode: addressing_mode(device, calls),
            memory_mib: memory(device, calls),
            numa: numa(device, calls),
            pcie: pcie(device, calls),
            pcie_width_now: calls.ask("nvmlDeviceGetCurrPcieLinkWidth", || device.current_pcie_link_width()),
            c2c: calls.raw("nvmlDeviceGetC2cModeInfoV", || raw::c2c(device)),
            display: calls.ask("nvmlDeviceGetDisplayActive", || device.is_display_active()),
            fabric: fabric(device, calls),
            nvlinks: nvlinks(device, calls),
            mig: mig::scan(device, calls, &minor, procfs),
            minor,
            ancestors,
            p2p,
        }
    };
    gpus.iter().map(scan).collect()
}

/// The newest CUDA version that the driver supports, by the call of GPU Feature Discovery.
pub fn cuda_version(nvml: &Nvml, calls: &Calls) -> Answer<CudaVersion> {
    let number = calls.raw(CUDA, || raw::cuda_version(nvml))?;
    // 1000 times the major version and 10 times the minor one (nvml.h).
    Ok(number.map(|number| CudaVersion { major: number / 1000, minor: number % 1000 / 10 }))
}

fn compute_capability(device: &Device<'_>, calls: &Calls) -> Answer<ComputeCapability> {
    let capability = calls.ask("nvmlDeviceGetCudaComputeCapability", || device.cuda_compute_capability())?;
    Ok(capability.and_then(|capability| {
        Some(ComputeCapability { major: capability.major.try_into().ok()?, minor: capability.minor.try_into().ok()? })
    }))
}

/// The brand, by the names of go-nvlib (pkg/nvlib/device/device.go), which NVIDIA's DRA driver publishes. A newer brand
/// is unknown.
fn brand(device: &Device<'_>, calls: &Calls) -> Answer<String> {
    /// The names by `nvmlBrandType_t`, from 0 on.
    const NAMES: &str = "Unknown Quadro Tesla NVS Grid GeForce Titan NvidiaVApps NvidiaVPC NvidiaVCS NvidiaVWS \
        NvidiaCloudGaming QuadroRTX NvidiaRTX Nvidia GeForceRTX TitanRTX";
    let number = calls.raw("nvmlDeviceGetBrand", || raw::brand(device))?;
    let name = |number| NAMES.split(' ').nth(usize::try_from(number).ok()?);
    Ok(number.and_then(name).map(str::to_owned))
}

/// The architecture, by the names of go-nvlib. A newer architecture is unknown.
fn architecture(device: &Device<'_>, calls: &Calls) -> Answer<String> {
    let number = calls.raw("nvmlDeviceGetArchitecture", || raw::architecture(device))?;
    Ok(number.and_then(architecture_name).map(str::to_owned))
}

/// The name of an architecture by its `nvmlDeviceArchitecture_t`.
fn architecture_name(number: u32) -> Option<&'static str> {
    /// The names from 2 on.
    const NAMES: [&str; 10] =
        ["Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Orin"];
    /// NVML_DEVICE_ARCH_RUBIN of NVML 13.
    const RUBIN: u32 = 13;
    if number == RUBIN {
        return Some("Rubin");
    }
    NAMES.get(usize::try_from(number.checked_sub(sys::NVML_DEVICE_ARCH_KEPLER)?).ok()?).copied()
}

fn addressing_mode(device: &Device<'_>, calls: &Calls) -> Answer<AddressingMode> {
    let number = calls.raw("nvmlDeviceGetAddressingMode", || raw::addressing_mode(device))?;
    Ok(number.and_then(AddressingMode::from_nvml))
}

/// The memory in MiB.
fn memory(device: &Device<'_>, calls: &Calls) -> Answer<u64> {
    let memory = match calls.ask("nvmlDeviceGetMemoryInfo_v2", || device.memory_info()) {
        Ok(None) => calls.raw("nvmlDeviceGetMemoryInfo", || raw::memory_total(device)),
        other => other.map(|memory| memory.map(|memory| memory.total)),
    };
    Ok(memory?.map(|bytes| bytes >> 20))
}

/// The one NUMA node of the memory affinity; several or none is unknown.
fn numa(device: &Device<'_>, calls: &Calls) -> Answer<NumaNodeId> {
    /// Room for the most nodes that Linux can have, 1024 (CONFIG_NODES_SHIFT is at most 10).
    const WORDS: usize = 1024 / c_ulong::BITS as usize;
    let nodes = || device.memory_affinity(WORDS, sys::NVML_AFFINITY_SCOPE_NODE);
    Ok(calls.ask("nvmlDeviceGetMemoryAffinity", nodes)?.and_then(|words| only_node(&words)))
}

fn only_node(words: &[c_ulong]) -> Option<NumaNodeId> {
    let mut set = words.iter().zip(0u32..).filter(|(word, _)| **word != 0);
    let (word, number) = set.next()?;
    let one = set.next().is_none() && word.is_power_of_two();
    one.then(|| NumaNodeId(number * c_ulong::BITS + word.trailing_zeros()))
}

/// The fastest link that both GPU and slot support.
fn pcie(device: &Device<'_>, calls: &Calls) -> Answer<PcieLink> {
    let generation = calls.ask("nvmlDeviceGetMaxPcieLinkGeneration", || device.max_pcie_link_gen())?;
    let width = calls.ask("nvmlDeviceGetMaxPcieLinkWidth", || device.max_pcie_link_width())?;
    Ok(generation.zip(width).and_then(|(generation, width)| pcie_link(generation, width)))
}

/// A generation and a width as a link. Virtual switches report 2.5 GT/s x1, which counts as unknown.
fn pcie_link(generation: u32, width: u32) -> Option<PcieLink> {
    /// The transfers of one lane in millions a second, from generation 1 on.
    const TRANSFERS: [u32; 6] = [2500, 5000, 8000, 16000, 32000, 64000];
    let mts = *TRANSFERS.get(usize::try_from(generation.checked_sub(1)?).ok()?)?;
    (width > 0 && (generation, width) != (1, 1)).then_some(PcieLink { mts, width })
}

fn nvlinks(device: &Device<'_>, calls: &Calls) -> Vec<Answer<NvLinkScan>> {
    let all = links::states(device, calls).ok().flatten();
    let numbers = 0..links::MAX_LINKS;
    match all {
        Some(all) => numbers.zip(all).map(|(link, up)| nvlink(device, calls, link, up)).collect(),
        None => numbers.map(|link| nvlink(device, calls, link, links::state(device, calls, link))).collect(),
    }
}

fn nvlink(device: &Device<'_>, calls: &Calls, link: u32, up: Answer<bool>) -> Answer<NvLinkScan> {
    let Some(active) = up? else { return Ok(None) };
    let kind = calls.raw("nvmlDeviceGetNvLinkRemoteDeviceType", || raw::remote_device_type(device, link));
    let pci = calls.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", || device.link_wrapper_for(link).remote_pci_info());
    let pci = offered(pci).map(|info| info.and_then(|info| address(&info.bus_id)));
    Ok(Some(NvLinkScan { active, kind: offered(kind), pci }))
}

/// The address, if there is one: virtual machines and some boards give all ones.
fn address(bus_id: &str) -> Option<PciAddress> {
    bus_id.parse().ok().filter(|pci: &PciAddress| pci.domain() != u32::MAX)
}

/// The call that reports the NVLink fabric.
pub const FABRIC: &str = "nvmlDeviceGetGpuFabricInfoV";

/// The fabric, once the GPU has joined it.
fn fabric(device: &Device<'_>, calls: &Calls) -> Answer<FabricObservation> {
    let fabric = calls.raw(FABRIC, || raw::fabric(device))?;
    let joined = fabric.filter(|fabric| {
        fabric.state == sys::NVML_GPU_FABRIC_STATE_COMPLETED && fabric.status == sys::nvmlReturn_enum_NVML_SUCCESS
    });
    Ok(joined.map(|fabric| FabricObservation { cluster: hyphenated(fabric.cluster), clique: fabric.clique }))
}

/// The text of a UUID, with hyphens.
fn hyphenated(uuid: [u8; 16]) -> String {
    let mut text = format!("{:032x}", u128::from_be_bytes(uuid));
    for at in [20, 16, 12, 8] {
        text.insert(at, '-');
    }
    text
}

fn common_ancestor(one: &Gpu<'_>, two: &Gpu<'_>) -> Answer<TopologyLevel> {
    const CALL: &str = "nvmlDeviceGetTopologyCommonAncestor";
    let level = one.calls.raw(CALL, || raw::common_ancestor(&one.device, &two.device))?;
    let Some(number) = level else { return Ok(None) };
    let unknown = || CallError::in_words(CALL, format!("unknown level {number}"));
    TopologyLevel::from_nvml(number).map(Some).ok_or_else(unknown)
}

/// The P2P status for reading from the other GPU or, if that is OK, for writing to it; NVML's number, 0 for OK.
fn p2p(one: &Gpu<'_>, two: &Gpu<'_>) -> Answer<u32> {
    use sys::{
        nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ as READ,
        nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE as WRITE, nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK as OK,
    };
    let ask =
        |capability| one.calls.raw("nvmlDeviceGetP2PStatus", || raw::p2p_status(&one.device, &two.device, capability));
    match ask(READ)? {
        Some(OK) => ask(WRITE),
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_or_no_numa_nodes_count_as_unknown() {
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
    fn placeholder_of_an_address_is_none() {
        assert_eq!(address("00000000:3B:00.0"), "0000:3b:00.0".parse().ok());
        for nothing in ["FFFFFFFF:FF:FF.0", "FFFFFFFF:00:00.0", "", "switch"] {
            assert_eq!(address(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_cluster_is_written_as_a_uuid() {
        let uuid = 0x1234_5678_9abc_def0_1234_5678_9abc_def0_u128.to_be_bytes();
        assert_eq!(hyphenated(uuid), "12345678-9abc-def0-1234-56789abcdef0");
    }

    #[test]
    fn architectures_have_nvidias_names() {
        for (number, name) in
            [(2, "Kepler"), (7, "Ampere"), (9, "Hopper"), (10, "Blackwell"), (11, "Orin"), (13, "Rubin")]
        {
            assert_eq!(architecture_name(number), Some(name));
        }
        for unknown in [0, 1, 12, 14, u32::MAX] {
            assert_eq!(architecture_name(unknown), None, "{unknown}");
        }
    }
}
