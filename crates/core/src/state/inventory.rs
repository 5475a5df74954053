//! [`Inventory`]: the hardware that the node had, to compare with the hardware that it has.
//!
//! A node that comes up with 7 of 8 GPUs looks like a node of 7. The inventory keeps the most that each GPU had, over
//! restarts and reboots. A scan that shows less begins a [`Shortfall`], which stands until the hardware is back or an
//! operator accepts it. A shortfall informs people and schedulers; it takes no GPU out of service.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Timestamp;
use crate::topology::{GpuObservation, GpuUuid, NodeObservation, NvLinkRemote, PciAddress};

/// The tolerance is memory / 64, because driver releases reserve different amounts.
const MEMORY_TOLERANCE: u64 = 64;

/// The hardware that a configuration expects of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expectation {
    /// The number of GPUs.
    pub gpus: Option<u32>,
    /// The model of each GPU, as NVML or the label `nvidia.com/gpu.product` has it.
    pub model: Option<String>,
    /// The number of active NVLinks of each GPU.
    pub nvlinks: Option<u32>,
}

/// The part of the health record about the node's hardware.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// The GPUs that the node had.
    pub gpus: BTreeMap<GpuUuid, KnownGpu>,
    /// The shortfalls that stand, without the accepted ones.
    pub shortfalls: Vec<Shortfall>,
    /// The shortfalls that an operator accepted, while they last. A missing GPU leaves `gpus` instead.
    pub accepted: Vec<Shortfall>,
}

/// The most that a GPU had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KnownGpu {
    /// Its last PCI address.
    pub pci: PciAddress,
    /// The product name.
    pub model: Option<String>,
    /// The board's serial number.
    pub serial: Option<String>,
    /// The memory in MiB.
    pub memory_mib: Option<u64>,
    /// The number of active lanes of its PCIe link.
    pub pcie_width: Option<u32>,
    /// The number of active NVLinks.
    pub nvlinks: Option<u32>,
    /// The number of active NVLinks to each other GPU, by the other GPU's address.
    pub nvlinks_to: BTreeMap<PciAddress, u32>,
    /// True if MIG mode was on at the last scan, changes by a boot or a load of the driver disregarded. `None` on GPUs
    /// without MIG.
    pub mig: Option<bool>,
    /// True if the GPU has MIG devices now: somebody made them, so MIG mode is intended.
    #[serde(skip)]
    has_mig_devices: bool,
}

/// One way in which the node has less hardware than before, or than its configuration expects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortfall {
    /// The GPU; `None` for the whole node.
    pub gpu: Option<(GpuUuid, PciAddress)>,
    /// The missing hardware.
    pub lack: Lack,
    /// The time of the scan that showed it first, in seconds since the Unix epoch.
    pub since: u64,
}

/// The missing hardware, with the earlier or expected value and the present one.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lack {
    /// The GPU.
    #[error("missing ({}{})", .model.as_deref().unwrap_or("model unknown"), serial_of(.serial.as_deref()))]
    Gpu {
        /// The product name.
        model: Option<String>,
        /// The board's serial number.
        serial: Option<String>,
    },
    /// NVLinks of the GPU.
    #[error("{has} of {had} NVLinks are active")]
    NvLinks {
        /// The number before, or the expected one.
        had: u32,
        /// The number now.
        has: u32,
    },
    /// Lanes of the GPU's PCIe link.
    #[error("its PCIe link has {has} of {had} lanes")]
    PcieWidth {
        /// The number before.
        had: u32,
        /// The number now.
        has: u32,
    },
    /// Memory of the GPU.
    #[error("it has {has} of {had} MiB of memory")]
    Memory {
        /// The MiB before.
        had: u64,
        /// The MiB now.
        has: u64,
    },
    /// The GPU's MIG mode, which the boot or the load of the driver changed.
    #[error("MIG mode has been {} since the last boot or driver load", if *.had { "off" } else { "on" })]
    MigMode {
        /// True if it was on.
        had: bool,
    },
    /// GPUs that the configuration expects.
    #[error("{has} GPUs, {had} are expected")]
    Count {
        /// The expected number.
        had: u32,
        /// The number now.
        has: u32,
    },
    /// The GPU's model, which is not the expected one.
    #[error("it is a {}, a {had} is expected", .has.as_deref().unwrap_or("GPU of unknown model"))]
    Model {
        /// The expected model.
        had: String,
        /// The GPU's model.
        has: Option<String>,
    },
}

fn serial_of(serial: Option<&str>) -> String {
    serial.map(|serial| format!(", serial {serial}")).unwrap_or_default()
}

impl Lack {
    /// The label in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Gpu { .. } => "gpu",
            Self::NvLinks { .. } => "nvlinks",
            Self::PcieWidth { .. } => "pcie_width",
            Self::Memory { .. } => "memory",
            Self::MigMode { .. } => "mig_mode",
            Self::Count { .. } => "count",
            Self::Model { .. } => "model",
        }
    }

    /// The number that is left; 0 if the lack has no number.
    fn left(&self) -> u64 {
        match self {
            Self::NvLinks { has, .. } | Self::PcieWidth { has, .. } | Self::Count { has, .. } => (*has).into(),
            Self::Memory { has, .. } => *has,
            Self::Gpu { .. } | Self::MigMode { .. } | Self::Model { .. } => 0,
        }
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.gpu {
            Some((uuid, pci)) => write!(f, "GPU {pci} ({uuid}): {}", self.lack),
            None => write!(f, "this node: {}", self.lack),
        }
    }
}

impl Shortfall {
    /// Returns true if both are the same lack of the same GPU. The numbers may differ.
    fn matches(&self, other: &Self) -> bool {
        let uuid = |shortfall: &Self| shortfall.gpu.as_ref().map(|(uuid, _)| uuid.clone());
        uuid(self) == uuid(other) && self.lack.label() == other.lack.label()
    }
}

impl KnownGpu {
    fn of(gpu: &GpuObservation) -> Self {
        let mut nvlinks_to: BTreeMap<PciAddress, u32> = BTreeMap::new();
        for end in gpu.nvlinks.iter().flatten().filter(|end| end.active) {
            if let NvLinkRemote::Gpu(pci) = end.remote {
                *nvlinks_to.entry(pci).or_default() += u32::try_from(end.links.len()).unwrap_or(u32::MAX);
            }
        }
        Self {
            pci: gpu.pci,
            model: gpu.model.clone(),
            serial: gpu.serial.clone(),
            memory_mib: gpu.memory_mib,
            pcie_width: gpu.pcie_width_now,
            nvlinks: gpu.active_nvlinks(),
            nvlinks_to,
            mig: gpu.mig.as_ref().map(|mig| mig.enabled),
            has_mig_devices: gpu.mig.as_ref().is_some_and(|mig| !mig.devices.is_empty()),
        }
    }

    /// Lists the hardware that the GPU lacks, compared with `self` and `expected`. NVLinks to `unlinked` GPUs do not
    /// count, because the other GPU is the cause.
    fn lacks(&self, has: &Self, unlinked: &BTreeSet<PciAddress>, expected: &Expectation) -> Vec<Lack> {
        let mut lacks = Vec::new();
        let gone = self.nvlinks_to.iter().filter(|(pci, _)| unlinked.contains(pci)).map(|(_, count)| *count).sum();
        let had = self.nvlinks.max(expected.nvlinks).map(|links| links.saturating_sub(gone));
        if let (Some(had), Some(has)) = (had, has.nvlinks)
            && has < had
        {
            lacks.push(Lack::NvLinks { had, has });
        }
        if let (Some(had), Some(has)) = (self.pcie_width, has.pcie_width)
            && has < had
        {
            lacks.push(Lack::PcieWidth { had, has });
        }
        if let (Some(had), Some(has)) = (self.memory_mib, has.memory_mib)
            && has < had - had / MEMORY_TOLERANCE
        {
            lacks.push(Lack::Memory { had, has });
        }
        if let (Some(had), Some(has)) = (self.mig, has.mig)
            && had != has
        {
            lacks.push(Lack::MigMode { had });
        }
        if let Some(model) = &expected.model
            && has.model.as_deref().map(product) != Some(product(model))
        {
            lacks.push(Lack::Model { had: model.clone(), has: has.model.clone() });
        }
        lacks
    }

    /// Takes over a scan's greater numbers, its address, model and serial number, and its MIG mode if an operator may
    /// have changed it.
    fn learn(&mut self, has: &Self, mig_may_change: bool) {
        if has.nvlinks >= self.nvlinks && has.nvlinks.is_some() {
            (self.nvlinks, self.nvlinks_to) = (has.nvlinks, has.nvlinks_to.clone());
        }
        if mig_may_change || self.mig.is_none() || has.has_mig_devices {
            self.mig = has.mig.or(self.mig);
        }
        self.pci = has.pci;
        self.model = has.model.clone().or(self.model.take());
        self.serial = has.serial.clone().or(self.serial.take());
        self.memory_mib = self.memory_mib.max(has.memory_mib);
        self.pcie_width = self.pcie_width.max(has.pcie_width);
    }
}

/// Writes a model as the label `nvidia.com/gpu.product` has it.
fn product(model: &str) -> String {
    model.replace(' ', "-")
}

impl Inventory {
    /// Applies a scan. `renewed` is true if the node booted, or the driver was loaded, since the last scan.
    /// `is_skipped` is true for a GPU that scans leave out. Returns the shortfalls that began and those that ended.
    pub(super) fn scanned(
        &mut self,
        observed: &NodeObservation,
        expected: &Expectation,
        renewed: bool,
        is_skipped: impl Fn(&GpuUuid) -> bool,
        now: Timestamp,
    ) -> [Vec<Shortfall>; 2] {
        let found: BTreeMap<&GpuUuid, KnownGpu> =
            observed.gpus.iter().map(|gpu| (&gpu.uuid, KnownGpu::of(gpu))).collect();
        self.follow_replacements(&found);
        let is_here = |(uuid, _): (&GpuUuid, _)| found.contains_key(uuid) || is_skipped(uuid);
        if !found.is_empty() && !self.gpus.iter().any(is_here) {
            // The node has no GPU of the record, and none at the record's addresses: the record is of another machine.
            *self = Self::default();
        }
        let mut now_lacks: Vec<(Option<(GpuUuid, PciAddress)>, Lack)> = Vec::new();
        let is_missing = |uuid: &GpuUuid| !found.contains_key(uuid) && !is_skipped(uuid);
        // The driver shuts down the NVLinks of a GPU in MIG mode.
        let in_mig_mode = found.values().filter(|gpu| gpu.mig == Some(true)).map(|gpu| gpu.pci);
        let missing = self.gpus.iter().filter(|(uuid, _)| is_missing(uuid)).map(|(_, gpu)| gpu.pci);
        let unlinked: BTreeSet<PciAddress> = missing.chain(in_mig_mode).collect();
        for (uuid, has) in &found {
            let known = self.gpus.entry((*uuid).clone()).or_default();
            let is_mig_lack = |shortfall: &Shortfall| {
                matches!(shortfall.lack, Lack::MigMode { .. })
                    && shortfall.gpu.as_ref().is_some_and(|(gpu, _)| gpu == *uuid)
            };
            let has_mig_lack = self.shortfalls.iter().chain(&self.accepted).any(is_mig_lack);
            known.learn(has, !renewed && !has_mig_lack);
            let lacks = known.lacks(has, &unlinked, expected);
            now_lacks.extend(lacks.into_iter().map(|lack| (Some(((*uuid).clone(), has.pci)), lack)));
        }
        for (uuid, known) in self.gpus.iter().filter(|(uuid, _)| is_missing(uuid)) {
            let lack = Lack::Gpu { model: known.model.clone(), serial: known.serial.clone() };
            now_lacks.push((Some((uuid.clone(), known.pci)), lack));
        }
        let has = u32::try_from(found.len()).unwrap_or(u32::MAX);
        if let Some(had) = expected.gpus.filter(|had| has < *had) {
            now_lacks.push((None, Lack::Count { had, has }));
        }
        let shown = now_lacks.into_iter().map(|(gpu, lack)| Shortfall { gpu, lack, since: now.as_secs() });
        self.enter(shown.collect())
    }

    /// Replaces the shortfalls by those of a scan. A shortfall that stood already keeps its beginning. An accepted one
    /// is left out unless it got worse. Returns the shortfalls that began and those that ended.
    fn enter(&mut self, mut shown: Vec<Shortfall>) -> [Vec<Shortfall>; 2] {
        let before = core::mem::take(&mut self.shortfalls);
        self.accepted.retain(|accepted| shown.iter().any(|new| new.matches(accepted)));
        shown.retain(|new| !self.accepted.iter().any(|old| new.matches(old) && new.lack.left() >= old.lack.left()));
        for new in &mut shown {
            if let Some(old) = before.iter().find(|old| old.matches(new)) {
                new.since = old.since;
            }
        }
        let is_absent = |list: &[Shortfall], lack: &Shortfall| !list.iter().any(|other| other.matches(lack));
        let began = shown.iter().filter(|new| is_absent(&before, new)).cloned().collect();
        let ended = before.into_iter().filter(|old| is_absent(&shown, old)).collect();
        self.shortfalls = shown;
        [began, ended]
    }

    /// Hands the values of a GPU that is gone to a new GPU at the same PCI address, which replaces it.
    fn follow_replacements(&mut self, found: &BTreeMap<&GpuUuid, KnownGpu>) {
        let new = found.iter().filter(|(uuid, _)| !self.gpus.contains_key(**uuid));
        let new: Vec<(GpuUuid, PciAddress)> = new.map(|(uuid, gpu)| ((*uuid).clone(), gpu.pci)).collect();
        for (uuid, pci) in new {
            let old = self.gpus.iter().find(|(old, gpu)| gpu.pci == pci && !found.contains_key(old));
            if let Some(known) = old.map(|(old, _)| old.clone()).and_then(|old| self.gpus.remove(&old)) {
                self.gpus.insert(uuid, known);
            }
        }
    }

    /// Accepts shortfalls on an operator's order. Returns the shortfalls that ended.
    pub(super) fn accept(&mut self, accepted: &[Shortfall]) -> Vec<Shortfall> {
        let ended: Vec<Shortfall> = self.shortfalls.extract_if(.., |shortfall| accepted.contains(shortfall)).collect();
        self.accepted.retain(|old| !ended.iter().any(|new| new.matches(old)));
        for shortfall in &ended {
            match (&shortfall.gpu, &shortfall.lack) {
                (Some((uuid, pci)), Lack::Gpu { .. }) => {
                    self.gpus.remove(uuid);
                    for known in self.gpus.values_mut() {
                        let gone = known.nvlinks_to.remove(pci).unwrap_or_default();
                        known.nvlinks = known.nvlinks.map(|links| links.saturating_sub(gone));
                    }
                }
                _ => self.accepted.push(shortfall.clone()),
            }
        }
        ended
    }
}
