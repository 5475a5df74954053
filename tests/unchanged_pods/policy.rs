//! The fields of the policies besides their expressions.

use serde_json::json;

use crate::unchanged_pods::resources;

/// A policy has one mutation, because a failing second one would leave a pod half changed. Neither a failed policy nor
/// a namespace without templates may refuse pods. A binding with a selector would be evaluated for each template, for
/// every pod.
#[test]
fn failed_policy_admits_pods_unchanged() {
    let counts: Vec<u32> = (1..=8).chain([16]).collect();
    for (folder, counts) in [("unchanged-pods", &counts[..]), ("several-claims", &counts[1..])] {
        let objects = resources(&format!("manifests/dra/{folder}"));
        let [policy, bindings @ ..] = &objects[..=counts.len()] else { panic!("{objects:?}") };
        assert_eq!(policy["spec"]["failurePolicy"], "Ignore", "{folder}");
        assert_eq!(policy["spec"]["mutations"].as_array().unwrap().len(), 1, "{folder}");
        for (binding, count) in bindings.iter().zip(counts) {
            let named = json!({"name": format!("linkwise-gpus-{count}"), "parameterNotFoundAction": "Allow"});
            let spec = &binding["spec"];
            assert_eq!((&spec["paramRef"], &spec["policyName"]), (&named, &policy["metadata"]["name"]), "{folder}");
        }
    }
}
