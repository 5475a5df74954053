//! Prometheus metrics: what is counted, under which names. docs/metrics.md documents each; a golden test
//! holds names, types and help.
//!
//! Owns the registry. The runtime records into it; `admin` serves what [`Metrics::encode`] writes. Series that
//! mirror state (per GPU, per resource) are a collector read at scrape, so that what is gone is gone.

mod collector;

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use crate::allocation::AllocationReport;
use crate::state::{NodeState, ResourceName};
use crate::topology::GpuUuid;

/// The content type of what [`Metrics::encode`] writes; as text/plain Prometheus refuses it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds of the choice's histogram, in seconds: from 1 µs by fours, the budget of 10 µs and of 300 µs between them.
const CHOICE_BUCKETS: [f64; 8] = [1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3];
/// Bounds of the RPCs' histogram, in seconds.
const RPC_BUCKETS: [f64; 8] = [64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0];

/// XIDs with a series of their own, for each GPU. The driver's numbers are small ones (the highest that `snapshot` knows is
/// 158, nverror.h counts up from 1); a library gone mad has no end of others, and these share a series.
const XIDS: RangeInclusive<u64> = 1..=255;
/// The methods of the device plugin API. A path comes from its caller: what is none of them has a common series.
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
struct ByOutcome {
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

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerXid {
    uuid: String,
    xid: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerCause {
    cause: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerFailure {
    uuid: String,
    reason: &'static str,
}

/// All metrics of the process.
pub struct Metrics {
    registry: Registry,
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
    xids: Family<PerXid, Counter>,
    failures: Family<PerFailure, Counter>,
    idle: Gauge,
    released: Gauge,
    agent_up: Gauge,
    agent_starts: Counter,
    cdi_writes: Family<ByOutcome, Counter>,
    config_valid: Gauge,
    agent_ends: Family<PerCause, Counter>,
    agents_stuck: Gauge,
    nvml_away: Gauge,
    unheard_gpus: Gauge,
    event_failures: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics of a process of version `version` that follows `snapshot`.
    pub fn new(version: &'static str, snapshot: watch::Receiver<Arc<NodeState>>) -> Self {
        let mut registry = Registry::with_prefix("linkwise");
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
            xids: Family::default(),
            failures: Family::default(),
            idle: Gauge::default(),
            released: Gauge::default(),
            agent_up: Gauge::default(),
            agent_starts: Counter::default(),
            cdi_writes: Family::default(),
            config_valid: Gauge::default(),
            agent_ends: Family::default(),
            agents_stuck: Gauge::default(),
            nvml_away: Gauge::default(),
            unheard_gpus: Gauge::default(),
            event_failures: Counter::default(),
            registry: Registry::default(),
        };
        registry.register("build", "The version that runs", Info::new(vec![("version", version)]));
        registry.register(
            "preferred_allocations",
            "Answers to GetPreferredAllocation: exact, best_found (a budget ended the search) or fallback (sorted order)",
            metrics.choices.clone(),
        );
        registry.register(
            "preferred_allocation_fallbacks",
            "Answers to GetPreferredAllocation in sorted order, by reason",
            metrics.fallbacks.clone(),
        );
        registry.register_with_unit(
            "choice_duration",
            "Time the choice of a set of devices took, without the RPC around it",
            Unit::Seconds,
            metrics.choice_seconds.clone(),
        );
        registry.register(
            "narrowed_requests",
            "GetPreferredAllocation requests that held back a device that is healthy and free, or had taken one already",
            metrics.narrowed.clone(),
        );
        registry.register("allocations", "Answers to Allocate: ok or refused", metrics.allocations.clone());
        registry.register("rpcs", "RPCs of the kubelet that ended, by method and gRPC code", metrics.rpcs.clone());
        registry.register_with_unit(
            "rpc_duration",
            "Time unary RPCs of the kubelet took, from the request to the end of the answer",
            Unit::Seconds,
            metrics.rpc_seconds.clone(),
        );
        registry.register(
            "registrations",
            "Registrations with the kubelet: ok or failed",
            metrics.registrations.clone(),
        );
        registry.register(
            "kubelet_connected",
            "1 while the registration of the resource stands: the kubelet holds an open stream and lists the devices",
            metrics.connected.clone(),
        );
        registry.register(
            "refused_callers",
            "Connections to our sockets that were refused for their uid",
            metrics.refused.clone(),
        );
        registry.register("xid_errors", "XIDs the driver reported, of any class", metrics.xids.clone());
        registry.register(
            "gpu_failures",
            "Times the GPU became unhealthy, or its first reason another",
            metrics.failures.clone(),
        );
        registry.register(
            "idle",
            "1 while this host has no NVIDIA GPU and linkwise waits for one",
            metrics.idle.clone(),
        );
        registry.register(
            "driver_released",
            "1 while linkwise lets go of the driver because an operator asked it to",
            metrics.released.clone(),
        );
        registry.register("nvml_agent_up", "1 while the process that speaks to NVML answers", metrics.agent_up.clone());
        registry.register(
            "nvml_agent_starts",
            "Starts of the process that speaks to NVML; more than one means that it died or was replaced",
            metrics.agent_starts.clone(),
        );
        registry.register(
            "cdi_spec_writes",
            "CDI specs that changed: ok (written) or failed (the last one stays)",
            metrics.cdi_writes.clone(),
        );
        registry.register(
            "config_valid",
            "1 while the configuration that was read last is the one that counts, 0 while it was refused and an older one counts",
            metrics.config_valid.clone(),
        );
        // What starts, starts with a configuration.
        metrics.config_valid.set(1);
        registry.register(
            "nvml_agent_ends",
            "Ends of the process that speaks to NVML, by cause",
            metrics.agent_ends.clone(),
        );
        registry.register(
            "nvml_agents_stuck",
            "Processes that spoke to NVML, were killed and have not ended",
            metrics.agents_stuck.clone(),
        );
        registry.register(
            "nvml_away",
            "1 while NVML has not answered for longer than the grace period",
            metrics.nvml_away.clone(),
        );
        registry.register(
            "nvml_unheard_gpus",
            "GPUs whose events are not heard: they could not be registered for them, or are lost",
            metrics.unheard_gpus.clone(),
        );
        registry.register(
            "nvml_event_failures",
            "Failures to hear the driver's events: a wait for them, a registration, an event without a name",
            metrics.event_failures.clone(),
        );
        registry.register_collector(Box::new(collector::State { snapshot }));
        Self { registry, ..metrics }
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// A resource exists: its series start at 0 instead of missing.
    pub fn resource(&self, resource: &ResourceName) {
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

    /// GetPreferredAllocation was answered.
    pub fn chosen(&self, resource: &ResourceName, report: &AllocationReport, elapsed: Duration, narrowed: bool) {
        let resource = resource.to_string();
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

    /// Allocate was answered.
    pub fn allocated(&self, resource: &ResourceName, ok: bool) {
        let outcome = if ok { "ok" } else { "refused" };
        self.allocations.get_or_create(&PerOutcome { resource: resource.to_string(), outcome }).inc();
    }

    /// An RPC ended. A stream's length says nothing of speed and is not observed.
    pub fn rpc(&self, resource: &ResourceName, method: &str, code: &'static str, elapsed: Duration) {
        let resource = resource.to_string();
        let served = code != "UNIMPLEMENTED" && METHODS.contains(&method);
        let method = if served { method } else { "unknown" }.to_owned();
        self.rpcs.get_or_create(&PerCall { resource: resource.clone(), method: method.clone(), code }).inc();
        if method != "ListAndWatch" {
            self.rpc_seconds.get_or_create(&PerMethod { resource, method }).observe(elapsed.as_secs_f64());
        }
    }

    /// A registration ended.
    pub fn registered(&self, resource: &ResourceName, ok: bool) {
        let outcome = if ok { "ok" } else { "failed" };
        self.registrations.get_or_create(&PerOutcome { resource: resource.to_string(), outcome }).inc();
    }

    /// The kubelet opened or lost its stream.
    pub fn connected(&self, resource: &ResourceName, open: bool) {
        self.connected.get_or_create(&PerResource { resource: resource.to_string() }).set(i64::from(open));
    }

    /// A resource is no longer offered: nobody waits for its stream.
    pub fn withdrawn(&self, resource: &ResourceName) {
        self.connected.remove(&PerResource { resource: resource.to_string() });
    }

    /// A caller was turned away.
    pub fn refused(&self, resource: &ResourceName) {
        self.refused.get_or_create(&PerResource { resource: resource.to_string() }).inc();
    }

    /// The driver reported an XID.
    pub fn xid(&self, gpu: &GpuUuid, xid: u64) {
        let xid = if XIDS.contains(&xid) { xid.to_string() } else { "other".to_owned() };
        self.xids.get_or_create(&PerXid { uuid: gpu.to_string(), xid }).inc();
    }

    /// A GPU became unhealthy.
    pub fn gpu_failed(&self, gpu: &GpuUuid, reason: &'static str) {
        self.failures.get_or_create(&PerFailure { uuid: gpu.to_string(), reason }).inc();
    }

    /// The configuration was read again.
    pub fn config_valid(&self, valid: bool) {
        self.config_valid.set(i64::from(valid));
    }

    /// This host has no NVIDIA GPU, or has one now.
    pub fn idle(&self, idle: bool) {
        self.idle.set(i64::from(idle));
    }

    /// The driver is let go of at an operator's word, or taken up again.
    pub fn driver_released(&self, released: bool) {
        self.released.set(i64::from(released));
    }

    /// The process that speaks to NVML was started.
    pub fn agent_started(&self) {
        self.agent_starts.inc();
    }

    /// A CDI spec that changed was written, or could not be.
    pub fn cdi_written(&self, ok: bool) {
        let outcome = if ok { "ok" } else { "failed" };
        self.cdi_writes.get_or_create(&ByOutcome { outcome }).inc();
    }

    /// It ended: `exited` by itself, `crashed`, `hung`, `silent`, `replaced` by a newer one, `released` on request.
    pub fn agent_ended(&self, cause: &'static str) {
        self.agent_ends.get_or_create(&PerCause { cause }).inc();
    }

    /// So many were killed and have not ended.
    pub fn agents_stuck(&self, number: usize) {
        self.agents_stuck.set(i64::try_from(number).unwrap_or(i64::MAX));
    }

    /// NVML has been away for too long, or is back.
    pub fn nvml_away(&self, away: bool) {
        self.nvml_away.set(i64::from(away));
    }

    /// So many GPUs are not heard.
    pub fn unheard_gpus(&self, gpus: u32) {
        self.unheard_gpus.set(i64::from(gpus));
    }

    /// Events could not be heard, or not be understood.
    pub fn event_failed(&self) {
        self.event_failures.inc();
    }

    /// It answers, or does not any more.
    pub fn agent_up(&self, up: bool) {
        self.agent_up.set(i64::from(up));
    }
}

#[cfg(test)]
mod tests;
