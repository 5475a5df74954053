//! What the plugins did, into metrics and into the log.

use std::collections::BTreeSet;

use crate::allocation::FallbackReason;
use crate::inventory::ResourceName;
use crate::kubelet::{Occurrence, Phase};
use crate::metrics::Metrics;

/// Counts an occurrence. On the path of an admission: nothing here waits.
pub(super) fn count(metrics: &Metrics, resource: &ResourceName, occurrence: &Occurrence) {
    match occurrence {
        Occurrence::Phase(phase) => metrics.connected(resource, *phase == Phase::Serving),
        Occurrence::Registered(result) => metrics.registered(resource, result.is_ok()),
        Occurrence::Waiting(_) | Occurrence::Ended(_) => {}
        Occurrence::Rpc { method, code, elapsed } => metrics.rpc(resource, method, code, *elapsed),
        Occurrence::Chosen { report, elapsed, narrowed } => metrics.chosen(resource, report, *elapsed, *narrowed),
        Occurrence::Allocated(result) => metrics.allocated(resource, result.is_ok()),
    }
}

/// Logs an occurrence; `told` holds the fallbacks that were told of, for each is told once.
pub(super) fn log(resource: &ResourceName, occurrence: &Occurrence, told: &mut BTreeSet<FallbackReason>) {
    match occurrence {
        Occurrence::Phase(phase) => tracing::info!(%resource, phase = phase.words(), "kubelet"),
        Occurrence::Waiting(why) => tracing::warn!(%resource, why, "waiting for the kubelet"),
        Occurrence::Registered(Ok(())) => tracing::info!(%resource, "registered"),
        Occurrence::Registered(Err(error)) => tracing::warn!(%resource, error, "not registered"),
        Occurrence::Ended(why) => tracing::warn!(%resource, why, "the session with the kubelet ended"),
        Occurrence::Rpc { method, code, elapsed } => tracing::debug!(%resource, method, code, ?elapsed, "rpc"),
        Occurrence::Chosen { report, elapsed, narrowed } => match report.fallback {
            Some(reason) if told.insert(reason) => {
                tracing::warn!(%resource, %report, "preferred in sorted order; further ones are counted, not logged");
            }
            Some(_) => tracing::debug!(%resource, %report, "preferred in sorted order"),
            None => tracing::info!(%resource, %report, ?elapsed, narrowed, "preferred"),
        },
        Occurrence::Allocated(Ok(devices)) => tracing::info!(%resource, devices = devices.join(","), "allocated"),
        Occurrence::Allocated(Err(refusal)) => tracing::warn!(%resource, refusal, "refused to allocate"),
    }
}
