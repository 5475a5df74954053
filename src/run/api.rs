//! The API server, to which `linkwise labels` publishes its labels as a NodeFeature object.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use linkwise_cluster::{Access, ApiMetrics, ApiServer, NodeFeatureSettings, NodeFeatureWriter, Pace};
use tokio_util::sync::CancellationToken;

use super::labels::LabelsWatch;
use crate::config::{Interval, LabelsArgs};

/// The shortest time between two checks of the object: shorter intervals are valid, and would keep the API server busy.
const SHORTEST: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(super) struct Publisher {
    access: Access,
    /// GPU Feature Discovery's object is replaced once by a process, also where a new configuration begins anew.
    settings: NodeFeatureSettings,
}

impl Publisher {
    /// The publisher of a process; `None` without an API server.
    pub fn new(args: &LabelsArgs) -> Option<Self> {
        let access = args.api.server.access().ok()?;
        let (node, namespace) = (args.api.node_name.clone().unwrap_or_default(), args.api.namespace.clone());
        let pod = args.api.pod_name.clone().filter(|pod| !pod.is_empty());
        Some(Self { access, settings: NodeFeatureSettings { node, namespace, pod, replaced: Arc::default() } })
    }

    /// Publishes labels, and compares them with what was published at each interval, until the token is cancelled or the
    /// channel is closed.
    pub async fn publish(self, labels: LabelsWatch, interval: Interval, shutdown: CancellationToken) -> Result<()> {
        let has_name = !self.settings.node.is_empty();
        ensure!(has_name, "--node-name (NODE_NAME) must not be empty: it names the NodeFeature object");
        let pace = Pace { reassert: interval.at_least(SHORTEST), ..Pace::DEFAULT };
        // No port serves these here.
        let server = ApiServer::new(self.access, pace, ApiMetrics::default());
        NodeFeatureWriter::new(server, self.settings).run(labels, shutdown).await;
        Ok(())
    }
}
