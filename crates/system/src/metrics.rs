//! A metric that registers itself.

use prometheus_client::registry::{Metric, Registry};

/// Makes a metric and registers it.
pub fn new<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}
