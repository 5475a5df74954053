//! Slices and claims that clients send: names, rules, gates, canonical forms.

use serde_json::{Value, json};

use crate::refusal::Refusal;
use crate::resource::Gates;
use crate::store::{Key, ResourceType, Selector, Store};

fn store() -> Store {
    let (slices, claims) = (ResourceType::RESOURCE_SLICES, ResourceType::RESOURCE_CLAIMS);
    Store::new(&[slices, claims, ResourceType::RESOURCE_CLAIM_TEMPLATES, ResourceType::DEVICE_CLASSES])
}

fn slice(devices: Value) -> Value {
    json!({
        "metadata": {"generateName": "00000-gpu.nvidia.com-n-"},
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": "n", "devices": devices,
            "pool": {"name": "n/gpu", "generation": 1, "resourceSliceCount": 1},
        },
    })
}

fn gpu(name: &str) -> Value {
    json!({"name": name, "attributes": {"type": {"string": "gpu"}}, "capacity": {"memory": {"value": "81559Mi"}}})
}

/// A slice of one device, `a`, with this field.
fn with_field(field: &str, value: Value) -> Value {
    slice(json!([{"name": "a", field: value}]))
}

/// The slice with a set of one counter.
fn shared_counters(mut slice: Value, set: &str, counter: &str) -> Value {
    slice["spec"]["sharedCounters"] = json!([{"name": set, "counters": {counter: {"value": "1"}}}]);
    slice
}

fn create(store: &mut Store, object: Value) -> Result<Value, Refusal> {
    store.create("test", &ResourceType::RESOURCE_SLICES.key(None, ""), object)
}

fn key(object: &Value) -> Key {
    ResourceType::RESOURCE_SLICES.key(None, object["metadata"]["name"].as_str().unwrap())
}

/// Checks that an object was refused because of this field alone.
fn assert_refused(refusal: Refusal, field: &str) {
    let status = refusal.status();
    assert_eq!((refusal.code, refusal.reason), (422, "Invalid"), "{status}");
    let fields: Vec<&str> =
        status["details"]["causes"].as_array().unwrap().iter().map(|cause| cause["field"].as_str().unwrap()).collect();
    assert_eq!(fields, [field], "{status}");
    assert!(refusal.message.contains(field), "{status}");
}

#[test]
fn slice_gets_name_generation_and_version() {
    let mut store = store();
    let made = create(&mut store, slice(json!([gpu("gpu-0")]))).unwrap();
    let name = made["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("00000-gpu.nvidia.com-n-") && name.len() == "00000-gpu.nvidia.com-n-".len() + 5, "{name}");
    assert_eq!(made["metadata"]["generation"], 1);
    let mut other = made.clone();
    other["spec"]["devices"] = json!([gpu("gpu-0"), gpu("gpu-1")]);
    let stored = store.replace("test", &key(&made), other.clone()).unwrap();
    assert_eq!(stored["metadata"]["generation"], 2);
    let conflict = store.replace("test", &key(&made), other).unwrap_err();
    assert_eq!((conflict.code, conflict.reason), (409, "Conflict"));
    // Replacing an object by itself is not a change.
    let again = store.replace("test", &key(&made), stored.clone()).unwrap();
    assert_eq!(again, stored);
    assert_ne!(create(&mut store, slice(json!([]))).unwrap()["metadata"]["name"], made["metadata"]["name"]);
}

#[test]
fn invalid_field_of_a_slice_is_refused_by_name() {
    let with = |change: fn(&mut Value)| {
        let mut sent = slice(json!([gpu("gpu-0")]));
        change(&mut sent);
        sent
    };
    let with_attribute = |name: &str, value: Value| with_field("attributes", json!({name: value}));
    let many = |count: usize, device: fn(usize) -> Value| json!((0..count).map(device).collect::<Vec<_>>());
    for (sent, field) in [
        (with(|s| s["spec"]["driver"] = json!("GPU")), "spec.driver"),
        (with(|s| s["spec"]["driver"] = json!("a".repeat(64))), "spec.driver"),
        (with(|s| s["spec"]["pool"]["name"] = json!("n//gpu")), "spec.pool.name"),
        (with(|s| s["spec"]["pool"]["resourceSliceCount"] = json!(0)), "spec.pool.resourceSliceCount"),
        (with(|s| s["spec"]["nodeName"] = Value::Null), "spec"),
        (shared_counters(slice(json!([gpu("gpu-0")])), "a", "b"), "spec"),
        (shared_counters(slice(json!([])), "a", "b"), "spec"),
        (slice(json!([gpu("gpu_0")])), "spec.devices[0].name"),
        (slice(json!([gpu("a"), gpu("a")])), "spec.devices[1].name"),
        (slice(many(129, |index| gpu(&format!("gpu-{index}")))), "spec.devices"),
        (
            slice(many(65, |index| {
                let taints = json!([{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]);
                json!({"name": format!("gpu-{index}"), "taints": taints})
            })),
            "spec.devices",
        ),
        (with_attribute("x-y", json!({"int": 1})), "spec.devices[0].attributes[x-y]"),
        (with_attribute("x", json!({})), "spec.devices[0].attributes[x]"),
        (with_attribute("x", json!({"int": 1, "bool": true})), "spec.devices[0].attributes[x]"),
        (with_attribute("x", json!({"string": "s".repeat(65)})), "spec.devices[0].attributes[x].string"),
        (with_attribute("x", json!({"version": "580.95.05"})), "spec.devices[0].attributes[x].version"),
        (with_field("capacity", json!({"m": {"value": "much"}})), "spec.devices[0].capacity[m].value"),
        (with_field("taints", json!([{"key": "k", "effect": "Evict"}])), "spec.devices[0].taints[0].effect"),
        (with_field("taints", json!([{"key": "", "effect": "None"}])), "spec.devices[0].taints[0].key"),
    ] {
        assert_refused(create(&mut store(), sent).unwrap_err(), field);
    }
    let attributes: serde_json::Map<_, _> = (0..33).map(|index| (format!("a{index}"), json!({"int": index}))).collect();
    let too_many = with_field("attributes", json!(attributes));
    assert_refused(create(&mut store(), too_many).unwrap_err(), "spec.devices[0]");
    let unnamed = json!({"metadata": {}, "spec": slice(json!([]))["spec"]});
    assert_eq!(create(&mut store(), unnamed).unwrap_err().code, 422);
    // The decoder refuses a value of another type before any rule applies.
    let wrong = create(&mut store(), slice(json!([{"name": 3}]))).unwrap_err();
    assert_eq!(wrong.code, 400, "{}", wrong.message);
}

#[test]
fn slice_cannot_change_driver_node_or_pool() {
    for (field, value) in [("driver", json!("b")), ("nodeName", json!("b")), ("pool.name", json!("b"))] {
        let mut store = store();
        let mut made = create(&mut store, slice(json!([]))).unwrap();
        let key = key(&made);
        *made.pointer_mut(&format!("/spec/{}", field.replace('.', "/"))).unwrap() = value;
        assert_refused(store.replace("test", &key, made).unwrap_err(), &format!("spec.{field}"));
    }
}

#[test]
fn gate_that_is_off_drops_fields_of_new_slices() {
    let taint = json!([{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]);
    let tainted_slice = || with_field("taints", taint.clone());
    let shared_slice = || {
        let policy = json!({"default": "1", "validRange": {"min": "1", "step": "1"}});
        let capacity = json!({"shares": {"value": "4", "requestPolicy": policy}});
        slice(json!([{"name": "a", "allowMultipleAllocations": true, "capacity": capacity}]))
    };
    let consuming_slice =
        || with_field("consumesCounters", json!([{"counterSet": "gpus", "counters": {"gpu-0": {"value": "1"}}}]));
    let counter_slice = || {
        let mut sent = shared_counters(slice(json!([])), "gpus", "gpu-0");
        sent["spec"].as_object_mut().unwrap().remove("devices");
        sent
    };
    let on = Gates::default();
    let without_taints = Gates { device_taints: false, ..on };
    let without_capacity = Gates { consumable_capacity: false, ..on };
    let without_partitions = Gates { partitionable_devices: false, ..on };
    for (gates, sent, pointer) in [
        (without_taints, tainted_slice(), "/spec/devices/0/taints"),
        (without_capacity, shared_slice(), "/spec/devices/0/allowMultipleAllocations"),
        (without_capacity, shared_slice(), "/spec/devices/0/capacity/shares/requestPolicy"),
        (without_partitions, consuming_slice(), "/spec/devices/0/consumesCounters"),
        (without_partitions, counter_slice(), "/spec/sharedCounters"),
    ] {
        let mut store = store();
        let before = create(&mut store, sent.clone()).unwrap();
        assert!(before.pointer(pointer).is_some(), "{pointer}: {before}");
        store.gates = gates;
        let dropped = create(&mut store, sent.clone()).unwrap();
        assert_eq!(dropped.pointer(pointer), None);
        // A stored object that has the field keeps it.
        let kept = store.replace("test", &key(&before), sent).unwrap();
        assert!(kept.pointer(pointer).is_some(), "{pointer}: {kept}");
    }
}

#[test]
fn stored_slice_is_canonical_and_its_taints_have_a_time() {
    let mut store = store();
    let device = json!({
        "name": "a", "capacity": {"memory": {"value": "81920Mi"}}, "unheardOf": 1,
        "taints": [{"key": "k", "effect": "NoSchedule"}], "attributes": {},
    });
    let made = create(&mut store, slice(json!([device]))).unwrap();
    let stored = &made["spec"]["devices"][0];
    assert_eq!(stored["capacity"]["memory"]["value"], "80Gi");
    assert_eq!((stored.get("unheardOf"), stored.get("attributes")), (None, None));
    let added = &stored["taints"][0]["timeAdded"];
    assert!(added.is_string());
    // A taint without a time gets a new time, which is a change.
    let sent = slice(json!([device]));
    let again = store.replace("test", &key(&made), sent).unwrap();
    assert_ne!(again["spec"]["devices"][0]["taints"][0]["timeAdded"], *added);
    let same = store.replace("test", &key(&made), again.clone()).unwrap();
    assert_eq!(same["metadata"]["resourceVersion"], again["metadata"]["resourceVersion"]);
}

#[test]
fn slices_are_selected_by_node_and_driver() {
    let mut store = store();
    for (node, driver) in [("n", "gpu.nvidia.com"), ("n", "dra.net"), ("m", "gpu.nvidia.com")] {
        let mut sent = slice(json!([]));
        (sent["spec"]["nodeName"], sent["spec"]["driver"]) = (json!(node), json!(driver));
        create(&mut store, sent).unwrap();
    }
    let slices = ResourceType::RESOURCE_SLICES;
    let count = |store: &Store, text: &str| {
        let selector = Selector::parse(&slices, text).unwrap();
        store.list(&slices, None).into_iter().filter(|object| selector.selects(object)).count()
    };
    assert_eq!(count(&store, "spec.nodeName=n"), 2);
    assert_eq!(count(&store, "spec.nodeName=n,spec.driver=gpu.nvidia.com"), 1);
    assert_eq!(Selector::parse(&slices, "spec.pool=a").unwrap_err().code, 400);
    assert_eq!(Selector::parse(&ResourceType::NODES, "spec.nodeName=a").unwrap_err().code, 400);
    let selector = Selector::parse(&slices, "spec.nodeName=n").unwrap();
    store.remove_selected(&slices, None, &selector);
    assert_eq!((count(&store, "spec.nodeName=n"), count(&store, "")), (0, 1));
}

#[test]
fn claim_spec_and_status_are_checked_apart() {
    let mut store = store();
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), "c");
    let request = |exactly: Value| json!({"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}});
    let constrained = |constraint: Value| json!({"spec": {"devices": {"requests": [], "constraints": [constraint]}}});
    let exactly = "spec.devices.requests[0].exactly";
    for (sent, field) in [
        (request(json!({})), &*format!("{exactly}.deviceClassName")),
        (request(json!({"deviceClassName": "c", "allocationMode": "All"})), &*format!("{exactly}.allocationMode")),
        (constrained(json!({"requests": ["a"], "matchAttribute": "d/a"})), "spec.devices.constraints[0].requests[0]"),
        (constrained(json!({"matchAttribute": "a"})), "spec.devices.constraints[0].matchAttribute"),
        (json!({"spec": {"devices": {"requests": [{"name": "a"}]}}}), "spec.devices.requests[0]"),
    ] {
        assert_refused(store.create("user", &key, sent).unwrap_err(), field);
    }
    let mut sent = request(json!({"deviceClassName": "gpu.nvidia.com"}));
    sent["status"] = json!({"allocation": {"devices": {"results": []}}});
    let made = store.create("user", &key, sent).unwrap();
    assert_eq!(made["spec"]["devices"]["requests"][0]["exactly"]["count"], 1, "the server's default");
    assert_eq!(made["status"], json!({}), "a client sets the status in a request of its own");
    let mut allocated = made.clone();
    let result = json!({"request": "gpus", "driver": "gpu.nvidia.com", "pool": "n/gpu", "device": "gpu-0"});
    allocated["status"] = json!({"allocation": {"devices": {"results": [result]}}});
    allocated["spec"] = json!({});
    let stored = store.replace_status("scheduler", &key, &allocated).unwrap();
    assert_eq!((&stored["spec"], &stored["status"]), (&made["spec"], &allocated["status"]));
    let mut other = stored.clone();
    other["status"]["allocation"]["devices"]["results"][0]["device"] = json!("gpu-1");
    assert_refused(store.replace_status("scheduler", &key, &other).unwrap_err(), "status.allocation");
}

/// A slice of one device in four shares, after a change of the device.
fn shared(change: fn(&mut Value)) -> Value {
    let policy = |default: &str, one: &str| json!({"default": default, "validRange": {"min": one, "step": one}});
    let mut device = json!({"name": "a", "allowMultipleAllocations": true, "capacity": {
        "shares": {"value": "4", "requestPolicy": policy("1", "1")},
        "memory": {"value": "80Gi", "requestPolicy": policy("20480Mi", "1Mi")},
    }});
    change(&mut device);
    slice(json!([device]))
}

#[test]
fn request_policy_is_stored_in_canonical_form() {
    let made = create(&mut store(), shared(|_| {})).unwrap();
    let policy = &made["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"];
    assert_eq!(*policy, json!({"default": "20Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}));
}

#[test]
fn request_policy_that_breaks_a_rule_is_refused() {
    let policy = "spec.devices[0].capacity[shares].requestPolicy";
    for (part, value) in
        [("min", json!("5")), ("min", Value::Null), ("max", json!("5")), ("step", json!("4")), ("step", json!("0"))]
    {
        let mut sent = shared(|_| {});
        sent["spec"]["devices"][0]["capacity"]["shares"]["requestPolicy"]["validRange"][part] = value;
        let status = create(&mut store(), sent).unwrap_err().status();
        assert_eq!(status["details"]["causes"][0]["field"], format!("{policy}.validRange.{part}"), "{status}");
    }
    let without_default = shared(|device| {
        device["capacity"]["shares"]["requestPolicy"].as_object_mut().unwrap().remove("default");
    });
    assert_refused(create(&mut store(), without_default).unwrap_err(), &format!("{policy}.default"));
    let exclusive = shared(|device| {
        device["allowMultipleAllocations"] = json!(false);
        device["capacity"]["memory"].as_object_mut().unwrap().remove("requestPolicy");
    });
    assert_refused(create(&mut store(), exclusive).unwrap_err(), policy);
    let malformed = shared(|device| device["capacity"]["shares"]["requestPolicy"]["default"] = json!("many"));
    assert_refused(create(&mut store(), malformed).unwrap_err(), policy);
}

#[test]
fn claim_capacity_and_share_id_are_checked() {
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), "c");
    let claim = |requests: Value| {
        let exactly = json!({"deviceClassName": "c", "capacity": {"requests": requests}});
        json!({"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}})
    };
    let made = store().create("user", &key, claim(json!({"shares": 2, "memory": "1024Mi"}))).unwrap();
    let asked = &made["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"];
    assert_eq!(*asked, json!({"shares": "2", "memory": "1Gi"}));
    let field = "spec.devices.requests[0].exactly.capacity.requests";
    for (requests, name) in [(json!({"shares": "many"}), "shares"), (json!({"x-y": "1"}), "x-y")] {
        assert_refused(store().create("user", &key, claim(requests)).unwrap_err(), &format!("{field}[{name}]"));
    }
    let mut off = store();
    off.gates = Gates::OFF;
    let made = off.create("user", &key, claim(json!({"shares": "2"}))).unwrap();
    assert_eq!(made.pointer("/spec/devices/requests/0/exactly/capacity"), None);
    let allocated = |share: &str| {
        let result = json!({"request": "gpu", "driver": "d", "pool": "p", "device": "a", "shareID": share});
        let mut object = made.clone();
        object["status"] = json!({"allocation": {"devices": {"results": [result]}}});
        object
    };
    let refusal = off.replace_status("scheduler", &key, &allocated("one")).unwrap_err();
    assert_refused(refusal, "status.allocation.devices.results[0].shareID");
    off.replace_status("scheduler", &key, &allocated("00000000-0000-4000-8000-00000000000a")).unwrap();
}
