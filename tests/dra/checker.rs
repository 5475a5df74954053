//! What the API server of Kubernetes 1.34 to 1.36 takes of a pool of ResourceSlices, by rules of this test's own,
//! read from `resource.k8s.io/v1`'s documentation. It sees JSON and shares no code with what is checked.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Checks the specifications of all slices of a pool; panics with what is wrong.
pub fn check(slices: &[Value]) {
    let (mut names, mut shared, mut consumed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for slice in slices {
        let pool = &slice["pool"];
        assert_eq!(pool, &slices[0]["pool"], "one pool");
        assert_eq!(pool["resourceSliceCount"], slices.len());
        assert!(pool["generation"].as_u64().unwrap() > 0);
        let pool_name = pool["name"].as_str().unwrap();
        assert!(pool_name.len() <= 253 && pool_name.split('/').all(is_subdomain), "{pool_name}");
        let driver = slice["driver"].as_str().unwrap();
        assert!(driver.len() <= 63 && is_subdomain(driver), "{driver}");
        assert!(is_subdomain(slice["nodeName"].as_str().unwrap()));
        let devices = slice.get("devices").map_or(&[][..], |devices| devices.as_array().unwrap());
        let is_limited =
            devices.iter().any(|device| device.get("taints").is_some() || device.get("consumesCounters").is_some());
        assert!(devices.len() <= if is_limited { 64 } else { 128 }, "{} devices, limited: {is_limited}", devices.len());
        let sets = slice.get("sharedCounters").map_or(&[][..], |sets| sets.as_array().unwrap());
        assert!(sets.is_empty() == slice.get("devices").is_some(), "a list of devices, or counters");
        assert!(sets.len() <= 8, "{} counter sets", sets.len());
        for set in sets {
            let (name, counters) = (set["name"].as_str().unwrap(), set["counters"].as_object().unwrap());
            assert!(is_label(name) && (1..=32).contains(&counters.len()), "{name}: {}", counters.len());
            for (counter, amount) in counters {
                assert!(is_label(counter) && is_canonical(amount["value"].as_str().unwrap()), "{name}: {counter}");
                assert!(shared.insert((name.to_owned(), counter.clone())), "{name}: {counter} twice");
            }
        }
        for device in devices {
            let name = device["name"].as_str().unwrap();
            assert!(is_label(name), "{name}");
            assert!(names.insert(name.to_owned()), "{name} twice");
            check_device(name, device.as_object().unwrap());
            consumed.extend(consumptions(name, device));
        }
    }
    // A pool in which a device consumes what is not there is invalid, and none of it is allocated.
    assert!(consumed.is_subset(&shared), "{:?}", consumed.difference(&shared));
}

/// The counters that a device consumes, by their set.
fn consumptions(name: &str, device: &Value) -> BTreeSet<(String, String)> {
    let sets = device.get("consumesCounters").map_or(&[][..], |sets| sets.as_array().unwrap());
    assert!(sets.len() <= 2, "{name}: {} counter sets", sets.len());
    let mut all = BTreeSet::new();
    for set in sets {
        let counters = set["counters"].as_object().unwrap();
        assert!((1..=32).contains(&counters.len()), "{name}: {} counters", counters.len());
        for (counter, amount) in counters {
            assert_eq!(amount["value"], "1", "{name}: {counter}");
            assert!(all.insert((set["counterSet"].as_str().unwrap().to_owned(), counter.clone())), "{name}: {counter}");
        }
    }
    all
}

fn check_device(name: &str, device: &Map<String, Value>) {
    let known = ["name", "attributes", "capacity", "taints", "consumesCounters"];
    assert!(device.keys().all(|key| known.contains(&key.as_str())), "{name}: {device:?}");
    let empty = Map::new();
    let of = |key: &str| device.get(key).map_or(&empty, |map| map.as_object().unwrap());
    let (attributes, capacity) = (of("attributes"), of("capacity"));
    assert!(attributes.len() + capacity.len() <= 32, "{name}: {} and {}", attributes.len(), capacity.len());
    for (key, value) in attributes {
        check_key(name, key);
        let value = value.as_object().unwrap();
        assert_eq!(value.len(), 1, "{name} {key}: {value:?}");
        let (kind, value) = value.iter().next().unwrap();
        match kind.as_str() {
            "int" => assert!(value.is_i64(), "{name} {key}"),
            "bool" => assert!(value.is_boolean(), "{name} {key}"),
            "string" => assert!(value.as_str().unwrap().len() <= 64, "{name} {key}: {value}"),
            "version" => assert!(is_version(value.as_str().unwrap()), "{name} {key}: {value}"),
            other => panic!("{name} {key}: {other}"),
        }
    }
    for (key, value) in capacity {
        check_key(name, key);
        assert_eq!(value.as_object().unwrap().len(), 1, "{name} {key}");
        let quantity = value["value"].as_str().unwrap();
        assert!(is_canonical(quantity), "{name} {key}: {quantity}");
    }
    let taints = device.get("taints").map_or(&[][..], |taints| taints.as_array().unwrap());
    // Kubernetes 1.34 takes four.
    assert!(taints.len() <= 4, "{name}: {} taints", taints.len());
    let mut keys = BTreeSet::new();
    for taint in taints {
        let (domain, id) = taint["key"].as_str().unwrap().split_once('/').unwrap();
        assert!(is_subdomain(domain) && is_label_value(id) && !id.is_empty(), "{name}: {taint}");
        assert!(is_label_value(taint.get("value").map_or("", |value| value.as_str().unwrap())), "{name}: {taint}");
        assert!(["NoSchedule", "NoExecute"].contains(&taint["effect"].as_str().unwrap()), "{name}: {taint}");
        assert!(keys.insert(taint["key"].to_string()), "{name}: {taint} twice");
    }
}

/// An identifier of C of at most 32 characters, behind a domain of at most 63 where it is not the driver's own.
fn check_key(device: &str, key: &str) {
    let (domain, id) = key.split_once('/').map_or((None, key), |(domain, id)| (Some(domain), id));
    let starts = id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let fits = starts && id.len() <= 32 && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    assert!(fits && domain.is_none_or(|domain| domain.len() <= 63 && is_subdomain(domain)), "{device}: {key}");
}

fn is_label(text: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.len() <= 63 && ends(text.chars().next()) && ends(text.chars().last()) && text.chars().all(inner)
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_label_value(text: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fits = text.len() <= 63 && text.chars().all(inner);
    text.is_empty() || fits && ends(text.chars().next()) && ends(text.chars().last())
}

/// Semantic versioning 2.0 without what may follow the third number.
fn is_version(text: &str) -> bool {
    let number = |part: &str| {
        part == "0" || !part.is_empty() && !part.starts_with('0') && part.chars().all(|c| c.is_ascii_digit())
    };
    text.len() <= 64 && text.split('.').count() == 3 && text.split('.').all(number)
}

/// A number as Kubernetes prints it: in the largest binary unit of which it is a whole number.
fn is_canonical(text: &str) -> bool {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.strip_prefix(digits).unwrap();
    let Ok(number) = digits.parse::<u64>() else { return false };
    let is_plain = digits == number.to_string();
    is_plain && (unit.is_empty() || ["Ki", "Mi", "Gi", "Ti", "Pi"].contains(&unit) && number > 0 && number % 1024 != 0)
}

#[test]
fn checker_refuses_what_breaks_a_rule() {
    let good = serde_json::json!({
        "driver": "gpu.nvidia.com", "nodeName": "node",
        "pool": {"name": "node/gpu", "generation": 1, "resourceSliceCount": 1},
        "devices": [
            {"name": "gpu-0", "attributes": {"a/b": {"version": "1.2.3"}}, "capacity": {"c": {"value": "1Mi"}}},
        ],
    });
    check(std::slice::from_ref(&good));
    let uses = |count: usize| -> Value {
        (0..count)
            .map(|n| serde_json::json!({"counterSet": format!("s{n}"), "counters": {"c": {"value": "1"}}}))
            .collect()
    };
    let broken: [(&str, Value); 11] = [
        ("/devices/0/name", "GPU".into()),
        ("/devices/0/attributes/a~1b/version", "1.02.3".into()),
        ("/devices/0/attributes/a~1b/version", "1.2".into()),
        ("/devices/0/attributes/a~1b", serde_json::json!({"string": "x".repeat(65)})),
        ("/devices/0/attributes", (0..33).map(|n| (format!("a{n}"), serde_json::json!({"int": 1}))).collect()),
        ("/devices/0/attributes", serde_json::json!({"a-b": {"int": 1}})),
        ("/devices/0/capacity/c/value", "1024Mi".into()),
        ("/pool/resourceSliceCount", 2.into()),
        ("/devices/0/consumesCounters", uses(1)),
        ("/devices/0/consumesCounters", uses(3)),
        ("/devices", (0..129).map(|n| serde_json::json!({"name": format!("gpu-{n}")})).collect()),
    ];
    for (place, value) in broken {
        let mut bad = good.clone();
        match bad.pointer_mut(place) {
            Some(found) => *found = value,
            None => bad["devices"][0]["consumesCounters"] = value,
        }
        let refused = std::panic::catch_unwind(|| check(&[bad.clone()]));
        assert!(refused.is_err(), "{bad}");
    }
}
