//! `linkwise doctor` with what the API server has about the node.
//!
//! A composition root, as `labels`: the program is `linkwise`'s own.

use std::process::ExitCode;

use futures_util::FutureExt;
use kube::Api;
use kube::api::{DynamicObject, ListParams};
use linkwise::commands::{NodeFeatureFound, NodeFeatures};
use linkwise::config::{Command, DoctorArgs};
use linkwise::runtime::{ApiClients, NodeFeatureReader};

use crate::access::Access;
use crate::metrics::ApiMetrics;
use crate::node_feature::{OBJECT, resource};
use crate::server::{ApiServer, Pace};

/// Checks the node; without an API server as `linkwise` does.
pub fn run(args: DoctorArgs) -> ExitCode {
    let Ok(access) = Access::of(&args.api) else { return linkwise::run(Command::Doctor(args), ApiClients::default()) };
    let reader = move |node: String| node_features(access.clone(), node).boxed();
    let reader: &NodeFeatureReader = &reader;
    linkwise::run(Command::Doctor(args), ApiClients { doctor: Some(reader), ..ApiClients::default() })
}

/// The NodeFeatures of the node in all namespaces. A cluster that has no such objects has none of this node.
async fn node_features(access: Access, node: String) -> NodeFeatures {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let name = format!("nvidia-features-for-{node}");
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let list = |client| async move { Api::<DynamicObject>::all_with(client, &resource()).list(&params).await };
    let listed = match server.call(OBJECT, "list", list).await {
        Ok(list) => list.items,
        Err(error) if error.code() == Some(404) => Vec::new(),
        Err(error) => return Err(linkwise::errors::chain(&error).to_string()),
    };
    let of_gfd = listed.into_iter().filter(|object| object.metadata.name.as_deref() == Some(name.as_str()));
    let found = |object: DynamicObject| NodeFeatureFound {
        namespace: object.metadata.namespace.unwrap_or_default(),
        name: name.clone(),
        managers: object.metadata.managed_fields.into_iter().flatten().filter_map(|entry| entry.manager).collect(),
    };
    let mut features: Vec<NodeFeatureFound> = of_gfd.map(found).collect();
    features.sort();
    Ok(features)
}
