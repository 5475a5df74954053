//! The metrics of the driver: the process that calls NVML, its ends, the driver's events. docs/metrics.md documents
//! them.

use std::ops::RangeInclusive;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use linkwise_core::topology::GpuUuid;
use linkwise_system::metrics::new;

/// XIDs with a series of their own for each GPU. The driver's numbers are small (the highest in our table is 170,
/// nverror.h counts up from 1). A broken library can report any number of others, which share a series.
const XIDS: RangeInclusive<u64> = 1..=255;

/// The metrics of the driver. Gauges that are flags are 0 or 1.
#[derive(Clone, Debug)]
pub struct DriverMetrics {
    xids: Family<[(&'static str, String); 2], Counter>,
    agent_ends: Family<[(&'static str, &'static str); 1], Counter>,
    /// `linkwise_idle`.
    pub idle: Gauge,
    /// `linkwise_driver_released`.
    pub released: Gauge,
    /// `linkwise_nvml_agent_up`.
    pub agent_up: Gauge,
    /// `linkwise_nvml_agent_starts`.
    pub agent_starts: Counter,
    /// `linkwise_nvml_agents_stuck`.
    pub agents_stuck: Gauge,
    /// `linkwise_nvml_away`.
    pub nvml_away: Gauge,
    /// `linkwise_nvml_unheard_gpus`.
    pub unheard_gpus: Gauge,
    /// `linkwise_nvml_event_failures`.
    pub event_failures: Counter,
}

impl DriverMetrics {
    /// Makes and registers the metrics.
    pub fn register(to: &mut Registry) -> Self {
        let starts = "Starts of the process that speaks to NVML; more than one after it died or was replaced, or after \
                      a release";
        let released = "1 while an operator has released the driver";
        let stuck = "Processes that spoke to NVML, were killed and have not ended";
        let away = "1 while NVML has not answered for longer than the grace period";
        let unheard = "GPUs whose events do not arrive: lost, not registered, or newer than the agent";
        let events = "Failed waits for the driver's events, and events that cannot be reported";
        Self {
            xids: new(to, "xid_errors", "XIDs the driver reported, of any class"),
            idle: new(to, "idle", "1 while this host has no NVIDIA GPU and linkwise waits for one"),
            released: new(to, "driver_released", released),
            agent_up: new(to, "nvml_agent_up", "1 while the process that speaks to NVML answers"),
            agent_starts: new(to, "nvml_agent_starts", starts),
            agent_ends: new(to, "nvml_agent_ends", "Ends of the process that speaks to NVML, by cause"),
            agents_stuck: new(to, "nvml_agents_stuck", stuck),
            nvml_away: new(to, "nvml_away", away),
            unheard_gpus: new(to, "nvml_unheard_gpus", unheard),
            event_failures: new(to, "nvml_event_failures", events),
        }
    }

    /// Counts an XID of the driver.
    pub fn xid(&self, gpu: &GpuUuid, xid: u64) {
        let xid = if XIDS.contains(&xid) { xid.to_string() } else { "other".to_owned() };
        self.xids.get_or_create(&[("uuid", gpu.to_string()), ("xid", xid)]).inc();
    }

    /// Counts the end of an agent: `crashed`, `hung`, `silent`, killed for its `memory`, `replaced` by a newer one,
    /// `released` on request, or else `exited`.
    pub fn agent_ended(&self, cause: &'static str) {
        self.agent_ends.get_or_create(&[("cause", cause)]).inc();
    }
}
