//! MutatingAdmissionPolicies: the policies that the server refuses, and the pods that stored policies change. A real
//! API server of Kubernetes 1.36.2 answered the same for the same policies and pods, unless a test says otherwise.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may panic")]

use linkwise_api_server_box::{ApiServerBox, ResourceType};
use serde_json::{Value, json};

/// A valid patch, which gives the pod a label.
const LABEL: &str = "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': 'b'}}]";

async fn server() -> ApiServerBox {
    let types = [
        ResourceType::NAMESPACES,
        ResourceType::LIMIT_RANGES,
        ResourceType::PODS,
        ResourceType::RESOURCE_CLAIM_TEMPLATES,
        ResourceType::MUTATING_ADMISSION_POLICIES,
        ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS,
    ];
    ApiServerBox::start(&types).await
}

/// A policy for new pods.
fn policy(conditions: &[&str], mutations: &[&str]) -> Value {
    let condition = |expression: &&str| json!({"name": "c", "expression": expression});
    let mutation = |expression: &&str| json!({"patchType": "JSONPatch", "jsonPatch": {"expression": expression}});
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    json!({"spec": {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": conditions.iter().map(condition).collect::<Vec<_>>(),
        "mutations": mutations.iter().map(mutation).collect::<Vec<_>>(),
    }})
}

fn message(status: &Value) -> &str {
    status["message"].as_str().unwrap()
}

/// Stores a policy `p` and its binding `b`.
fn store(server: &ApiServerBox, policy: Value) -> Result<(), Value> {
    server.create("kubectl", &ResourceType::MUTATING_ADMISSION_POLICIES.key(None, "p"), policy)?;
    let binding = json!({"spec": {"policyName": "p"}});
    server.create("kubectl", &ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS.key(None, "b"), binding)?;
    Ok(())
}

fn create_pod(server: &ApiServerBox) -> Result<Value, Value> {
    let container = json!({"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": 2}}});
    let pod = json!({"spec": {"containers": [container]}});
    server.create("kubectl", &ResourceType::PODS.key(Some("n"), "pod"), pod)
}

/// Creates the pod on a new server that has this policy.
async fn admitted(policy: Value) -> Result<Value, Value> {
    let server = server().await;
    store(&server, policy).unwrap_or_else(|status| panic!("{status}"));
    create_pod(&server)
}

#[tokio::test]
async fn policy_with_an_invalid_expression_is_refused() {
    for (condition, mutation, why) in [
        ("frobnicate(object)", LABEL, "undeclared reference to 'frobnicate'"),
        ("pod.spec == 1", LABEL, "undeclared reference to 'pod'"),
        ("params == null", LABEL, "undeclared reference to 'params'"),
        ("variables.a == 'a'", LABEL, "undeclared reference to 'variables'"),
        ("jsonpatch.escapeKey('a') == 'a'", LABEL, "undeclared reference to 'jsonpatch'"),
        ("1 + 1", LABEL, "must evaluate to bool"),
        ("'a' + 1 == 'a1'", LABEL, "found no matching overload for '_+_'"),
        ("[1, 'a'].size() == 2", LABEL, "expected type Int but found String"),
        ("object.spec.", LABEL, "compilation failed"),
        ("true", "JSONPatch{op: 'add', path: '/x', value: 1}", "must evaluate to list(JSONPatch)"),
        ("true", "['a']", "must evaluate to list(JSONPatch)"),
        ("true", "[JSONPatch{op: 'add', path: '/x', val: 1}]", "undefined field 'val'"),
        ("true", "[JSONPatch{op: 'add', path: 1, value: 1}]", "expected type of field 'path' is 'string'"),
        (
            "true",
            "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': object.metadata.name, 'b': 'c'}}]",
            "expected type Dyn but found String",
        ),
        // The real server accepts this list of `Object` literals, and panics when a client creates a pod.
        ("true", "[JSONPatch{op: 'add', path: '/spec/x', value: [Object.spec.x{name: 'x'}]}]", "not modelled"),
    ] {
        let refused = store(&server().await, policy(&[condition], &[mutation])).expect_err(condition);
        assert!(message(&refused).contains(why), "{condition} {mutation}: {}", message(&refused));
    }
    let mut broken = policy(&[], &[LABEL]);
    broken["spec"]["variables"] = json!([{"name": "a", "expression": "jsonpatch.escapeKey('a')"}]);
    let refused = store(&server().await, broken).unwrap_err();
    assert!(message(&refused).contains("undeclared reference to 'jsonpatch'"), "{refused}");
}

#[tokio::test]
async fn patches_change_the_pod_in_order() {
    let pod = admitted(policy(&["object.spec.containers.size() == 1"], &[LABEL])).await.unwrap();
    assert_eq!(pod["metadata"]["labels"], json!({"a": "b"}));
    // The elements of a list may be strings or maps.
    let lists = "[JSONPatch{op: 'add', path: '/spec/resourceClaims', value: [{'name': 'x'}]},
                  JSONPatch{op: 'add', path: '/spec/containers/0/args', value: ['a', 'b']}]";
    let pod = admitted(policy(&[], &[lists])).await.unwrap();
    assert_eq!(pod["spec"]["resourceClaims"], json!([{"name": "x"}]));
    assert_eq!(pod["spec"]["containers"][0]["args"], json!(["a", "b"]));
    let limits = json!({"nvidia.com/gpu": "2"});
    assert_eq!(pod["spec"]["containers"][0]["resources"], json!({"limits": limits, "requests": limits}));
    // A later mutation sees the changes of an earlier one. Between mutations, defaults are filled in again.
    let seen = "[JSONPatch{op: 'add', path: '/metadata/labels/c', value: object.metadata.labels.a}]";
    let removed = "[JSONPatch{op: 'remove',
        path: '/spec/containers/0/resources/requests/' + jsonpatch.escapeKey('nvidia.com/gpu')}]";
    let pod = admitted(policy(&[], &[LABEL, seen, removed])).await.unwrap();
    assert_eq!(pod["metadata"]["labels"], json!({"a": "b", "c": "b"}));
    assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"], limits, "the default is not filled in again");
    let pod = admitted(policy(&["false"], &[LABEL])).await.unwrap();
    assert!(pod["metadata"]["labels"].is_null());
}

#[tokio::test]
async fn limit_range_gives_defaults_after_a_policy() {
    let (server, max) = (server().await, json!({"nvidia.com/gpu": "2"}));
    let range = json!({"spec": {"limits": [{"type": "Container", "max": max}]}});
    server.put("kubectl", &ResourceType::LIMIT_RANGES.key(Some("n"), "range"), range);
    store(&server, policy(&[], &["[JSONPatch{op: 'remove', path: '/spec/containers/0/resources'}]"])).unwrap();
    let pod = create_pod(&server).unwrap();
    assert_eq!(pod["spec"]["containers"][0]["resources"], json!({"limits": max, "requests": max}));
}

#[tokio::test]
async fn failing_policy_refuses_pod_unless_ignored() {
    let absent = "object.spec.nope == 'x'";
    let reads = "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': string(object.spec.nope)}}]";
    let removes = "[JSONPatch{op: 'remove', path: '/spec/nope'}]";
    let appends = "[JSONPatch{op: 'add', path: '/spec/resourceClaims/-', value: {'name': 'x'}}]";
    let puts = "[JSONPatch{op: 'put', path: '/spec/nope', value: 1}]";
    let cases: [(&[&str], &[&str], &str, Value); 6] = [
        (&[absent], &[LABEL], "resulted in error", json!(null)),
        (&[], &[reads], "resulted in error", json!(null)),
        (&[], &[removes], "Unable to remove nonexistent key", json!(null)),
        (&[], &[appends], "doc is missing path", json!(null)),
        (&[], &[puts], "Unexpected kind: put", json!(null)),
        // The changes of the mutations before the failing one stay.
        (&[], &[LABEL, removes], "Unable to remove nonexistent key", json!({"a": "b"})),
    ];
    for (conditions, mutations, why, ignored) in cases {
        let mut policy = policy(conditions, mutations);
        let refused = admitted(policy.clone()).await.unwrap_err();
        assert!(
            message(&refused).contains(why) && message(&refused).contains("policy 'p' with binding 'b'"),
            "{refused}"
        );
        policy["spec"]["failurePolicy"] = json!("Ignore");
        assert_eq!(admitted(policy).await.unwrap()["metadata"]["labels"], ignored, "{mutations:?}");
    }
    // An error of a variable matters only if an expression reads the variable.
    let mut unread = policy(&[], &[LABEL]);
    unread["spec"]["variables"] = json!([{"name": "a", "expression": "object.spec.nope"}]);
    assert!(admitted(unread.clone()).await.is_ok());
    let read = "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': string(variables.a)}}]";
    unread["spec"]["mutations"][0]["jsonPatch"]["expression"] = json!(read);
    assert!(admitted(unread).await.is_err());
}

/// A false condition decides, even after a condition that cannot be evaluated. This follows the source
/// (`matchconditions/matcher.go`), and was not tried on a real server.
#[tokio::test]
async fn false_condition_beats_one_that_fails() {
    let (absent, no, yes) = ("object.spec.nope == 'x'", "1 == 2", "1 == 1");
    for (conditions, is_refused) in [([absent, no], false), ([no, absent], false), ([absent, yes], true)] {
        let result = admitted(policy(&conditions, &[LABEL])).await;
        assert_eq!(result.is_err(), is_refused, "{conditions:?}");
        assert!(result.is_err() || result.unwrap()["metadata"]["labels"].is_null(), "{conditions:?}");
    }
}

#[tokio::test]
async fn policy_is_evaluated_for_each_parameter() {
    let server = server().await;
    let add = "[JSONPatch{op: 'add', path: '/metadata/' + params.metadata.name, value: {'a': 'b'}}]";
    let mut policy = policy(&[], &[add]);
    policy["spec"]["paramKind"] = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"});
    server.create("kubectl", &ResourceType::MUTATING_ADMISSION_POLICIES.key(None, "p"), policy).unwrap();
    let bind = |action: &str| {
        let labels = json!({"matchLabels": {"for": "pods"}});
        let spec = json!({"policyName": "p", "paramRef": {"selector": labels, "parameterNotFoundAction": action}});
        server.put("kubectl", &ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS.key(None, "b"), json!({"spec": spec}));
    };
    bind("Deny");
    assert!(message(&create_pod(&server).unwrap_err()).contains("no params found"));
    bind("Allow");
    assert!(create_pod(&server).unwrap()["metadata"]["labels"].is_null());
    server.remove(&ResourceType::PODS.key(Some("n"), "pod"));
    for (namespace, name, labels) in
        [("n", "labels", json!({"for": "pods"})), ("n", "annotations", json!({"for": "pods"})), ("n", "x", json!({}))]
    {
        let key = ResourceType::RESOURCE_CLAIM_TEMPLATES.key(Some(namespace), name);
        server.put("kubectl", &key, json!({"metadata": {"labels": labels}, "spec": {}}));
    }
    let metadata = create_pod(&server).unwrap()["metadata"].clone();
    assert_eq!((&metadata["labels"], &metadata["annotations"]), (&json!({"a": "b"}), &json!({"a": "b"})));
    assert!(metadata["x"].is_null());
    let spec = json!({"policyName": "p", "paramRef": {"name": "labels", "parameterNotFoundAction": "Deny"}});
    server.put("kubectl", &ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS.key(None, "b"), json!({"spec": spec}));
    server.remove(&ResourceType::PODS.key(Some("n"), "pod"));
    let metadata = create_pod(&server).unwrap()["metadata"].clone();
    assert_eq!((&metadata["labels"], metadata["annotations"].is_null()), (&json!({"a": "b"}), true));
}

#[tokio::test]
async fn reinvocation_policy_evaluates_again_if_needed() {
    let append =
        "[JSONPatch{op: 'add', path: '/spec/containers/0/args/-', value: string(object.spec.containers.size())}]";
    let list = "has(object.spec.containers[0].args) ? []
        : [JSONPatch{op: 'add', path: '/spec/containers/0/args', value: ['first']}]";
    for (reinvocation, args) in [("Never", json!(["first", "1"])), ("IfNeeded", json!(["first", "1", "1"]))] {
        let mut policy = policy(&[], &[list, append]);
        policy["spec"]["reinvocationPolicy"] = json!(reinvocation);
        assert_eq!(admitted(policy).await.unwrap()["spec"]["containers"][0]["args"], args, "{reinvocation}");
    }
}

#[tokio::test]
async fn patch_without_effect_causes_reinvocation() {
    for (reinvocation, condition, patches) in [("Never", "true", 1), ("IfNeeded", "true", 2), ("IfNeeded", "false", 0)]
    {
        let (server, mut policy) = (server().await, policy(&[condition], &["[]"]));
        policy["spec"]["reinvocationPolicy"] = json!(reinvocation);
        store(&server, policy).unwrap();
        create_pod(&server).unwrap();
        assert_eq!(server.patches(), patches, "{reinvocation}, {condition}");
    }
}

#[tokio::test]
async fn starting_server_refuses_pod_that_a_policy_matches() {
    for (condition, refused) in [("true", true), ("false", false)] {
        let (server, mut policy) = (server().await, policy(&[condition], &["[]"]));
        policy["spec"]["failurePolicy"] = json!("Ignore");
        store(&server, policy).unwrap();
        server.set_starting(true);
        let code = create_pod(&server).err().map(|status| status["code"].clone());
        assert_eq!(code, refused.then(|| json!(503)), "{condition}");
    }
}

#[tokio::test]
async fn policy_changes_only_selected_pods() {
    for (labels, pod_labels, changed) in [
        (json!({"on": "yes"}), json!({}), true),
        (json!({"on": "no"}), json!({}), false),
        (json!({}), json!({}), false),
        (json!({"on": "yes"}), json!({"out": "yes"}), false),
        (json!({"on": "yes"}), json!({"out": "no"}), true),
    ] {
        let server = server().await;
        server.put("kubectl", &ResourceType::NAMESPACES.key(None, "n"), json!({"metadata": {"labels": labels}}));
        let add = "[JSONPatch{op: 'add', path: '/metadata/annotations', value: {'a': 'b'}}]";
        server
            .create("kubectl", &ResourceType::MUTATING_ADMISSION_POLICIES.key(None, "p"), policy(&[], &[add]))
            .unwrap();
        let out = json!({"key": "out", "operator": "NotIn", "values": ["yes"]});
        let resources = json!({
            "namespaceSelector": {"matchLabels": {"on": "yes"}}, "objectSelector": {"matchExpressions": [out]},
        });
        let binding = json!({"spec": {"policyName": "p", "matchResources": resources}});
        server.create("kubectl", &ResourceType::MUTATING_ADMISSION_POLICY_BINDINGS.key(None, "b"), binding).unwrap();
        let pod = json!({"metadata": {"labels": pod_labels}, "spec": {"containers": []}});
        let pod = server.create("kubectl", &ResourceType::PODS.key(Some("n"), "pod"), pod).unwrap();
        assert_eq!(pod["metadata"]["annotations"] == json!({"a": "b"}), changed, "{labels} {pod_labels}");
    }
}
