//! Metrics of labels. docs/metrics.md documents them.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerOutcome {
    outcome: &'static str,
}

/// Counts labels and writes of their file.
#[derive(Clone, Debug, Default)]
pub struct LabelMetrics {
    labels: Gauge,
    dropped: Gauge,
    writes: Family<PerOutcome, Counter>,
    last_write: Gauge<u64, AtomicU64>,
}

impl LabelMetrics {
    /// Makes and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("labels", "Labels of this node, 0 before the first", metrics.labels.clone());
        let help = "Labels left out because Kubernetes would refuse their value";
        registry.register("labels_dropped", help, metrics.dropped.clone());
        let help = "Writes of the labels' file: ok (it changed) or failed (the last one stays)";
        registry.register("label_writes", help, metrics.writes.clone());
        let help = "When the labels' file was last as it should be, in seconds since 1970; 0 before the first time";
        registry.register("labels_written_timestamp_seconds", help, metrics.last_write.clone());
        metrics
    }

    /// So many labels there are, and so many were left out.
    pub fn made(&self, labels: usize, dropped: usize) {
        self.labels.set(i64::try_from(labels).unwrap_or(i64::MAX));
        self.dropped.set(i64::try_from(dropped).unwrap_or(i64::MAX));
    }

    /// The file changed, or could not be changed.
    pub fn written(&self, ok: bool) {
        self.writes.get_or_create(&PerOutcome { outcome: if ok { "ok" } else { "failed" } }).inc();
    }

    /// The file is as it should be, at this second.
    pub fn is_written(&self, seconds: u64) {
        self.last_write.set(seconds);
    }
}
