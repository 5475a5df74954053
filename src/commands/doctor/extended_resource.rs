//! Checks for one extended resource through both doors: the scheduler uses the device plugin on every node where the
//! kubelet counts a device of it, and a kubelet counts a device plugin for some minutes after its end.

use super::finding::Findings;
use super::kubelet_policy::Policy;
use linkwise_cluster::doctor::ExtendedResourceFound;
use linkwise_core::state::DRA_DRIVER;

/// Reports which devices pods with the extended resource of the driver's DeviceClass get here.
pub(super) fn check(
    found: &mut Findings,
    facts: Option<Result<Option<ExtendedResourceFound>, String>>,
    policy: Option<&Policy>,
) {
    found.check = "DRA";
    let resource = match facts {
        None | Some(Ok(None)) => return,
        Some(Ok(Some(resource))) => resource,
        Some(Err(why)) => {
            return found.skipped(
                format!(
                    "the Node could not be read, so which door pods with the class's extended resource take: {why}"
                ),
                Some("kubectl get node NODE -o jsonpath='{.status.allocatable}'"),
            );
        }
    };
    let ExtendedResourceFound { name, allocatable, capacity } = resource;
    match (allocatable, capacity) {
        (Some(1..), _) => found.warning(
            format!(
                "{name} is a resource of the device plugin here and of the DeviceClass {DRA_DRIVER}: pods with {name} and \
                 without a claim get devices of the plugin only, also while all of them are taken"
            ),
            "offer all GPUs of the node through one of the two, or let these pods name a claim (docs/migrating-to-dra.md)",
        ),
        (_, Some(1..)) => {
            let forgets = "the kubelet forgets a device plugin 5 minutes after its end; linkwise_gpu_door tells whether \
                           GPUs are still on their way";
            let remembers = format!("the kubelet still remembers a device plugin of {name}, with no healthy device");
            match policy {
                Some(policy) if policy.name == "none" => found.ok(format!("{remembers}; pods get GPUs through DRA")),
                Some(policy) => found.warning(
                    format!(
                        "{remembers}: with the Topology Manager policy {} ({}) it may reject pods with {name} and without \
                         a claim (TopologyAffinityError)",
                        policy.name, policy.source
                    ),
                    forgets,
                ),
                None => found.warning(
                    format!(
                        "{remembers}: with a Topology Manager policy it may reject pods with {name} and without a claim \
                         (TopologyAffinityError); the policy is not known here"
                    ),
                    forgets,
                ),
            }
        }
        _ => found.ok(format!("pods with {name} and without a claim get GPUs of this node through the DeviceClass {DRA_DRIVER}")),
    }
}
