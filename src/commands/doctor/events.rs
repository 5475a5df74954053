//! Events about pods: whether linkwise may write them, where the configuration asks for them.

use super::Node;
use super::finding::Findings;
use crate::config::Environment;
use crate::config::settings::{Flags, load};

/// The rights that events need and this program's account lacks, as `create events`; or why they are unknown.
pub type MissingRights = Result<Vec<String>, String>;

/// What gives the rights.
const ADVICE: &str =
    "kubectl apply -k manifests/overlays/events makes the role, and so does the chart (events.enabled)";

/// Names the rights that are missing. Where no events are asked for there is nothing to report.
pub(super) fn check(found: &mut Findings, node: &Node, missing: Option<MissingRights>) {
    let Ok(settings) = load(&Flags::default(), &Environment::read()).map(|loaded| loaded.settings) else { return };
    if !settings.events.value {
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
