//! Small pools and claims for the tests.

use linkwise_scheduler_box::{Cluster, Failure, Placement};
use serde_json::{Value, json};

/// The driver of all pools, unless a test sets another.
pub const DRIVER: &str = "gpu.example.com";

/// The only slice of the pool `n` on the node `n`.
pub fn slice(name: &str, devices: Value) -> Value {
    json!({
        "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {
            "driver": DRIVER, "nodeName": "n", "devices": devices,
            "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
        },
    })
}

/// Devices without attributes.
pub fn plain(names: impl IntoIterator<Item = impl std::fmt::Display>) -> Value {
    names.into_iter().map(|name| json!({"name": name.to_string()})).collect()
}

/// The slice with another value of the field at a JSON pointer below `spec`.
pub fn with(mut slice: Value, pointer: &str, value: Value) -> Value {
    *slice["spec"].pointer_mut(pointer).expect("the slice lacks the field") = value;
    slice
}

/// The class `all`, which selects all devices, and the class `gpu`, which selects those of [`DRIVER`].
pub fn classes() -> Vec<Value> {
    vec![
        json!({"metadata": {"name": "all"}, "spec": {}}),
        json!({"metadata": {"name": "gpu"}, "spec": {"selectors": [{"cel": {
            "expression": format!("device.driver == '{DRIVER}'"),
        }}]}}),
    ]
}

/// A claim with these requests and constraints.
pub fn claim(requests: Value, constraints: Value) -> Value {
    let devices = json!({"requests": requests, "constraints": constraints});
    json!({"metadata": {"name": "c", "namespace": "default"}, "spec": {"devices": devices}})
}

/// A claim for this number of devices of class `all`.
pub fn count(count: usize) -> Value {
    claim(json!([{"name": "r", "exactly": {"deviceClassName": "all", "count": count}}]), json!([]))
}

/// A cluster with these slices.
pub fn cluster(slices: &[Value]) -> Cluster {
    Cluster::new(slices, &classes(), &[]).unwrap()
}

/// Allocates one claim on node `n`.
pub fn allocate(slices: &[Value], claim: &Value) -> Result<Placement, Failure> {
    cluster(slices).allocate("n", std::slice::from_ref(claim))
}

/// The request and the device of each result of a claim, as `request device`.
pub fn results(placement: &Placement, claim: usize) -> Vec<String> {
    let allocated = placement.allocations[claim]["devices"]["results"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    allocated.iter().map(|result| format!("{} {}", text(&result["request"]), text(&result["device"]))).collect()
}

/// Allocates one claim on node `n`. Returns the reason if the node refuses it.
pub fn granted(slices: &[Value], claim: &Value) -> Result<Placement, String> {
    allocate(slices, claim).map_err(|failure| match failure {
        Failure::Refused(why) => why[0].to_string(),
        other => panic!("{other}"),
    })
}

/// The devices that a claim gets on the node `n`, or the reason why the node refuses it.
pub fn devices(slices: &[Value], claim: &Value) -> Result<Vec<String>, String> {
    let results = results(&granted(slices, claim)?, 0);
    Ok(results.iter().map(|one| one.split_once(' ').unwrap().1.to_owned()).collect())
}
