//! Pods with several claims that fit nowhere: what an attempt costs the scheduler, in devices that it looks at.

use std::collections::BTreeMap;

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use linkwise_scheduler_box::{Cluster, Failure};
use serde_json::{Value, json};

use crate::dra::model::published::{accepted, node, printed};
use crate::unchanged_pods::several::becomes;
use crate::unchanged_pods::{ON, put_template, read, server};

/// Half a second of kube-scheduler 1.36.2 on 100 nodes: it took 8.2 s for 205,000 devices on each (docs/scale.md).
const HALF_A_SECOND: u64 = 12_500;

/// The most devices of an attempt of this model.
const MAX_STEPS: u64 = 20_000_000;

/// The templates of manifests/dra/templates, as lists.
fn shipped() -> Vec<Value> {
    [2, 4, 8].map(|gpus| read(&format!("manifests/dra/templates/linkwise-gpus-{gpus}.yaml"))).into()
}

/// The same with all groups of a machine.
fn of_machine(machine: &str) -> Vec<Value> {
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

fn looked_at(cluster: &Cluster, node: &str, claims: &[Value]) -> u64 {
    match cluster.allocate(node, claims) {
        Err(Failure::Refused(why)) => why[0].steps,
        other => panic!("{node}: {other:?}"),
    }
}

/// The worst of some pods without the policy, as a multiple of plain claims; panics where the policy does not bound one.
async fn worst(name: &'static str, server: &ApiServerBox, lists: &[Value], pods: &[&[u32]]) -> u64 {
    let node = node(name);
    let (cluster, claims, mut worst) = (node.cluster(&[]).with_most_steps(MAX_STEPS), claims(lists), 0);
    for sizes in pods {
        // One GPU too few is free: no other number has as many sets to try.
        let free = sizes.iter().sum::<u32>().min(node.gpus()) - 1;
        let cluster = node.occupied(&cluster, (1 << free) - 1);
        let asked: Vec<String> = sizes.iter().map(|gpus| format!("linkwise-gpus-{gpus}")).collect();
        let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
        let of = |names: Vec<String>| names.iter().map(|name| claims[name].clone()).collect::<Vec<_>>();
        let plain = looked_at(&cluster, name, &of(asked.iter().map(|name| format!("{name}-any")).collect()));
        let bounded = looked_at(&cluster, name, &of(becomes(server, ON, &asked)));
        let most = (2 * plain).max(HALF_A_SECOND);
        assert!(bounded <= most, "{name} {sizes:?}: {bounded} devices, {plain} by plain claims");
        worst = worst.max(looked_at(&cluster, name, &of(asked.iter().map(|&name| name.to_owned()).collect())) / plain);
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
    // What the bound is for.
    assert!(worst_of_all > 10, "claims with alternatives cost {worst_of_all} times as much as plain ones");
    worst("dgx2-v100", &shared, &shipped(), &[&[2, 2, 2], &[4, 4], &[8, 2], &[8, 4]]).await;
}

/// Templates of one machine list all its groups, up to eight alternatives.
#[tokio::test]
async fn policy_bounds_the_cost_of_many_alternatives() {
    let (server, lists) = (server_of(of_machine("dgx1-v100")).await, of_machine("dgx1-v100"));
    let pods: [&[u32]; 6] = [&[2, 2], &[2, 4], &[4, 4], &[2, 2, 2], &[2, 2, 2, 2], &[2, 2, 4]];
    assert!(worst("dgx1-v100", &server, &lists, &pods).await > 10);
}

/// A server with these templates in the place of the shipped ones.
async fn server_of(lists: Vec<Value>) -> ApiServerBox {
    let server = server().await;
    for template in lists.iter().flat_map(|list| list["items"].as_array().unwrap()) {
        let name = template["metadata"]["name"].as_str().unwrap();
        server.remove(&ResourceType::RESOURCE_CLAIM_TEMPLATES.key(Some(ON), name));
        put_template(&server, ON, template.clone());
    }
    server
}
