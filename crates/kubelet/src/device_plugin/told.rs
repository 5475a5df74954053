//! What is told of a resource's plugin: to the log, the metrics, /readyz, the node's state and its views.

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

/// Those who are told.
pub(super) struct Told {
    resource: ResourceName,
    journal: Journal,
    sources: Sources,
    /// The fallbacks that were logged.
    fallbacks: Mutex<Reported<FallbackReason>>,
}

impl Told {
    pub fn new(resource: ResourceName, sources: Sources) -> Self {
        let journal = Journal::new(Part::Plugin(resource.clone()), sources.readiness.clone());
        Self { resource, journal, sources, fallbacks: Mutex::default() }
    }

    /// Tells what happened between the plugin and the kubelet.
    pub fn life(&self, event: &Life<Phase>) {
        self.sources.metrics.life(&self.resource, event);
        self.journal.note(event);
    }

    /// Tells the answer to GetPreferredAllocation, and the time of the choice alone.
    pub fn chosen(&self, report: AllocationReport, elapsed: Duration, narrowed: bool) {
        let (resource, report) = (&self.resource, Arc::new(report));
        self.sources.metrics.chosen(resource, &report, elapsed, narrowed);
        (self.sources.chosen)(resource, &report, narrowed);
        // Only whole reasons are ever put in.
        let is_news = |reason| lock(&self.fallbacks).is_news(reason);
        match report.fallback {
            Some(reason) if is_news(reason) => {
                let what = "preferred in sorted order; further ones are counted, not logged";
                tracing::warn!(%resource, %report, "{what}");
            }
            Some(_) => tracing::debug!(%resource, %report, "preferred in sorted order"),
            None => tracing::info!(%resource, %report, ?elapsed, narrowed, "preferred"),
        }
    }

    /// Tells the answer to Allocate; `offered` are the devices from which the kubelet let us choose, none if it did not
    /// ask.
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
        // The queue is full: the devices that were free then stay unknown.
        let _ = self.sources.events.try_send(Event::Allocated { resource: resource.clone(), devices, offered });
    }
}
