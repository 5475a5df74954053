//! The occurrences of plugins and the health of GPUs, for the log and the metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::readiness::{Part, Readiness};
use linkwise_core::allocation::FallbackReason;
use linkwise_core::once::Once;
use linkwise_core::state::{Health, NodeState, ResourceName, UnhealthyReason};
use linkwise_core::topology::{GpuUuid, MigUuid};
use linkwise_kubelet::device_plugin::{Life, Occurrence, Phase};
use linkwise_system::grpc::{Refusal, Rpc};
use linkwise_system::metrics::new;
use linkwise_system::uds::Peer;

/// The most troubles of a resource, and the most refused users, that are remembered; further ones are not logged.
const MOST: usize = 64;

/// Counts GPUs that became unhealthy.
#[derive(Clone, Debug)]
pub struct GpuFailures(Family<[(&'static str, String); 2], Counter>);

impl GpuFailures {
    /// Makes and registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        Self(new(registry, "gpu_failures", "Times the GPU became unhealthy, or its first reason another"))
    }

    /// Counts a GPU that became unhealthy.
    pub fn count(&self, gpu: &GpuUuid, reason: &'static str) {
        self.0.get_or_create(&[("uuid", gpu.to_string()), ("reason", reason.to_owned())]).inc();
    }
}

/// The most ids that one line of the log names; with more, the line has their number.
const NAMED: usize = 8;

/// The first of some ids, for a line of the log.
pub fn some<T: fmt::Display>(ids: &[T]) -> String {
    let named: Vec<String> = ids.iter().take(NAMED).map(ToString::to_string).collect();
    let named = named.join(", ");
    match ids.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// Shows the GPUs that are held through the other door than the node's, and logs each holder once.
pub fn held(state: &NodeState, readiness: &Readiness, reported: &mut Once<String>) {
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
    let phase = if holders.is_empty() { "waiting for the kubelet's lists" } else { "waiting for the holders' ends" };
    let of = if holders.is_empty() { String::new() } else { format!(", of {}", some(&holders)) };
    readiness.note(Part::Held, phase, format!("GPUs: {gpus}{of}"));
    let news = reported.replace(holders);
    if !news.is_empty() {
        let (door, holders) = (state.offers().plan().door.label(), some(&news));
        tracing::info!(gpus, door, holders, "GPUs are held through the other door, and offered when their holders end");
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

/// The facts that the log has already: each is logged once, and its repetitions are counted.
#[derive(Debug)]
pub struct Reported {
    fallbacks: Once<FallbackReason>,
    /// The troubles of each resource since it last served.
    troubles: BTreeMap<ResourceName, Once<String>>,
    refused: Once<u32>,
}

impl Default for Reported {
    fn default() -> Self {
        Self { fallbacks: Once::new(), troubles: BTreeMap::new(), refused: Once::with_bound(MOST) }
    }
}

impl Reported {
    /// Returns true if this is new since the resource last served.
    fn is_news(&mut self, resource: &ResourceName, kind: &str, why: &str) -> bool {
        let troubles = self.troubles.entry(resource.clone()).or_insert_with(|| Once::with_bound(MOST));
        troubles.is_news(format!("{kind}: {why}"))
    }

    /// Logs an occurrence; one that was logged already goes to debug level.
    pub fn log(&mut self, resource: &ResourceName, occurrence: &Occurrence) {
        match occurrence {
            Occurrence::Life(Life::Phase(Phase::Serving)) => {
                let repeated = self.troubles.remove(resource).map_or(0, |mut troubles| troubles.clear());
                tracing::info!(%resource, phase = Phase::Serving.words(), repeated, "kubelet");
            }
            Occurrence::Life(Life::Phase(phase)) => tracing::debug!(%resource, phase = phase.words(), "kubelet"),
            Occurrence::Detached(Ok(())) => {
                tracing::info!(%resource, "serving beside the plugin before us, whose end will change nothing");
            }
            Occurrence::Detached(Err(error)) => {
                tracing::warn!(%resource, error, "the end of the plugin before us may cost another registration");
            }
            Occurrence::Life(Life::Waiting(why)) if self.is_news(resource, "waiting", why) => {
                tracing::warn!(%resource, why, "waiting for the kubelet");
            }
            Occurrence::Life(Life::Registered(Ok(()))) if self.is_news(resource, "registered", "") => {
                tracing::info!(%resource, "registered");
            }
            Occurrence::Life(Life::Registered(Err(error))) if self.is_news(resource, "not registered", error) => {
                tracing::warn!(%resource, error, "not registered");
            }
            Occurrence::Life(Life::Ended(why)) if self.is_news(resource, "ended", why) => {
                tracing::warn!(%resource, why, "the session with the kubelet ended");
            }
            Occurrence::Life(Life::Refused(Refusal::NotAccepted(error)))
                if self.is_news(resource, "not accepted", error) =>
            {
                tracing::warn!(%resource, error, "a connection could not be accepted");
            }
            Occurrence::Life(Life::Refused(Refusal::Caller(Peer { uid, pid }))) if self.refused.is_news(*uid) => {
                tracing::warn!(%resource, uid, pid, "refused a caller; root and linkwise's own user may call");
            }
            Occurrence::Life(Life::Rpc(Rpc { method, code, elapsed })) => {
                tracing::debug!(%resource, method, code, ?elapsed, "rpc");
            }
            Occurrence::Life(again) => tracing::debug!(%resource, ?again, "again"),
            Occurrence::Chosen { report, elapsed, narrowed } => match report.fallback {
                Some(reason) if self.fallbacks.is_news(reason) => {
                    let what = "preferred in sorted order; further ones are counted, not logged";
                    tracing::warn!(%resource, %report, "{what}");
                }
                Some(_) => tracing::debug!(%resource, %report, "preferred in sorted order"),
                None => tracing::info!(%resource, %report, ?elapsed, narrowed, "preferred"),
            },
            // The line above it has the devices.
            Occurrence::Given { .. } => {}
            Occurrence::Allocated(Ok(devices)) => tracing::info!(%resource, devices = devices.join(","), "allocated"),
            Occurrence::Allocated(Err(refusal)) => tracing::warn!(%resource, refusal, "refused to allocate"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn troubles_are_news_again_once_it_has_served() {
        let (mut reported, gpu) = (Reported::default(), ResourceName::gpu());
        assert!(reported.is_news(&gpu, "ended", "a") && reported.is_news(&gpu, "waiting", "a"));
        assert!(!reported.is_news(&gpu, "ended", "a"));
        reported.log(&gpu, &Occurrence::Life(Life::Phase(Phase::Serving)));
        assert!(reported.is_news(&gpu, "ended", "a"));
    }

    #[test]
    fn strangers_fill_neither_log_nor_memory() {
        let (mut reported, gpu) = (Reported::default(), ResourceName::gpu());
        let logged = (0..10_000).filter(|uid| reported.refused.is_news(*uid)).count();
        assert_eq!(logged, MOST);
        let logged = (0..10_000).filter(|number| reported.is_news(&gpu, "ended", &number.to_string())).count();
        assert_eq!(logged, MOST);
    }
}
