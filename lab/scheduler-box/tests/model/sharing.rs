//! Devices that several claims may have: the capacity that each claim takes.

use serde_json::{Value, json};

use crate::support::{allocate, claim, cluster, got, plain, slice};
use linkwise_scheduler_box::{Cluster, Failure};

/// A device in four shares with 80 Gi of memory.
fn shared(name: &str) -> Value {
    let policy = |default: &str, one: &str| json!({"default": default, "validRange": {"min": one, "step": one}});
    json!({"name": name, "allowMultipleAllocations": true, "capacity": {
        "shares": {"value": "4", "requestPolicy": policy("1", "1")},
        "memory": {"value": "80Gi", "requestPolicy": policy("20Gi", "1Mi")},
    }})
}

/// A claim for this number of devices, with these amounts of each.
fn part(count: usize, requests: Value) -> Value {
    let exactly = json!({"deviceClassName": "all", "count": count, "capacity": {"requests": requests}});
    claim(json!([{"name": "r", "exactly": exactly}]), json!([]))
}

/// The amounts that a claim takes of each device: shares and memory.
fn takes(slices: &[Value], claim: &Value) -> Result<Vec<(String, String)>, String> {
    match allocate(slices, claim) {
        Ok(placement) => {
            let results = placement.allocations[0]["devices"]["results"].as_array().unwrap().iter();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            let consumed = results.map(|result| &result["consumedCapacity"]);
            Ok(consumed.map(|consumed| (text(&consumed["shares"]), text(&consumed["memory"]))).collect())
        }
        Err(Failure::Refused(why)) => Err(why[0].to_string()),
        Err(other) => panic!("{other}"),
    }
}

/// consumable_capacity.go: no amount stands for the policy's default, an amount below the least for the least; an
/// amount between two steps is rounded up to the next, and a part of a unit to a whole one.
#[test]
fn amounts_are_rounded_as_policies_say() {
    let slices = [slice("a", json!([shared("a")]))];
    for (asked, shares, memory) in [
        (json!({}), "1", "20Gi"),
        (json!({"shares": "2"}), "2", "20Gi"),
        (json!({"shares": "0"}), "1", "20Gi"),
        (json!({"shares": "-3"}), "1", "20Gi"),
        (json!({"shares": "1500m"}), "2", "20Gi"),
        (json!({"memory": "40Gi"}), "1", "40Gi"),
        (json!({"memory": "0"}), "1", "1Mi"),
        (json!({"memory": "1"}), "1", "1Mi"),
        (json!({"memory": "1000M"}), "1", "954Mi"),
        (json!({"memory": "1.5Gi", "shares": "4"}), "4", "1536Mi"),
    ] {
        assert_eq!(takes(&slices, &part(1, asked.clone())), Ok(vec![(shares.into(), memory.into())]), "{asked}");
    }
}

#[test]
fn amount_that_no_device_has_is_refused() {
    let slices = [slice("a", json!([shared("a"), {"name": "b", "capacity": {"memory": {"value": "80Gi"}}}]))];
    for asked in [json!({"shares": "5"}), json!({"memory": "81Gi"}), json!({"cores": "1"})] {
        let why = takes(&slices, &part(1, asked.clone())).unwrap_err();
        assert!(why.ends_with("needs 1 of 2 selected devices (0 in use, 0 tainted, 2 without the capacity)"), "{why}");
    }
    // A claim with a device of its own has it all, and a claim for a share never gets it.
    assert_eq!(got(&allocate(&slices[..1], &part(1, json!({"memory": "1Gi"}))).unwrap(), 0), ["r a"]);
    let whole = [slice("a", json!([{"name": "b", "capacity": {"memory": {"value": "80Gi"}}}]))];
    let placement = allocate(&whole, &part(1, json!({"memory": "1Gi"}))).unwrap();
    let result = &placement.allocations[0]["devices"]["results"][0];
    assert_eq!((result.get("shareID"), result.get("consumedCapacity")), (None, None));
    takes(&whole, &part(1, json!({"shares": "1"}))).unwrap_err();
}

#[test]
fn largest_amount_of_a_policy_holds() {
    let device = |policy: Value| {
        let capacity = json!({"memory": {"value": "80Gi", "requestPolicy": policy}, "shares": {"value": "1"}});
        [slice("a", json!([{"name": "a", "allowMultipleAllocations": true, "capacity": capacity}]))]
    };
    let memory = |slices: &[Value], asked: &str| {
        takes(slices, &part(1, json!({"memory": asked}))).map(|taken| taken[0].1.clone()).ok()
    };
    let most = device(json!({"default": "10Gi", "validRange": {"min": "10Gi", "max": "40Gi", "step": "1Gi"}}));
    assert_eq!(memory(&most, "11Gi").as_deref(), Some("11Gi"));
    assert_eq!(memory(&most, "41Gi"), None);
}

#[test]
fn shares_are_given_until_none_is_left() {
    let mut cluster = cluster(&[slice("a", json!([shared("a"), shared("b")]))]);
    let two = part(1, json!({"shares": "2"}));
    let mut given: Vec<Value> = Vec::new();
    for _ in 0..5 {
        let Ok(mut placement) = cluster.allocate("n", std::slice::from_ref(&two)) else { break };
        given.push(placement.allocations.pop().unwrap());
        cluster.occupy(given.last().unwrap()).unwrap();
    }
    let devices: Vec<&Value> = given.iter().map(|given| &given["devices"]["results"][0]["device"]).collect();
    assert_eq!(devices, ["a", "a", "b", "b"]);
    let ids: std::collections::BTreeSet<_> =
        given.iter().map(|given| given["devices"]["results"][0]["shareID"].to_string()).collect();
    assert_eq!(ids.len(), 4, "{ids:?}");
    cluster.release(&given[1]).unwrap();
    let again = cluster.allocate("n", std::slice::from_ref(&two)).unwrap();
    assert_eq!(got(&again, 0), ["r a"]);
    // A scheduler that starts again knows the earlier claims.
    let slices = [slice("a", json!([shared("a")]))];
    let allocated = |allocation: &Value| json!({"metadata": {"name": "c"}, "status": {"allocation": allocation}});
    let all: Vec<Value> = given.iter().take(2).map(allocated).collect();
    let full = Cluster::new(&slices, &crate::support::classes(), &all).unwrap();
    full.allocate("n", &[part(1, json!({}))]).unwrap_err();
}

/// allocator_incubating.go: within a request the search goes on behind the last device; another request, or another
/// claim of the pod, may get the same one.
#[test]
fn one_request_takes_different_devices() {
    let slices = [slice("a", json!([shared("a"), shared("b")]))];
    assert_eq!(got(&allocate(&slices, &part(2, json!({}))).unwrap(), 0), ["r a", "r b"]);
    assert!(allocate(&slices, &part(3, json!({}))).is_err());
    let exactly = json!({"deviceClassName": "all", "capacity": {"requests": {"shares": "2"}}});
    let both = claim(json!([{"name": "x", "exactly": exactly}, {"name": "y", "exactly": exactly}]), json!([]));
    assert_eq!(got(&allocate(&slices, &both).unwrap(), 0), ["x a", "y a"]);
}

#[test]
fn exclusive_and_shared_exclude_each_other() {
    let was_shared = allocate(&[slice("a", json!([shared("a")]))], &part(1, json!({}))).unwrap();
    let mut exclusive = shared("a");
    exclusive["allowMultipleAllocations"] = json!(false);
    for policy in ["shares", "memory"] {
        exclusive["capacity"][policy].as_object_mut().unwrap().remove("requestPolicy");
    }
    let mut now_exclusive = cluster(&[slice("a", json!([exclusive]))]);
    now_exclusive.occupy(&was_shared.allocations[0]).unwrap();
    now_exclusive.allocate("n", &[crate::support::count(1)]).unwrap_err();
    let was_exclusive = allocate(&[slice("a", plain(&["a"]))], &crate::support::count(1)).unwrap();
    let mut now_shared = cluster(&[slice("a", json!([shared("a")]))]);
    now_shared.occupy(&was_exclusive.allocations[0]).unwrap();
    now_shared.allocate("n", &[part(1, json!({}))]).unwrap_err();
}
