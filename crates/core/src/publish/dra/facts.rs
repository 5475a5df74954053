//! [`DraFacts`]: what the devices of a node are made from.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::SliceDevice;
use super::layout::GpuLayout;
use crate::allocation::GpuSet;
use crate::state::{DriverVersions, MigInstance, NodeState, ResourcePlan, UnhealthyReason};
use crate::topology::{Gpu, GpuUuid, MigDevice, NodeTopology};

/// What the devices of a node are made from.
#[derive(Clone, Debug)]
pub struct DraFacts<'a> {
    /// The GPUs and their links.
    pub topology: &'a NodeTopology,
    /// The driver's versions.
    pub versions: &'a DriverVersions,
    /// The GPUs that are offered through DRA, by their places: [`offered`], less those that the device plugin still has.
    pub gpus: GpuSet,
    /// Order and groups of these GPUs.
    pub layout: &'a GpuLayout,
    /// Why GPUs are unhealthy: all reasons that count, in the order in which they began.
    pub reasons: BTreeMap<GpuUuid, Vec<UnhealthyReason>>,
    /// The names of devices that claims hold.
    pub held: BTreeSet<String>,
    /// The devices that were published last, for those that are held and gone.
    pub previous: &'a [SliceDevice],
    /// What else decides.
    pub settings: DraSettings,
}

/// What decides about devices beside the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraSettings {
    /// Whether the API server keeps taints.
    pub taints_survive: bool,
    /// Whether pods are evicted from a GPU that is lost (`NoExecute`).
    pub evict_from_lost: bool,
}

impl Default for DraSettings {
    /// Taints are kept, and evict no pod.
    fn default() -> Self {
        Self { taints_survive: true, evict_from_lost: false }
    }
}

/// The GPUs that a plan offers through DRA, by their places.
pub fn offered(topology: &NodeTopology, plan: &ResourcePlan) -> GpuSet {
    let gpus = topology.gpus().iter().enumerate();
    gpus.filter(|(_, gpu)| plan.filter.offers(gpu) && plan.dra.include(gpu)).map(|(place, _)| place).collect()
}

impl<'a> DraFacts<'a> {
    /// The facts of a machine of which no health is known.
    pub fn of_machine(
        topology: &'a NodeTopology,
        versions: &'a DriverVersions,
        gpus: GpuSet,
        layout: &'a GpuLayout,
    ) -> Self {
        Self {
            topology,
            versions,
            gpus,
            layout,
            reasons: BTreeMap::new(),
            held: BTreeSet::new(),
            previous: &[],
            settings: DraSettings::default(),
        }
    }

    /// The facts of a snapshot; `driver` is the DRA driver whose claims hold our devices. What its plugin has prepared and
    /// the kubelet does not list is for the caller to add to `held`.
    pub fn of_state(
        state: &'a NodeState,
        driver: &str,
        gpus: GpuSet,
        layout: &'a GpuLayout,
        previous: &'a [SliceDevice],
        settings: DraSettings,
    ) -> Self {
        let hardware = state.hardware();
        let reasons = hardware.topology().gpus().iter().map(|gpu| {
            let counting = hardware.counting(&gpu.uuid).cloned().collect();
            (gpu.uuid.clone(), counting)
        });
        let claims = state.ledger().holdings().claims.iter().filter(|claimed| claimed.driver == driver);
        Self {
            reasons: reasons.collect(),
            held: claims.map(|claimed| claimed.device.clone()).collect(),
            previous,
            settings,
            ..Self::of_machine(hardware.topology(), hardware.versions(), gpus, layout)
        }
    }

    /// The reasons that make a GPU, or a MIG device of it, unhealthy.
    pub(super) fn reasons(&self, gpu: &Gpu, mig: Option<&MigDevice>) -> impl Iterator<Item = &UnhealthyReason> + Clone {
        let instance =
            mig.map(|mig| MigInstance { gpu_instance: mig.gpu_instance, compute_instance: Some(mig.compute_instance) });
        let reasons = self.reasons.get(&gpu.uuid).into_iter().flatten();
        reasons.filter(move |reason| reason.concerns(instance))
    }
}
