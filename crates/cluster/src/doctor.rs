//! Reads the API server's facts about a node, for `linkwise doctor`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::Api;
use kube::api::{DynamicObject, ListParams, PartialObjectMeta, PostParams};
use linkwise_core::errors::chain;
use linkwise_core::state::DRA_DRIVER;
use serde_json::json;

use crate::error::{ApiError, ApiMetrics};
use crate::events::EventWriter;
use crate::node_feature::{self, OBJECT};
use crate::server::{Access, ApiServer, Pace, resource};

/// A NodeFeature named after this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeFeatureFound {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The programs that wrote its fields.
    pub managers: Vec<String>,
}

/// The NodeFeatures of a node in all namespaces, or the reason why they are unknown. Objects whose name does not have
/// GPU Feature Discovery's form are left out.
pub type NodeFeatures = Result<Vec<NodeFeatureFound>, String>;

/// The doctor's questions about a node to the API server.
#[derive(Clone, Debug)]
pub struct ClusterQuestions {
    /// The node's name.
    pub node: String,
    /// True if GPUs go through DRA.
    pub dra: bool,
    /// True if events about pods are to be written.
    pub events: bool,
}

/// The API server's facts about a node.
#[derive(Clone, Debug)]
pub struct ClusterFacts {
    /// Its NodeFeatures.
    pub features: NodeFeatures,
    /// The facts about DRA; `None` if no GPU goes through it.
    pub dra: Option<DraFound>,
    /// The version of its kubelet; `None` if it cannot be seen.
    pub kubelet: Option<String>,
    /// The rights for events about pods that this account lacks; `None` if events are off.
    pub events: Option<MissingRights>,
}

/// The facts about DRA, each with a value or the reason why it is unknown.
#[derive(Clone, Debug)]
pub struct DraFound {
    /// True if there is a DeviceClass of the driver's name.
    pub has_class: Result<bool, String>,
    /// The driver's ResourceSlices on this node: their names, and the programs that wrote them.
    pub slices: Result<Vec<(String, Vec<String>)>, String>,
    /// The policy that turns `nvidia.com/gpu: N` of pods into claims.
    pub pod_policy: Result<PodPolicy, String>,
    /// The extended resource of the driver's DeviceClass; `None` if it has none, or if the class
    /// is missing or unknown.
    pub extended_resource: Result<Option<ExtendedResourceFound>, String>,
}

/// The extended resource of a DeviceClass, with the numbers of a device plugin's devices under its name on this node.
#[derive(Clone, Debug)]
pub struct ExtendedResourceFound {
    /// The resource.
    pub name: String,
    /// The allocatable devices in the Node's status; `None` if it does not name the resource.
    pub allocatable: Option<u64>,
    /// The capacity in the Node's status, unhealthy devices included.
    pub capacity: Option<u64>,
}

/// The MutatingAdmissionPolicy of manifests/dra/unchanged-pods, and its binding, which has the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPolicy {
    /// The API server has no such kind.
    NotServed,
    /// The policy does not exist.
    Absent,
    /// The policy has no binding, and so no effect.
    Unbound,
    /// The policy has its binding.
    Bound,
}

impl PodPolicy {
    /// The name of the policy, and of its binding.
    pub const NAME: &'static str = "linkwise-unchanged-pods";
}

/// The rights that events need and this account lacks, such as `create events`; or the reason why they are unknown.
pub type MissingRights = Result<Vec<String>, String>;

/// Reads the facts about a node from the API server.
pub async fn facts(access: Access, questions: ClusterQuestions) -> ClusterFacts {
    let ClusterQuestions { node, dra, events } = questions;
    let server = &mut ApiServer::new(access, Pace::DEFAULT, ApiMetrics::default());
    let get = |client| async { Api::<Node>::all(client).get(&node).await };
    let status = server.call("nodes", "get", get).await.map(|found| found.status.unwrap_or_default()).map_err(text);
    let dra = if dra { Some(dra_facts(server, &node, &status).await) } else { None };
    let events = if events { Some(missing_rights(server).await) } else { None };
    let kubelet = status.ok().and_then(|status| status.node_info).map(|info| info.kubelet_version);
    ClusterFacts { features: node_features(server, node).await, dra, kubelet, events }
}

/// The rights for events that this account lacks cluster-wide. Every authenticated account may ask for its rights.
async fn missing_rights(server: &mut ApiServer) -> MissingRights {
    let (reviews, mut missing) = ("selfsubjectaccessreviews", Vec::new());
    for (verb, group, of) in EventWriter::RIGHTS {
        let attributes = json!({"verb": verb, "group": group, "resource": of});
        let kind = resource("authorization.k8s.io", "v1", "SelfSubjectAccessReview", reviews);
        let review = DynamicObject::new("", &kind).data(json!({"spec": {"resourceAttributes": attributes}}));
        let create = |client| async move {
            Api::<DynamicObject>::all_with(client, &kind).create(&PostParams::default(), &review).await
        };
        let answer = server.call(reviews, "create", create).await.map_err(text)?;
        if answer.data["status"]["allowed"] != true {
            missing.push(format!("{verb} {of}"));
        }
    }
    Ok(missing)
}

async fn dra_facts(server: &mut ApiServer, node: &str, status: &Result<NodeStatus, String>) -> DraFound {
    let (classes, slices) = ("deviceclasses", "resourceslices");
    let class = resource("resource.k8s.io", "v1", "DeviceClass", classes);
    let get = |client| async move { Api::<DynamicObject>::all_with(client, &class).get_opt(DRA_DRIVER).await };
    let class = server.call(classes, "get", get).await.map_err(text);
    let has_class = class.as_ref().map(Option::is_some).map_err(Clone::clone);
    let mapped = |class: DynamicObject| Some(class.data["spec"]["extendedResourceName"].as_str()?.to_owned());
    let extended_resource = match (class.ok().flatten().and_then(mapped), status) {
        (Some(name), Ok(status)) => Ok(Some(extended_resource(status, name))),
        (Some(_), Err(why)) => Err(why.clone()),
        (None, _) => Ok(None),
    };
    let slice = resource("resource.k8s.io", "v1", "ResourceSlice", slices);
    let params = ListParams::default().fields(&format!("spec.nodeName={node},spec.driver={DRA_DRIVER}"));
    let list = |client| async move { Api::<DynamicObject>::all_with(client, &slice).list_metadata(&params).await };
    let listed = server.call(slices, "list", list).await.map_err(text);
    let written = |slice: PartialObjectMeta<DynamicObject>| {
        (slice.metadata.name.unwrap_or_default(), managers(slice.metadata.managed_fields))
    };
    let slices = listed.map(|listed| listed.items.into_iter().map(written).collect());
    DraFound { has_class, slices, pod_policy: pod_policy(server).await, extended_resource }
}

/// Looks for the policy for unchanged pods, then for its binding.
async fn pod_policy(server: &mut ApiServer) -> Result<PodPolicy, String> {
    for (kind, plural, without) in [
        ("MutatingAdmissionPolicy", "mutatingadmissionpolicies", PodPolicy::Absent),
        ("MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", PodPolicy::Unbound),
    ] {
        let resource = resource("admissionregistration.k8s.io", "v1", kind, plural);
        let get = |client| async move {
            Api::<DynamicObject>::all_with(client, &resource).get_metadata(PodPolicy::NAME).await
        };
        match server.call(plural, "get", get).await {
            Ok(_) => {}
            Err(error) if error.code() == Some(404) => {
                // The server names no object in an answer about a kind that it does not have.
                return Ok(if text(error).contains(PodPolicy::NAME) { without } else { PodPolicy::NotServed });
            }
            Err(error) => return Err(text(error)),
        }
    }
    Ok(PodPolicy::Bound)
}

/// The counts of devices that the Node's status has under a class's extended resource. They belong to a device plugin.
fn extended_resource(status: &NodeStatus, name: String) -> ExtendedResourceFound {
    let counted = |quantities: &Option<BTreeMap<String, Quantity>>| quantities.as_ref()?.get(&name)?.0.parse().ok();
    let (allocatable, capacity) = (counted(&status.allocatable), counted(&status.capacity));
    ExtendedResourceFound { name, allocatable, capacity }
}

/// The NodeFeatures of the node in all namespaces; none if the cluster does not have this kind of object.
async fn node_features(server: &mut ApiServer, node: String) -> NodeFeatures {
    let name = format!("nvidia-features-for-{node}");
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let list =
        |client| async move { Api::<DynamicObject>::all_with(client, &node_feature::resource()).list(&params).await };
    let listed = match server.call(OBJECT, "list", list).await {
        Ok(list) => list.items,
        Err(error) if error.code() == Some(404) => Vec::new(),
        Err(error) => return Err(text(error)),
    };
    let of_gfd = listed.into_iter().filter(|object| object.metadata.name.as_deref() == Some(name.as_str()));
    let found = |object: DynamicObject| NodeFeatureFound {
        namespace: object.metadata.namespace.unwrap_or_default(),
        name: name.clone(),
        managers: managers(object.metadata.managed_fields),
    };
    let mut features: Vec<NodeFeatureFound> = of_gfd.map(found).collect();
    features.sort();
    Ok(features)
}

/// The programs that wrote an object's fields.
fn managers(fields: Option<Vec<ManagedFieldsEntry>>) -> Vec<String> {
    fields.into_iter().flatten().filter_map(|entry| entry.manager).collect()
}

fn text(error: ApiError) -> String {
    chain(&error)
}
