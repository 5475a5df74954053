//! The metrics' registry: what /metrics shows. docs/metrics.md documents each metric; a golden test holds names, types
//! and help.
//!
//! Each module that counts makes its metrics and registers them here; the runtime passes the registry around. Series
//! that mirror state (per GPU, per resource) are a collector that reads the snapshot at scrape, so that what is gone is
//! gone.

mod collector;
mod placements;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use tokio::sync::watch;

use crate::state::NodeState;

/// The content type of what [`Metrics::encode`] writes; as text/plain Prometheus refuses it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Makes a metric and registers it.
pub fn new<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

pub use placements::PlacementReader;

/// All metrics of the process.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    placements: PlacementReader,
}

impl Metrics {
    /// Metrics of a process of version `version` that follows `snapshot`.
    pub fn new(version: &'static str, snapshot: watch::Receiver<Arc<NodeState>>) -> Self {
        let mut registry = Registry::with_prefix("linkwise");
        registry.register("build", "The version that runs", Info::new(vec![("version", version)]));
        registry.register_collector(Box::new(collector::State { snapshot: snapshot.clone() }));
        let placements = PlacementReader::new(snapshot);
        registry.register_collector(Box::new(placements::Series(placements.clone())));
        Self { registry: Arc::new(Mutex::new(registry)), placements }
    }

    /// Who holds what, as the series have it.
    pub fn placements(&self) -> &PlacementReader {
        &self.placements
    }

    /// Registers a module's metrics.
    pub fn register<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry())
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry())?;
        Ok(text)
    }

    /// A panic while a module registers leaves the registry whole.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
