//! What the plugins did, into metrics and into the log.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocation::{DeviceId, FallbackReason};
use crate::kubelet::{Occurrence, Phase};
use crate::metrics::Metrics;
use crate::state::{Health, ResourceName};
use crate::topology::{GpuUuid, MigUuid};

/// Causes, and uids, that are remembered; what comes on top of so many is not logged.
const MOST: usize = 64;

/// Counts an occurrence. On the path of an admission: nothing here waits.
pub(super) fn count(metrics: &Metrics, resource: &ResourceName, occurrence: &Occurrence) {
    match occurrence {
        Occurrence::Phase(phase) => metrics.connected(resource, *phase == Phase::Serving),
        Occurrence::Registered(result) => metrics.registered(resource, result.is_ok()),
        Occurrence::Waiting(_) | Occurrence::Ended(_) | Occurrence::NotAccepted(_) => {}
        Occurrence::Refused { .. } => metrics.refused(resource),
        Occurrence::Rpc { method, code, elapsed } => metrics.rpc(resource, method, code, *elapsed),
        Occurrence::Chosen { report, elapsed, narrowed } => metrics.chosen(resource, report, *elapsed, *narrowed),
        Occurrence::Allocated(result) => metrics.allocated(resource, result.is_ok()),
    }
}

/// Ids that one line of the log names; of more it says how many.
const NAMED: usize = 8;

/// Ids for a line of the log.
pub(super) fn some(ids: &[DeviceId]) -> String {
    let named: Vec<&str> = ids.iter().take(NAMED).map(DeviceId::as_str).collect();
    let named = named.join(", ");
    match ids.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// What the log has said already: a thing is said once, what repeats it is counted.
#[derive(Debug, Default)]
pub(super) struct Told {
    fallbacks: BTreeSet<FallbackReason>,
    /// The troubles of each resource since it last served, with how often each was not said.
    troubles: BTreeMap<ResourceName, BTreeMap<String, u64>>,
    refused: BTreeSet<u32>,
}

impl Told {
    /// Whether this is new since the resource last served.
    fn first(&mut self, resource: &ResourceName, kind: &str, why: &str) -> bool {
        let troubles = self.troubles.entry(resource.clone()).or_default();
        let key = format!("{kind}: {why}");
        let full = troubles.len() >= MOST;
        match troubles.get_mut(&key) {
            Some(unsaid) => *unsaid += 1,
            None if full => {}
            None => return troubles.insert(key, 0).is_none(),
        }
        false
    }

    /// It serves: what troubles come next are new. How many were not said.
    fn served(&mut self, resource: &ResourceName) -> u64 {
        self.troubles.remove(resource).unwrap_or_default().into_values().sum()
    }

    fn first_refusal(&mut self, uid: u32) -> bool {
        self.refused.len() < MOST && self.refused.insert(uid)
    }
}

/// Logs a change of health: of a GPU, or of one MIG device of it alone.
pub(super) fn health(gpu: &GpuUuid, mig: Option<&MigUuid>, health: &Health) {
    let mig = mig.map(MigUuid::as_str);
    match (health, mig) {
        (Health::Healthy, None) => tracing::info!(%gpu, "the GPU is healthy"),
        (Health::Healthy, Some(mig)) => tracing::info!(%gpu, mig, "the MIG device is healthy"),
        (Health::Unhealthy { reason, since }, None) => {
            let (since, ends_with) = (since.as_secs(), reason.ends_with());
            tracing::warn!(%gpu, %reason, since, ends_with, "the GPU is unhealthy");
        }
        (Health::Unhealthy { reason, since }, Some(mig)) => {
            let (since, ends_with) = (since.as_secs(), reason.ends_with());
            tracing::warn!(%gpu, mig, %reason, since, ends_with, "the MIG device is unhealthy");
        }
    }
}

/// Logs an occurrence.
pub(super) fn log(resource: &ResourceName, occurrence: &Occurrence, told: &mut Told) {
    match occurrence {
        Occurrence::Phase(Phase::Serving) => {
            let unsaid = told.served(resource);
            tracing::info!(%resource, phase = Phase::Serving.words(), repeated = unsaid, "kubelet");
        }
        Occurrence::Phase(phase) => tracing::debug!(%resource, phase = phase.words(), "kubelet"),
        Occurrence::Waiting(why) if told.first(resource, "waiting", why) => {
            tracing::warn!(%resource, why, "waiting for the kubelet");
        }
        Occurrence::Registered(Ok(())) if told.first(resource, "registered", "") => {
            tracing::info!(%resource, "registered");
        }
        Occurrence::Registered(Err(error)) if told.first(resource, "not registered", error) => {
            tracing::warn!(%resource, error, "not registered");
        }
        Occurrence::Ended(why) if told.first(resource, "ended", why) => {
            tracing::warn!(%resource, why, "the session with the kubelet ended");
        }
        Occurrence::NotAccepted(error) if told.first(resource, "not accepted", error) => {
            tracing::warn!(%resource, error, "a connection could not be accepted");
        }
        Occurrence::Refused { uid, pid } if told.first_refusal(*uid) => {
            tracing::warn!(%resource, uid, pid, "refused a caller; --allowed-uids names who may call besides root");
        }
        Occurrence::Waiting(_)
        | Occurrence::Registered(_)
        | Occurrence::Ended(_)
        | Occurrence::NotAccepted(_)
        | Occurrence::Refused { .. } => tracing::debug!(%resource, ?occurrence, "again"),
        Occurrence::Rpc { method, code, elapsed } => tracing::debug!(%resource, method, code, ?elapsed, "rpc"),
        Occurrence::Chosen { report, elapsed, narrowed } => match report.fallback {
            Some(reason) if told.fallbacks.insert(reason) => {
                tracing::warn!(%resource, %report, "preferred in sorted order; further ones are counted, not logged");
            }
            Some(_) => tracing::debug!(%resource, %report, "preferred in sorted order"),
            None => tracing::info!(%resource, %report, ?elapsed, narrowed, "preferred"),
        },
        Occurrence::Allocated(Ok(devices)) => tracing::info!(%resource, devices = devices.join(","), "allocated"),
        Occurrence::Allocated(Err(refusal)) => tracing::warn!(%resource, refusal, "refused to allocate"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_said_once_until_it_serves_again() {
        let (mut told, gpu) = (Told::default(), ResourceName::gpu());
        assert!(told.first(&gpu, "ended", "a") && told.first(&gpu, "ended", "b") && told.first(&gpu, "waiting", "a"));
        assert!(!told.first(&gpu, "ended", "a") && !told.first(&gpu, "ended", "a") && !told.first(&gpu, "ended", "b"));
        assert_eq!(told.served(&gpu), 3);
        assert!(told.first(&gpu, "ended", "a"));
        assert_eq!((told.served(&gpu), told.served(&gpu)), (0, 0));
    }

    #[test]
    fn strangers_fill_neither_the_log_nor_memory() {
        let (mut told, gpu) = (Told::default(), ResourceName::gpu());
        let said = (0..10_000).filter(|uid| told.first_refusal(*uid)).count();
        assert_eq!((said, told.first_refusal(0)), (MOST, false));
        let said = (0..10_000).filter(|number| told.first(&gpu, "ended", &number.to_string())).count();
        assert_eq!(said, MOST);
    }
}
