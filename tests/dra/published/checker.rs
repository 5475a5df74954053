//! A checker of ResourceSlices: the API server box must store each slice as sent, and all slices must make one pool.

use std::collections::BTreeSet;

use linkwise_api_server_box::{Gates, ResourceType, stored};
use serde_json::{Value, json};

/// The most taints of a device that Kubernetes 1.34 accepts. The box has the limit of 1.36.
const MAX_TAINTS: usize = 4;

/// The items of a list that may be absent.
fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Checks the specifications of all slices of a pool, and panics if one breaks a rule.
pub fn check(slices: &[Value]) {
    let (mut names, mut shared, mut consumed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let counters = |set: &Value, name: &str| -> Vec<(String, String)> {
        let counters = set["counters"].as_object().unwrap().keys();
        counters.map(|counter| (set[name].to_string(), counter.clone())).collect()
    };
    for slice in slices {
        assert_eq!(slice["pool"], slices[0]["pool"], "several pools");
        assert_eq!(slice["pool"]["resourceSliceCount"], slices.len());
        let object = json!({"metadata": {"name": "slice"}, "spec": slice});
        let kept = stored(&ResourceType::RESOURCE_SLICES, None, Gates::default(), &object);
        let mut kept = kept.unwrap_or_else(|refusal| panic!("{refusal}"))["spec"].take();
        let devices = kept.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten();
        let taints = devices.filter_map(|device| device.get_mut("taints")?.as_array_mut());
        taints.flatten().for_each(|taint| drop(taint.as_object_mut().unwrap().remove("timeAdded")));
        for device in list(&slice["devices"]) {
            assert!(names.insert(device["name"].to_string()), "{device} twice");
            assert!(list(&device["taints"]).count() <= MAX_TAINTS, "{device}");
            consumed.extend(list(&device["consumesCounters"]).flat_map(|set| counters(set, "counterSet")));
        }
        for counter in list(&slice["sharedCounters"]).flat_map(|set| counters(set, "name")) {
            assert!(shared.insert(counter.clone()), "{counter:?} twice");
        }
        let mut sent = slice.clone();
        sent.as_object_mut().unwrap().retain(|_, part| part.as_array().is_none_or(|list| !list.is_empty()));
        assert_eq!(kept, sent, "the server does not store the slice as sent");
    }
    // If a device consumes counters that the pool lacks, the scheduler allocates no device of the pool.
    assert!(consumed.is_subset(&shared), "{:?}", consumed.difference(&shared));
}
