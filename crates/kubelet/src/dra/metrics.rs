//! Metrics of the DRA plugin: requests, prepared claims, registration, health streams.
//!
//! The node registers them, the plugin counts. docs/metrics.md documents them.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Phase;
use crate::registration::Life;
use linkwise_system::grpc::Refusal;
use linkwise_system::metrics::{new, number};

/// Bounds of the requests' histogram, in seconds. An answer out of the checkpoint takes the least; the kubelet waits
/// for 45 s.
const BUCKETS: [f64; 9] = [256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0, 4.0, 16.0];

/// Labels by name, in the order shown.
type Labels<const N: usize> = [(&'static str, &'static str); N];

/// The metrics of the DRA plugin.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    requests: Family<Labels<2>, Counter>,
    seconds: Family<Labels<1>, Histogram, fn() -> Histogram>,
    claims: Gauge,
    devices: Gauge,
    registered: Gauge,
    /// The health streams that the kubelet has open.
    pub(super) streams: Gauge,
    refused: Counter,
}

impl PluginMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let seconds: Family<_, _, fn() -> Histogram> = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let help = "Time that preparing or unpreparing a claim took";
        registry.register_with_unit("dra_request_duration", help, Unit::Seconds, seconds.clone());
        let requests = "Claims that the kubelet asked to prepare or to unprepare: ok, repeated (answered from the \
                        checkpoint) or failed; and claims that were gone or half made (sweep)";
        let refused = "Connections to the DRA plugin's sockets that were refused for their uid";
        let this = Self {
            requests: new(registry, "dra_requests", requests),
            seconds,
            claims: new(registry, "dra_prepared_claims", "Claims that are prepared on this node"),
            devices: new(registry, "dra_prepared_devices", "Devices of the claims that are prepared on this node"),
            registered: new(registry, "dra_registered", "1 while the kubelet has the DRA plugin registered"),
            streams: new(registry, "dra_health_streams", "Health streams that the kubelet has open"),
            refused: new(registry, "dra_refused_callers", refused),
        };
        for (method, results) in [
            ("prepare", ["ok", "repeated", "failed"].as_slice()),
            ("unprepare", &["ok", "failed"]),
            ("sweep", &["ok", "failed"]),
        ] {
            for result in results {
                drop(this.requests.get_or_create(&[("method", method), ("result", result)]));
            }
        }
        this
    }

    /// Counts what happens between the plugin and the kubelet.
    pub(super) fn life(&self, event: &Life<Phase>) {
        match event {
            Life::Phase(phase) => {
                self.registered.set(i64::from(matches!(phase, Phase::Accepted | Phase::Registered)));
            }
            Life::Refused(Refusal::Caller(_)) => drop(self.refused.inc()),
            _ => {}
        }
    }

    /// Counts a Prepare of a claim. `is_repeated` is true if the answer came from the checkpoint.
    pub(super) fn prepared(&self, is_ok: bool, is_repeated: bool, elapsed: Duration) {
        let result = match (is_ok, is_repeated) {
            (false, _) => "failed",
            (true, true) => "repeated",
            (true, false) => "ok",
        };
        self.request("prepare", result, Some(elapsed));
    }

    /// Counts an Unprepare of a claim.
    pub(super) fn unprepared(&self, is_ok: bool, elapsed: Duration) {
        self.request("unprepare", if is_ok { "ok" } else { "failed" }, Some(elapsed));
    }

    /// Counts an attempt to undo a claim that is gone or half made.
    pub(super) fn swept(&self, is_ok: bool) {
        self.request("sweep", if is_ok { "ok" } else { "failed" }, None);
    }

    /// Sets the number of prepared claims, and of their devices.
    pub fn held(&self, claims: usize, devices: usize) {
        self.claims.set(number(claims));
        self.devices.set(number(devices));
    }

    fn request(&self, method: &'static str, result: &'static str, elapsed: Option<Duration>) {
        self.requests.get_or_create(&[("method", method), ("result", result)]).inc();
        if let Some(elapsed) = elapsed {
            self.seconds.get_or_create(&[("method", method)]).observe(elapsed.as_secs_f64());
        }
    }
}
