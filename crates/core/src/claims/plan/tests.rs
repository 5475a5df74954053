//! Plans of claims on small machines.

use super::*;
use alloc::collections::{BTreeMap, BTreeSet};

use crate::claims::{AllocatedConfig, Allocation, ClaimStatus, DeviceAllocation, MpsOrder, OpaqueConfig, RequestEdits};
use crate::publish::RdmaNodes;
use crate::publish::injection::{CdiOptions, HostDevices, Injection, InjectionOptions};
use crate::state::{Door, Event, Filter, GpuSelector, Holdings, NodeState, NumaHints, PreparedClaim, ResourcePlan};
use crate::topology::{GpuObservation, GpuUuid, NodeObservation};
use core::time::Duration;

mod mps;
mod shares;

const DRIVER: &str = "gpu.nvidia.com";

/// Two GPUs (minors 0 and 1) that are offered through this door.
fn state(door: Door) -> NodeState {
    state_with(door, &serde_json::json!({}))
}

/// The state that `state` makes, with more fields of the first GPU.
fn state_with(door: Door, first: &serde_json::Value) -> NodeState {
    // As in a node file, a missing field is unknown.
    let gpu = |index: u32| -> GpuObservation {
        let (uuid, pci) = (format!("GPU-{index}"), format!("0000:0{}:00.0", index + 1));
        let mut gpu = serde_json::json!({"index": index, "uuid": uuid, "pci": pci, "minor": index});
        let more = first.as_object().unwrap().clone().into_iter().filter(|_| index == 0);
        gpu.as_object_mut().unwrap().extend(more);
        serde_json::from_value(gpu).unwrap()
    };
    let observed = NodeObservation { gpus: vec![gpu(0), gpu(1)], ..NodeObservation::default() };
    let planned = Event::Planned(Box::new(ResourcePlan { door, ..ResourcePlan::default() }));
    // Two lists without a holder move the GPUs to DRA.
    let unheld = || Event::Holders(Some(Holdings::default()));
    let events = [planned, Event::Observed(Box::new(observed)), unheld(), unheld()];
    let nothing = NodeState::new(NumaHints::default());
    events.into_iter().fold(nothing, |state, event| state.apply(event, Duration::ZERO).0)
}

fn options() -> InjectionOptions {
    let cdi = CdiOptions { kind: "v/gpu".to_owned(), annotation_prefix: None, cri: true };
    let mps_root = "/run/nvidia/mps".to_owned();
    // Claims ignore `envvar` and `device_nodes`, strategies of the device plugin.
    InjectionOptions { envvar: true, device_nodes: true, cdi: Some(cdi), mps_root, ..InjectionOptions::default() }
}

fn name(uid: &str) -> ClaimName {
    ClaimName { namespace: "ml".to_owned(), name: format!("claim-{uid}"), uid: uid.to_owned() }
}

/// A claim to which these devices are allocated; each is given as (request, name).
fn claim(uid: &str, devices: &[(&str, &str)]) -> Claim {
    let result = |(request, device): &(&str, &str)| AllocatedDevice {
        request: (*request).to_owned(),
        driver: DRIVER.to_owned(),
        pool: "pool".to_owned(),
        device: (*device).to_owned(),
        ..AllocatedDevice::default()
    };
    let results = devices.iter().map(result).collect();
    let allocation = Allocation { devices: DeviceAllocation { results, config: Vec::new() } };
    Claim { metadata: name(uid), pod_claim_name: None, status: ClaimStatus { allocation: Some(allocation) } }
}

fn configured(mut claim: Claim, configs: &[(&str, &[&str], &str)]) -> Claim {
    let config = |(source, requests, parameters): &(&str, &[&str], &str)| AllocatedConfig {
        source: (*source).to_owned(),
        requests: requests.iter().map(|request| (*request).to_owned()).collect(),
        opaque: Some(OpaqueConfig { driver: DRIVER.to_owned(), parameters: (*parameters).to_owned() }),
    };
    claim.status.allocation.as_mut().unwrap().devices.config = configs.iter().map(config).collect();
    claim
}

fn planned_on(
    state: &NodeState,
    host: &HostDevices,
    claim: &Claim,
    uid: &str,
    others: &[(ClaimName, Prepared)],
) -> Result<Prepared, String> {
    let options = options();
    let entry = |(claim, prepared): &(ClaimName, Prepared)| PreparedClaim {
        claim: claim.clone(),
        prepared: prepared.clone(),
        is_of_another_boot: false,
    };
    // Without `others` the state keeps the claims that it has.
    let entered = (!others.is_empty()).then(|| Event::Prepared(others.iter().map(entry).collect()));
    let state = &entered.into_iter().fold(state.clone(), |state, event| state.apply(event, Duration::ZERO).0);
    let node =
        PlanInputs { pool: "pool", state, injection: &options, host, makes_mig: false, common_shm: &BTreeSet::new() };
    plan(claim, &name(uid), node).map_err(|error| error.to_string())
}

fn planned(claim: &Claim) -> Result<Prepared, String> {
    planned_on(&state(Door::Dra), &HostDevices::default(), claim, &claim.metadata.uid, &[])
}

/// The content of a claim's CDI devices.
fn contents(state: &NodeState, host: &HostDevices, prepared: &Prepared) -> BTreeMap<String, RequestEdits> {
    let options = options();
    containers(
        prepared,
        PlanInputs { pool: "pool", state, injection: &options, host, makes_mig: false, common_shm: &BTreeSet::new() },
    )
    .unwrap()
}

#[test]
fn devices_have_the_cdi_name_of_their_base_request() {
    let prepared = planned(&claim("u", &[("gpus/pair", "gpu-1"), ("gpus/pair", "gpu-0"), ("one", "gpu-0")]));
    assert!(prepared.unwrap_err().contains("shares hardware"));
    let prepared = planned(&claim("u", &[("gpus/pair", "gpu-1"), ("one", "gpu-0")])).unwrap();
    let got: Vec<_> = prepared.devices.iter().map(|device| (&*device.request, &*device.device, &device.cdi)).collect();
    let cdi = |device: &str, request: &str| {
        vec![format!("linkwise.dev/device=u-{request}-{device}"), format!("linkwise.dev/claim=u-{request}")]
    };
    assert_eq!(got, [("gpus", "gpu-1", &cdi("gpu-1", "gpus")), ("one", "gpu-0", &cdi("gpu-0", "one"))]);
    let contents = contents(&state(Door::Dra), &HostDevices::default(), &prepared);
    let of = |request: &str| contents[request].devices.iter().map(|of| (&*of.name, &*of.nodes[0])).collect::<Vec<_>>();
    assert_eq!((of("gpus"), of("one")), (vec![("v/gpu=GPU-1", "/dev/nvidia1")], vec![("v/gpu=GPU-0", "/dev/nvidia0")]));
    assert_eq!(contents["one"].own, Injection::default());
}

#[test]
fn extras_come_once_with_a_request() {
    let rdma = RdmaNodes::default();
    let host = HostDevices { cdi_devices: vec!["v/gds=all".to_owned()], rdma: Some(rdma), ..HostDevices::default() };
    let claim = claim("u", &[("a", "gpu-0"), ("a", "gpu-1")]);
    let prepared = planned_on(&state(Door::Dra), &host, &claim, "u", &[]).unwrap();
    let contents = contents(&state(Door::Dra), &host, &prepared);
    let names: Vec<_> = contents["a"].devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["v/gpu=GPU-0", "v/gpu=GPU-1", "v/gds=all"]);
    assert_eq!(contents["a"].own.env.keys().collect::<Vec<_>>(), ["LINKWISE_NICS"]);
}

#[test]
fn claim_keeps_cdi_names_of_the_gpus_that_it_has() {
    let with = |names: &[&str]| {
        let mut prepared = planned(&claim("u", &[("a", "gpu-0")])).unwrap();
        prepared.devices[0].cdi = names.iter().map(|name| (*name).to_owned()).collect();
        prepared
    };
    let own = "linkwise.dev/claim=u-a";
    let kept = |before: &[&str]| {
        let mut prepared = with(&[own]);
        prepared.keep_names(&with(before), "v/gpu").map(|()| prepared.devices[0].cdi.clone())
    };
    assert_eq!(kept(&[own]).unwrap(), [own]);
    assert_eq!(kept(&["v/gpu=GPU-0", "v/gds=all", own]).unwrap(), [own, "v/gpu=GPU-0", "v/gds=all"]);
    assert_eq!(kept(&["v/gpu=GPU-0", "v/gpu=GPU-1"]).unwrap_err(), ["v/gpu=GPU-1"]);
}

#[test]
fn claim_unfit_for_the_node_is_refused_by_name() {
    let good = || claim("u", &[("a", "gpu-0")]);
    let mut unallocated = good();
    unallocated.status.allocation = None;
    let mut foreign = good();
    foreign.status.allocation.as_mut().unwrap().devices.results[0].driver = "dra.net".to_owned();
    let mut elsewhere = good();
    elsewhere.status.allocation.as_mut().unwrap().devices.results[0].pool = "other".to_owned();
    for (claim, complaint) in [
        (unallocated, "the claim ml/claim-u has no allocation"),
        (foreign, "the claim ml/claim-u has no device of the driver gpu.nvidia.com"),
        (elsewhere, "device 'gpu-0' belongs to the pool 'other', not to this node's 'pool'"),
        (claim("u", &[("a", "gpu-9")]), "there is no device 'gpu-9' on this node; there are gpu-0, gpu-1"),
    ] {
        assert_eq!(planned(&claim).unwrap_err(), complaint);
    }
    let of = |claim: &Claim| planned_on(&state(Door::Dra), &HostDevices::default(), claim, "u", &[]).unwrap_err();
    let mut recreated = good();
    recreated.metadata.uid = "v".to_owned();
    assert_eq!(of(&recreated), "the claim ml/claim-u has the UID 'v', not 'u'");
    assert_eq!(of(&claim("w", &[])), "the API server answered with the claim 'ml/claim-w', not 'ml/claim-u'");
}

#[test]
fn claim_beyond_the_apis_limits_is_refused() {
    let of_admin = |count: usize| {
        let mut claim = claim("u", &vec![("a", "gpu-0"); count]);
        let results = &mut claim.status.allocation.as_mut().unwrap().devices.results;
        results.iter_mut().for_each(|result| result.admin_access = Some(true));
        claim
    };
    assert_eq!(planned(&of_admin(32)).unwrap().devices.len(), 32);
    assert_eq!(planned(&of_admin(33)).unwrap_err(), "the claim ml/claim-u has 33 devices; the API's limit is 32");
    let gpu = r#"{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}"#;
    let with = |count: usize| planned(&configured(of_admin(1), &vec![("FromClass", [].as_slice(), gpu); count]));
    assert!(with(64).is_ok());
    assert_eq!(with(65).unwrap_err(), "the claim ml/claim-u has 65 configurations; the API's limit is 64");
}

#[test]
fn gpu_held_outside_the_pool_is_refused() {
    let plugin = (crate::state::ResourceName::gpu(), crate::allocation::DeviceId::from("GPU-0".to_owned()));
    let claimed = |pool: &str| crate::state::ClaimedDevice {
        claim: "ml/old".to_owned(),
        driver: DRIVER.to_owned(),
        pool: pool.to_owned(),
        device: "gpu-0".to_owned(),
        cdi_names: Vec::new(),
    };
    let of_claim = |pool| Holdings { claims: [claimed(pool)].into(), ..Holdings::default() };
    let result = |holdings: Holdings, claim: &Claim| {
        let state = state(Door::Dra).apply(Event::Holders(Some(holdings)), Duration::ZERO).0;
        planned_on(&state, &HostDevices::default(), claim, "u", &[]).map(drop)
    };
    let mut of_admin = claim("u", &[("a", "gpu-0")]);
    let plain = of_admin.clone();
    of_admin.status.allocation.as_mut().unwrap().devices.results[0].admin_access = Some(true);
    let held = |holder: &str| Err(format!("device gpu-0 (GPU-0) is held by {holder}"));
    for (holdings, expected) in [
        (Holdings::from_iter([plugin]), held("a pod, as nvidia.com/gpu 'GPU-0'")),
        (of_claim("node"), held("the claim ml/old, from the pool 'node'")),
        // A claim of our own pool may have ended after the list.
        (of_claim("pool"), Ok(())),
    ] {
        assert_eq!(result(holdings.clone(), &plain), expected);
        assert_eq!(result(holdings, &of_admin), Ok(()), "an administrator gets a held GPU too");
    }
}

#[test]
fn gpu_of_other_door_is_planned_for_its_claim_alone() {
    let gpu = |state: &NodeState, uid: &str| {
        planned_on(state, &HostDevices::default(), &claim(uid, &[("a", "gpu-0")]), uid, &[]).map(drop)
    };
    let apply = |state: NodeState, event: Event| state.apply(event, Duration::ZERO).0;
    let devices = vec![PreparedDevice::whole("gpu-0", "GPU-0".parse().unwrap())];
    let own = Prepared { devices, ..Prepared::default() };
    let own = PreparedClaim { claim: name("u"), prepared: own, ..PreparedClaim::default() };
    let off = apply(state(Door::Plugin), Event::Prepared(vec![own]));
    assert_eq!(gpu(&off, "u"), Ok(()), "the ledger has the GPU for this claim");
    let complaint = "device gpu-0 (GPU-0) belongs to the device plugin: ";
    assert!(gpu(&off, "late").unwrap_err().starts_with(complaint));
    let held = [(crate::state::ResourceName::gpu(), crate::allocation::DeviceId::from("GPU-0".to_owned()))];
    let held = Event::Holders(Some(held.into_iter().collect()));
    let on = Event::Planned(Box::new(ResourcePlan { door: Door::Dra, ..ResourcePlan::default() }));
    let moving = [held.clone(), on, held].into_iter().fold(state(Door::Plugin), apply);
    let complaint = "device gpu-0 (GPU-0) is held by a pod, as nvidia.com/gpu 'GPU-0'";
    assert_eq!(gpu(&moving, "u"), Err(complaint.to_owned()));
    let moving = apply(moving, Event::Holders(Some(Holdings::default())));
    assert!(gpu(&moving, "u").unwrap_err().ends_with("two of the kubelet's lists in a row must show no holder"));
    assert_eq!(gpu(&apply(moving, Event::Holders(Some(Holdings::default()))), "u"), Ok(()));
    let filter = Filter { exclude: vec![GpuSelector::Index(0)], ..Filter::default() };
    let filtered = Event::Planned(Box::new(ResourcePlan { filter, door: Door::Dra, ..ResourcePlan::default() }));
    let complaint = "is not offered on this node: a filter leaves it out";
    assert!(gpu(&apply(state(Door::Dra), filtered), "u").unwrap_err().ends_with(complaint));
}

#[test]
fn only_an_administrator_gets_another_claims_gpu() {
    let mut claim = claim("u", &[("a", "gpu-0")]);
    let other = [(name("other"), planned(&claim).unwrap())];
    let plan = |claim: &Claim| planned_on(&state(Door::Dra), &HostDevices::default(), claim, "u", &other);
    let complaint = "device gpu-0 (GPU-0) is prepared for the claim ml/claim-other (UID other)";
    assert_eq!(plan(&claim).unwrap_err(), complaint);
    claim.status.allocation.as_mut().unwrap().devices.results[0].admin_access = Some(true);
    assert!(plan(&claim).unwrap().devices[0].admin);
    let itself = [(name("u"), other[0].1.clone())];
    assert!(planned_on(&state(Door::Dra), &HostDevices::default(), &claim, "u", &itself).is_ok());
}

#[test]
fn whole_gpu_and_its_part_overlap() {
    let device = |mig: Option<&str>| PreparedDevice {
        mig: mig.map(|mig| mig.parse().unwrap()),
        ..PreparedDevice::whole("x", "GPU-0".parse().unwrap())
    };
    let (whole, one, other) = (device(None), device(Some("MIG-1")), device(Some("MIG-2")));
    assert!(whole.overlaps(&one) && one.overlaps(&whole) && one.overlaps(&one) && !one.overlaps(&other));
    // A MIG device that was destroyed before it was ready, because the process was killed, takes no place.
    let gone = |device: &str| PreparedDevice { device: device.to_owned(), mig: None, ..one.clone() };
    let (gone_one, gone_other) = (gone("gpu-0-mig-2g20gb-14-2"), gone("gpu-0-mig-2g20gb-14-4"));
    assert!(!gone_one.overlaps(&gone_other) && !one.overlaps(&gone_other) && !gone_one.overlaps(&whole));
}

#[test]
fn mig_devices_of_a_gpu_are_prepared_apart() {
    let device = |number: u32| {
        serde_json::json!({"index": number, "uuid": format!("MIG-{number}"), "gpu_instance": 7 + number,
            "compute_instance": 0, "gpu_slices": 1, "compute_slices": 1, "memory_mib": 9728, "profile_id": 19,
            "placement": {"start": number, "size": 1}, "capabilities": {"gpu_instance": 1, "compute_instance": 2}})
    };
    let mig = serde_json::json!({"memory_mib": 81920, "mig": {"enabled": true, "devices": [device(0), device(1)]}});
    let state = state_with(Door::Dra, &mig);
    let plan = |claim: &Claim, uid: &str, others: &[(ClaimName, Prepared)]| {
        planned_on(&state, &HostDevices::default(), claim, uid, others)
    };
    let complaint =
        "there is no device 'gpu-0' on this node; there are gpu-0-mig-1g10gb-19-0, gpu-0-mig-1g10gb-19-1, gpu-1";
    assert_eq!(plan(&claim("u", &[("a", "gpu-0")]), "u", &[]).unwrap_err(), complaint);
    let one = claim("u", &[("a", "gpu-0-mig-1g10gb-19-0")]);
    let first = plan(&one, "u", &[]).unwrap();
    let contents = contents(&state, &HostDevices::default(), &first);
    assert_eq!(contents["a"].devices[0].name, "v/gpu=MIG-0");
    assert_eq!(
        contents["a"].devices[0].nodes,
        ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    );
    let others = [(name("u"), first)];
    assert!(plan(&claim("v", &[("a", "gpu-0-mig-1g10gb-19-1")]), "v", &others).is_ok());
    assert!(plan(&claim("v", &[("a", "gpu-0-mig-1g10gb-19-0")]), "v", &others).unwrap_err().contains("(UID u)"));
    let object = |kind: &str| format!(r#"{{"apiVersion":"resource.nvidia.com/v1beta1","kind":"{kind}"}}"#);
    let config =
        |kind: &str| plan(&configured(one.clone(), &[("FromClaim", &["a"], &object(kind))]), "u", &[]).map(drop);
    assert_eq!(config("MigDeviceConfig"), Ok(()));
    let mps = object("MigDeviceConfig").replace('}', r#","sharing":{"strategy":"MPS"}}"#);
    let why = plan(&configured(one.clone(), &[("FromClass", &[], &mps)]), "u", &[]).unwrap_err();
    assert!(why.contains("linkwise runs MPS control daemons for whole GPUs, not for MIG devices"), "{why}");
    assert!(config("GpuConfig").unwrap_err().contains("whose device gpu-0-mig-1g10gb-19-0 is of another kind"));
}

#[test]
fn lost_gpu_is_refused_and_one_with_xid_is_not() {
    let claim = claim("u", &[("a", "gpu-0")]);
    let gpu: GpuUuid = "GPU-0".parse().unwrap();
    let plan = |event: Event| {
        let (state, _) = state(Door::Dra).apply(event, Duration::ZERO);
        planned_on(&state, &HostDevices::default(), &claim, "u", &[]).map(drop)
    };
    assert_eq!(plan(Event::Xid { gpu: gpu.clone(), code: 48, instance: None }), Ok(()));
    let reach = crate::state::Reach::Lost { call: "nvmlDeviceGetUUID".to_owned() };
    let poll = crate::state::HealthPoll { reach, ..crate::state::HealthPoll::default() };
    let healthy = crate::state::HealthPoll::default();
    let complaint = "device gpu-0 (GPU-0) is lost: nvmlDeviceGetUUID says that the GPU is lost";
    let polls = [(gpu, poll), ("GPU-1".parse().unwrap(), healthy)].into();
    assert_eq!(plan(Event::Polled(polls)).unwrap_err(), complaint);
}

#[test]
fn opaque_settings_are_accepted_or_refused_by_name() {
    let gpu = |fields: &str| format!(r#"{{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"{fields}}}"#);
    let mig =
        |fields: &str| format!(r#"{{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"{fields}}}"#);
    let slices = |interval: &str| {
        gpu(&format!(r#","sharing":{{"strategy":"TimeSlicing","timeSlicingConfig":{{"interval":"{interval}"}}}}"#))
    };
    let one = claim("u", &[("a/b", "gpu-0")]);
    let with = |configs: &[(&str, &[&str], &str)]| planned(&configured(one.clone(), configs)).map(drop);
    let class = |parameters: &str| with(&[("FromClass", &[], parameters)]);
    for good in [gpu(""), slices("Default"), gpu(r#","sharing":null"#), gpu(r#","sharing":{"strategy":"TimeSlicing"}"#)]
    {
        assert_eq!(class(&good), Ok(()), "{good}");
    }
    for (bad, complaint) in [
        (String::new(), "opaque parameters: EOF"),
        ("[]".to_owned(), "opaque parameters: not a JSON object"),
        (
            gpu("").replace("v1beta1", "v1"),
            "apiVersion 'resource.nvidia.com/v1' is not supported; use resource.nvidia.",
        ),
        (gpu("").replace("Gpu", "Vfio"), "kind 'VfioConfig' is not supported; use GpuConfig or MigDeviceConfig"),
        (gpu(r#","shring":{}"#), "GpuConfig: unknown field `shring`, expected `sharing`"),
        (gpu(r#","sharing":{"strategy":"Random"}"#), "unknown variant `Random`, expected `TimeSlicing` or `MPS`"),
        (slices("Huge"), "unknown interval 'Huge', expected one of Default, Short, Medium, Long"),
        (slices("Long"), "GpuConfig: sharing.timeSlicingConfig.interval Long is not supported: linkwise leaves"),
        (gpu(r#","sharing":{"strategy":"MPS","mpsConfig":{"threads":5}}"#), "GpuConfig: unknown field `threads`"),
        (gpu(r#","sharing":{"strategy":"TimeSlicing","mpsConfig":{}}"#), "mpsConfig is given with the strategy"),
        (mig(r#","sharing":{"strategy":"MPS","timeSlicingConfig":{}}"#), "unknown field `timeSlicingConfig`"),
    ] {
        let error = class(&bad).unwrap_err();
        assert!(error.contains(complaint), "{bad}: {error}");
    }
    // The claim's configuration overrides its class's in any order of the list. Of one source, the later one counts.
    assert_eq!(with(&[("FromClaim", &["a"], &gpu("")), ("FromClass", &[], &slices("Long"))]), Ok(()));
    assert_eq!(with(&[("FromClaim", &["a"], &slices("Long")), ("FromClaim", &["a/b"], &gpu(""))]), Ok(()));
    assert!(with(&[("FromClaim", &["a/b"], &gpu("")), ("FromClaim", &["a"], &slices("Long"))]).is_err());
    // A configuration for another driver or request does not apply to this device, nor one for another kind of device
    // unless it names the request.
    assert_eq!(with(&[("FromClaim", &["c"], &slices("Long")), ("FromClass", &[], &mig(""))]), Ok(()));
    let other = with(&[("FromClaim", &["a"], &mig(""))]).unwrap_err();
    assert_eq!(other, "MigDeviceConfig is given for the request 'a/b', whose device gpu-0 is of another kind");
    let mut claim = configured(one.clone(), &[("FromClaim", &[], "nonsense")]);
    let config = &mut claim.status.allocation.as_mut().unwrap().devices.config[0];
    config.opaque.as_mut().unwrap().driver = "dra.net".to_owned();
    assert!(planned(&claim).is_ok());
    // The kind of device is checked before the sharing.
    let mps = mig(r#","sharing":{"strategy":"MPS"}"#);
    let error = with(&[("FromClaim", &["a"], &mps)]).unwrap_err();
    assert!(error.contains("is given for the request 'a/b'"), "{error}");
    assert!(with(&[("FromMoon", &[], &gpu(""))]).unwrap_err().contains("from 'FromMoon' is not supported"));
}
