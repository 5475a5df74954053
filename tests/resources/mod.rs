//! Resources: MIG devices, slots, names, filters and doors, from the agent's observation to the kubelet's list.

mod agreement;
mod availability;
mod conflicts;
mod doors;
mod hardware;
mod mps;
mod orphans;
mod plans;
mod scans;
mod shares;

use std::time::Duration;

use linkwise_core::claims::ClaimName;
use linkwise_core::state::{
    ClaimedDevice, Effect, Event, Holdings, MigStrategy, NamePattern, NodeState, Pattern, Prepared, PreparedClaim,
    PreparedDevice, ResourceName, ResourcePlan, SharedResource, Sharing, SharingKind,
};
use linkwise_core::topology::{GpuUuid, NodeObservation};
use linkwise_host::machines;

pub const NOW: Duration = Duration::from_secs(1_000_000);
pub const LATER: Duration = Duration::from_secs(1_000_060);

/// Four A100: one whole; one with seven 1g; one with a 3g and two halves of a 4g; one with a 2g and two 1g, of which
/// one has media extensions.
pub const MIXED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/four-gpus-mig.yaml");

/// The machine of [`MIXED`].
pub fn mixed() -> NodeObservation {
    machines::load(MIXED).unwrap().observed
}

/// The first GPUs of a DGX-1. Long histories take few, because they read the state often.
pub fn dgx(gpus: usize) -> NodeObservation {
    let mut observed = machines::load("dgx1-v100").unwrap().observed;
    observed.gpus.truncate(gpus);
    observed
}

pub fn resource(name: &str) -> ResourceName {
    name.parse().unwrap()
}

/// The name of whole GPUs, unless a plan renames them.
pub fn gpu() -> ResourceName {
    ResourceName::gpu()
}

pub fn planned(plan: &ResourcePlan) -> Event {
    Event::Planned(Box::new(plan.clone()))
}

pub fn seen(node: NodeObservation) -> Event {
    Event::Observed(Box::new(node))
}

/// A list of the kubelet without a holder.
pub fn no_holders() -> Event {
    Event::Holders(Some(Holdings::default()))
}

/// A device of a claim, as the kubelet lists it.
pub fn claimed(claim: &str, device: &str, cdi_name: &str) -> ClaimedDevice {
    let [claim, driver, pool, device] = [claim, "gpu.nvidia.com", "node", device].map(str::to_owned);
    ClaimedDevice { claim, driver, pool, device, cdi_names: vec![cdi_name.to_owned()] }
}

/// A claim that is prepared with a whole GPU.
pub fn prepared(namespace: &str, name: &str, device: &str, gpu: GpuUuid) -> PreparedClaim {
    let claim = ClaimName { namespace: namespace.into(), name: name.into(), uid: format!("uid-{name}") };
    let prepared = Prepared { devices: vec![PreparedDevice::whole(device, gpu)], ..Prepared::default() };
    PreparedClaim { claim, prepared, ..PreparedClaim::default() }
}

/// The state after these events.
pub fn after(state: NodeState, events: impl IntoIterator<Item = Event>) -> NodeState {
    events.into_iter().fold(state, |state, event| state.apply(event, NOW).0)
}

/// The state of a node with this plan and machine.
pub fn with(plan: &ResourcePlan, node: NodeObservation) -> NodeState {
    after(NodeState::default(), [planned(plan), seen(node)])
}

/// A node's state, and the effects of all events so far.
pub struct World {
    pub state: NodeState,
    pub effects: Vec<Effect>,
}

impl World {
    pub fn of(events: impl IntoIterator<Item = Event>) -> Self {
        Self::with(NodeState::default(), events)
    }

    pub fn with(state: NodeState, events: impl IntoIterator<Item = Event>) -> Self {
        let mut world = Self { state, effects: Vec::new() };
        events.into_iter().for_each(|event| world.apply(event));
        world
    }

    pub fn apply(&mut self, event: Event) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, NOW);
        self.state = state;
        self.effects.extend(effects);
    }
}

/// The texts of the plan's problems.
pub fn problems(effects: &[Effect]) -> Vec<String> {
    let problem = |effect: &Effect| match effect {
        Effect::PlanProblem(problem) => Some(problem.to_string()),
        _ => None,
    };
    effects.iter().filter_map(problem).collect()
}

pub fn mig(mig_strategy: MigStrategy) -> ResourcePlan {
    ResourcePlan { mig_strategy, ..ResourcePlan::default() }
}

pub fn sharing(kind: SharingKind, resources: Vec<SharedResource>) -> ResourcePlan {
    ResourcePlan { sharing: Some(Sharing::new(kind, resources)), ..ResourcePlan::default() }
}

/// All whole GPUs with time slices.
pub fn sliced(replicas: u32) -> ResourcePlan {
    sharing(SharingKind::TimeSlicing, vec![SharedResource::new(gpu(), replicas)])
}

/// All whole GPUs as `nvidia.com/a100`.
pub fn renamed() -> ResourcePlan {
    let name = NamePattern { pattern: Pattern::new("*"), name: resource("nvidia.com/a100") };
    ResourcePlan { gpu_names: vec![name], ..ResourcePlan::default() }
}
