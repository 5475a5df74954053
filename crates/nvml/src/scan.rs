//! One full scan of the GPUs, answer by answer; where a call failed, the previous scan's answer stays. Pure.
//!
//! The agent fills a [`NodeScan`] and sends it; the program, the doctor and `linkwise snapshot` complete it with
//! [`NodeScan::after`] and read it as observations. A failed call affects only its own fact. "Not offered" is an
//! answer, and replaces a known value.

use std::collections::BTreeMap;

use nvml_wrapper_sys::bindings as sys;
use serde::{Deserialize, Serialize};

use super::call::{Answer, CallError};
use super::protocol::Place;
use linkwise_core::topology::{
    AddressingMode, ComputeCapability, CudaVersion, FabricObservation, GpuObservation, GpuUuid, HostObservation,
    MAX_MEMORY_MIB, MigCapabilities, MigDeviceObservation, MigExtension, MigObservation, MigProfileObservation,
    MigSlot, NodeObservation, NumaNodeId, NvLinkObservation, NvLinkRemote, P2pRefusal, PciAddress, PcieLink,
    ProbeFailure, TopologyLevel,
};

/// The answers of NVML to a full scan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeScan {
    /// The driver's version, such as `580.95.05`.
    pub driver: Answer<String>,
    /// The library's version.
    pub library: Answer<String>,
    /// The path or the name by which the library was loaded.
    pub path: String,
    /// The newest CUDA version that the driver supports.
    pub cuda: Answer<CudaVersion>,
    /// NVML's count of GPUs, with those that were skipped or could not be identified. `None` if the count failed; then
    /// no GPU is listed either.
    pub count: Option<u32>,
    /// The GPUs, in NVML's order.
    pub gpus: Vec<GpuScan>,
    /// The failed calls, except those whose outcome is in the other fields.
    pub failures: Vec<CallFailure>,
    /// As in [`NodeObservation`]; the supervisor sets it.
    #[serde(skip)]
    pub mig_orders: u64,
}

/// NVML's answers about one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuScan {
    pub index: u32,
    pub uuid: GpuUuid,
    pub pci: PciAddress,
    pub model: Answer<String>,
    /// The board's serial number.
    pub serial: Answer<String>,
    /// N of /dev/nvidiaN.
    pub minor: Answer<u32>,
    pub compute_capability: Answer<ComputeCapability>,
    /// The brand, by go-nvlib's names.
    pub brand: Answer<String>,
    /// The architecture, by go-nvlib's names.
    pub architecture: Answer<String>,
    /// The way in which the GPU addresses the host's memory.
    pub addressing_mode: Answer<AddressingMode>,
    pub memory_mib: Answer<u64>,
    /// The NUMA node of the memory affinity.
    pub numa: Answer<NumaNodeId>,
    /// The greatest speed of the PCIe link.
    pub pcie: Answer<PcieLink>,
    /// The lanes of the PCIe link now.
    pub pcie_width_now: Answer<u32>,
    /// True if NVLink-C2C joins the GPU to a processor.
    pub c2c: Answer<bool>,
    /// True if a display is set up on the GPU.
    pub display: Answer<bool>,
    /// The NVLink fabric it has joined.
    pub fabric: Answer<FabricObservation>,
    /// The NVLinks by number.
    pub nvlinks: Vec<Answer<NvLinkScan>>,
    pub mig: Answer<MigScan>,
    /// The common ancestors with the GPUs of higher PCI addresses: each pair is asked once.
    pub ancestors: BTreeMap<GpuUuid, Answer<TopologyLevel>>,
    /// The statuses of P2P with the GPUs of higher PCI addresses, as `nvmlGpuP2PStatus_t`.
    pub p2p: BTreeMap<GpuUuid, Answer<u32>>,
}

/// One NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLinkScan {
    /// True if the link is up.
    pub active: bool,
    /// The far end's kind, an `nvmlIntNvLinkDeviceType_t`.
    pub kind: Answer<u32>,
    pub pci: Answer<PciAddress>,
}

/// MIG on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigScan {
    pub enabled: bool,
    /// The MIG devices by index; an error if NVML could not count them, or shows none although the kernel has some.
    pub devices: Answer<BTreeMap<u32, Answer<MigDeviceScan>>>,
    /// The profiles that can be placed on the GPU; an error if the call for any of them failed.
    pub profiles: Answer<Vec<MigProfileObservation>>,
}

/// One MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigDeviceScan {
    /// The required facts of a MIG device.
    pub device: MigDeviceObservation,
    /// The profile and the place of its GPU instance.
    pub instance: Answer<MigSlot>,
    pub extension: Answer<MigExtension>,
    /// Its capabilities; an error if the GPU's minor number, by which the kernel lists them, could not be read.
    pub capabilities: Answer<MigCapabilities>,
}

/// A failed call, and its subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallFailure {
    /// A PCI address, `GPU 3`, `driver`.
    pub subject: String,
    /// The part of the subject, such as `NVLink 1, 2`; empty for the whole.
    pub part: String,
    /// The error.
    pub error: CallError,
}

impl CallFailure {
    /// A failed call about the whole subject.
    pub fn new(subject: impl Into<String>, error: CallError) -> Self {
        Self { subject: subject.into(), part: String::new(), error }
    }
}

impl From<CallFailure> for ProbeFailure {
    fn from(CallFailure { subject, part, error }: CallFailure) -> Self {
        let reason = if part.is_empty() { error.reason.to_string() } else { format!("{part}: {}", error.reason) };
        Self { subject, call: error.call.into_owned(), error: reason }
    }
}

/// The value, if it is known.
pub fn known<T>(answer: &Answer<T>) -> Option<&T> {
    answer.as_ref().ok().and_then(Option::as_ref)
}

/// Adds the errors of one subject to the failures, and puts the previous answers, if known, in their place.
struct Retained<'a> {
    subject: String,
    failures: &'a mut Vec<CallFailure>,
}

impl Retained<'_> {
    fn fact<T: Clone>(&mut self, now: &mut Answer<T>, before: Option<&Answer<T>>) {
        self.part("", None, now, before);
    }

    /// Retains the answer for a part. Equal errors of several parts, such as NVLinks, become one failure that lists
    /// each part once: one failed call may cost a part two facts.
    fn part<T: Clone>(&mut self, what: &str, number: Option<u32>, now: &mut Answer<T>, before: Option<&Answer<T>>) {
        let Err(error) = &*now else { return };
        let same = |known: &&mut CallFailure| known.subject == self.subject && known.error == *error;
        match (self.failures.iter_mut().find(same), number) {
            (Some(known), Some(number)) if known.part.ends_with(&format!(" {number}")) => {}
            (Some(known), Some(number)) if !known.part.is_empty() => known.part += &format!(", {number}"),
            (Some(_), _) => {}
            (None, number) => {
                let part = number.map(|number| format!("{what} {number}")).unwrap_or_default();
                self.failures.push(CallFailure { subject: self.subject.clone(), part, error: error.clone() });
            }
        }
        if let Some(before @ Ok(_)) = before {
            now.clone_from(before);
        }
    }
}

impl NodeScan {
    /// A scan that lists these GPUs, with a driver of which nothing is known.
    #[cfg(test)]
    pub fn bare(gpus: Vec<GpuScan>) -> Self {
        Self {
            driver: Ok(None),
            library: Ok(None),
            path: String::new(),
            cuda: Ok(None),
            count: u32::try_from(gpus.len()).ok(),
            gpus,
            failures: Vec::new(),
            mig_orders: 0,
        }
    }

    /// Completes this scan from the previous one. Facts whose calls failed stay as they were, and so do whole GPUs that
    /// NVML counts but that the agent skipped or could not identify. The errors become [`Self::failures`].
    #[must_use]
    pub fn after(mut self, before: Option<&Self>) -> Self {
        let mut failures = std::mem::take(&mut self.failures);
        let mut driver = Retained { subject: "driver".to_owned(), failures: &mut failures };
        driver.fact(&mut self.driver, before.map(|before| &before.driver));
        driver.fact(&mut self.library, before.map(|before| &before.library));
        driver.fact(&mut self.cuda, before.map(|before| &before.cuda));
        let indices: BTreeMap<GpuUuid, u32> = self.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.index)).collect();
        let old_gpus = before.map_or(&[][..], |before| &before.gpus);
        for gpu in &mut self.gpus {
            let old = old_gpus.iter().find(|old| (&old.uuid, old.pci) == (&gpu.uuid, gpu.pci));
            let mut facts = Retained { subject: gpu.pci.to_string(), failures: &mut failures };
            gpu.retain(old, &mut facts);
            for (other, level) in &mut gpu.ancestors {
                facts.part("with GPU", indices.get(other).copied(), level, None);
            }
            for (other, status) in &mut gpu.p2p {
                let before = old.and_then(|old| old.p2p.get(other));
                facts.part("with GPU", indices.get(other).copied(), status, before);
            }
        }
        self.failures = failures;
        let Some(before) = before else { return self };
        self.count = self.count.or(before.count);
        if self.count == before.count {
            for old in &before.gpus {
                if !self.gpus.iter().any(|gpu| gpu.index == old.index || gpu.uuid == old.uuid) {
                    self.gpus.push(GpuScan { ancestors: BTreeMap::new(), p2p: BTreeMap::new(), ..old.clone() });
                }
            }
            self.gpus.sort_by_key(|gpu| gpu.index);
        }
        self.retain_ancestors(&before.gpus);
        self
    }

    /// Retains the common ancestors of pairs whose call failed, and of pairs with a GPU that is itself retained.
    fn retain_ancestors(&mut self, before: &[GpuScan]) {
        let listed: Vec<GpuUuid> = self.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        for gpu in &mut self.gpus {
            let ancestors = before.iter().filter(|old| old.uuid == gpu.uuid).flat_map(|old| &old.ancestors);
            for (other, level) in ancestors.filter(|(other, level)| level.is_ok() && listed.contains(other)) {
                let now = gpu.ancestors.entry(other.clone()).or_insert_with(|| level.clone());
                if now.is_err() {
                    now.clone_from(level);
                }
            }
        }
    }

    /// The GPU at a place, if this scan lists it.
    pub fn at(&self, place: Place) -> Option<&GpuScan> {
        self.gpus.iter().find(|gpu| self.count == Some(place.of) && gpu.index == place.index)
    }

    /// The node: these GPUs, and the host around them with the failures of reading it.
    pub fn node(&self, host: HostObservation, host_failures: Vec<ProbeFailure>) -> NodeObservation {
        let failures = self.failures.iter().cloned().map(Into::into);
        NodeObservation {
            gpus: self.observations(),
            host,
            driver_version: known(&self.driver).cloned(),
            cuda_version: known(&self.cuda).copied(),
            failures: failures.chain(host_failures).collect(),
            mig_orders: self.mig_orders,
        }
    }

    /// A refusal of P2P, by the index of the other GPU.
    fn refusal(&self, other: &GpuUuid, status: &Answer<u32>) -> Option<(u32, P2pRefusal)> {
        let other = self.gpus.iter().find(|gpu| gpu.uuid == *other)?;
        Some((other.index, P2pRefusal::from_nvml(*known(status)?)?))
    }

    /// The GPUs as observations.
    pub fn observations(&self) -> Vec<GpuObservation> {
        let mut levels: BTreeMap<(&GpuUuid, u32), TopologyLevel> = BTreeMap::new();
        for gpu in &self.gpus {
            for (other, level) in &gpu.ancestors {
                let other = self.gpus.iter().find(|known| known.uuid == *other);
                if let (Some(other), Some(level)) = (other, known(level)) {
                    levels.insert((&gpu.uuid, other.index), *level);
                    levels.insert((&other.uuid, gpu.index), *level);
                }
            }
        }
        let is_gpu_here = |pci| self.gpus.iter().any(|gpu| gpu.pci == pci);
        let observe = |gpu: &GpuScan| {
            let own = levels.range((&gpu.uuid, 0)..=(&gpu.uuid, u32::MAX));
            GpuObservation {
                index: gpu.index,
                uuid: gpu.uuid.clone(),
                pci: gpu.pci,
                model: known(&gpu.model).cloned(),
                serial: known(&gpu.serial).cloned(),
                minor: known(&gpu.minor).copied(),
                compute_capability: known(&gpu.compute_capability).copied(),
                brand: known(&gpu.brand).cloned(),
                architecture: known(&gpu.architecture).cloned(),
                addressing_mode: known(&gpu.addressing_mode).copied(),
                memory_mib: known(&gpu.memory_mib).copied().filter(|mib| *mib <= MAX_MEMORY_MIB),
                numa: known(&gpu.numa).copied(),
                pcie: known(&gpu.pcie).copied(),
                pcie_width_now: known(&gpu.pcie_width_now).copied(),
                nvlinks: nvlinks(&gpu.nvlinks, is_gpu_here),
                c2c: known(&gpu.c2c).copied(),
                display: known(&gpu.display).copied(),
                mig: known(&gpu.mig).map(MigScan::observation),
                fabric: known(&gpu.fabric).cloned(),
                common_ancestors: own.map(|((_, other), level)| (*other, *level)).collect(),
                p2p_refused: gpu.p2p.iter().filter_map(|(other, status)| self.refusal(other, status)).collect(),
            }
        };
        self.gpus.iter().map(observe).collect()
    }
}

impl GpuScan {
    /// A GPU about which NVML offers no other fact.
    #[cfg(test)]
    pub fn bare(index: u32, uuid: GpuUuid, pci: PciAddress) -> Self {
        Self {
            index,
            uuid,
            pci,
            model: Ok(None),
            serial: Ok(None),
            minor: Ok(None),
            compute_capability: Ok(None),
            brand: Ok(None),
            architecture: Ok(None),
            addressing_mode: Ok(None),
            memory_mib: Ok(None),
            numa: Ok(None),
            pcie: Ok(None),
            pcie_width_now: Ok(None),
            c2c: Ok(None),
            display: Ok(None),
            fabric: Ok(None),
            nvlinks: Vec::new(),
            mig: Ok(None),
            ancestors: BTreeMap::new(),
            p2p: BTreeMap::new(),
        }
    }

    fn retain(&mut self, before: Option<&Self>, facts: &mut Retained<'_>) {
        macro_rules! retain {
            ($($fact:ident),*) => {$( facts.fact(&mut self.$fact, before.map(|before| &before.$fact)); )*};
        }
        retain!(model, serial, minor, compute_capability, brand, architecture, addressing_mode, memory_mib);
        retain!(numa, pcie, pcie_width_now, c2c, display, fabric);
        for (number, link) in (0..).zip(&mut self.nvlinks) {
            let before = before.and_then(|before| before.nvlinks.get(usize::try_from(number).ok()?));
            if let Ok(Some(link)) = link {
                let before = before.and_then(known);
                facts.part("NVLink", Some(number), &mut link.kind, before.map(|before| &before.kind));
                facts.part("NVLink", Some(number), &mut link.pci, before.map(|before| &before.pci));
            } else {
                facts.part("NVLink", Some(number), link, before);
            }
        }
        if let Ok(Some(mig)) = &mut self.mig {
            mig.retain(before.and_then(|before| known(&before.mig)), facts);
        } else {
            retain!(mig);
        }
    }
}

/// The links, grouped by far end and state, in the order of their first links; `None` if no link could be asked.
fn nvlinks(links: &[Answer<NvLinkScan>], is_gpu_here: impl Fn(PciAddress) -> bool) -> Option<Vec<NvLinkObservation>> {
    let mut groups: Vec<NvLinkObservation> = Vec::new();
    for (number, link) in (0..).zip(links) {
        let Some(link) = known(link) else { continue };
        let remote = link.remote(&is_gpu_here);
        match groups.iter_mut().find(|group| (group.remote, group.active) == (remote, link.active)) {
            Some(group) => group.links.push(number),
            None => groups.push(NvLinkObservation { links: vec![number], remote, active: link.active }),
        }
    }
    links.iter().any(Result::is_ok).then_some(groups)
}

impl NvLinkScan {
    fn remote(&self, is_gpu_here: &impl Fn(PciAddress) -> bool) -> NvLinkRemote {
        match (known(&self.kind).copied(), known(&self.pci).copied()) {
            (Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU), _) => NvLinkRemote::Cpu,
            (Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH), pci) => NvLinkRemote::Switch(pci),
            (Some(sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU), Some(pci)) => NvLinkRemote::Gpu(pci),
            (_, Some(pci)) if is_gpu_here(pci) => NvLinkRemote::Gpu(pci),
            _ => NvLinkRemote::Unknown,
        }
    }
}

impl MigScan {
    fn retain(&mut self, before: Option<&Self>, facts: &mut Retained<'_>) {
        let before = before.filter(|_| self.enabled);
        facts.fact(&mut self.profiles, before.map(|before| &before.profiles));
        let before = before.map(|before| &before.devices);
        let Ok(Some(devices)) = &mut self.devices else { return facts.fact(&mut self.devices, before) };
        let before = before.and_then(known);
        let here: Vec<_> = devices.values().filter_map(known).map(|found| found.device.uuid.clone()).collect();
        for (index, found) in devices {
            let at = |index| before.and_then(|before| before.get(index));
            if let Ok(Some(found)) = found {
                let same = |old: &&MigDeviceScan| old.device.uuid == found.device.uuid;
                let old = before.into_iter().flat_map(BTreeMap::values).filter_map(known).find(same);
                facts.part("MIG device", Some(*index), &mut found.instance, old.map(|old| &old.instance));
                facts.part("MIG device", Some(*index), &mut found.extension, old.map(|old| &old.extension));
                facts.fact(&mut found.capabilities, old.map(|old| &old.capabilities));
            } else {
                // A device that moved to another index must not appear twice.
                let moved = |old: &MigDeviceScan| here.contains(&old.device.uuid);
                facts.part("MIG device", Some(*index), found, at(index).filter(|old| !known(old).is_some_and(moved)));
            }
        }
    }

    fn observation(&self) -> MigObservation {
        let devices = known(&self.devices).into_iter().flat_map(BTreeMap::values).filter_map(known);
        let devices = devices.map(|found| MigDeviceObservation {
            profile_id: known(&found.instance).map(|instance| instance.profile_id),
            placement: known(&found.instance).map(|instance| instance.placement),
            extension: known(&found.extension).copied(),
            capabilities: known(&found.capabilities).copied(),
            ..found.device.clone()
        });
        let profiles = known(&self.profiles).cloned().unwrap_or_default();
        MigObservation { enabled: self.enabled, devices: devices.collect(), profiles }
    }
}

#[cfg(test)]
pub(crate) mod tests;
