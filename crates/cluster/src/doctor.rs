//! `linkwise doctor` with what the API server has about the node.
//!
//! A composition root, as `labels`: the program is `linkwise`'s own.

use std::process::ExitCode;

use futures_util::FutureExt;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use linkwise::commands::{ClusterFacts, DraFound, NodeFeatureFound, NodeFeatures};
use linkwise::config::{Command, DoctorArgs};
use linkwise::runtime::{ApiClients, NodeReader};

use crate::access::Access;
use crate::metrics::ApiMetrics;
use crate::node_feature::{OBJECT, resource};
use crate::server::{ApiServer, Pace};

/// Checks the node; without an API server as `linkwise` does.
pub fn run(args: DoctorArgs) -> ExitCode {
    let Ok(access) = Access::of(&args.api) else { return linkwise::run(Command::Doctor(args), ApiClients::default()) };
    let reader = move |node: String, driver: Option<String>| facts(access.clone(), node, driver).boxed();
    let reader: &NodeReader = &reader;
    linkwise::run(Command::Doctor(args), ApiClients { doctor: Some(reader), ..ApiClients::default() })
}

async fn facts(access: Access, node: String, driver: Option<String>) -> ClusterFacts {
    let dra = match driver {
        Some(driver) => Some(of_dra(access.clone(), &node, driver).await),
        None => None,
    };
    ClusterFacts { features: node_features(access, node).await, dra }
}

async fn of_dra(access: Access, node: &str, driver: String) -> DraFound {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let mut list = async |object: &'static str, kind: &str, params: ListParams| {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind), object);
        let list =
            |client| async move { Api::<DynamicObject>::all_with(client, &resource).list_metadata(&params).await };
        let listed = server.call(object, "list", list).await;
        listed.map(|list| list.items).map_err(|error| linkwise::errors::chain(&error).to_string())
    };
    let classes = list("deviceclasses", "DeviceClass", ListParams::default()).await;
    let classes = classes.map(|all| all.into_iter().filter_map(|class| class.metadata.name).collect());
    let selector = format!("spec.nodeName={node},spec.driver={driver}");
    let slices = list("resourceslices", "ResourceSlice", ListParams::default().fields(&selector)).await;
    let slices = slices.map(|all| {
        let found = all.into_iter().map(|slice| {
            let managers = slice.metadata.managed_fields.into_iter().flatten().filter_map(|entry| entry.manager);
            (slice.metadata.name.unwrap_or_default(), managers.collect())
        });
        found.collect()
    });
    DraFound { driver, classes, slices }
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
