//! The published devices and their taints as the node's state changes.

use linkwise_core::publish::dra::{
    DraFacts, DraSettings, LayoutCache, SliceDevice, Taint, TaintEffect, devices, offered_now,
};
use linkwise_core::state::{
    ClaimedDevice, Door, Event, Filter, GpuSelector, Holdings, MigInstance, NodeState, NumaHints, Prepared,
    PreparedClaim, PreparedDevice, ResourcePlan, Timestamp,
};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_host::machines;

const NOW: Timestamp = Timestamp::from_secs(1_000);
const DRIVER: &str = "gpu.nvidia.com";

struct Node {
    state: NodeState,
    layouts: LayoutCache,
    settings: DraSettings,
}

impl Node {
    /// A machine whose GPUs have all gone to DRA.
    fn new(observed: NodeObservation) -> Self {
        let state = NodeState::new(NumaHints::Node);
        let mut node = Self { state, layouts: LayoutCache::default(), settings: DraSettings::default() };
        node.apply(Event::Observed(Box::new(observed)));
        node.apply(Event::Planned(Box::new(ResourcePlan { door: Door::Dra, ..ResourcePlan::default() })));
        for _ in 0..3 {
            node.apply(Event::Holders(Some(Holdings::default())));
        }
        node
    }

    fn apply(&mut self, event: Event) {
        self.state = self.state.clone().apply(event, NOW).0;
    }

    fn devices(&mut self) -> Vec<SliceDevice> {
        let layout = self.layouts.layout(self.state.tables(), offered_now(&self.state));
        devices(&DraFacts::of_state(&self.state, &layout, self.settings)).0
    }

    fn taints(&mut self, name: &str) -> Option<Vec<Taint>> {
        self.devices().into_iter().find(|device| device.name == name).map(|device| device.taints)
    }

    /// Lets PodResources list this device alone, with a claim.
    fn kubelet_lists(&mut self, name: &str) {
        let [claim, driver, device] = ["default/a", DRIVER, name].map(str::to_owned);
        let claimed = ClaimedDevice { claim, driver, device, ..ClaimedDevice::default() };
        self.apply(Event::Holders(Some(Holdings { claims: [claimed].into(), ..Holdings::default() })));
    }
}

fn taint(key: &str, value: &str, effect: TaintEffect) -> Vec<Taint> {
    vec![Taint { key: key.to_owned(), value: value.to_owned(), effect }]
}

fn dgx() -> NodeObservation {
    machines::load("dgx-h100").unwrap().observed
}

#[test]
fn fault_taints_the_gpu_until_it_is_cleared() {
    let observed = dgx();
    let gpu = observed.gpus[3].uuid.clone();
    let mut node = Node::new(observed);
    assert_eq!(node.devices().len(), 8);
    node.apply(Event::Xid { gpu: gpu.clone(), code: 79, instance: None });
    assert_eq!(node.taints("gpu-3"), Some(taint("gpu.nvidia.com/xid", "79", TaintEffect::NoSchedule)));
    assert_eq!(node.devices().iter().filter(|device| !device.taints.is_empty()).count(), 1);
    node.apply(Event::Cleared(gpu.clone()));
    assert_eq!(node.taints("gpu-3"), Some(Vec::new()));
    node.apply(Event::DoubleBitEcc(gpu));
    assert_eq!(node.taints("gpu-3"), Some(taint("linkwise.dev/unhealthy", "double_bit_ecc", TaintEffect::NoSchedule)));
}

#[test]
fn sick_gpu_is_left_out_where_taints_are_dropped() {
    let observed = dgx();
    let gpu = observed.gpus[3].uuid.clone();
    let mut node = Node::new(observed);
    node.settings.taints_survive = false;
    node.apply(Event::Xid { gpu: gpu.clone(), code: 79, instance: None });
    assert_eq!((node.devices().len(), node.taints("gpu-3")), (7, None));
    node.kubelet_lists("gpu-3");
    assert_eq!((node.devices().len(), node.taints("gpu-3")), (8, Some(Vec::new())), "a claim has the GPU");
    node.apply(Event::Holders(Some(Holdings::default())));
    assert_eq!(node.devices().len(), 7);
    node.apply(Event::Cleared(gpu));
    assert_eq!(node.devices().len(), 8);
}

/// A prepared claim with these devices and their GPUs.
fn prepared<const N: usize>(devices: [(&str, GpuUuid); N]) -> PreparedClaim {
    let devices = devices.map(|(name, gpu)| PreparedDevice::whole(name, gpu)).into();
    PreparedClaim { prepared: Prepared { devices, ..Prepared::default() }, ..PreparedClaim::default() }
}

#[test]
fn lost_gpu_stays_for_its_claim_and_may_evict_it() {
    let mut observed = dgx();
    let mut node = Node::new(observed.clone());
    let before = node.devices().into_iter().find(|device| device.name == "gpu-3").unwrap();
    node.apply(Event::Prepared(vec![prepared([("gpu-3", observed.gpus[3].uuid.clone())])]));
    observed.gpus.remove(3);
    node.apply(Event::Observed(Box::new(observed)));
    let lost = |effect| Some(taint("gpu.nvidia.com/gpu-lost", "", effect));
    assert_eq!(node.taints("gpu-3"), lost(TaintEffect::NoSchedule));
    let after = node.devices().pop().unwrap();
    assert_eq!((&after.name, &after.attributes["uuid"]), (&before.name, &before.attributes["uuid"]));
    node.settings.evict_from_lost = true;
    assert_eq!(node.taints("gpu-3"), lost(TaintEffect::NoExecute));
    node.apply(Event::Prepared(Vec::new()));
    assert_eq!((node.devices().len(), node.taints("gpu-3")), (7, None), "no claim has the lost GPU");
}

/// A DGX H100 whose first GPU has two MIG devices.
fn divided() -> NodeObservation {
    let text = "{enabled: true, devices: [\
        {index: 0, uuid: MIG-0, gpu_instance: 1, compute_instance: 0, gpu_slices: 1, compute_slices: 1,\
        memory_mib: 9728},\
        {index: 1, uuid: MIG-1, gpu_instance: 2, compute_instance: 0, gpu_slices: 1, compute_slices: 1,\
        memory_mib: 9728}]}";
    let mut observed = dgx();
    observed.gpus[0].mig = Some(serde_saphyr::from_str(text).unwrap());
    observed
}

#[test]
fn sick_mig_device_beside_a_claimed_one_is_left_out() {
    const ONE: &str = "gpu-0-mig-1g10gb-gi1-ci0";
    let observed = divided();
    let gpu = observed.gpus[0].uuid.clone();
    let mut node = Node::new(observed);
    node.settings.taints_survive = false;
    node.apply(Event::Xid { gpu: gpu.clone(), code: 79, instance: None });
    let of_gpu = |node: &mut Node| -> Vec<String> {
        node.devices().into_iter().map(|device| device.name).filter(|name| name.starts_with("gpu-0")).collect()
    };
    assert_eq!(of_gpu(&mut node), [""; 0]);
    node.apply(Event::Prepared(vec![prepared([(ONE, gpu)])]));
    assert_eq!(of_gpu(&mut node), [ONE], "the claim is prepared");
    node.apply(Event::Prepared(Vec::new()));
    node.kubelet_lists(ONE);
    assert_eq!(of_gpu(&mut node), [ONE], "the kubelet lists the claim");
    // The name that NVIDIA's driver gives a MIG device does not show which of the two it is.
    node.kubelet_lists("gpu-0-mig-1g10gb-19-0");
    assert_eq!(of_gpu(&mut node).len(), 2);
}

#[test]
fn fault_of_an_instance_taints_its_mig_device_alone() {
    let observed = divided();
    let gpu = observed.gpus[0].uuid.clone();
    let mut node = Node::new(observed);
    let instance = Some(MigInstance { gpu_instance: 2, compute_instance: None });
    node.apply(Event::Xid { gpu: gpu.clone(), code: 48, instance });
    let sick = |node: &mut Node| -> Vec<String> {
        node.devices().into_iter().filter(|device| !device.taints.is_empty()).map(|device| device.name).collect()
    };
    assert_eq!(sick(&mut node), ["gpu-0-mig-1g10gb-gi2-ci0"]);
    node.apply(Event::Xid { gpu, code: 79, instance: None });
    assert_eq!(sick(&mut node), ["gpu-0-mig-1g10gb-gi1-ci0", "gpu-0-mig-1g10gb-gi2-ci0"]);
}

#[test]
fn filtered_gpu_is_tainted_while_a_claim_holds_it() {
    let mut node = Node::new(dgx());
    node.kubelet_lists("gpu-0");
    let filter = Filter { exclude: [0, 1].map(GpuSelector::Index).into(), ..Filter::default() };
    node.apply(Event::Planned(Box::new(ResourcePlan { filter, door: Door::Dra, ..ResourcePlan::default() })));
    assert_eq!(node.taints("gpu-0"), Some(taint("linkwise.dev/unhealthy", "withdrawn", TaintEffect::NoSchedule)));
    assert_eq!((node.devices().len(), node.taints("gpu-1")), (7, None));
}

/// Older releases published sets of GPUs as devices. A claim keeps such a set until its pod ends.
#[test]
fn gpus_of_a_claimed_set_stay_with_dra_unpublished() {
    let observed = dgx();
    let (gpus, set) = ([4, 7].map(|gpu: usize| observed.gpus[gpu].uuid.clone()), "gpus-2-4-7");
    let prepared = prepared(gpus.clone().map(|gpu| (set, gpu)));
    let [claim, driver, device] = ["default/a", DRIVER, set].map(str::to_owned);
    let cdi_names = gpus.iter().map(ToString::to_string).collect();
    let listed = ClaimedDevice { claim, driver, device, cdi_names, ..ClaimedDevice::default() };
    let listed = Holdings { claims: [listed].into(), ..Holdings::default() };
    // The claim is known from its checkpoint alone, then from the kubelet's list alone.
    for (prepared, listed) in [(vec![prepared], Holdings::default()), (Vec::new(), listed)] {
        let mut node = Node::new(observed.clone());
        node.apply(Event::Prepared(prepared));
        node.apply(Event::Holders(Some(listed.clone())));
        let names: Vec<String> = node.devices().into_iter().map(|device| device.name).collect();
        assert_eq!(names.len(), 6);
        assert!(!names.iter().any(|name| ["gpu-4", "gpu-7"].contains(&name.as_str())), "{names:?}");
        node.apply(Event::Planned(Box::default()));
        let lists = [listed.clone(), listed].map(|listed| Event::Holders(Some(listed)));
        let left = lists.into_iter().fold(node.state, |state, event| state.apply(event, NOW).0);
        let with_dra = left.topology().gpus().iter().filter(|gpu| left.is_with_dra(&gpu.uuid));
        assert_eq!(with_dra.map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(), gpus);
    }
}
