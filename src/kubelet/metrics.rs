//! Metrics of the device plugins: choices, allocations, RPCs, registrations.
//!
//! The runtime registers them and counts each [`Occurrence`]. docs/metrics.md documents them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::{Occurrence, Phase};
use crate::allocation::AllocationReport;
use crate::state::ResourceName;

/// Bounds of the choice's histogram, in seconds: from 1 µs by fours, the budget of 10 µs and of 300 µs between them.
const CHOICE_BUCKETS: [f64; 8] = [1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3];
/// Bounds of the RPCs' histogram, in seconds.
const RPC_BUCKETS: [f64; 8] = [64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0];
/// The methods of the device plugin API. A method comes from the caller: any other has a common series.
const METHODS: [&str; 5] =
    ["GetDevicePluginOptions", "ListAndWatch", "GetPreferredAllocation", "Allocate", "PreStartContainer"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerResource {
    resource: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerOutcome {
    resource: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerReason {
    resource: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerCall {
    resource: String,
    method: String,
    code: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerMethod {
    resource: String,
    method: String,
}

/// The metrics of all plugins of a node.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    choices: Family<PerOutcome, Counter>,
    fallbacks: Family<PerReason, Counter>,
    choice_seconds: Family<PerResource, Histogram, fn() -> Histogram>,
    narrowed: Family<PerResource, Counter>,
    allocations: Family<PerOutcome, Counter>,
    rpcs: Family<PerCall, Counter>,
    rpc_seconds: Family<PerMethod, Histogram, fn() -> Histogram>,
    registrations: Family<PerOutcome, Counter>,
    connected: Family<PerResource, Gauge>,
    refused: Family<PerResource, Counter>,
}

impl PluginMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            choices: Family::default(),
            fallbacks: Family::default(),
            choice_seconds: Family::new_with_constructor(|| Histogram::new(CHOICE_BUCKETS)),
            narrowed: Family::default(),
            allocations: Family::default(),
            rpcs: Family::default(),
            rpc_seconds: Family::new_with_constructor(|| Histogram::new(RPC_BUCKETS)),
            registrations: Family::default(),
            connected: Family::default(),
            refused: Family::default(),
        };
        let help = "Answers to GetPreferredAllocation: exact, best_found (a budget ended the search) or fallback \
                    (sorted order)";
        registry.register("preferred_allocations", help, metrics.choices.clone());
        let help = "Answers to GetPreferredAllocation in sorted order, by reason";
        registry.register("preferred_allocation_fallbacks", help, metrics.fallbacks.clone());
        let help = "Time the choice of a set of devices took, without the RPC around it";
        registry.register_with_unit("choice_duration", help, Unit::Seconds, metrics.choice_seconds.clone());
        let help = "GetPreferredAllocation requests that held back a device that is healthy and free, or had taken \
                    one already";
        registry.register("narrowed_requests", help, metrics.narrowed.clone());
        registry.register("allocations", "Answers to Allocate: ok or refused", metrics.allocations.clone());
        registry.register("rpcs", "RPCs of the kubelet that ended, by method and gRPC code", metrics.rpcs.clone());
        let help = "Time unary RPCs of the kubelet took, from the request to the end of the answer";
        registry.register_with_unit("rpc_duration", help, Unit::Seconds, metrics.rpc_seconds.clone());
        let help = "Registrations with the kubelet: ok or failed";
        registry.register("registrations", help, metrics.registrations.clone());
        let help =
            "1 while the registration of the resource stands: the kubelet holds an open stream and lists the devices";
        registry.register("kubelet_connected", help, metrics.connected.clone());
        let help = "Connections to our sockets that were refused for their uid";
        registry.register("refused_callers", help, metrics.refused.clone());
        metrics
    }

    /// A resource is offered: its series start at 0 instead of missing.
    pub fn offered(&self, resource: &ResourceName) {
        let resource = resource.to_string();
        drop(self.connected.get_or_create(&PerResource { resource: resource.clone() }));
        drop(self.narrowed.get_or_create(&PerResource { resource: resource.clone() }));
        drop(self.refused.get_or_create(&PerResource { resource: resource.clone() }));
        let outcomes = [
            (&self.allocations, ["ok", "refused"].as_slice()),
            (&self.choices, &["exact", "best_found", "fallback"]),
            (&self.registrations, &["ok", "failed"]),
        ];
        for (family, outcomes) in outcomes {
            for &outcome in outcomes {
                drop(family.get_or_create(&PerOutcome { resource: resource.clone(), outcome }));
            }
        }
    }

    /// A resource is no longer offered: it has no stream to be connected.
    pub fn withdrawn(&self, resource: &ResourceName) {
        self.connected.remove(&PerResource { resource: resource.to_string() });
    }

    /// Counts an occurrence. On the path of an admission: nothing here waits.
    pub fn count(&self, resource: &ResourceName, occurrence: &Occurrence) {
        let resource = resource.to_string();
        let outcome = |family: &Family<PerOutcome, Counter>, outcome| {
            family.get_or_create(&PerOutcome { resource: resource.clone(), outcome }).inc();
        };
        match occurrence {
            Occurrence::Phase(phase) => {
                self.connected.get_or_create(&PerResource { resource }).set(i64::from(*phase == Phase::Serving));
            }
            Occurrence::Registered(result) => {
                outcome(&self.registrations, if result.is_ok() { "ok" } else { "failed" });
            }
            Occurrence::Allocated(result) => outcome(&self.allocations, if result.is_ok() { "ok" } else { "refused" }),
            Occurrence::Refused { .. } => drop(self.refused.get_or_create(&PerResource { resource }).inc()),
            Occurrence::Rpc { method, code, elapsed } => self.rpc(resource, method, code, *elapsed),
            Occurrence::Chosen { report, elapsed, narrowed } => self.chosen(resource, report, *elapsed, *narrowed),
            Occurrence::Waiting(_) | Occurrence::Ended(_) | Occurrence::NotAccepted(_) => {}
        }
    }

    fn chosen(&self, resource: String, report: &AllocationReport, elapsed: Duration, narrowed: bool) {
        let outcome = match report.fallback {
            Some(_) => "fallback",
            None if report.exact => "exact",
            None => "best_found",
        };
        self.choices.get_or_create(&PerOutcome { resource: resource.clone(), outcome }).inc();
        if let Some(reason) = report.fallback {
            let labels = PerReason { resource: resource.clone(), reason: reason.label() };
            self.fallbacks.get_or_create(&labels).inc();
        }
        let per_resource = PerResource { resource };
        if narrowed {
            self.narrowed.get_or_create(&per_resource).inc();
        }
        self.choice_seconds.get_or_create(&per_resource).observe(elapsed.as_secs_f64());
    }

    /// The length of a stream says nothing of speed and is not observed.
    fn rpc(&self, resource: String, method: &str, code: &'static str, elapsed: Duration) {
        let served = code != "UNIMPLEMENTED" && METHODS.contains(&method);
        let method = if served { method } else { "unknown" }.to_owned();
        self.rpcs.get_or_create(&PerCall { resource: resource.clone(), method: method.clone(), code }).inc();
        if method != "ListAndWatch" {
            self.rpc_seconds.get_or_create(&PerMethod { resource, method }).observe(elapsed.as_secs_f64());
        }
    }
}
