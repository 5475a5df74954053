//! The published devices of small machines. tests/dra has those of real machines, and the API's limits.

use super::*;
use crate::allocation::{AllocationTables, GpuSet};
use crate::state::{
    Cordon, Door, Event, Filter, GpuSelector, GpuShares, GpuSharing, NodeState, ResourcePlan, UnhealthyReason,
};
use crate::topology::{GpuObservation, NodeObservation, NodeTopology};
use alloc::sync::Arc;

/// Four V100, each connected with the next by one NVLink.
fn chain() -> NodeObservation {
    let gpu = |number: u32| {
        let links: Vec<String> = [number.checked_sub(1), Some(number + 1).filter(|next| *next < 4)]
            .into_iter()
            .enumerate()
            .filter_map(|(link, other)| {
                Some(format!("{{\"links\": [{link}], \"remote\": {{\"gpu\": \"0000:0{}:00.0\"}}}}", other?))
            })
            .collect();
        format!(
            "{{\"index\": {number}, \"uuid\": \"GPU-{number}\", \"pci\": \"0000:0{number}:00.0\", \"minor\": {number}, \
             \"compute_capability\": \"7.0\", \"nvlinks\": [{}]}}",
            links.join(", ")
        )
    };
    node(&(0..4).map(gpu).collect::<Vec<_>>().join(", "))
}

fn node(gpus: &str) -> NodeObservation {
    let gpus: Vec<GpuObservation> = serde_json::from_str(&format!("[{gpus}]")).unwrap();
    NodeObservation { gpus, driver_version: Some("580.95.05".to_owned()), ..NodeObservation::default() }
}

fn graph(observed: &NodeObservation) -> NodeTopology {
    NodeTopology::assemble(observed).0
}

fn published(observed: &NodeObservation, plan: &ResourcePlan) -> (Vec<SliceDevice>, Vec<DraProblem>) {
    let state = NodeState::of_machine(observed.clone(), plan.clone());
    let layout = GpuLayout::of(state.tables(), offered_now(&state));
    devices(&DraFacts::of_state(&state, &layout, DraSettings::default()))
}

fn all_through_dra() -> ResourcePlan {
    ResourcePlan { door: Door::Dra, ..ResourcePlan::default() }
}

fn text(device: &SliceDevice, key: &str) -> Option<String> {
    match device.attributes.get(key) {
        Some(Attribute::String(text) | Attribute::Version(text)) => Some(text.clone()),
        Some(Attribute::Int(number)) => Some(number.to_string()),
        None => None,
    }
}

#[test]
fn unknown_facts_but_addressing_mode_are_left_out() {
    let observed = node("{\"index\": 0, \"uuid\": \"GPU-0\", \"pci\": \"10000:01:00.0\"}");
    let (devices, problems) = published(&observed, &all_through_dra());
    assert_eq!((devices.len(), problems.len(), devices[0].name.as_str()), (1, 0, "gpu-pci-10000-01-00-0"));
    let keys: Vec<&str> = devices[0].attributes.keys().map(String::as_str).collect();
    assert_eq!(keys, ["addressingMode", "driverVersion", "linkwise.dev/order", "type", "uuid"]);
    assert!(devices[0].capacity.is_empty());
}

#[test]
fn value_that_does_not_fit_is_left_out_and_named() {
    let model = "x".repeat(65);
    let observed = node(&format!(
        "{{\"index\": 0, \"uuid\": \"GPU-0\", \"pci\": \"0000:01:00.0\", \"minor\": 3, \"model\": \"{model}\"}}"
    ));
    let (devices, problems) = published(&observed, &all_through_dra());
    assert_eq!(text(&devices[0], "productName"), None);
    let [problem] = problems.as_slice() else { panic!("{problems:?}") };
    assert!(problem.to_string().starts_with("attribute productName of gpu-3 left out: "), "{problem}");
}

#[test]
fn device_without_a_name_of_its_own_is_reported() {
    let gpu = |uuid: &str| format!("{{\"index\": 0, \"uuid\": \"{uuid}\", \"pci\": \"0000:01:00.0\"}}");
    let (devices, problems) = published(&node(&[gpu("GPU-0"), gpu("GPU-1")].join(", ")), &all_through_dra());
    assert_eq!(devices.len(), 1);
    assert_eq!(problems, [DraProblem::NoName("GPU-1".to_owned())]);
}

#[test]
fn cordon_is_a_taint_beside_those_of_health() {
    let uuid = || "GPU-1".parse().unwrap();
    let cordon = |evict| Cordon { by: "ada".to_owned(), why: "a hot cable".to_owned(), evict };
    let taints = |events: Vec<Event>| -> Vec<String> {
        let state = events.into_iter().fold(NodeState::of_machine(chain(), all_through_dra()), |state, event| {
            state.apply(event, core::time::Duration::from_secs(1)).0
        });
        let layout = GpuLayout::of(state.tables(), offered_now(&state));
        let devices = devices(&DraFacts::of_state(&state, &layout, DraSettings::default())).0;
        let tainted = devices.iter().flat_map(|device| device.taints.iter().map(move |taint| (device, taint)));
        tainted.map(|(device, Taint { key, effect, .. })| format!("{} {key} {effect:?}", device.name)).collect()
    };
    let key = "gpu-1 linkwise.dev/cordoned";
    assert_eq!(taints(vec![Event::Cordoned(uuid(), Some(cordon(false)))]), [format!("{key} NoSchedule")]);
    let sick = Event::Xid { gpu: uuid(), code: 79, instance: None };
    let both = taints(vec![sick, Event::Cordoned(uuid(), Some(cordon(true)))]);
    assert_eq!(both, ["gpu-1 gpu.nvidia.com/xid NoSchedule".to_owned(), format!("{key} NoExecute")]);
    let over = vec![Event::Cordoned(uuid(), Some(cordon(true))), Event::Cordoned(uuid(), None)];
    assert_eq!(taints(over), Vec::<String>::new());
}

#[test]
fn nvlink_domains_are_of_published_gpus_alone() {
    let observed = chain();
    let domains = |gpus: &[u32]| -> Vec<Option<String>> {
        let exclude = (0..4).filter(|index| !gpus.contains(index)).map(GpuSelector::Index).collect();
        let plan = ResourcePlan { filter: Filter { exclude, ..Filter::default() }, ..all_through_dra() };
        let mut devices = published(&observed, &plan).0;
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        devices.iter().map(|device| text(device, "linkwise.dev/nvlinkDomain")).collect()
    };
    let first = || Some("0000:00:00.0".to_owned());
    assert_eq!(domains(&[0, 1, 2, 3]), [first(), first(), first(), first()]);
    assert_eq!(domains(&[0, 1, 3]), [first(), first(), None], "GPU 3 was connected through GPU 2");
}

/// The families of a machine's GPUs, and their groups as bits.
fn families(observed: &NodeObservation, sizes: &[usize]) -> Vec<(String, Vec<u64>)> {
    let gpus = (0..observed.gpus.len()).collect();
    let layout = GpuLayout::of(&AllocationTables::new(Arc::new(graph(observed))), gpus);
    let bits = |family: &Family| family.groups.iter().map(|group| group.gpus.0).collect();
    let meant = layout.families.iter().filter(|family| sizes.contains(&family.size));
    meant.map(|family| (family.name.clone(), bits(family))).collect()
}

#[test]
fn tiers_are_split_into_families_of_disjoint_groups() {
    let pairs = [("pair1a", Vec::from([0b0011, 0b1100])), ("pair1b", Vec::from([0b0110]))];
    let expected: Vec<_> = pairs.into_iter().map(|(name, groups)| (name.to_owned(), groups)).collect();
    assert_eq!(families(&chain(), &[2]), expected, "the other pairs are the last tier, which has no family");
}

#[test]
fn gpus_that_are_alike_are_one_group() {
    let gpu = |n: u32| format!("{{\"index\": {n}, \"uuid\": \"GPU-{n}\", \"pci\": \"0000:0{n}:00.0\"}}");
    let alike = || node(&(0..5).map(gpu).collect::<Vec<_>>().join(", "));
    let one = |name: &str| (name.to_owned(), Vec::from([0b11111]));
    assert_eq!(families(&alike(), &[2, 4]), [one("pair1a"), one("quad1a")]);
    assert_eq!(families(&alike(), &[8]), [], "the node has fewer than eight GPUs");
}

#[test]
fn sick_gpu_takes_its_sets_out_of_the_groups() {
    let state = NodeState::of_machine(chain(), all_through_dra());
    let layout = GpuLayout::of(state.tables(), offered_now(&state));
    let mut facts = DraFacts::of_state(&state, &layout, DraSettings::default());
    let groups = |facts: &DraFacts<'_>, attribute: &str| -> Vec<Option<String>> {
        let mut devices = devices(facts).0;
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        devices.iter().map(|device| text(device, &format!("linkwise.dev/{attribute}"))).collect()
    };
    let (first, third) = (Some("0000:00:00.0".to_owned()), Some("0000:02:00.0".to_owned()));
    assert_eq!(groups(&facts, "pair1a"), [first.clone(), first, third.clone(), third.clone()]);
    facts.devices.iter_mut().find(|device| device.place == Some(0)).unwrap().reasons =
        Vec::from([UnhealthyReason::DoubleBitEcc]);
    assert_eq!(groups(&facts, "pair1a"), [None, None, third.clone(), third]);
    assert_eq!(groups(&facts, "quad1a"), [None, None, None, None], "three healthy GPUs are no quad");
}

#[test]
fn sick_shared_gpu_is_left_out_without_taints() {
    let state = NodeState::of_machine(chain(), all_through_dra());
    let layout = GpuLayout::of(state.tables(), offered_now(&state));
    let mut facts = DraFacts::of_state(&state, &layout, DraSettings::default());
    facts.settings.taints_survive = false;
    facts.held.insert("gpu-0".to_owned());
    let is_gpu_0 = |device: &&mut DraDevice<'_>| device.name.as_deref() == Some("gpu-0");
    let is_published = |facts: &DraFacts<'_>| devices(facts).0.iter().any(|device| device.name == "gpu-0");
    facts.devices.iter_mut().find(is_gpu_0).unwrap().reasons = Vec::from([UnhealthyReason::DoubleBitEcc]);
    assert!(is_published(&facts), "its claim has the whole GPU");
    let four = Some(GpuShares { shares: 4, one_each: false });
    facts.devices.iter_mut().find(is_gpu_0).unwrap().sharing = GpuSharing { now: four, next: four };
    assert!(!is_published(&facts), "other claims could get the free shares");
    facts.settings.taints_survive = true;
    assert!(is_published(&facts), "a taint keeps other claims away");
}

#[test]
fn layout_is_kept_for_the_same_tables_and_gpus() {
    let tables = Arc::new(AllocationTables::new(Arc::new(graph(&chain()))));
    let mut cache = LayoutCache::default();
    let whole = cache.layout(&tables, (0..4).collect());
    assert!(Arc::ptr_eq(&whole, &cache.layout(&tables, (0..4).collect())));
    let part = cache.layout(&tables, (0..2).collect());
    assert_eq!(part.order.len(), 2);
    let others = Arc::new(AllocationTables::new(Arc::new(NodeTopology::default())));
    assert_eq!(*cache.layout(&others, GpuSet::default()), GpuLayout::default());
}

#[test]
fn group_keeps_its_name_when_its_first_gpu_is_lost() {
    let gpu = |n: u32| format!("{{\"index\": {n}, \"uuid\": \"GPU-{n}\", \"pci\": \"0000:0{n}:00.0\"}}");
    let alike = node(&(0..5).map(gpu).collect::<Vec<_>>().join(", "));
    let tables = |places: &[usize]| Arc::new(AllocationTables::new(Arc::new(graph(&alike).restricted(places))));
    let mut cache = LayoutCache::default();
    let whole = cache.layout(&tables(&[0, 1, 2, 3, 4]), (0..5).collect());
    let fewer = cache.layout(&tables(&[1, 2, 3, 4]), (0..4).collect());
    let [before, after] = [&whole, &fewer].map(|layout| layout.families[0].groups[0]);
    assert_eq!((before.gpus, after.gpus), (GpuSet(0b11111), GpuSet(0b1111)));
    assert_eq!((before.name, after.name), ("0000:00:00.0".parse().unwrap(), before.name));
}

#[test]
fn lost_gpu_leaves_the_groups_of_others_as_they_were() {
    let tables = |places: &[usize]| Arc::new(AllocationTables::new(Arc::new(graph(&chain()).restricted(places))));
    let mut cache = LayoutCache::default();
    let whole = cache.layout(&tables(&[0, 1, 2, 3]), (0..4).collect());
    let without_first = cache.layout(&tables(&[1, 2, 3]), (0..3).collect());
    let groups = |layout: &GpuLayout| -> Vec<(String, Vec<u64>)> {
        let bits = |family: &Family| family.groups.iter().map(|group| group.gpus.0).collect();
        layout.families.iter().map(|family| (family.name.clone(), bits(family))).collect()
    };
    // The groups are GPUs 2 and 3, then 1 and 2. Without the cache they would have the opposite order.
    let expected = [("pair1a".to_owned(), Vec::from([0b110])), ("pair1b".to_owned(), Vec::from([0b011]))];
    assert_eq!(groups(&without_first), expected);
    assert_eq!(whole.order.iter().filter(|gpu| **gpu > 0).map(|gpu| gpu - 1).collect::<Vec<_>>(), without_first.order);
    let fresh = GpuLayout::of(&tables(&[1, 2, 3]), (0..3).collect());
    assert_ne!(groups(&fresh), expected, "otherwise this test proves nothing");
    assert_eq!(cache.layout(&tables(&[0, 1, 2, 3]), (0..4).collect()), whole, "the GPU came back");
    let middle_lost = cache.layout(&tables(&[0, 1, 3]), (0..3).collect());
    assert_eq!(middle_lost.nvlink_domains, [GpuSet(0b011)], "GPU 3 was connected through GPU 2");
}

#[test]
fn each_kind_of_reason_has_its_taint() {
    let xid = |code| UnhealthyReason::Xid { code, instance: None };
    let ecc = UnhealthyReason::DoubleBitEcc;
    let reasons = [ecc.clone(), xid(48), UnhealthyReason::OffBus, xid(79), UnhealthyReason::RowRemapFailed];
    let taints = |evict| -> Vec<(String, String, TaintEffect)> {
        let taints = attributes::taints(&reasons, evict).into_iter();
        taints.map(|taint| (taint.key, taint.value, taint.effect)).collect()
    };
    let lost = |effect| ("gpu.nvidia.com/gpu-lost".to_owned(), String::new(), effect);
    let first_xid = || ("gpu.nvidia.com/xid".to_owned(), "48".to_owned(), TaintEffect::NoSchedule);
    let other = || ("linkwise.dev/unhealthy".to_owned(), "double_bit_ecc".to_owned(), TaintEffect::NoSchedule);
    assert_eq!(taints(false), [lost(TaintEffect::NoSchedule), first_xid(), other()]);
    assert_eq!(taints(true), [lost(TaintEffect::NoExecute), first_xid(), other()]);
    assert_eq!(attributes::taints(&[], true), []);
}
