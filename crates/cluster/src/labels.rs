//! `linkwise labels` with a NodeFeature object as its way out.
//!
//! A composition root: the program is `linkwise`'s own, and this is the publisher that it calls where its settings ask
//! for the NodeFeature API.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use linkwise::config::{Command, Interval, LabelsArgs};
use linkwise::runtime::{ApiClients, LabelsWatch, Publisher};
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::metrics::ApiMetrics;
use crate::node_feature::{NodeFeatureMetrics, NodeFeatureSettings, NodeFeatureWriter};
use crate::server::{ApiServer, Pace};

/// The shortest time for which the object is left alone: shorter intervals are valid, and would keep the API server busy.
const SHORTEST: Duration = Duration::from_secs(10);

/// Publishes labels until a signal ends it; without an API server in the file that NFD reads.
pub fn run(mut args: Box<LabelsArgs>) -> ExitCode {
    // The client's own lines about failures, which are logged here once.
    args.log.log = format!("kube_client=off,{}", args.log.log);
    let Ok(access) = Access::of(&args.api.server) else {
        return linkwise::run(Command::Labels(args), ApiClients::default());
    };
    let (node, namespace, pod) = (args.api.node_name.clone(), args.api.namespace.clone(), args.api.pod_name.clone());
    let pod = pod.filter(|pod| !pod.is_empty());
    // A new configuration begins anew, and GPU Feature Discovery's object is replaced once by a process.
    let replaced = Arc::default();
    let publisher = move |labels: LabelsWatch, interval: Interval, shutdown: CancellationToken| {
        let (access, node, namespace, pod) = (access.clone(), node.clone(), namespace.clone(), pod.clone());
        let replaced = Arc::clone(&replaced);
        let task = async move {
            let Some(node) = node.filter(|node| !node.is_empty()) else {
                bail!("--node-name (NODE_NAME) must not be empty: it names the NodeFeature object")
            };
            // No port serves these here.
            let server =
                ApiServer::new(access, Pace { reassert: reassert(interval), ..Pace::DEFAULT }, ApiMetrics::default());
            let settings = NodeFeatureSettings { node, namespace, pod, replaced };
            NodeFeatureWriter::new(server, settings, NodeFeatureMetrics::default()).run(labels, shutdown).await;
            Ok(())
        };
        Box::pin(task) as std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>>
    };
    let publisher: &Publisher = &publisher;
    linkwise::run(Command::Labels(args), ApiClients { labels: Some(publisher), ..ApiClients::default() })
}

/// How long the object is left alone, by the interval that is configured.
fn reassert(interval: Interval) -> Duration {
    match interval {
        Interval::Every(time) => time.max(SHORTEST),
        Interval::Infinite => Duration::MAX,
    }
}
