//! Small pools and claims.

use linkwise_scheduler_box::{Cluster, Failure, Placement};
use serde_json::{Value, json};

/// The driver of all pools that do not name another.
pub const DRIVER: &str = "gpu.example.com";

/// A slice of node `n` with pool `n`, one slice to the pool.
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
pub fn plain(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"name": name})).collect()
}

/// A slice with another value of a field, by its JSON pointer below `spec`.
pub fn with(mut slice: Value, pointer: &str, value: Value) -> Value {
    *slice["spec"].pointer_mut(pointer).expect("the field is there") = value;
    slice
}

/// A class that selects all devices, one that selects this driver's, one with this expression.
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

/// The cluster of these slices.
pub fn cluster(slices: &[Value]) -> Cluster {
    Cluster::new(slices, &classes(), &[]).unwrap()
}

/// Allocates one claim on node `n`.
pub fn allocate(slices: &[Value], claim: &Value) -> Result<Placement, Failure> {
    cluster(slices).allocate("n", std::slice::from_ref(claim))
}

/// `request device` of each result of a claim.
pub fn got(placement: &Placement, claim: usize) -> Vec<String> {
    let results = placement.allocations[claim]["devices"]["results"].as_array().unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    results.iter().map(|result| format!("{} {}", text(&result["request"]), text(&result["device"]))).collect()
}

/// The devices of the one claim, or the reason why there are none.
pub fn devices(slices: &[Value], claim: &Value) -> Result<Vec<String>, String> {
    match allocate(slices, claim) {
        Ok(placement) => Ok(got(&placement, 0).iter().map(|one| one.split_once(' ').unwrap().1.to_owned()).collect()),
        Err(Failure::Refused(why)) => Err(why[0].to_string()),
        Err(other) => panic!("{other}"),
    }
}
