//! What the API server has about this node: NodeFeature objects that would give it labels beside linkwise's.
//!
//! Read where the pod has a token or a kubeconfig is given.

use super::finding::Findings;
use super::{Node, names};
use linkwise_cluster::doctor::{NodeFeatureFound, NodeFeatures};

/// The manager of objects that linkwise wrote.
const OURS: &str = "linkwise";

/// Names the objects that GPU Feature Discovery left behind: NFD makes labels of all of them.
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
                found.warning(
                    format!("{object} was written by {}, and may override linkwise's labels", names(&managers)),
                    &format!(
                        "if that program no longer runs: kubectl -n {namespace} delete nodefeatures.nfd.k8s-sigs.io {name}"
                    ),
                );
            }
        }
        Some(Err(why)) => found.skipped(format!("NodeFeature objects could not be listed: {why}"), Some(BY_HAND)),
        // Outside of a cluster there are no such objects.
        None if node.args.api.is_given() => {
            found.skipped("NodeFeature objects were not listed: this pod has no token", Some(BY_HAND));
        }
        None => {}
    }
}

/// The command by which a person finds them.
const BY_HAND: &str = "kubectl get nodefeatures.nfd.k8s-sigs.io -A | grep nvidia-features-for-";
