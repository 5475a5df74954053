//! The slices that are read, and their order.

use serde_json::{Value, json};

use crate::support::{DRIVER, allocate, claim, classes, cluster, count, devices, plain, slice, with};
use linkwise_scheduler_box::{Cluster, Failure};

/// pools_incubating.go:179-202, 239: pools by driver, then by name; slices by the name of their object; devices as they
/// are listed. The slices are given in another order than that.
#[test]
fn devices_are_tried_in_published_order() {
    let two = json!(2);
    let one = with(slice("00000-a", plain(&["z", "b"])), "/pool/resourceSliceCount", two.clone());
    let other = with(slice("00001-a", plain(&["a"])), "/pool/resourceSliceCount", two);
    let later_pool = with(slice("00000-0", plain(&["c"])), "/pool/name", json!("o"));
    let first_driver = with(slice("zz", plain(&["d"])), "/driver", json!("a.example.com"));
    let slices = [later_pool, other, first_driver, one];
    assert_eq!(devices(&slices, &count(5)).unwrap(), ["d", "z", "b", "a", "c"]);
}

/// types.go, ResourcePool: only slices of the highest generation are considered.
#[test]
fn older_generation_is_not_read() {
    let old = slice("a", plain(&["old"]));
    let new = with(slice("b", plain(&["new"])), "/pool/generation", json!(2));
    assert_eq!(devices(&[old.clone(), new.clone()], &count(1)).unwrap(), ["new"]);
    devices(&[old, new], &count(2)).unwrap_err();
}

/// allocator_incubating.go:1065-1068: nothing is allocated from a pool with missing slices.
#[test]
fn incomplete_pool_serves_nothing() {
    let half = with(slice("a", plain(&["half"])), "/pool/resourceSliceCount", json!(2));
    let why = devices(std::slice::from_ref(&half), &count(1)).unwrap_err();
    assert!(why.contains("gpu.example.com/n is incomplete: 1 of 2 slices"), "{why}");
    let whole = with(slice("b", plain(&["whole"])), "/pool/name", json!("o"));
    assert_eq!(devices(&[half, whole], &count(1)).unwrap(), ["whole"]);
}

/// pools_incubating.go, buildPool: a pool is invalid if device names repeat, or if a device consumes a counter that no
/// counter set has.
#[test]
fn invalid_pool_serves_nothing() {
    let why = devices(&[slice("a", plain(&["one", "twin", "twin"]))], &count(1)).unwrap_err();
    assert!(why.contains("two devices are named twin"), "{why}");
    let consumed = json!([{"counterSet": "gpus", "counters": {"gpu-0": {"value": "1"}}}]);
    let why = devices(&[slice("a", json!([{"name": "one", "consumesCounters": consumed}]))], &count(1)).unwrap_err();
    assert!(why.contains("consumes counter gpus/gpu-0, which no slice has"), "{why}");
}

#[test]
fn slice_of_another_node_is_not_read() {
    let theirs = with(slice("a", plain(&["theirs"])), "/nodeName", json!("m"));
    devices(&[theirs], &count(1)).unwrap_err();
}

#[test]
fn what_is_not_modelled_is_refused_by_name() {
    let request = |more: &str, value: Value| {
        let mut exactly = json!({"deviceClassName": "all"});
        exactly[more] = value;
        claim(json!([{"name": "r", "exactly": exactly}]), json!([]))
    };
    let mut configured = count(1);
    configured["spec"]["devices"]["config"] = json!([{}]);
    for (claim, name) in [
        (request("allocationMode", json!("All")), "All"),
        (request("adminAccess", json!(true)), "adminAccess"),
        (request("tolerations", json!([])), "tolerations"),
        (claim(json!([]), json!([{"distinctAttribute": "example.com/group"}])), "distinctAttribute"),
        (configured, "config"),
    ] {
        let failure = allocate(&[slice("a", plain(&["a"]))], &claim).unwrap_err();
        assert!(matches!(&failure, Failure::Malformed { why, .. } if why.contains(name)), "{name}: {failure}");
    }
    let mut shared = slice("a", plain(&["a"]));
    shared["spec"]["allNodes"] = json!(true);
    let failure = Cluster::new(&[shared], &classes(), &[]).unwrap_err();
    assert!(failure.to_string().contains("allNodes"), "{failure}");
}

/// The API's `status.allocation` (types.go, AllocationResult): driver, pool, device and request of each result, and a
/// node selector, since the devices belong to one node.
#[test]
fn allocation_is_as_the_api_has_it() {
    let placement = allocate(&[slice("a", plain(&["gpu-0"]))], &count(1)).unwrap();
    let field = json!({"key": "metadata.name", "operator": "In", "values": ["n"]});
    assert_eq!(
        placement.allocations[0],
        json!({
            "devices": {"results": [{"request": "r", "driver": DRIVER, "pool": "n", "device": "gpu-0"}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        })
    );
}

/// Devices of allocated claims are in use, by driver, pool and name.
#[test]
fn device_of_another_claim_is_not_given() {
    let slices = [slice("a", plain(&["one", "two", "three"]))];
    let results = json!([{"request": "r", "driver": DRIVER, "pool": "n", "device": "one"}]);
    let allocated = json!({"status": {"allocation": {"devices": {"results": results}}}});
    let mut cluster = Cluster::new(&slices, &classes(), &[allocated]).unwrap();
    let placement = cluster.allocate("n", &[count(2)]).unwrap();
    assert_eq!(crate::support::got(&placement, 0), ["r two", "r three"]);
    cluster.occupy(&placement.allocations[0]).unwrap();
    let Err(Failure::Refused(why)) = cluster.allocate("n", &[count(1)]) else { panic!("all are in use") };
    assert_eq!((why[0].wanted, why[0].selected, why[0].used), (1, 3, 3), "{}", why[0]);
    cluster.release(&placement.allocations[0]).unwrap();
    cluster.allocate("n", &[count(2)]).unwrap();
}

/// The API has no more than 32 results for a claim (types.go, AllocationResultsMaxSize).
#[test]
fn claim_gets_at_most_32_devices() {
    let names: Vec<String> = (0..40).map(|index| format!("d{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let slices = [slice("a", plain(&names))];
    assert_eq!(devices(&slices, &count(32)).unwrap().len(), 32);
    devices(&slices, &count(33)).unwrap_err();
}

/// The real scheduler ends such a search by time (DRASchedulerFilterTimeout), the model by work: a request for 12 of 24
/// equal devices has many combinations, and no device fulfils a second request.
#[test]
fn hopeless_search_is_given_up() {
    let names: Vec<String> = (0..24).map(|index| format!("d{index}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let requests = json!([
        {"name": "many", "exactly": {"deviceClassName": "all", "count": 12}},
        {"name": "none", "exactly": {"deviceClassName": "all", "selectors": [{"cel": {"expression": "false"}}]}},
    ]);
    let cluster = cluster(&[slice("a", plain(&names))]).with_most_steps(10_000);
    let failure = cluster.allocate("n", &[claim(requests, json!([]))]).unwrap_err();
    assert!(matches!(failure, Failure::TooMuchWork(_, 10_000)), "{failure}");
}

/// allocateOne goes through combinations, not permutations: if all devices of a request fit but a later request does
/// not, 4 of 8 devices are tried in C(8,1) + C(8,2) + C(8,3) + C(8,4) = 162 steps, and each of the 70 sets examines the
/// 8 devices for the later request.
#[test]
fn combinations_are_tried_once() {
    let requests = json!([
        {"name": "four", "exactly": {"deviceClassName": "all", "count": 4}},
        {"name": "none", "exactly": {"deviceClassName": "all", "selectors": [{"cel": {"expression": "false"}}]}},
    ]);
    let cluster = cluster(&[slice("a", plain(&["a", "b", "c", "d", "e", "f", "g", "h"]))]);
    let claims = [claim(requests, json!([]))];
    let enough = cluster.clone().with_most_steps(162 + 70 * 8).allocate("n", &claims).unwrap_err();
    assert!(matches!(enough, Failure::Refused(_)), "{enough}");
    let short = cluster.with_most_steps(162 + 70 * 8 - 1).allocate("n", &claims).unwrap_err();
    assert!(matches!(short, Failure::TooMuchWork(..)), "{short}");
}
