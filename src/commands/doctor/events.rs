//! Checks that linkwise may write events about pods, if the configuration asks for them.

use super::Node;
use super::finding::Findings;
use linkwise_cluster::doctor::MissingRights;

/// The remedy: what grants the rights.
const ADVICE: &str =
    "kubectl apply -k manifests/overlays/events makes the role, and so does the chart (events.enabled)";

/// Names the missing rights. Reports nothing if events are off.
pub(super) fn check(found: &mut Findings, node: &Node, missing: Option<MissingRights>) {
    if !node.settings.as_ref().is_some_and(|settings| settings.events.value) {
        return;
    }
    found.check = "events";
    match missing {
        Some(Ok(missing)) if missing.is_empty() => found.ok("linkwise may write events about pods"),
        Some(Ok(missing)) => {
            let lacks = missing.join(" and to ");
            found.warning(format!("linkwise has no right to {lacks}: no pod gets an event"), ADVICE);
        }
        Some(Err(why)) => {
            let by_hand = "kubectl auth can-i create events.events.k8s.io -A --as=system:serviceaccount:NAMESPACE:NAME";
            found.skipped(format!("the right to write events is unknown: {why}"), Some(by_hand));
        }
        None if node.args.node_name.as_ref().is_none_or(String::is_empty) => {
            found.warning("events need the node's name, and --node-name (NODE_NAME) is not set", ADVICE);
        }
        None => found.warning("events need the API server, and there are no credentials for it", ADVICE),
    }
}
