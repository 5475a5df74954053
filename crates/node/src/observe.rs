//! The health of GPUs, their holders through the other door and the plan's faults, for log, metrics and readiness.

use std::collections::BTreeSet;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::readiness::{Part, Readiness};
use linkwise_core::reported::Reported;
use linkwise_core::state::{Door, Health, NodeState, UnhealthyReason};
use linkwise_core::topology::{GpuUuid, MigUuid};
use linkwise_core::words::few;
use linkwise_system::metrics::new;

/// Counts the times that a GPU or a MIG device of it became unhealthy, or changed its first reason.
#[derive(Clone, Debug)]
pub struct GpuFailures(Family<[(&'static str, String); 2], Counter>);

impl GpuFailures {
    /// Makes and registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        Self(new(registry, "gpu_failures", "Times the GPU became unhealthy, or its first reason changed"))
    }

    /// Counts a failure of a GPU.
    pub fn count(&self, gpu: &GpuUuid, reason: &'static str) {
        self.0.get_or_create(&[("uuid", gpu.to_string()), ("reason", reason.to_owned())]).inc();
    }
}

/// The most ids that one line of the log names; with more, the line has their number.
const MAX_NAMED_IDS: usize = 8;

/// The first ids of a list, for one line of the log.
pub fn ids_for_log<T: ToString>(ids: &[T]) -> String {
    few(ids, MAX_NAMED_IDS)
}

/// Shows the GPUs that are or may be held through the other door, and logs each holder once.
pub fn held(state: &NodeState, readiness: &Readiness, reported: &mut Reported<String>) {
    let held = state.held_through_other_door();
    if held.is_empty() {
        readiness.remove(&Part::Held);
        reported.clear();
        return;
    }
    let holder = |reason: &UnhealthyReason| match reason {
        UnhealthyReason::Claimed { claim, .. } => Some(format!("the claim {claim}")),
        UnhealthyReason::HeldElsewhere { resource, id } => Some(format!("a pod with {resource} {id}")),
        _ => None,
    };
    let holders: BTreeSet<String> = held.values().filter_map(|reason| holder(reason)).collect();
    let (gpus, holders) = (held.len(), Vec::from_iter(holders));
    let phase = if holders.is_empty() { "waiting for the kubelet's lists" } else { "waiting for the holders to end" };
    let by = if holders.is_empty() { String::new() } else { format!(", held by {}", ids_for_log(&holders)) };
    readiness.note(Part::Held, phase, format!("GPUs: {gpus}{by}"));
    let news = reported.replace(holders);
    if !news.is_empty() {
        let (door, holders) = (state.offers().plan().door.label(), ids_for_log(&news));
        tracing::info!(gpus, door, holders, "GPUs are held through the other door: offered when their holders end");
    }
}

/// Shows the parts of the configuration that this node cannot offer. The node is ready while it offers anything else.
pub fn plan(state: &NodeState, readiness: &Readiness) {
    let problems: Vec<String> = state.offers().faults().map(ToString::to_string).collect();
    let has_gpus = !state.topology().gpus().is_empty();
    match (state.offers_any(), problems.is_empty()) {
        _ if !has_gpus => readiness.remove(&Part::Plan),
        (true, true) => readiness.remove(&Part::Plan),
        (true, false) => readiness.note(Part::Plan, "offered in part", problems.join("; ")),
        // The MPS daemons and the parts of DRA report their own trouble.
        _ if !state.mps_shares().is_empty() || state.offers().plan().door == Door::Dra => readiness.remove(&Part::Plan),
        (false, false) => readiness.refuse(Part::Plan, "nothing can be offered", problems.join("; ")),
        (false, true) => readiness.refuse(Part::Plan, "nothing is offered", "every GPU is left out".to_owned()),
    }
}

/// Logs a change of health: of a GPU, or of one MIG device of it alone.
pub fn health(gpu: &GpuUuid, mig: Option<&MigUuid>, health: &Health) {
    let (mig, device) = (mig.map(MigUuid::as_str), if mig.is_some() { "MIG device" } else { "GPU" });
    match health {
        Health::Healthy => tracing::info!(%gpu, mig, "the {device} is healthy"),
        Health::Unhealthy { reason, since } => {
            let (since, ends_with) = (since.as_secs(), reason.ends_with());
            tracing::warn!(%gpu, mig, %reason, since, ends_with, "the {device} is unhealthy");
        }
    }
}
