//! Metrics of the driver's life: the process that calls NVML, its ends, the driver's events. docs/metrics.md documents them.

use std::ops::RangeInclusive;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::topology::GpuUuid;

/// XIDs with a series of their own for each GPU. The driver's numbers are small (the highest in our table is 158, nverror.h
/// counts up from 1); a broken library has no end of others, and these share a series.
const XIDS: RangeInclusive<u64> = 1..=255;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerXid {
    uuid: String,
    xid: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerCause {
    cause: &'static str,
}

/// The metrics of the driver; one agent has one set.
#[derive(Clone, Debug, Default)]
pub struct DriverMetrics {
    xids: Family<PerXid, Counter>,
    idle: Gauge,
    released: Gauge,
    agent_up: Gauge,
    agent_starts: Counter,
    agent_ends: Family<PerCause, Counter>,
    agents_stuck: Gauge,
    nvml_away: Gauge,
    unheard_gpus: Gauge,
    event_failures: Counter,
}

impl DriverMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("xid_errors", "XIDs the driver reported, of any class", metrics.xids.clone());
        let help = "1 while this host has no NVIDIA GPU and linkwise waits for one";
        registry.register("idle", help, metrics.idle.clone());
        let help = "1 while linkwise lets go of the driver because an operator asked it to";
        registry.register("driver_released", help, metrics.released.clone());
        let help = "1 while the process that speaks to NVML answers";
        registry.register("nvml_agent_up", help, metrics.agent_up.clone());
        let help = "Starts of the process that speaks to NVML; more than one means that it died or was replaced";
        registry.register("nvml_agent_starts", help, metrics.agent_starts.clone());
        let help = "Ends of the process that speaks to NVML, by cause";
        registry.register("nvml_agent_ends", help, metrics.agent_ends.clone());
        let help = "Processes that spoke to NVML, were killed and have not ended";
        registry.register("nvml_agents_stuck", help, metrics.agents_stuck.clone());
        let help = "1 while NVML has not answered for longer than the grace period";
        registry.register("nvml_away", help, metrics.nvml_away.clone());
        let help = "GPUs whose events are not heard: they could not be registered for them, or are lost";
        registry.register("nvml_unheard_gpus", help, metrics.unheard_gpus.clone());
        let help = "Failures to hear the driver's events: a wait for them, a registration, an event without a name";
        registry.register("nvml_event_failures", help, metrics.event_failures.clone());
        metrics
    }

    /// The driver reported an XID.
    pub fn xid(&self, gpu: &GpuUuid, xid: u64) {
        let xid = if XIDS.contains(&xid) { xid.to_string() } else { "other".to_owned() };
        self.xids.get_or_create(&PerXid { uuid: gpu.to_string(), xid }).inc();
    }

    /// Whether this host has no NVIDIA GPU.
    pub fn idle(&self, idle: bool) {
        self.idle.set(i64::from(idle));
    }

    /// Whether an operator released the driver.
    pub fn driver_released(&self, released: bool) {
        self.released.set(i64::from(released));
    }

    /// The process that calls NVML was started.
    pub fn agent_started(&self) {
        self.agent_starts.inc();
    }

    /// Whether it answers.
    pub fn agent_up(&self, up: bool) {
        self.agent_up.set(i64::from(up));
    }

    /// It ended: `exited` by itself, `crashed`, `hung`, `silent`, `replaced` by a newer one, `released` on request.
    pub fn agent_ended(&self, cause: &'static str) {
        self.agent_ends.get_or_create(&PerCause { cause }).inc();
    }

    /// How many were killed and have not ended.
    pub fn agents_stuck(&self, number: usize) {
        self.agents_stuck.set(i64::try_from(number).unwrap_or(i64::MAX));
    }

    /// Whether NVML has not answered for longer than the grace period.
    pub fn nvml_away(&self, away: bool) {
        self.nvml_away.set(i64::from(away));
    }

    /// How many GPUs have no events.
    pub fn unheard_gpus(&self, gpus: u32) {
        self.unheard_gpus.set(i64::from(gpus));
    }

    /// A wait for events, a registration or the reading of an event failed.
    pub fn event_failed(&self) {
        self.event_failures.inc();
    }
}
