//! Resources: MIG devices, slots, names and filters, from what the NVML child sees to what the kubelet gets.

mod agreement;
mod availability;
mod conflicts;
mod doors;
mod hardware;
mod look;
mod mps;
mod orphans;
mod plans;
mod shares;

use std::time::Duration;

use linkwise_core::state::{
    Effect, Event, Holdings, MigStrategy, NamePattern, NodeState, Pattern, ResourceName, ResourcePlan, SharedResource,
    Sharing, SharingKind,
};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

pub const NOW: Duration = Duration::from_secs(1_000_000);
pub const LATER: Duration = Duration::from_secs(1_000_060);

/// Four A100: whole, seven 1g, a 3g and two halves of a 4g, two 1g (one with media extensions) and a 2g.
pub const MIXED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/four-gpus-mig.yaml");

/// The machine of [`MIXED`].
pub fn mixed() -> NodeObservation {
    machines::load(MIXED).unwrap().observed
}

/// The first GPUs of a DGX-1: a few, because histories look often.
pub fn dgx(gpus: usize) -> NodeObservation {
    let mut seen = machines::load("dgx1-v100").unwrap().observed;
    seen.gpus.truncate(gpus);
    seen
}

/// A resource by its name.
pub fn resource(name: &str) -> ResourceName {
    name.parse().unwrap()
}

/// Whole GPUs, unless a plan names them otherwise.
pub fn gpu() -> ResourceName {
    ResourceName::gpu()
}

pub fn planned(plan: &ResourcePlan) -> Event {
    Event::Planned(Box::new(plan.clone()))
}

pub fn seen(node: NodeObservation) -> Event {
    Event::Observed(Box::new(node))
}

/// The kubelet lists no holder.
pub fn nobody() -> Event {
    Event::Holders(Some(Holdings::default()))
}

/// The state after these events.
pub fn after(state: NodeState, events: impl IntoIterator<Item = Event>) -> NodeState {
    events.into_iter().fold(state, |state, event| state.apply(event, NOW).0)
}

/// A node that has seen a machine under a plan.
pub fn with(plan: &ResourcePlan, node: NodeObservation) -> NodeState {
    after(NodeState::default(), [planned(plan), seen(node)])
}

/// A node, and all that it was to do.
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
        events.into_iter().for_each(|event| world.tell(event));
        world
    }

    pub fn tell(&mut self, event: Event) {
        let (state, effects) = std::mem::take(&mut self.state).apply(event, NOW);
        self.state = state;
        self.effects.extend(effects);
    }
}

/// The problems that people are told of.
pub fn told(effects: &[Effect]) -> Vec<String> {
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

/// All whole GPUs in so many time slices.
pub fn sliced(replicas: u32) -> ResourcePlan {
    sharing(SharingKind::TimeSlicing, vec![SharedResource::new(gpu(), replicas)])
}

/// All whole GPUs as `nvidia.com/a100`.
pub fn renamed() -> ResourcePlan {
    let name = NamePattern { pattern: Pattern::new("*"), name: resource("nvidia.com/a100") };
    ResourcePlan { gpu_names: vec![name], ..ResourcePlan::default() }
}
