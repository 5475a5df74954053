//! Pools: the slices that the model reads, their order, and the bounds of a search.

use serde_json::{Value, json};

use crate::support::{DRIVER, allocate, claim, classes, cluster, count, devices, plain, slice, with};
use linkwise_scheduler_box::{Cluster, Failure};

/// pools_incubating.go:179-202, 239: pools are ordered by driver and name, slices by the name of their object, devices
/// as their slice lists them. The test gives the slices in another order.
#[test]
fn devices_are_tried_in_published_order() {
    let two = json!(2);
    let one = with(slice("00000-a", plain(["z", "b"])), "/pool/resourceSliceCount", two.clone());
    let other = with(slice("00001-a", plain(["a"])), "/pool/resourceSliceCount", two);
    let later_pool = with(slice("00000-0", plain(["c"])), "/pool/name", json!("o"));
    let first_driver = with(slice("zz", plain(["d"])), "/driver", json!("a.example.com"));
    let slices = [later_pool, other, first_driver, one];
    assert_eq!(devices(&slices, &count(5)).unwrap(), ["d", "z", "b", "a", "c"]);
}

/// types.go, ResourcePool: only slices of the highest generation are considered.
#[test]
fn slices_of_older_generations_are_skipped() {
    let old = slice("a", plain(["old"]));
    let new = with(slice("b", plain(["new"])), "/pool/generation", json!(2));
    assert_eq!(devices(&[old.clone(), new.clone()], &count(1)).unwrap(), ["new"]);
    devices(&[old, new], &count(2)).unwrap_err();
}

/// allocator_incubating.go:1065-1068: the allocator skips a pool with missing slices.
#[test]
fn incomplete_pool_is_skipped() {
    let half = with(slice("a", plain(["half"])), "/pool/resourceSliceCount", json!(2));
    let why = devices(std::slice::from_ref(&half), &count(1)).unwrap_err();
    assert!(why.contains("gpu.example.com/n is incomplete: 1 of 2 slices"), "{why}");
    let whole = with(slice("b", plain(["whole"])), "/pool/name", json!("o"));
    assert_eq!(devices(&[half, whole], &count(1)).unwrap(), ["whole"]);
}

/// pools_incubating.go, buildPool: a pool is invalid if device names repeat, or if a device consumes a counter that no
/// counter set has.
#[test]
fn invalid_pool_is_skipped() {
    let why = devices(&[slice("a", plain(["one", "twin", "twin"]))], &count(1)).unwrap_err();
    assert!(why.contains("two devices are named twin"), "{why}");
    let consumed = json!([{"counterSet": "gpus", "counters": {"gpu-0": {"value": "1"}}}]);
    let why = devices(&[slice("a", json!([{"name": "one", "consumesCounters": consumed}]))], &count(1)).unwrap_err();
    assert!(why.contains("consumes counter gpus/gpu-0, which no slice has"), "{why}");
}

#[test]
fn slice_of_another_node_is_skipped() {
    let theirs = with(slice("a", plain(["theirs"])), "/nodeName", json!("m"));
    devices(&[theirs], &count(1)).unwrap_err();
}

#[test]
fn unmodelled_field_is_refused_by_name() {
    let request = |field: &str, value: Value| {
        let mut exactly = json!({"deviceClassName": "all"});
        exactly[field] = value;
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
        let failure = allocate(&[slice("a", plain(["a"]))], &claim).unwrap_err();
        assert!(matches!(&failure, Failure::Malformed { why, .. } if why.contains(name)), "{name}: {failure}");
    }
    let mut shared = slice("a", plain(["a"]));
    shared["spec"]["allNodes"] = json!(true);
    let failure = Cluster::new(&[shared], &classes(), &[]).unwrap_err();
    assert!(failure.to_string().contains("allNodes"), "{failure}");
}

/// types.go, AllocationResult: an allocation has the driver, pool, device and request of each result, and a node
/// selector, because the devices belong to one node.
#[test]
fn allocation_has_results_and_node_selector() {
    let placement = allocate(&[slice("a", plain(["gpu-0"]))], &count(1)).unwrap();
    let field = json!({"key": "metadata.name", "operator": "In", "values": ["n"]});
    assert_eq!(
        placement.allocations[0],
        json!({
            "devices": {"results": [{"request": "r", "driver": DRIVER, "pool": "n", "device": "gpu-0"}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        })
    );
}

#[test]
fn device_of_another_claim_is_in_use_until_released() {
    let slices = [slice("a", plain(["one", "two", "three"]))];
    let results = json!([{"request": "r", "driver": DRIVER, "pool": "n", "device": "one"}]);
    let allocated = json!({"status": {"allocation": {"devices": {"results": results}}}});
    let mut cluster = Cluster::new(&slices, &classes(), &[allocated]).unwrap();
    let placement = cluster.allocate("n", &[count(2)]).unwrap();
    assert_eq!(crate::support::results(&placement, 0), ["r two", "r three"]);
    cluster.occupy(&placement.allocations[0]).unwrap();
    let Err(Failure::Refused(why)) = cluster.allocate("n", &[count(1)]) else { panic!("a used device was given") };
    assert_eq!((why[0].wanted, why[0].selected, why[0].used), (1, 3, 3), "{}", why[0]);
    cluster.release(&placement.allocations[0]).unwrap();
    cluster.allocate("n", &[count(2)]).unwrap();
}

/// A claim has at most 32 results (types.go, AllocationResultsMaxSize).
#[test]
fn claim_gets_at_most_32_devices() {
    let slices = [slice("a", plain((0..40).map(|index| format!("d{index}"))))];
    assert_eq!(devices(&slices, &count(32)).unwrap().len(), 32);
    devices(&slices, &count(33)).unwrap_err();
}

/// The real scheduler stops a search after a time (DRASchedulerFilterTimeout), the model after a number of steps.
/// A request for 12 of 24 equal devices has many combinations, and no device satisfies the second request.
#[test]
fn search_stops_at_the_most_steps() {
    let requests = json!([
        {"name": "many", "exactly": {"deviceClassName": "all", "count": 12}},
        {"name": "none", "exactly": {"deviceClassName": "all", "selectors": [{"cel": {"expression": "false"}}]}},
    ]);
    let cluster = cluster(&[slice("a", plain((0..24).map(|index| format!("d{index}"))))]).with_most_steps(10_000);
    let failure = cluster.allocate("n", &[claim(requests, json!([]))]).unwrap_err();
    assert!(matches!(failure, Failure::TooMuchWork(_, 10_000)), "{failure}");
}

/// allocateOne tries combinations, not permutations. If every device satisfies a request but none a later request, the
/// search needs C(8,1) + C(8,2) + C(8,3) + C(8,4) = 162 steps to choose 4 of 8 devices in all ways. For each of the 70
/// choices it examines the 8 devices for the later request.
#[test]
fn combination_is_tried_in_one_order() {
    let requests = json!([
        {"name": "four", "exactly": {"deviceClassName": "all", "count": 4}},
        {"name": "none", "exactly": {"deviceClassName": "all", "selectors": [{"cel": {"expression": "false"}}]}},
    ]);
    let cluster = cluster(&[slice("a", plain(["a", "b", "c", "d", "e", "f", "g", "h"]))]);
    let claims = [claim(requests, json!([]))];
    let refused = cluster.clone().with_most_steps(162 + 70 * 8).allocate("n", &claims).unwrap_err();
    assert!(matches!(refused, Failure::Refused(_)), "{refused}");
    let stopped = cluster.with_most_steps(162 + 70 * 8 - 1).allocate("n", &claims).unwrap_err();
    assert!(matches!(stopped, Failure::TooMuchWork(..)), "{stopped}");
}
