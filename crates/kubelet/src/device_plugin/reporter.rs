//! Reports of a resource's plugin: to the log, the metrics, /readyz, the node's state and its views.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tonic::Status;

use super::{Phase, Sources};
use crate::readiness::Part;
use crate::registration::{Journal, Life};
use linkwise_core::allocation::{AllocationReport, DeviceId, FallbackReason};
use linkwise_core::reported::Reported;
use linkwise_core::state::{Event, ResourceName};
use linkwise_system::lock;

/// The reporter of one plugin, made by [`super::Plugin::run`].
pub(super) struct Reporter {
    resource: ResourceName,
    journal: Journal,
    sources: Sources,
    /// The fallbacks that were logged.
    fallbacks: Mutex<Reported<FallbackReason>>,
}

impl Reporter {
    pub fn new(resource: ResourceName, sources: Sources) -> Self {
        let journal = Journal::new(Part::Plugin(resource.clone()), sources.readiness.clone());
        Self { resource, journal, sources, fallbacks: Mutex::default() }
    }

    /// Reports an event between the plugin and the kubelet.
    pub fn report(&self, event: &Life<Phase>) {
        self.sources.metrics.life(&self.resource, event);
        self.journal.note(event);
    }

    /// Reports an answer to GetPreferredAllocation. `elapsed` is the time of the choice, without the RPC around it.
    pub fn chosen(&self, report: AllocationReport, elapsed: Duration, narrowed: bool) {
        let (resource, report) = (&self.resource, Arc::new(report));
        self.sources.metrics.chosen(resource, &report, elapsed, narrowed);
        (self.sources.chosen)(resource, &report, narrowed);
        let begins = |reason| lock(&self.fallbacks).begins(reason);
        match report.fallback {
            Some(reason) if begins(reason) => {
                tracing::warn!(%resource, %report, "preferred in sorted order; later ones are logged at debug level");
            }
            Some(_) => tracing::debug!(%resource, %report, "preferred in sorted order"),
            None => tracing::info!(%resource, %report, ?elapsed, narrowed, "preferred"),
        }
    }

    /// Reports an answer to Allocate. `offered` are the devices that the last GetPreferredAllocation offered; empty if
    /// it did not offer the allocated ones.
    pub fn allocated(&self, devices: Vec<DeviceId>, offered: Vec<DeviceId>, refusal: Option<&Status>) {
        let resource = &self.resource;
        self.sources.metrics.allocated(resource, refusal.is_none());
        if let Some(refusal) = refusal {
            tracing::warn!(%resource, refusal = refusal.message(), "refused to allocate");
            return;
        }
        let ids: Vec<&str> = devices.iter().map(DeviceId::as_str).collect();
        tracing::info!(%resource, devices = ids.join(","), "allocated");
        let devices = devices.into_iter().collect();
        // If the queue is full, the state does not learn of this allocation before the kubelet lists it.
        let _ = self.sources.events.try_send(Event::Allocated { resource: resource.clone(), devices, offered });
    }
}
