//! What the policy says beside its expressions.

use serde_json::json;

use crate::unchanged_pods::resources;

/// A second mutation that fails would leave half, a pod that is refused for the policy's sake is worse than one with the
/// first GPUs, and a binding that denies would refuse every pod of a namespace without templates.
#[test]
fn policies_fail_open_and_whole() {
    for folder in ["unchanged-pods", "several-claims"] {
        let objects = resources(&format!("manifests/dra/{folder}"));
        let [policy, binding, ..] = objects.as_slice() else { panic!("{objects:?}") };
        assert_eq!(policy["spec"]["failurePolicy"], "Ignore", "{folder}");
        assert_eq!(policy["spec"]["mutations"].as_array().unwrap().len(), 1, "{folder}");
        assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"], "{folder}");
        assert_eq!(
            binding["spec"]["paramRef"],
            json!({"selector": {}, "parameterNotFoundAction": "Allow"}),
            "{folder}"
        );
    }
}
