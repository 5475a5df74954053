//! What the policy says beside its expressions.

use serde_json::json;

use crate::unchanged_pods::resources;

/// A second mutation that fails would leave half, a pod that is refused for the policy's sake is worse than one with the
/// first GPUs, and a binding that denies would refuse every pod of a namespace without templates. One that selected
/// templates would have the policy evaluated for each, at the cost of every pod.
#[test]
fn policies_fail_open_and_whole() {
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
