//! The policy for pods with several claims: only a few claims keep their alternatives.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use linkwise_api_server_box::ApiServerBox;

use crate::unchanged_pods::{EMPTY, EXACT, GPUS, OFF, ON, created, put_template, server, server_with};

const TWO: &str = "linkwise-gpus-2";
const TWO_ANY: &str = "linkwise-gpus-2-any";
const FOUR: &str = "linkwise-gpus-4";
const EIGHT: &str = "linkwise-gpus-8";

/// A pod with a container for each claim. An entry names the claim's template, or after `=` an existing claim.
fn pod(templates: &[&str]) -> Value {
    let claims = templates.iter().enumerate().map(|(place, template)| match template.strip_prefix('=') {
        Some(claim) => json!({"name": format!("c{place}"), "resourceClaimName": claim}),
        None => json!({"name": format!("c{place}"), "resourceClaimTemplateName": template}),
    });
    let container = |place| {
        let name = format!("c{place}");
        json!({"name": name, "image": "i", "resources": {"claims": [{"name": name}]}})
    };
    let containers: Vec<Value> = (0..templates.len()).map(container).collect();
    json!({"spec": {"containers": containers, "resourceClaims": claims.collect::<Vec<_>>()}})
}

/// The templates of a pod's claims, in the form of [`pod`].
fn templates(pod: &Value) -> Vec<String> {
    let claims = pod["spec"]["resourceClaims"].as_array().unwrap().iter();
    let name = |claim: &Value| match claim["resourceClaimName"].as_str() {
        Some(name) => format!("={name}"),
        None => claim["resourceClaimTemplateName"].as_str().unwrap().to_owned(),
    };
    claims.map(name).collect()
}

/// The claims of a pod after its admission to a namespace. Asserts that its containers are unchanged.
pub fn admitted_claims(server: &ApiServerBox, namespace: &str, asked: &[&str]) -> Vec<String> {
    let after = created(server, namespace, &pod(asked)).unwrap();
    let names = templates(&after);
    let same: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(after["spec"]["containers"], created(server, EMPTY, &pod(&same)).unwrap()["spec"]["containers"]);
    names
}

#[tokio::test]
async fn first_of_several_claims_keeps_its_alternatives() {
    let server = server().await;
    let template = |name: &str, further: &str, alternatives: usize| {
        let alternative = |number| json!({"name": format!("a{number}"), "deviceClassName": "gpu.nvidia.com"});
        let lists: Vec<Value> = (0..alternatives).map(alternative).collect();
        json!({
            "metadata": {"name": name, "annotations": {"linkwise.dev/further-claims": further}},
            "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "firstAvailable": lists}]}}},
        })
    };
    for namespace in [ON, OFF] {
        put_template(&server, namespace, template("mine", "mine-any", 4));
        put_template(&server, namespace, template("linkwise-gpus-3", "linkwise-gpus-3-any", 5));
        put_template(&server, namespace, template("linkwise-gpus-6", "", 4));
    }
    for (asked, expected) in [
        (&[TWO][..], &[TWO][..]),
        (&[EIGHT], &[EIGHT]),
        // Two claims with few alternatives cost the scheduler little.
        (&[TWO, TWO], &[TWO, TWO]),
        (&[TWO, FOUR], &[TWO, FOUR]),
        (&[FOUR, FOUR], &[FOUR, FOUR]),
        (&["nic", FOUR, "=mine", FOUR], &["nic", FOUR, "=mine", FOUR]),
        (&[EIGHT, EIGHT], &[EIGHT, "linkwise-gpus-8-any"]),
        (&[TWO, EIGHT], &[TWO, "linkwise-gpus-8-any"]),
        (&[TWO, TWO, TWO, TWO], &[TWO, TWO_ANY, TWO_ANY, TWO_ANY]),
        (&[TWO, FOUR, TWO], &[TWO, "linkwise-gpus-4-any", TWO_ANY]),
        (&["nic", TWO, "=mine", TWO, TWO], &["nic", TWO, "=mine", TWO_ANY, TWO_ANY]),
        // Claims without alternatives do not count.
        (&[TWO_ANY, TWO, TWO], &[TWO_ANY, TWO, TWO_ANY]),
        (&["linkwise-gpus-1", EIGHT], &["linkwise-gpus-1", EIGHT]),
        // Two claims with more alternatives cost too much.
        (&["linkwise-gpus-3", "linkwise-gpus-3"], &["linkwise-gpus-3", "linkwise-gpus-3-any"]),
        // The policy ignores templates with other names.
        (&["mine", "mine"], &["mine", "mine"]),
        (&["mine", TWO, TWO, TWO], &["mine", TWO, TWO_ANY, TWO_ANY]),
        (&["linkwise-gpus-6", "linkwise-gpus-6"], &["linkwise-gpus-6", "linkwise-gpus-6"]),
    ] {
        // The namespace's label does not matter to pods with claims.
        for namespace in [ON, OFF] {
            assert_eq!(admitted_claims(&server, namespace, asked), expected, "{namespace}");
        }
        // Exact claims have no alternatives, and without templates the policy knows none.
        for namespace in [EXACT, EMPTY] {
            assert_eq!(admitted_claims(&server, namespace, asked), asked, "{namespace}");
        }
    }
}

/// A pod may have its own claims and a container with the resource. The API server applies the policies in any order.
#[tokio::test]
async fn claims_added_by_a_policy_count_too() {
    let rename_to_last = |object: &mut Value| {
        let name = object["metadata"]["name"].as_str().unwrap();
        if object["kind"] == "MutatingAdmissionPolicyBinding" && name.starts_with("linkwise-several-claims") {
            object["metadata"]["name"] = json!(format!("z-{name}"));
        }
    };
    for server in [server().await, server_with(rename_to_last).await] {
        for (asked, gpus, expected) in [
            (&[FOUR, TWO][..], 2, &[FOUR, TWO_ANY, TWO_ANY][..]),
            (&[EIGHT], 4, &[EIGHT, "linkwise-gpus-4-any"]),
            (&[FOUR], 4, &[FOUR, FOUR]),
        ] {
            let mut pod = pod(asked);
            let main = json!({"name": "main", "image": "i", "resources": {"limits": {GPUS: gpus}}});
            pod["spec"]["containers"].as_array_mut().unwrap().push(main);
            assert_eq!(templates(&created(&server, ON, &pod).unwrap()), expected);
        }
    }
}

#[tokio::test]
async fn empty_annotation_names_no_template() {
    let server = server().await;
    let exactly = json!({"deviceClassName": "gpu.nvidia.com", "count": 16});
    let template = json!({
        "metadata": {"name": "linkwise-gpus-16", "annotations": {"linkwise.dev/further-claims": ""}},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}},
    });
    put_template(&server, ON, template);
    let container = |name| json!({"name": name, "image": "i", "resources": {"limits": {GPUS: 16}}});
    let pod = json!({"spec": {"containers": [container("a"), container("b")]}});
    assert_eq!(templates(&created(&server, ON, &pod).unwrap()), ["linkwise-gpus-16"; 2]);
}

/// While the server starts, it refuses pods that a policy has to patch, and admits a pod without claims and GPUs.
#[tokio::test]
async fn pod_is_patched_only_for_its_own_templates() {
    let server = server().await;
    server.set_starting(true);
    let plain = json!({"spec": {"containers": [{"name": "c", "image": "i"}]}});
    created(&server, ON, &plain).unwrap();
    assert_eq!(server.patches(), 0);
    let pod = pod(&[TWO, EIGHT]);
    let refused = created(&server, ON, &pod).unwrap_err();
    assert!(refused.contains("There can be a delay"), "{refused}");
    server.set_starting(false);
    created(&server, ON, &pod).unwrap();
    assert!((1..=4).contains(&server.patches()), "the policies ran for other templates: {} patches", server.patches());
}

/// The pods of a group find the claim that they share by the name of its template.
#[tokio::test]
async fn claims_of_a_pod_group_keep_their_templates() {
    let server = server().await;
    let asked = [EIGHT; 3];
    let mut pod = pod(&asked);
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": "train"});
    assert_eq!(templates(&created(&server, ON, &pod).unwrap()), asked);
}

#[tokio::test]
async fn random_pods_keep_few_alternatives() {
    let names = [TWO, FOUR, EIGHT, TWO_ANY, "nic", "=mine"];
    let pods = prop::collection::vec(prop::sample::select(names.to_vec()), 1..6);
    let server = server().await;
    let mut runner = TestRunner::deterministic();
    let mut changed = 0;
    for _ in 0..100 {
        let asked = pods.new_tree(&mut runner).unwrap().current();
        let after = admitted_claims(&server, OFF, &asked);
        // A second admission of the changed pod changes nothing.
        let again: Vec<&str> = after.iter().map(String::as_str).collect();
        assert_eq!(admitted_claims(&server, OFF, &again), after);
        for (asked, after) in asked.iter().zip(&after) {
            assert!(after == asked || *after == format!("{asked}-any"), "{asked} became {after}");
        }
        let ours: Vec<&str> = again.iter().filter(|name| name.starts_with("linkwise-gpus-")).copied().collect();
        let with_alternatives = ours.iter().filter(|name| !name.ends_with("-any")).count();
        let are_small = !ours.iter().any(|name| name.contains('8'));
        assert!(with_alternatives < 2 || (ours.len() == 2 && are_small), "{asked:?} became {after:?}");
        // The first claim with alternatives keeps them.
        let has_alternatives = |name: &&str| name.starts_with("linkwise-gpus-") && !name.ends_with("-any");
        if let Some(first) = asked.iter().position(has_alternatives) {
            assert_eq!(after[first], asked[first], "{asked:?} became {after:?}");
        }
        changed += u32::from(again != asked);
    }
    assert!((33..100).contains(&changed), "{changed} changed");
}
