//! Pods with several claims that fit nowhere: the number of devices that the scheduler examines in an attempt.

use std::collections::BTreeMap;

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use crate::dra::model::published::{accepted, node, printed};
use crate::unchanged_pods::several::admitted_claims;
use crate::unchanged_pods::{ON, put_template, read, server};

/// The devices of each node that kube-scheduler 1.36.2 examines in half a second on 100 nodes: it took 8.2 s
/// (docs/scale.md) where the model counts 205,000 devices of each node.
const STEPS_IN_HALF_A_SECOND: u64 = 12_500;

/// The most devices that the model examines in an attempt.
const MAX_STEPS: u64 = 20_000_000;

/// The templates of manifests/dra/templates, as lists.
fn shipped() -> Vec<Value> {
    [2, 4, 8].map(|gpus| read(&format!("manifests/dra/templates/linkwise-gpus-{gpus}.yaml"))).into()
}

/// Templates of the same names for one machine, which list all its groups.
fn templates_for(machine: &str) -> Vec<Value> {
    let print = |gpus: &str| {
        let name = format!("linkwise-gpus-{gpus}");
        printed(&["claim", "--gpus", gpus, "--node", machine, "--kind", "template", "--name", &name])
    };
    ["2", "4", "8"].map(print).into()
}

/// The claim of each template, by the template's name.
fn claims(lists: &[Value]) -> BTreeMap<String, Value> {
    let templates = lists.iter().flat_map(|list| list["items"].as_array().unwrap());
    let claim = |template: &Value| {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
            "spec": template["spec"]["spec"],
        });
        (template["metadata"]["name"].as_str().unwrap().to_owned(), accepted(&object, Some("default")))
    };
    templates.map(claim).collect()
}

/// The number of devices that the scheduler examines before it refuses these claims.
fn steps(cluster: &Cluster, node: &str, claims: &[Value]) -> u64 {
    match cluster.allocate(node, claims) {
        Err(Failure::Refused(why)) => why[0].steps,
        other => panic!("{node}: {other:?}"),
    }
}

/// The highest cost (examined devices) of a pod without the admission policy, as a multiple of that of plain claims.
/// Panics if the policy does not bound the cost.
async fn worst(name: &'static str, server: &ApiServerBox, lists: &[Value], pods: &[&[u32]]) -> u64 {
    let node = node(name);
    let (cluster, claims, mut worst) = (node.cluster(&[]).with_most_steps(MAX_STEPS), claims(lists), 0);
    for sizes in pods {
        // One GPU fewer is free than the pod needs or the node has: then the scheduler tries the most sets.
        let free = sizes.iter().sum::<u32>().min(node.gpus()) - 1;
        let cluster = node.occupied(&cluster, (1 << free) - 1);
        let templates: Vec<String> = sizes.iter().map(|gpus| format!("linkwise-gpus-{gpus}")).collect();
        let names: Vec<&str> = templates.iter().map(String::as_str).collect();
        let cost = |templates: Vec<String>| {
            steps(&cluster, name, &templates.iter().map(|name| claims[name].clone()).collect::<Vec<_>>())
        };
        let plain = cost(names.iter().map(|name| format!("{name}-any")).collect());
        let bounded = cost(admitted_claims(server, ON, &names));
        let most = (2 * plain).max(STEPS_IN_HALF_A_SECOND);
        assert!(bounded <= most, "{name} {sizes:?}: {bounded} devices, {plain} by plain claims");
        worst = worst.max(cost(templates) / plain);
    }
    worst
}

#[tokio::test]
async fn policy_bounds_the_cost_of_several_claims() {
    let pods: [&[u32]; 8] = [&[2, 2], &[2, 4], &[4, 4], &[2, 2, 2], &[2, 2, 2, 2], &[4, 2, 2], &[2, 2, 4], &[8, 2]];
    let (shared, mut worst_of_all) = (server().await, 0);
    for name in ["dgx1-v100", "aws-p5", "nvlink-bridge-pairs", "pcie-8x-pix-pairs"] {
        worst_of_all = worst_of_all.max(worst(name, &shared, &shipped(), &pods).await);
    }
    // Without such a cost the policy would not be needed.
    assert!(worst_of_all > 10, "claims with alternatives cost only {worst_of_all} times as much as plain ones");
    worst("dgx2-v100", &shared, &shipped(), &[&[2, 2, 2], &[4, 4], &[8, 2], &[8, 4]]).await;
}

/// Templates for one machine list all its groups, up to eight alternatives.
#[tokio::test]
async fn policy_bounds_the_cost_of_many_alternatives() {
    let (server, lists) = (server_with(templates_for("dgx1-v100")).await, templates_for("dgx1-v100"));
    let pods: [&[u32]; 6] = [&[2, 2], &[2, 4], &[4, 4], &[2, 2, 2], &[2, 2, 2, 2], &[2, 2, 4]];
    assert!(worst("dgx1-v100", &server, &lists, &pods).await > 10);
}

/// A server with these templates instead of the shipped ones.
async fn server_with(lists: Vec<Value>) -> ApiServerBox {
    let server = server().await;
    for template in lists.iter().flat_map(|list| list["items"].as_array().unwrap()) {
        let name = template["metadata"]["name"].as_str().unwrap();
        server.remove(&ResourceType::RESOURCE_CLAIM_TEMPLATES.key(Some(ON), name));
        put_template(&server, ON, template.clone());
    }
    server
}
