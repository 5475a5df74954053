//! Metrics of CDI specs. docs/metrics.md documents them.

use linkwise_system::metrics::new;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Counts writes of specs.
#[derive(Clone, Debug)]
pub struct CdiMetrics {
    writes: Family<[(&'static str, &'static str); 1], Counter>,
}

impl CdiMetrics {
    /// Makes and registers the metric.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "CDI specs that changed: ok (written) or failed (the last one stays)";
        Self { writes: new(registry, "cdi_spec_writes", help) }
    }

    /// Counts a write of a changed spec, or a failure of one.
    pub fn cdi_written(&self, ok: bool) {
        self.writes.get_or_create(&[("outcome", if ok { "ok" } else { "failed" })]).inc();
    }
}
