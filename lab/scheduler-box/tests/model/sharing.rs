//! Devices that several claims may have: the capacity that each claim consumes.

use serde_json::{Value, json};

use crate::support::{allocate, claim, cluster, granted, plain, results, slice};
use linkwise_scheduler_box::Cluster;

/// A device with four shares and 80 Gi of memory.
fn shared(name: &str) -> Value {
    let policy = |default: &str, step: &str| json!({"default": default, "validRange": {"min": step, "step": step}});
    json!({"name": name, "allowMultipleAllocations": true, "capacity": {
        "shares": {"value": "4", "requestPolicy": policy("1", "1")},
        "memory": {"value": "80Gi", "requestPolicy": policy("20Gi", "1Mi")},
    }})
}

/// A claim for this number of devices, and these amounts of each.
fn share(count: usize, requests: Value) -> Value {
    let exactly = json!({"deviceClassName": "all", "count": count, "capacity": {"requests": requests}});
    claim(json!([{"name": "r", "exactly": exactly}]), json!([]))
}

/// The shares and the memory that a claim consumes of each device, or the reason why it is refused.
fn consumed(slices: &[Value], claim: &Value) -> Result<Vec<(String, String)>, String> {
    let placement = granted(slices, claim)?;
    let results = placement.allocations[0]["devices"]["results"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let capacities = results.map(|result| &result["consumedCapacity"]);
    Ok(capacities.map(|capacity| (text(&capacity["shares"]), text(&capacity["memory"]))).collect())
}

/// consumable_capacity.go: a missing amount becomes the policy's default, and an amount below the minimum becomes the
/// minimum. Other amounts are rounded up to the next step, and to whole units.
#[test]
fn amounts_are_rounded_up_by_the_policy() {
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
        assert_eq!(consumed(&slices, &share(1, asked.clone())), Ok(vec![(shares.into(), memory.into())]), "{asked}");
    }
}

#[test]
fn amount_beyond_every_device_is_refused() {
    let slices = [slice("a", json!([shared("a"), {"name": "b", "capacity": {"memory": {"value": "80Gi"}}}]))];
    for asked in [json!({"shares": "5"}), json!({"memory": "81Gi"}), json!({"cores": "1"})] {
        let why = consumed(&slices, &share(1, asked.clone())).unwrap_err();
        assert!(why.ends_with("needs 1 of 2 selected devices (0 in use, 0 tainted, 2 without the capacity)"), "{why}");
    }
    assert_eq!(results(&allocate(&slices, &share(1, json!({"memory": "1Gi"}))).unwrap(), 0), ["r a"]);
    // A claim that gets an unshared device gets it whole. A claim for `shares` never gets such a device.
    let whole = [slice("a", json!([{"name": "b", "capacity": {"memory": {"value": "80Gi"}}}]))];
    let placement = allocate(&whole, &share(1, json!({"memory": "1Gi"}))).unwrap();
    let result = &placement.allocations[0]["devices"]["results"][0];
    assert_eq!((result.get("shareID"), result.get("consumedCapacity")), (None, None));
    consumed(&whole, &share(1, json!({"shares": "1"}))).unwrap_err();
}

#[test]
fn amount_above_the_policys_maximum_is_refused() {
    let device = |policy: Value| {
        let capacity = json!({"memory": {"value": "80Gi", "requestPolicy": policy}, "shares": {"value": "1"}});
        [slice("a", json!([{"name": "a", "allowMultipleAllocations": true, "capacity": capacity}]))]
    };
    let memory = |slices: &[Value], asked: &str| {
        consumed(slices, &share(1, json!({"memory": asked}))).map(|taken| taken[0].1.clone()).ok()
    };
    let slices = device(json!({"default": "10Gi", "validRange": {"min": "10Gi", "max": "40Gi", "step": "1Gi"}}));
    assert_eq!(memory(&slices, "11Gi").as_deref(), Some("11Gi"));
    assert_eq!(memory(&slices, "41Gi"), None);
}

#[test]
fn shares_are_allocated_until_none_is_left() {
    let mut cluster = cluster(&[slice("a", json!([shared("a"), shared("b")]))]);
    let two = share(1, json!({"shares": "2"}));
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
    assert_eq!(results(&again, 0), ["r a"]);
    // A restarted scheduler reads the shares of the earlier claims.
    let slices = [slice("a", json!([shared("a")]))];
    let allocated = |allocation: &Value| json!({"metadata": {"name": "c"}, "status": {"allocation": allocation}});
    let all: Vec<Value> = given.iter().take(2).map(allocated).collect();
    let full = Cluster::new(&slices, &crate::support::classes(), &all).unwrap();
    full.allocate("n", &[share(1, json!({}))]).unwrap_err();
}

/// allocator_incubating.go: a request gets different devices. Another request, or another claim of the pod, may get the
/// same device.
#[test]
fn one_request_takes_different_devices() {
    let slices = [slice("a", json!([shared("a"), shared("b")]))];
    assert_eq!(results(&allocate(&slices, &share(2, json!({}))).unwrap(), 0), ["r a", "r b"]);
    assert!(allocate(&slices, &share(3, json!({}))).is_err());
    let exactly = json!({"deviceClassName": "all", "capacity": {"requests": {"shares": "2"}}});
    let both = claim(json!([{"name": "x", "exactly": exactly}, {"name": "y", "exactly": exactly}]), json!([]));
    assert_eq!(results(&allocate(&slices, &both).unwrap(), 0), ["x a", "y a"]);
}

#[test]
fn shared_and_exclusive_claims_exclude_each_other() {
    let shared_placement = allocate(&[slice("a", json!([shared("a")]))], &share(1, json!({}))).unwrap();
    let mut exclusive = shared("a");
    exclusive["allowMultipleAllocations"] = json!(false);
    for capacity in ["shares", "memory"] {
        exclusive["capacity"][capacity].as_object_mut().unwrap().remove("requestPolicy");
    }
    let mut now_exclusive = cluster(&[slice("a", json!([exclusive]))]);
    now_exclusive.occupy(&shared_placement.allocations[0]).unwrap();
    now_exclusive.allocate("n", &[crate::support::count(1)]).unwrap_err();
    let exclusive_placement = allocate(&[slice("a", plain(["a"]))], &crate::support::count(1)).unwrap();
    let mut now_shared = cluster(&[slice("a", json!([shared("a")]))]);
    now_shared.occupy(&exclusive_placement.allocations[0]).unwrap();
    now_shared.allocate("n", &[share(1, json!({}))]).unwrap_err();
}
