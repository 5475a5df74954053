//! `linkwise doctor` with what the API server has about the node.
//!
//! A composition root, as `labels`: the program is `linkwise`'s own.

use std::collections::BTreeMap;
use std::process::ExitCode;

use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use linkwise::commands::{
    ClusterFacts, ClusterQuestions, DraFound, ExtendedResourceFound, MissingRights, NodeFeatureFound, NodeFeatures,
    PodPolicy,
};
use linkwise::config::{Command, DoctorArgs};
use linkwise::runtime::{ApiClients, NodeReader};
use linkwise::state::DRA_DRIVER;
use serde_json::json;

use crate::access::Access;
use crate::events::EventWriter;
use crate::metrics::ApiMetrics;
use crate::node_feature::{OBJECT, resource};
use crate::server::{ApiServer, Pace};

/// Checks the node; without an API server as `linkwise` does.
pub fn run(args: DoctorArgs) -> ExitCode {
    let Ok(access) = Access::of(&args.api) else { return linkwise::run(Command::Doctor(args), ApiClients::default()) };
    let reader = move |questions| facts(access.clone(), questions).boxed();
    let reader: &NodeReader = &reader;
    linkwise::run(Command::Doctor(args), ApiClients { doctor: Some(reader), ..ApiClients::default() })
}

async fn facts(access: Access, questions: ClusterQuestions) -> ClusterFacts {
    let ClusterQuestions { node, dra, events } = questions;
    let dra = match dra {
        true => Some(of_dra(access.clone(), &node).await),
        false => None,
    };
    let events = match events {
        true => Some(missing_rights(access.clone()).await),
        false => None,
    };
    ClusterFacts { features: node_features(access, node).await, dra, events }
}

/// The rights of events that this account does not have in all namespaces. Whoever is authenticated may ask that.
async fn missing_rights(access: Access) -> MissingRights {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let kind = GroupVersionKind::gvk("authorization.k8s.io", "v1", "SelfSubjectAccessReview");
    let (reviews, mut missing) = ("selfsubjectaccessreviews", Vec::new());
    for (verb, group, resource) in EventWriter::RIGHTS {
        let attributes = json!({"verb": verb, "group": group, "resource": resource});
        let of = ApiResource::from_gvk_with_plural(&kind, reviews);
        let review = DynamicObject::new("", &of).data(json!({"spec": {"resourceAttributes": attributes}}));
        let create = |client| async move {
            Api::<DynamicObject>::all_with(client, &of).create(&PostParams::default(), &review).await
        };
        let answer = server.call(reviews, "create", create).await;
        let answer = answer.map_err(|error| linkwise::errors::chain(&error).to_string())?;
        if answer.data["status"]["allowed"] != true {
            missing.push(format!("{verb} {resource}"));
        }
    }
    Ok(missing)
}

async fn of_dra(access: Access, node: &str) -> DraFound {
    let mut server = ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let (classes, slices) = ("deviceclasses", "resourceslices");
    let resource =
        |kind, plural| ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind), plural);
    let class = resource("DeviceClass", classes);
    let get = |client| async move { Api::<DynamicObject>::all_with(client, &class).get_opt(DRA_DRIVER).await };
    let found = server.call(classes, "get", get).await;
    let class = found.map_err(|error| linkwise::errors::chain(&error).to_string());
    let has_class = class.as_ref().map(Option::is_some).map_err(Clone::clone);
    let mapped = |class: DynamicObject| Some(class.data["spec"]["extendedResourceName"].as_str()?.to_owned());
    let extended_resource = match class.ok().flatten().and_then(mapped) {
        Some(name) => extended_resource(&mut server, node, name).await.map(Some),
        None => Ok(None),
    };
    let slice = resource("ResourceSlice", slices);
    let params = ListParams::default().fields(&format!("spec.nodeName={node},spec.driver={DRA_DRIVER}"));
    let list = |client| async move { Api::<DynamicObject>::all_with(client, &slice).list_metadata(&params).await };
    let slices = match server.call(slices, "list", list).await {
        Ok(listed) => {
            let found = listed.items.into_iter().map(|slice| {
                let managers = slice.metadata.managed_fields.into_iter().flatten().filter_map(|entry| entry.manager);
                (slice.metadata.name.unwrap_or_default(), managers.collect())
            });
            Ok(found.collect())
        }
        Err(error) => Err(linkwise::errors::chain(&error).to_string()),
    };
    let pod_policy = pod_policy(&mut server).await;
    DraFound { has_class, slices, pod_policy, extended_resource }
}

/// Looks for the policy for unchanged pods, then for its binding.
async fn pod_policy(server: &mut ApiServer) -> Result<PodPolicy, String> {
    for (kind, plural, without) in [
        ("MutatingAdmissionPolicy", "mutatingadmissionpolicies", PodPolicy::Absent),
        ("MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", PodPolicy::Unbound),
    ] {
        let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        let get = |client| async move {
            Api::<DynamicObject>::all_with(client, &resource).get_metadata(PodPolicy::NAME).await
        };
        match server.call(plural, "get", get).await {
            Ok(_) => {}
            Err(error) if error.code() == Some(404) => {
                // Of a kind that it does not have the server names no object.
                let text = linkwise::errors::chain(&error).to_string();
                return Ok(if text.contains(PodPolicy::NAME) { without } else { PodPolicy::NotServed });
            }
            Err(error) => return Err(linkwise::errors::chain(&error).to_string()),
        }
    }
    Ok(PodPolicy::Bound)
}

/// How many devices of a device plugin the Node's status has under the name of a class's extended resource.
async fn extended_resource(server: &mut ApiServer, node: &str, name: String) -> Result<ExtendedResourceFound, String> {
    let get = |client| async move { Api::<Node>::all(client).get(node).await };
    let found = server.call("nodes", "get", get).await;
    let status = found.map_err(|error| linkwise::errors::chain(&error).to_string())?.status.unwrap_or_default();
    let counted = |quantities: Option<BTreeMap<String, Quantity>>| quantities?.get(&name)?.0.parse().ok();
    let (allocatable, capacity) = (counted(status.allocatable), counted(status.capacity));
    Ok(ExtendedResourceFound { name, allocatable, capacity })
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
