//! The choice of devices and nodes: counts, alternatives, constraints, taints, counters, extended resources.

use serde_json::{Value, json};

use crate::support::{DRIVER, allocate, claim, cluster, count, devices, plain, results, slice, with};
use linkwise_scheduler_box::{Cluster, Failure};

fn in_group(name: &str, group: &str) -> Value {
    json!({"name": name, "attributes": {"example.com/group": {"string": group}}})
}

/// A claim for this number of devices of class `all` in the same group.
fn grouped(count: usize) -> Value {
    claim(
        json!([{"name": "r", "exactly": {"deviceClassName": "all", "count": count}}]),
        json!([{"matchAttribute": "example.com/group"}]),
    )
}

/// allocator_incubating.go, allocateOne: the first combination that fits wins. Group a has only one device, so that the
/// devices of group b are the first pair.
#[test]
fn first_combination_that_fits_is_taken() {
    let one = slice("a", json!([in_group("a0", "a"), in_group("b0", "b"), in_group("c0", "c"), in_group("b1", "b")]));
    assert_eq!(devices(std::slice::from_ref(&one), &grouped(2)).unwrap(), ["b0", "b1"]);
    let why = devices(&[one], &grouped(3)).unwrap_err();
    assert!(why.contains("constrained by matchAttribute example.com/group"), "{why}");
}

/// matchAttributeConstraint.add: a device without the attribute never matches, not even alone. Values of different
/// types never match: the int 1 is not the string "1".
#[test]
fn missing_or_mistyped_attribute_never_matches() {
    devices(&[slice("a", plain(["a", "b"]))], &grouped(1)).unwrap_err();
    let mixed = json!([{"name": "a", "attributes": {"example.com/group": {"int": 1}}}, in_group("b", "1")]);
    devices(&[slice("a", mixed)], &grouped(2)).unwrap_err();
}

/// lookupAttribute: an attribute without a domain is in the driver's domain.
#[test]
fn attribute_without_domain_is_in_the_drivers_domain() {
    let device = |name: &str| json!({"name": name, "attributes": {"group": {"int": 1}}});
    let slices = [slice("a", json!([device("a"), device("b")]))];
    let request = json!([{"name": "r", "exactly": {"deviceClassName": "all", "count": 2}}]);
    let by = |attribute: &str| claim(request.clone(), json!([{"matchAttribute": attribute}]));
    devices(&slices, &by(&format!("{DRIVER}/group"))).unwrap();
    devices(&slices, &by("other.example.com/group")).unwrap_err();
}

/// types.go, DeviceConstraint: a constraint that names requests applies only to these, and their devices must agree
/// even across drivers. The first GPU has no NIC in its group, so that the search goes on to the second GPU.
#[test]
fn constraint_aligns_two_requests() {
    let gpus = slice("a", json!([in_group("gpu-0", "a"), in_group("gpu-1", "b")]));
    let nics = with(slice("b", json!([in_group("nic-1", "b")])), "/driver", json!("net.example.com"));
    let requests = json!([
        {"name": "gpu", "exactly": {"deviceClassName": "gpu"}},
        {"name": "nic", "exactly": {"deviceClassName": "all",
            "selectors": [{"cel": {"expression": "device.driver == 'net.example.com'"}}]}},
    ]);
    let aligned = claim(requests.clone(), json!([{"requests": ["gpu", "nic"], "matchAttribute": "example.com/group"}]));
    let slices = [gpus, nics];
    assert_eq!(results(&allocate(&slices, &aligned).unwrap(), 0), ["gpu gpu-1", "nic nic-1"]);
    let unaligned = claim(requests, json!([{"requests": ["gpu"], "matchAttribute": "example.com/group"}]));
    assert_eq!(results(&allocate(&slices, &unaligned).unwrap(), 0), ["gpu gpu-0", "nic nic-1"]);
}

/// A claim for two devices with the alternatives `best` (both in one group), `next` and `any`.
fn alternatives() -> Value {
    let pair = |name: &str| json!({"name": name, "deviceClassName": "all", "count": 2});
    claim(
        json!([{"name": "r", "firstAvailable": [pair("best"), pair("next"), pair("any")]}]),
        json!([{"requests": ["r/best"], "matchAttribute": "example.com/group"}]),
    )
}

/// types.go, DeviceSubRequest: the first alternative that can be allocated wins, and its results name
/// `<request>/<subrequest>`. A constraint that names an alternative applies only to that alternative.
#[test]
fn first_alternative_that_fits_is_taken() {
    let together = slice("a", json!([in_group("a0", "a"), in_group("b0", "b"), in_group("a1", "a")]));
    let placement = allocate(&[together], &alternatives()).unwrap();
    assert_eq!((results(&placement, 0), placement.score), (vec!["r/best a0".to_owned(), "r/best a1".to_owned()], 8));
    let apart = slice("a", json!([in_group("a0", "a"), in_group("b0", "b")]));
    let placement = allocate(&[apart], &alternatives()).unwrap();
    assert_eq!((results(&placement, 0), placement.score), (vec!["r/next a0".to_owned(), "r/next b0".to_owned()], 7));
}

#[test]
fn constraint_on_a_request_applies_to_all_alternatives() {
    let mut claim = alternatives();
    claim["spec"]["devices"]["constraints"][0]["requests"] = json!(["r"]);
    let apart = slice("a", json!([in_group("a0", "a"), in_group("b0", "b")]));
    devices(&[apart], &claim).unwrap_err();
}

/// If the first alternative leaves too few devices for a later request, the search takes the next alternative.
#[test]
fn alternative_that_starves_a_later_request_is_skipped() {
    let requests = json!([
        {"name": "a", "firstAvailable": [
            {"name": "two", "deviceClassName": "all", "count": 2}, {"name": "one", "deviceClassName": "all"},
        ]},
        {"name": "b", "exactly": {"deviceClassName": "all"}},
    ]);
    let placement = allocate(&[slice("a", plain(["x", "y"]))], &claim(requests, json!([]))).unwrap();
    assert_eq!(results(&placement, 0), ["a/one x", "b y"]);
}

/// dynamicresources.go:1073-1145, computeScore: a node's score is 8 minus the index of the alternative, and the best
/// score wins. Node a has no pair in one group. Among equal nodes the model takes the first by name.
#[test]
fn node_with_the_better_alternative_wins() {
    let on = |node: &str, devices: Value| {
        let slice = with(slice(&format!("s-{node}"), devices), "/nodeName", json!(node));
        with(slice, "/pool/name", json!(node))
    };
    let apart = || json!([in_group("a0", "a"), in_group("b0", "b")]);
    let together = || json!([in_group("a0", "a"), in_group("a1", "a")]);
    let cluster = cluster(&[on("a", apart()), on("b", together()), on("c", together())]);
    let placement = cluster.schedule(&["c", "b", "a"], &[alternatives()]).unwrap();
    assert_eq!((placement.node.as_str(), placement.score), ("b", 8));
    let placement = cluster.schedule(&["a", "b"], &[count(2)]).unwrap();
    assert_eq!((placement.node.as_str(), placement.score), ("a", 0));
    let Err(Failure::Refused(why)) = cluster.schedule(&["a", "b"], &[count(3)]) else { panic!("a node gave three") };
    assert_eq!(why.iter().map(|why| why.node.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

/// Taints with the effect None or an unknown effect only inform.
#[test]
fn tainted_device_is_not_allocated() {
    let tainted = |effect: &str| {
        let taint = json!({"key": "gpu.example.com/xid", "value": "79", "effect": effect});
        [slice("a", json!([{"name": "sick", "taints": [taint]}]))]
    };
    for (effect, is_allocated) in [("NoSchedule", false), ("NoExecute", false), ("None", true), ("NoWhatever", true)] {
        assert_eq!(devices(&tainted(effect), &count(1)).is_ok(), is_allocated, "{effect}");
    }
    let why = devices(&tainted("NoSchedule"), &count(1)).unwrap_err();
    assert!(why.contains("1 tainted"), "{why}");
}

/// Single GPUs and sets of GPUs consume the same counters (KEP-4815). An allocated device and a device chosen in this
/// attempt both leave less for the others. If the search undoes a choice, it gives the counters back.
#[test]
fn counters_keep_overlapping_devices_apart() {
    let counters =
        |gpus: &[usize]| -> Value { gpus.iter().map(|gpu| (format!("gpu-{gpu}"), json!({"value": "1"}))).collect() };
    let device = |name: &str, gpus: &[usize]| {
        let consumed = json!([{"counterSet": "gpus", "counters": counters(gpus)}]);
        json!({"name": name, "consumesCounters": consumed})
    };
    let devices = json!([device("pair", &[0, 1]), device("gpu-0", &[0]), device("gpu-1", &[1]), device("gpu-2", &[2])]);
    let one = with(slice("a", devices), "/pool/resourceSliceCount", json!(2));
    let mut two = with(slice("b", json!([])), "/pool/resourceSliceCount", json!(2));
    two["spec"]["sharedCounters"] = json!([{"name": "gpus", "counters": counters(&[0, 1, 2])}]);
    let slices = [one, two];
    // The pair consumes the counters of gpu-0 and gpu-1, so that only gpu-2 fits beside it.
    assert_eq!(crate::support::devices(&slices, &count(2)).unwrap(), ["pair", "gpu-2"]);
    assert_eq!(crate::support::devices(&slices, &count(3)).unwrap(), ["gpu-0", "gpu-1", "gpu-2"]);
    let mut cluster = cluster(&slices);
    let pair = cluster.allocate("n", &[count(1)]).unwrap();
    cluster.occupy(&pair.allocations[0]).unwrap();
    assert_eq!(results(&cluster.allocate("n", &[count(1)]).unwrap(), 0), ["r gpu-2"]);
    assert!(cluster.allocate("n", &[count(2)]).is_err());
}

/// The claims of a pod are allocated together, all of them or none.
#[test]
fn claims_of_a_pod_share_no_device() {
    let cluster = cluster(&[slice("a", plain(["x", "y", "z"]))]);
    let placement = cluster.allocate("n", &[count(1), count(2)]).unwrap();
    assert_eq!(
        (results(&placement, 0), results(&placement, 1)),
        (vec!["r x".into()], vec!["r y".into(), "r z".into()])
    );
    assert!(cluster.allocate("n", &[count(2), count(2)]).is_err());
}

/// extendeddynamicresources.go: the claim has a request `container-<i>-request-<j>` for each resource with a class in
/// each container. types.go, DeviceClassSpec.extendedResourceName: the class that was created last wins, then the
/// first by name. The claim has no constraints, so that it gets the first devices in published order.
#[test]
fn extended_resource_gets_the_first_devices() {
    let class = |name: &str, created: &str| {
        let metadata = json!({"name": name, "creationTimestamp": created});
        json!({"metadata": metadata, "spec": {"extendedResourceName": "example.com/gpu"}})
    };
    let classes =
        [class("old", "2026-01-01T00:00:00Z"), class("b", "2026-01-02T00:00:00Z"), class("a", "2026-01-02T00:00:00Z")];
    let cluster = Cluster::new(&[slice("s", plain(["x", "y", "z"]))], &classes, &[]).unwrap();
    let containers = [vec![("cpu.example.com/x", 1), ("example.com/gpu", 2)], vec![("example.com/gpu", 1)]];
    let claim = cluster.extended_claim("default", "p", &containers).unwrap();
    let requests = claim["spec"]["devices"]["requests"].as_array().unwrap();
    let class_of = |index: usize| requests[index]["exactly"]["deviceClassName"].as_str().unwrap();
    assert_eq!((class_of(0), class_of(1)), ("a", "a"));
    let placement = cluster.allocate("n", std::slice::from_ref(&claim)).unwrap();
    assert_eq!(
        results(&placement, 0),
        ["container-0-request-1 x", "container-0-request-1 y", "container-1-request-0 z"]
    );
    assert_eq!(cluster.extended_claim("default", "p", &[vec![("cpu.example.com/x", 1)]]), None);
}
