//! Metrics of CDI specs. docs/metrics.md documents them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Counts writes of specs.
#[derive(Clone, Debug)]
pub struct CdiMetrics {
    writes: Family<[(&'static str, &'static str); 1], Counter>,
}

impl CdiMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let writes = Family::<_, Counter>::default();
        let help = "CDI specs that changed: ok (written) or failed (the last one stays)";
        registry.register("cdi_spec_writes", help, writes.clone());
        Self { writes }
    }

    /// A spec that changed was written, or could not be.
    pub fn cdi_written(&self, ok: bool) {
        self.writes.get_or_create(&[("outcome", if ok { "ok" } else { "failed" })]).inc();
    }
}
