//! Metrics of takeovers.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use linkwise_system::metrics::new;

/// The outcomes of takeovers. docs/metrics.md documents them.
#[derive(Clone, Debug)]
pub struct TakeoverMetrics {
    takeovers: Family<[(&'static str, &'static str); 1], Counter>,
    /// The gap of the last takeover, in seconds.
    pub gap: Gauge<f64, AtomicU64>,
    /// 1 while another linkwise serves this node.
    pub standing_by: Gauge,
}

impl TakeoverMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Takeovers between two linkwise of this node that this process took part in, by how they went";
        let takeovers: Family<_, Counter> = new(registry, "takeovers", help);
        for outcome in ["took_over", "succeeded", "failed", "handed_over", "went_on"] {
            drop(takeovers.get_or_create(&[("outcome", outcome)]));
        }
        let gap = Gauge::default();
        let help = "How long no plugin was registered in this process's last takeover, as far as it can tell";
        registry.register_with_unit("takeover_gap", help, Unit::Seconds, gap.clone());
        let standing_by = new(registry, "standing_by", "1 while another linkwise serves this node");
        Self { takeovers, gap, standing_by }
    }

    /// Counts a takeover with this outcome.
    pub fn count(&self, outcome: &'static str) {
        self.takeovers.get_or_create(&[("outcome", outcome)]).inc();
    }
}
