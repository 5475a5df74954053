//! The policy that gives unchanged pods claims, on each pod in pods.yaml and on random pods.

use insta::assert_snapshot;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::unchanged_pods::{EMPTY, EXACT, GPUS, OFF, ON, UNNAMED, created, read, rules, server};

/// The pod of an entry in pods.yaml.
fn pod(entry: &Value) -> Value {
    let mut metadata = json!({});
    for part in ["labels", "annotations"] {
        if !entry[part].is_null() {
            metadata[part] = entry[part].clone();
        }
    }
    json!({"metadata": metadata, "spec": entry["spec"]})
}

#[tokio::test]
async fn each_pod_is_changed_whole_or_left_alone() {
    let server = server().await;
    let mut shown = String::new();
    for entry in read("tests/unchanged_pods/pods.yaml").as_array().unwrap() {
        let (name, pod) = (entry["pod"].as_str().unwrap(), pod(entry));
        let (without, with) = (created(&server, OFF, &pod), created(&server, ON, &pod));
        // Without templates the policy changes nothing.
        assert_eq!(created(&server, EMPTY, &pod), without, "{name}");
        let outcome = |with: &Result<Value, String>, has_alternatives: bool| match (&without, with) {
            (Ok(before), Ok(after)) => match rules::changed(before, after, has_alternatives).as_slice() {
                [] => json!("same"),
                places => json!({ "claims": places }),
            },
            (Err(before), Err(after)) if before == after => json!("refused"),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(outcome(&with, true), entry["becomes"], "{name}");
        assert_eq!(outcome(&created(&server, EXACT, &pod), false), entry["becomes"], "{name}");
        // Without templates for further claims, several claims have too many alternatives: the pod stays the same.
        let claims = entry["becomes"]["claims"].as_array().map_or(0, Vec::len);
        let expected = if claims > 1 { &json!("same") } else { &entry["becomes"] };
        assert_eq!(outcome(&created(&server, UNNAMED, &pod), true), *expected, "{name}");
        if outcome(&with, true).is_object() {
            shown += &format!("{name}: {}\n", serde_json::to_string_pretty(&with.unwrap()["spec"]).unwrap());
        }
    }
    assert_snapshot!("changed-pods", shown);
}

/// Resources of a container, often with GPUs.
fn resources() -> impl Strategy<Value = Value> {
    let counts = prop_oneof![
        3 => Just(json!(2)),
        2 => Just(json!("4")),
        1 => Just(json!("2000m")),
        1 => Just(json!("8.0")),
        1 => prop::sample::select(json!([0, 1, 3, "+2", "4e0", "-2", "2m"]).as_array().unwrap().clone()),
    ];
    let claims = prop::sample::select(vec![json!([]), json!([{"name": "nic"}]), json!([{"name": "linkwise-gpus-1"}])]);
    let (counts, claims) = (prop::option::weighted(0.7, counts), prop::option::weighted(0.2, claims));
    (counts, 0..8u8, claims).prop_map(|(count, form, claims)| {
        let mut resources = json!({});
        if let Some(count) = count {
            // Form 0 has requests, form 1 both, the others limits.
            if form != 0 {
                resources["limits"] = json!({GPUS: count, "memory": "1Gi"});
            }
            if form <= 1 {
                resources["requests"] = json!({ GPUS: count });
            }
        }
        if let Some(claims) = claims {
            resources["claims"] = claims;
        }
        resources
    })
}

fn containers(count: std::ops::Range<usize>) -> impl Strategy<Value = Value> {
    prop::collection::vec(resources(), count).prop_map(|all| {
        let container = |(place, resources)| json!({"name": format!("c{place}"), "image": "i", "resources": resources});
        all.into_iter().enumerate().map(container).collect()
    })
}

fn pods() -> impl Strategy<Value = Value> {
    let claims = prop::sample::select(vec![
        json!([{"name": "nic", "resourceClaimName": "nic"}]),
        json!([{"name": "linkwise-gpus-1", "resourceClaimName": "mine"}]),
    ]);
    let rare = || prop::bool::weighted(0.1);
    let (init, claims) = (prop::option::weighted(0.2, containers(0..3)), prop::option::weighted(0.2, claims));
    (containers(1..4), init, claims, rare(), rare()).prop_map(|(containers, init, claims, bound, other)| {
        let mut spec = json!({ "containers": containers });
        if let Some(init) = init {
            spec["initContainers"] = init;
        }
        if let Some(claims) = claims {
            spec["resourceClaims"] = claims;
        }
        if bound {
            spec["nodeName"] = json!("node");
        }
        if other {
            spec["schedulerName"] = json!("other");
        }
        json!({ "spec": spec })
    })
}

#[tokio::test]
async fn random_pods_are_never_changed_in_part() {
    let server = server().await;
    let (mut changed, mut several, mut same, mut refused, mut exact) = (0, 0, 0, 0, 0);
    let mut runner = TestRunner::deterministic();
    for _ in 0..200 {
        let pod = pods().new_tree(&mut runner).unwrap().current();
        match (created(&server, OFF, &pod), created(&server, ON, &pod)) {
            (Ok(before), Ok(after)) => match rules::changed(&before, &after, true).len() {
                0 => same += 1,
                places => {
                    several += u32::from(places > 1);
                    changed += 1;
                }
            },
            (Err(before), Err(after)) if before == after => refused += 1,
            other => panic!("{pod}: {other:?}"),
        }
        if let (Ok(before), Ok(after)) = (created(&server, OFF, &pod), created(&server, EXACT, &pod)) {
            exact += u32::from(!rules::changed(&before, &after, false).is_empty());
        }
        if let (Ok(before), Ok(after)) = (created(&server, OFF, &pod), created(&server, UNNAMED, &pod)) {
            assert!(rules::changed(&before, &after, true).len() <= 1, "a pod with several claims is changed: {pod}");
        }
    }
    assert!(several > 3, "{several} with several claims");
    assert!(changed > 30 && same > 30 && refused > 30, "{changed} changed, {same} the same, {refused} refused");
    assert_eq!(exact, changed, "the policy changes other pods with exact templates");
}
