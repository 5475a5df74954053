//! Metrics of the DRA plugin: requests, prepared claims, registration, health streams.
//!
//! The node registers them and counts each [`Occurrence`]. docs/metrics.md documents them.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::{Life, Occurrence, Phase};
use linkwise_system::grpc::Refusal;
use linkwise_system::metrics::new;

/// Bounds of the requests' histogram, in seconds: from a checkpoint's answer to the kubelet's limit of 45 s.
const BUCKETS: [f64; 9] = [256e-6, 1e-3, 4e-3, 16e-3, 64e-3, 256e-3, 1.0, 4.0, 16.0];

/// Labels by name, in the order in which they are shown.
type Labels<const N: usize> = [(&'static str, &'static str); N];

/// The metrics of the DRA plugin.
#[derive(Clone, Debug)]
pub struct PluginMetrics {
    requests: Family<Labels<2>, Counter>,
    seconds: Family<Labels<1>, Histogram, fn() -> Histogram>,
    claims: Gauge,
    devices: Gauge,
    registered: Gauge,
    streams: Gauge,
    refused: Counter,
}

impl PluginMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let seconds: Family<_, _, fn() -> Histogram> = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let help = "Time that preparing or unpreparing a claim took";
        registry.register_with_unit("dra_request_duration", help, Unit::Seconds, seconds.clone());
        let requests = "Claims that the kubelet asked to prepare or to unprepare: ok, repeated (answered from the \
                        checkpoint) or failed; and claims that were gone (sweep)";
        let this = Self {
            requests: new(registry, "dra_requests", requests),
            seconds,
            claims: new(registry, "dra_prepared_claims", "Claims that are prepared on this node"),
            devices: new(registry, "dra_prepared_devices", "Devices of the claims that are prepared on this node"),
            registered: new(registry, "dra_registered", "1 while the kubelet has the DRA plugin registered"),
            streams: new(registry, "dra_health_streams", "Health streams that the kubelet has open"),
            refused: new(
                registry,
                "dra_refused_callers",
                "Connections to the DRA plugin's sockets that were refused for their uid",
            ),
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

    /// Counts an occurrence. While the kubelet waits: nothing here waits.
    pub fn count(&self, occurrence: &Occurrence) {
        let gauge = |gauge: &Gauge, value: usize| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        match occurrence {
            Occurrence::Life(Life::Phase(phase)) => {
                self.registered.set(i64::from(matches!(phase, Phase::Accepted | Phase::Registered)));
            }
            Occurrence::Prepared { result: Ok(_), repeated, elapsed, .. } => {
                self.request("prepare", if *repeated { "repeated" } else { "ok" }, Some(*elapsed));
            }
            Occurrence::Prepared { elapsed, .. } => self.request("prepare", "failed", Some(*elapsed)),
            Occurrence::Unprepared { result, elapsed, .. } => {
                self.request("unprepare", if result.is_ok() { "ok" } else { "failed" }, Some(*elapsed));
            }
            Occurrence::Swept { result, .. } | Occurrence::HalfMade { result, .. } => {
                self.request("sweep", if result.is_ok() { "ok" } else { "failed" }, None);
            }
            Occurrence::Held { claims, devices } => {
                gauge(&self.claims, *claims);
                gauge(&self.devices, *devices);
            }
            Occurrence::HealthStreams(open) => gauge(&self.streams, *open),
            Occurrence::Life(Life::Refused(Refusal::Caller(_))) => {
                self.refused.inc();
            }
            Occurrence::Life(_) | Occurrence::LeftBehind { .. } | Occurrence::CheckpointUnreadable { .. } => {}
        }
    }

    fn request(&self, method: &'static str, result: &'static str, elapsed: Option<Duration>) {
        self.requests.get_or_create(&[("method", method), ("result", result)]).inc();
        if let Some(elapsed) = elapsed {
            self.seconds.get_or_create(&[("method", method)]).observe(elapsed.as_secs_f64());
        }
    }
}
