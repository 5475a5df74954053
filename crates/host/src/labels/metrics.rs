//! Metrics of labels. docs/metrics.md documents them.

use std::sync::atomic::AtomicU64;

use linkwise_system::metrics::new;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Counts labels and writes of their file.
#[derive(Clone, Debug, Default)]
pub struct LabelMetrics {
    labels: Gauge,
    dropped: Gauge,
    writes: Family<[(&'static str, &'static str); 1], Counter>,
    last_write: Gauge<u64, AtomicU64>,
}

impl LabelMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let dropped = "Labels left out because Kubernetes would refuse their value";
        let writes = "Writes of the labels' file: ok (it changed) or failed (the last one stays)";
        let last = "When the labels' file was last as it should be, in seconds since 1970; 0 before the first time";
        Self {
            labels: new(registry, "labels", "Labels of this node, 0 before the first"),
            dropped: new(registry, "labels_dropped", dropped),
            writes: new(registry, "label_writes", writes),
            last_write: new(registry, "labels_written_timestamp_seconds", last),
        }
    }

    /// Records the numbers of labels and of labels left out.
    pub fn made(&self, labels: usize, dropped: usize) {
        self.labels.set(i64::try_from(labels).unwrap_or(i64::MAX));
        self.dropped.set(i64::try_from(dropped).unwrap_or(i64::MAX));
    }

    /// Counts a change of the file, or a failure of one.
    pub fn written(&self, ok: bool) {
        self.writes.get_or_create(&[("outcome", if ok { "ok" } else { "failed" })]).inc();
    }

    /// Records that the file was correct at this second.
    pub fn is_written(&self, seconds: u64) {
        self.last_write.set(seconds);
    }
}
