//! `linkwise labels` with a NodeFeature object as its way out.
//!
//! A composition root: the program is `linkwise`'s own, and this is the publisher that it calls where its settings ask
//! for the NodeFeature API.

use std::process::ExitCode;

use anyhow::{Result, bail};
use linkwise::config::{Command, LabelsArgs};
use linkwise::runtime::{LabelsWatch, Publisher};
use tokio_util::sync::CancellationToken;

use crate::access::Access;
use crate::metrics::ApiMetrics;
use crate::node_feature::{NodeFeatureMetrics, NodeFeatureSettings, NodeFeatureWriter};
use crate::server::{ApiServer, Pace};

/// Publishes labels until a signal ends it; without an API server in the file that NFD reads.
pub fn run(mut args: Box<LabelsArgs>) -> ExitCode {
    // The client's own lines about failures, which are logged here once.
    args.log.log = format!("kube_client=off,{}", args.log.log);
    let Ok(access) = Access::of(&args.api.server) else { return linkwise::run(Command::Labels(args), None) };
    let (node, namespace, pod) = (args.api.node_name.clone(), args.api.namespace.clone(), args.api.pod_name.clone());
    let pod = pod.filter(|pod| !pod.is_empty());
    let publisher = move |labels: LabelsWatch, shutdown: CancellationToken| {
        let (access, node, namespace, pod) = (access.clone(), node.clone(), namespace.clone(), pod.clone());
        let task = async move {
            let Some(node) = node.filter(|node| !node.is_empty()) else {
                bail!("--node-name (NODE_NAME) must not be empty: it names the NodeFeature object")
            };
            // No port serves these here.
            let server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
            let settings = NodeFeatureSettings { node, namespace, pod };
            NodeFeatureWriter::new(server, settings, NodeFeatureMetrics::default()).run(labels, shutdown).await;
            Ok(())
        };
        Box::pin(task) as std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>>
    };
    let publisher: &Publisher = &publisher;
    linkwise::run(Command::Labels(args), Some(publisher))
}
