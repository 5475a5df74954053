//! Checks the parts of linkwise that need the API server: DRA, if the configuration uses it, and other drivers of its
//! name; an extended resource that both doors serve; the rights to write events; and NodeFeature objects that would
//! give this node other labels than linkwise's.

use std::io::ErrorKind;
use std::path::PathBuf;

use super::kubelet::Policy;
use super::{Findings, Node, entries, names};
use crate::config::Settings;
use linkwise_cluster::doctor::{
    DraFound, ExtendedResourceFound, MissingRights, NodeFeatureFound, NodeFeatures, PodPolicy,
};
use linkwise_core::state::{DRA_DRIVER, Door};

/// The first part of the names of our registration sockets.
const OURS: &str = "linkwise-";

/// The manager of objects that linkwise wrote.
const MANAGER: &str = "linkwise";

/// Checks that DRA finds the API server and the kubelet's folders. Reports nothing if no GPU goes through DRA.
pub(super) fn check(found: &mut Findings, node: &Node) {
    if let Some(settings) = &node.settings
        && settings.dra_gpus.value != Door::Plugin
    {
        api_server(found, node);
        folders(found, node, settings);
    }
}

/// Checks the API server's objects by which pods get GPUs through DRA. `policy` is the Topology Manager's.
pub(super) fn slices(found: &mut Findings, facts: DraFound, policy: Option<&Policy>) {
    let DraFound { has_class, slices, pod_policy: policy_of_pods, extended_resource: resource } = facts;
    found.check = "DRA";
    let unread = format!("cannot read the DeviceClass {DRA_DRIVER} and its extended resource");
    match found.known(has_class, &unread, &format!("kubectl get deviceclass {DRA_DRIVER} -o yaml")) {
        Some(true) => found.ok(format!("there is a DeviceClass {DRA_DRIVER}")),
        Some(false) => found.warning(
            format!("there is no DeviceClass {DRA_DRIVER}: claims that name it get no GPU"),
            "make it with kubectl apply -k manifests/overlays/dra, or with the chart (dra.deviceClasses)",
        ),
        None => {}
    }
    let by_hand = "kubectl get resourceslices --field-selector spec.nodeName=NODE";
    let slices = found.known(slices, "cannot list ResourceSlices", by_hand);
    if slices.as_ref().is_some_and(Vec::is_empty) {
        found.failed(
            format!("there is no ResourceSlice of {DRA_DRIVER} for this node: no claim gets its GPUs"),
            "look for the cause in linkwise admin state and in the log: the parts DRA slices and DRA plugin",
        );
    }
    for (name, managers) in slices.into_iter().flatten() {
        if managers.iter().any(|manager| manager == MANAGER) {
            found.ok(format!("ResourceSlice {name} is linkwise's"));
            continue;
        }
        let advice =
            "remove any other DRA driver of this name; if none runs, start linkwise, which deletes such slices";
        found.failed(format!("ResourceSlice {name} was written by {}: GPUs published twice", names(&managers)), advice);
    }
    pod_policy(found, policy_of_pods);
    extended_resource(found, resource, policy);
}

/// Checks that pods with `nvidia.com/gpu: N` can get claims. The doctor has no right to read which namespaces have the
/// label and the templates.
fn pod_policy(found: &mut Findings, policy: Result<PodPolicy, String>) {
    let name = PodPolicy::NAME;
    let without = "pods with nvidia.com/gpu: N and without a claim get the first GPUs that are free";
    let by_hand = format!("kubectl get mutatingadmissionpolicies,mutatingadmissionpolicybindings {name}");
    let unread = format!("cannot read the MutatingAdmissionPolicy {name}");
    let Some(policy) = found.known(policy, &unread, &by_hand) else { return };
    match policy {
        PodPolicy::Bound => found.ok(format!(
            "the policy {name} makes claims of nvidia.com/gpu: N, in namespaces with its label and the templates"
        )),
        PodPolicy::Unbound => found.warning(
            format!("the policy {name} has no binding, and no effect: {without}"),
            "make both with kubectl apply -k manifests/dra/unchanged-pods",
        ),
        PodPolicy::Absent => found.skipped(
            format!("there is no MutatingAdmissionPolicy {name}: {without}"),
            Some("for the best sets: kubectl apply -k manifests/dra/unchanged-pods (docs/dra-pods.md)"),
        ),
        PodPolicy::NotServed => found.skipped(
            format!("the API server has no MutatingAdmissionPolicies of admissionregistration.k8s.io/v1: {without}"),
            Some("Kubernetes 1.36 has them; for older ones see docs/dra-pods.md"),
        ),
    }
}

fn api_server(found: &mut Findings, node: &Node) {
    let api = &node.args.api;
    if !api.is_given() {
        let advice = "run linkwise in a pod with a token (manifests/overlays/dra), or set --kubeconfig";
        return found.failed("no API server: KUBERNETES_SERVICE_HOST is not set, and no --kubeconfig is given", advice);
    }
    if !api.kubeconfig.is_empty() {
        return found.ok(format!("API server of the kubeconfig {}", api.kubeconfig));
    }
    let token = api.service_account_dir.join("token");
    match std::fs::File::open(&token) {
        Ok(_) => found.ok(format!("API server {}, with a token", api.api_server_host)),
        Err(error) => found.failed(
            format!("cannot read the ServiceAccount's token {}: {error}", token.display()),
            "set automountServiceAccountToken, as manifests/overlays/dra does",
        ),
    }
}

fn folders(found: &mut Findings, node: &Node, settings: &Settings) {
    let mounted = "mount the kubelet's folder at this path (manifests/overlays/dra); if the kubelet has another \
                   --root-dir, set --dra-registry-dir and --dra-plugins-dir";
    let registry = node.at(&settings.dra_registry_dir.value.to_string_lossy());
    match entries(&registry) {
        Ok(mut others) => {
            let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            others.retain(|path| name(path).contains(DRA_DRIVER) && !name(path).starts_with(OURS));
            for other in &others {
                found.failed(
                    format!("another DRA driver registers as {DRA_DRIVER}: {}", other.display()),
                    "two drivers of one name take pods and ResourceSlices from each other: remove NVIDIA's kubelet \
                     plugin from this node (resources.gpus.enabled=false), and its socket",
                );
            }
            if others.is_empty() {
                found.ok(format!("{}: no other DRA driver is called {DRA_DRIVER}", registry.display()));
            }
        }
        Err(error) => found.failed(format!("cannot read the kubelet's {}: {error}", registry.display()), mounted),
    }
    let plugins = node.at(&settings.dra_plugins_dir.value.to_string_lossy());
    if let Err(error) = std::fs::metadata(&plugins) {
        let is_missing = error.kind() == ErrorKind::NotFound;
        let why = if is_missing { " does not exist".to_owned() } else { format!(": {error}") };
        found.failed(format!("the kubelet's {}{why}", plugins.display()), mounted);
    }
}

/// Reports which devices pods with the extended resource of the driver's DeviceClass get here.
///
/// The scheduler uses the device plugin on every node where the kubelet counts a device of the plugin, and a kubelet
/// counts such devices for some minutes after the plugin's end.
fn extended_resource(
    found: &mut Findings,
    facts: Result<Option<ExtendedResourceFound>, String>,
    policy: Option<&Policy>,
) {
    let unread = "cannot read the Node, which shows whether the device plugin serves the class's extended resource";
    let facts = found.known(facts, unread, "kubectl get node NODE -o jsonpath='{.status.allocatable}'");
    let Some(Some(ExtendedResourceFound { name, allocatable, capacity })) = facts else { return };
    match (allocatable, capacity) {
        (Some(1..), _) => found.warning(
            format!(
                "{name} is a resource of the device plugin here and of the DeviceClass {DRA_DRIVER}: pods with {name} \
                 and without a claim get devices of the plugin only, also while all of them are taken"
            ),
            "remove the device plugin of that name from the node, or set dra.gpus to none (docs/migrating-to-dra.md)",
        ),
        (_, Some(1..)) => {
            let forgets = "the kubelet forgets a device plugin 5 minutes after its end; `linkwise admin state` shows \
                           pods that still hold GPUs through it";
            let remembers = format!("the kubelet still remembers a device plugin of {name}, with no healthy device");
            let (with, unknown) = match policy {
                Some(policy) if policy.name == "none" => {
                    return found.ok(format!("{remembers}; pods get GPUs through DRA"));
                }
                Some(Policy { name, source }) => (format!("the Topology Manager policy {name} ({source})"), ""),
                None => ("a Topology Manager policy".to_owned(), "; the policy is not known here"),
            };
            let rejects = format!("it may reject pods with {name} and without a claim (TopologyAffinityError)");
            found.warning(format!("{remembers}: with {with} {rejects}{unknown}"), forgets);
        }
        _ => {
            found.ok(format!("pods with {name} and without a claim get GPUs here through the DeviceClass {DRA_DRIVER}"))
        }
    }
}

/// The remedy, which grants the rights.
const ADVICE: &str =
    "make the role with kubectl apply -k manifests/overlays/events, or with the chart (events.enabled)";

/// Names the missing rights. Reports nothing if events are off.
pub(super) fn event_rights(found: &mut Findings, node: &Node, missing: Option<MissingRights>) {
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
        None => found.warning("events need the API server, and none is given", ADVICE),
    }
}

/// Reports who wrote each NodeFeature object of this node, because NFD makes labels of all of them.
pub(super) fn node_features(found: &mut Findings, node: &Node, features: Option<NodeFeatures>) {
    found.check = "labels";
    // Outside of a cluster there are no NodeFeature objects.
    if features.is_none() && node.args.api.is_given() {
        found.skipped("NodeFeature objects were not listed: --node-name (NODE_NAME) is not set", Some(BY_HAND));
    }
    let listed = features.and_then(|listed| found.known(listed, "cannot list NodeFeature objects", BY_HAND));
    for NodeFeatureFound { namespace, name, managers } in listed.into_iter().flatten() {
        let object = format!("NodeFeature {namespace}/{name}");
        if managers.iter().any(|manager| manager == MANAGER) {
            found.ok(format!("{object} is linkwise's"));
            continue;
        }
        let delete = format!("kubectl -n {namespace} delete nodefeatures.nfd.k8s-sigs.io {name}");
        found.warning(
            format!("{object} was written by {}, and may override linkwise's labels", names(&managers)),
            &format!("if that program no longer runs: {delete}"),
        );
    }
}

/// The command by which a person finds GPU Feature Discovery's objects.
const BY_HAND: &str = "kubectl get nodefeatures.nfd.k8s-sigs.io -A | grep nvidia-features-for-";
