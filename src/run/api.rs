//! The API server as the parts of `linkwise run` share it: one access, one set of metrics.

use linkwise_cluster::{Access, ApiMetrics, ApiServer, Pace};

/// The way to the API server.
#[derive(Clone, Debug)]
pub struct Api {
    access: Access,
    metrics: ApiMetrics,
}

impl Api {
    /// The API server that `access` leads to. It is not asked yet.
    pub fn new(access: Access) -> Self {
        Self { access, metrics: ApiMetrics::default() }
    }

    /// The counts of requests.
    pub fn metrics(&self) -> &ApiMetrics {
        &self.metrics
    }

    /// A client of its own for one part of the program.
    pub fn server(&self) -> ApiServer {
        ApiServer::new(self.access.clone(), Pace::DEFAULT, self.metrics.clone())
    }
}
