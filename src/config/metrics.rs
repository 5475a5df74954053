//! Metrics of the configuration. docs/metrics.md documents them.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Whether the configuration that was read last is in use.
#[derive(Clone, Debug, Default)]
pub struct ConfigMetrics {
    valid: Gauge,
}

impl ConfigMetrics {
    /// Makes and registers them. A process that starts, starts with a valid configuration.
    pub fn register(registry: &mut Registry) -> Self {
        let valid: Gauge = Gauge::default();
        let help = "1 while the configuration that was read last is the one that counts, 0 while it was refused and an \
                    older one counts";
        registry.register("config_valid", help, valid.clone());
        valid.set(1);
        Self { valid }
    }

    /// The configuration was read again.
    pub fn config_valid(&self, valid: bool) {
        self.valid.set(i64::from(valid));
    }
}
