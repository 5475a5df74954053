//! Metrics of the configuration. docs/metrics.md documents them.

use linkwise_system::metrics::new;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// A metric that tells if the last configuration read is in use.
#[derive(Clone, Debug, Default)]
pub struct ConfigMetrics {
    valid: Gauge,
}

impl ConfigMetrics {
    /// Makes and registers the metric. A process starts with a valid configuration.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "1 while the configuration that was read last is the one that counts, 0 while it was refused and an \
                    older one counts";
        let valid: Gauge = new(registry, "config_valid", help);
        valid.set(1);
        Self { valid }
    }

    /// Records that the configuration was read again.
    pub fn config_valid(&self, valid: bool) {
        self.valid.set(i64::from(valid));
    }
}
