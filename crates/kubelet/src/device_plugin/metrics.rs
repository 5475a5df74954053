//! Metrics of the device plugins: choices, allocations, RPCs, registrations.
//!
//! The node registers them, the plugins count. docs/metrics.md documents them.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Phase;
use crate::registration::Life;
use linkwise_core::allocation::AllocationReport;
use linkwise_core::state::ResourceName;
use linkwise_system::grpc::{Refusal, Rpc};
use linkwise_system::metrics::new;

/// Bounds of the choice's histogram, in seconds: from 1 µs, each about four times the previous one.
const CHOICE_BUCKETS: [f64; 8] = [1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3];
/// Bounds of the RPCs' histogram, in seconds.
const RPC_BUCKETS: [f64; 8] = [64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0];
/// The methods of the device plugin API. The caller chooses the method's name, so all other names share one series.
const METHODS: [&str; 5] =
    ["GetDevicePluginOptions", "ListAndWatch", "GetPreferredAllocation", "Allocate", "PreStartContainer"];

/// Labels by name, in the order in which they are shown.
type Labels<const N: usize> = [(&'static str, String); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// The metrics of all plugins of a node.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    choices: Counters<2>,
    fallbacks: Counters<2>,
    choice_seconds: Histograms<1>,
    narrowed: Counters<1>,
    allocations: Counters<2>,
    rpcs: Counters<3>,
    rpc_seconds: Histograms<2>,
    registrations: Counters<2>,
    connected: Family<Labels<1>, Gauge>,
    refused: Counters<1>,
}

fn seconds<const N: usize>(registry: &mut Registry, name: &str, help: &str, one: fn() -> Histogram) -> Histograms<N> {
    let metric = Family::new_with_constructor(one);
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

impl PluginMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let choices = "Answers to GetPreferredAllocation: exact, best_found (a budget ended the search) or fallback \
                       (sorted order)";
        let fallbacks = "Answers to GetPreferredAllocation in sorted order, by reason";
        let choice_seconds = "Time the choice of a set of devices took, without the RPC around it";
        let narrowed = "GetPreferredAllocation requests in which the kubelet held back a healthy and free device, \
                        or had chosen one already";
        let rpc_seconds = "Time unary RPCs of the kubelet took, from the request to the end of the answer";
        let connected =
            "1 while the registration stands: the kubelet holds an open stream, and PodResources lists the devices";
        Self {
            choices: new(registry, "preferred_allocations", choices),
            fallbacks: new(registry, "preferred_allocation_fallbacks", fallbacks),
            choice_seconds: seconds(registry, "choice_duration", choice_seconds, || Histogram::new(CHOICE_BUCKETS)),
            narrowed: new(registry, "narrowed_requests", narrowed),
            allocations: new(registry, "allocations", "Answers to Allocate: ok or refused"),
            rpcs: new(registry, "rpcs", "RPCs of the kubelet that ended, by method and gRPC code"),
            rpc_seconds: seconds(registry, "rpc_duration", rpc_seconds, || Histogram::new(RPC_BUCKETS)),
            registrations: new(registry, "registrations", "Registrations with the kubelet: ok or failed"),
            connected: new(registry, "kubelet_connected", connected),
            refused: new(registry, "refused_callers", "Connections to our sockets that were refused for their uid"),
        }
    }

    /// Makes the series with known labels of an offered resource, so that they start at 0.
    pub fn offered(&self, resource: &ResourceName) {
        drop(self.connected.get_or_create(&of(resource)));
        drop(self.narrowed.get_or_create(&of(resource)));
        drop(self.refused.get_or_create(&of(resource)));
        let outcomes = [
            (&self.allocations, ["ok", "refused"].as_slice()),
            (&self.choices, &["exact", "best_found", "fallback"]),
            (&self.registrations, &["ok", "failed"]),
        ];
        for (family, outcomes) in outcomes {
            for outcome in outcomes {
                drop(family.get_or_create(&with(resource, "outcome", outcome)));
            }
        }
    }

    /// Removes the `kubelet_connected` series of a resource that is no longer offered.
    pub fn withdrawn(&self, resource: &ResourceName) {
        self.connected.remove(&of(resource));
    }

    fn outcome(family: &Counters<2>, resource: &ResourceName, outcome: &str) {
        family.get_or_create(&with(resource, "outcome", outcome)).inc();
    }

    /// Counts what happens between a plugin and the kubelet.
    pub fn life(&self, resource: &ResourceName, event: &Life<Phase>) {
        match event {
            Life::Phase(phase) => drop(self.connected.get_or_create(&of(resource)).set(phase.is_serving().into())),
            Life::Registered(result) => {
                Self::outcome(&self.registrations, resource, if result.is_ok() { "ok" } else { "failed" });
            }
            Life::Refused(Refusal::Caller(_)) => drop(self.refused.get_or_create(&of(resource)).inc()),
            Life::Rpc(rpc) => self.rpc(resource, rpc),
            Life::Waiting(_) | Life::Ended(_) | Life::Refused(_) => {}
        }
    }

    /// Counts an answer to Allocate.
    pub fn allocated(&self, resource: &ResourceName, is_ok: bool) {
        Self::outcome(&self.allocations, resource, if is_ok { "ok" } else { "refused" });
    }

    /// Counts an answer to GetPreferredAllocation. Called during an admission: nothing here waits.
    pub fn chosen(&self, resource: &ResourceName, report: &AllocationReport, elapsed: Duration, narrowed: bool) {
        let outcome = match report.fallback {
            Some(_) => "fallback",
            None if report.exact => "exact",
            None => "best_found",
        };
        Self::outcome(&self.choices, resource, outcome);
        if let Some(reason) = report.fallback {
            self.fallbacks.get_or_create(&with(resource, "reason", &reason.to_string())).inc();
        }
        if narrowed {
            self.narrowed.get_or_create(&of(resource)).inc();
        }
        self.choice_seconds.get_or_create(&of(resource)).observe(elapsed.as_secs_f64());
    }

    /// Counts an RPC, and observes its duration unless it is a stream, whose length says nothing about speed.
    fn rpc(&self, resource: &ResourceName, rpc: &Rpc) {
        let served = rpc.code != "UNIMPLEMENTED" && METHODS.contains(&rpc.method.as_str());
        let method = if served { &rpc.method } else { "unknown" };
        let [resource, method] = with(resource, "method", method);
        self.rpcs.get_or_create(&[resource.clone(), method.clone(), ("code", rpc.code.clone())]).inc();
        if method.1 != "ListAndWatch" {
            self.rpc_seconds.get_or_create(&[resource, method]).observe(rpc.elapsed.as_secs_f64());
        }
    }
}

fn of(resource: &ResourceName) -> Labels<1> {
    [("resource", resource.to_string())]
}

fn with(resource: &ResourceName, label: &'static str, value: &str) -> Labels<2> {
    [("resource", resource.to_string()), (label, value.to_owned())]
}
