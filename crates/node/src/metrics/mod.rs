//! The metrics' registry: the content of /metrics. docs/metrics.md documents each metric; a golden test checks names,
//! types and help.
//!
//! Each module that counts makes its metrics and registers them here; the node passes the registry around. Series
//! that mirror state (per GPU, per resource) are a collector that reads the snapshot at scrape, so that the series of
//! removed items end.

mod collector;
mod placements;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use linkwise_core::state::NodeState;

/// The content type of [`Metrics::encode`]'s text; as text/plain Prometheus refuses it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

    /// The reader of the placements that the series show.
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

    /// Locks the registry. A panic while a module registers leaves the registry whole.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes one gauge with all its series.
fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    series: impl IntoIterator<Item = (L, V)>,
) -> fmt::Result
where
    ConstGauge<V>: EncodeMetric,
{
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in series {
        ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}
