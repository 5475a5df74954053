//! Makes and registers metrics, and turns counts into values of gauges.

use prometheus_client::registry::{Metric, Registry};

/// A number of things as a gauge's value.
pub fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Makes a metric and registers it.
pub fn new<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}
