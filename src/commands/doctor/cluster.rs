//! What the API server has about this node: NodeFeature objects that would give it labels beside linkwise's.
//!
//! It is read by `linkwise-cluster`, which the doctor becomes where the pod has a token or a kubeconfig is given.

use super::Node;
use super::events::MissingRights;
use super::finding::Findings;
use crate::quote::quoted;

/// The manager of objects that linkwise wrote.
const OURS: &str = "linkwise";

/// A NodeFeature with this node's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeFeatureFound {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The programs that wrote its fields.
    pub managers: Vec<String>,
}

/// The NodeFeatures of a node in all namespaces, or why they are unknown. Objects whose name has not GPU Feature
/// Discovery's form are left out.
pub type NodeFeatures = Result<Vec<NodeFeatureFound>, String>;

/// What the API server is asked about a node.
#[derive(Clone, Debug)]
pub struct ClusterQuestions {
    /// The node's name.
    pub node: String,
    /// Whether GPUs go through DRA.
    pub dra: bool,
    /// Whether events about pods are to be written.
    pub events: bool,
}

/// What the API server has about a node.
#[derive(Clone, Debug)]
pub struct ClusterFacts {
    /// Its NodeFeatures.
    pub features: NodeFeatures,
    /// What there is of DRA; `None` where no GPU goes through it.
    pub dra: Option<DraFound>,
    /// What events about pods lack; `None` where none are asked for.
    pub events: Option<MissingRights>,
}

/// What there is of DRA, each part or why it is unknown.
#[derive(Clone, Debug)]
pub struct DraFound {
    /// Whether there is the DeviceClass of the driver's name.
    pub has_class: Result<bool, String>,
    /// The driver's ResourceSlices on this node: their names, and the programs that wrote them.
    pub slices: Result<Vec<(String, Vec<String>)>, String>,
    /// The policy that turns `nvidia.com/gpu: N` of pods into claims.
    pub pod_policy: Result<PodPolicy, String>,
    /// The extended resource of that DeviceClass; `None` where it has none, or there is no such class.
    pub extended_resource: Result<Option<ExtendedResourceFound>, String>,
}

/// The extended resource of the DeviceClass, as the kubelet counts a device plugin's on this node.
#[derive(Clone, Debug)]
pub struct ExtendedResourceFound {
    /// The resource.
    pub name: String,
    /// How many devices the Node's status has as allocatable; `None` where it does not name the resource.
    pub allocatable: Option<u64>,
    /// The same in all, unhealthy ones included.
    pub capacity: Option<u64>,
}

/// The MutatingAdmissionPolicy of manifests/dra/unchanged-pods, and its binding, which has the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPolicy {
    /// The API server has no such kind.
    NotServed,
    /// There is none.
    Absent,
    /// It has no binding: it is without effect.
    Unbound,
    /// It has its binding.
    Bound,
}

impl PodPolicy {
    /// The name of the policy, and of its binding.
    pub const NAME: &'static str = "linkwise-unchanged-pods";
}

/// Names the objects that a GPU Feature Discovery left: NFD makes labels of all of them.
pub(super) fn check(found: &mut Findings, node: &Node, features: Option<NodeFeatures>) {
    found.check = "labels";
    match features {
        Some(Ok(features)) => {
            for NodeFeatureFound { namespace, name, managers } in features {
                let object = format!("NodeFeature {namespace}/{name}");
                if managers.iter().any(|manager| manager == OURS) {
                    found.ok(format!("{object} is linkwise's"));
                    continue;
                }
                let managers: Vec<String> = managers.iter().map(|manager| quoted(manager).to_string()).collect();
                found.warning(
                    format!("{object} was written by {}, and may override linkwise's labels", managers.join(", ")),
                    &format!(
                        "if that program no longer runs: kubectl -n {namespace} delete nodefeatures.nfd.k8s-sigs.io {name}"
                    ),
                );
            }
        }
        Some(Err(why)) => found.skipped(format!("NodeFeature objects could not be listed: {why}"), Some(BY_HAND)),
        // Outside of a cluster there are none.
        None if node.args.api.is_given() => {
            found.skipped("NodeFeature objects were not listed: this pod has no token", Some(BY_HAND));
        }
        None => {}
    }
}

/// How a person looks for them.
const BY_HAND: &str = "kubectl get nodefeatures.nfd.k8s-sigs.io -A | grep nvidia-features-for-";
