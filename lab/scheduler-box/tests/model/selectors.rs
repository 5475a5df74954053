//! Selectors of devices in CEL.

use serde_json::{Value, json};

use crate::support::{DRIVER, claim, classes, plain, slice};
use linkwise_scheduler_box::{Cluster, Failure};

fn gpu() -> Value {
    json!({
        "name": "gpu-0",
        "attributes": {
            "type": {"string": "gpu"}, "minor": {"int": 3}, "ecc": {"bool": true},
            "example.com/group": {"string": "a"},
        },
    })
}

fn selecting(expression: &str) -> Value {
    let selectors = json!([{"cel": {"expression": expression}}]);
    claim(json!([{"name": "r", "exactly": {"deviceClassName": "all", "selectors": selectors}}]), json!([]))
}

fn selects(devices: Value, expression: &str) -> Result<bool, Failure> {
    let cluster = Cluster::new(&[slice("a", devices)], &classes(), &[]).unwrap();
    match cluster.allocate("n", &[selecting(expression)]) {
        Ok(_) => Ok(true),
        Err(Failure::Refused(_)) => Ok(false),
        Err(other) => Err(other),
    }
}

/// dynamic-resource-allocation/cel/compile.go: the fields of `device`.
#[test]
fn selector_reads_driver_attributes_and_sharing() {
    let own = format!("device.attributes['{DRIVER}']");
    for (expression, expected) in [
        (format!("device.driver == '{DRIVER}' && {own}.type == 'gpu'"), true),
        (format!("{own}.minor in [1, 2, 3] && {own}.ecc"), true),
        (format!("{own}.minor > 3"), false),
        ("device.attributes['example.com'].group.startsWith('a')".to_owned(), true),
        ("'group' in device.attributes['other.example.com']".to_owned(), false),
        ("has(device.attributes['other.example.com'].group)".to_owned(), false),
        ("device.attributes['other.example.com'].?group.orValue('none') == 'none'".to_owned(), true),
        (format!("has({own}.absent) && {own}.absent == 1"), false),
        ("!device.allowMultipleAllocations".to_owned(), true),
    ] {
        assert_eq!(selects(json!([gpu()]), &expression), Ok(expected), "{expression}");
    }
}

/// allocator_incubating.go:1278-1283 and dynamicresources.go (`case err != nil`): a selector that fails, for example
/// because a device lacks the attribute, ends the attempt on all nodes.
#[test]
fn failing_selector_ends_the_attempt() {
    for expression in [
        format!("device.attributes['{DRIVER}'].absent == 1"),
        "device.attributes['other.example.com'].type == 'gpu'".to_owned(),
        "device.unheardOf".to_owned(),
        "unheardOf(device)".to_owned(),
        "1 +".to_owned(),
        "'gpu'".to_owned(),
    ] {
        let failure = selects(json!([gpu()]), &expression).unwrap_err();
        let Failure::Selector { expression: named, device, claim, request, .. } = &failure else { panic!("{failure}") };
        let expected = (expression.as_str(), "gpu.example.com/n/gpu-0", "default/c", "r");
        assert_eq!((named.as_str(), device.as_str(), claim.as_str(), request.as_str()), expected);
    }
}

/// isSelectable: the selectors of the class are evaluated first, so that those of the claim are evaluated only for
/// devices of the class. Devices that the search does not reach are not examined.
#[test]
fn selectors_of_the_class_are_evaluated_first() {
    let nic = json!({"name": "nic", "attributes": {"net.example.com/rdma": {"bool": true}}});
    let mut nics = slice("b", json!([nic]));
    (nics["spec"]["driver"], nics["spec"]["pool"]["name"]) = (json!("a-net.example.com"), json!("nics"));
    let slices = [nics, slice("a", json!([gpu(), {"name": "bare"}]))];
    let mut claim = selecting(&format!("device.attributes['{DRIVER}'].type == 'gpu'"));
    let cluster = Cluster::new(&slices, &classes(), &[]).unwrap();
    assert!(matches!(cluster.allocate("n", &[claim.clone()]), Err(Failure::Selector { .. })), "the NIC was skipped");
    claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = json!("gpu");
    cluster.allocate("n", &[claim.clone()]).unwrap();
    claim["spec"]["devices"]["requests"][0]["exactly"]["count"] = json!(2);
    assert!(matches!(cluster.allocate("n", &[claim]), Err(Failure::Selector { .. })), "'bare' was not examined");
}

#[test]
fn unknown_class_is_refused_by_name() {
    let cluster = Cluster::new(&[slice("a", plain(["x"]))], &[], &[]).unwrap();
    let failure = cluster.allocate("n", &[selecting("true")]).unwrap_err();
    assert_eq!(failure.to_string(), "claim default/c, request r: there is no DeviceClass all");
}
