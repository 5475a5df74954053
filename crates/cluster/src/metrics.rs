//! [`ApiMetrics`]: counts requests to the API server by their outcome. docs/config-manager.md documents it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PerRequest {
    object: &'static str,
    verb: &'static str,
    outcome: &'static str,
}

/// Counts requests.
#[derive(Clone, Debug, Default)]
pub struct ApiMetrics {
    requests: Family<PerRequest, Counter>,
    registered: Arc<AtomicBool>,
}

impl ApiMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        metrics.register_in(registry);
        metrics
    }

    /// Registers the metrics, unless that was done before: several parts of a program may count here.
    pub fn register_in(&self, registry: &mut Registry) {
        let help = "Requests to the API server by kind of object, verb and outcome; a watch counts when it begins, and \
                    once more where it breaks";
        if !self.registered.swap(true, Ordering::Relaxed) {
            registry.register("api_requests", help, self.requests.clone());
        }
    }

    pub(crate) fn count(&self, object: &'static str, verb: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&PerRequest { object, verb, outcome }).inc();
    }

    /// The number of requests with this outcome, for tests.
    pub fn requests(&self, object: &'static str, verb: &'static str, outcome: &'static str) -> u64 {
        self.requests.get_or_create(&PerRequest { object, verb, outcome }).get()
    }
}
