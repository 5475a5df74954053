//! [`NodeView`]: everything that people see of a node, in one value. The admin socket's JSON, the node's page
//! and `linkwise top` print it, and add nothing; the metrics add counters of the process.
//!
//! [`view`] computes it from a snapshot, the snapshot's [`Placements`] and the facts of the process. A command reads
//! the JSON, which another version may have written: a missing field gets its default.

use crate::prelude::*;
use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::placement::{Allocation, Outlook, Placements};
use crate::allocation::{AllocationReport, FallbackReason, Value};
use crate::state::{
    Availability, Door, GpuStatus, NodeState, Resource, ResourceName, Shortfall, Timestamp, UnhealthyReason,
};
use crate::topology::{GpuUuid, NumaNodeId, TopologyWarning};
use crate::words::{gigabytes, ranges};

/// A constant text of this version, or an owned one of another.
type Word = Cow<'static, str>;

/// The view of a node. docs/operations.md documents its JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeView {
    /// The running version.
    pub version: Word,
    /// The node's name, if the process knows it.
    pub node: Option<String>,
    /// The parts that are not ready, a line for each, as /readyz answers. Empty while the node is ready.
    pub unready: Vec<String>,
    /// True while the driver is released on an operator's order.
    pub driver_released: bool,
    /// The reason why no resource is offered; null if one is, or with DRA.
    pub idle: Option<String>,
    /// The resources by name.
    pub resources: BTreeMap<String, ResourceView>,
    /// The other parts whose readiness counts, by name.
    pub parts: BTreeMap<String, PartState>,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuView>,
    /// The GPUs of containers, by namespace, pod, container and resource. `None` while it is unknown which GPUs are
    /// held.
    pub allocations: Option<Vec<Allocation>>,
    /// The GPUs that requests for 1, 2, 4 ... GPUs would get now. `None` while it is unknown which GPUs are held.
    pub outlook: Option<Vec<Outlook>>,
    /// The last choices, the latest first.
    pub choices: Vec<ChoiceView>,
    /// The parts of the configuration that this node cannot offer, with the reasons.
    pub problems: Vec<String>,
    /// The hardware that the node had, or should have by its configuration, and does not have.
    pub shortfalls: Vec<ShortfallView>,
    /// The warnings about the node; the log has each of them once.
    pub warnings: Vec<String>,
    /// Sums that only the metrics print.
    #[serde(skip)]
    pub sums: Sums,
}

/// The sums over a node. The JSON does not have them, because a script can compute them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// The devices on the kubelet's lists, by resource.
    pub devices: BTreeMap<String, Devices>,
    /// The API that offers each GPU of the graph, or `none`; empty on a node without DRA.
    pub doors: BTreeMap<String, &'static str>,
    /// The number of GPUs of each availability, 0 included; the numbers add up to all GPUs.
    pub gpus: BTreeMap<Availability, usize>,
    /// The machine's best collective by the number of GPUs, MB/s.
    pub best: BTreeMap<usize, u64>,
    /// As [`Placements::free`].
    pub free: BTreeMap<Option<NumaNodeId>, usize>,
    /// As [`Placements::fragmentation`].
    pub fragmentation: Option<(u64, u64)>,
    /// The number of parts of the configuration that this node cannot offer, by resource (empty if a part concerns no
    /// single resource) and reason.
    pub problems: BTreeMap<(String, &'static str), usize>,
    /// The GPUs that differ from the others of their model, by UUID and difference.
    pub odd: Vec<(String, &'static str)>,
}

/// The devices of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// The number of devices that may be given out.
    pub healthy: usize,
    /// The number of devices that may not be given out.
    pub unhealthy: usize,
    /// The unhealthy devices by the kind of their reason.
    pub reasons: BTreeMap<&'static str, usize>,
}

/// One resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceView {
    /// The phase of the plugin's registration with the kubelet, in words.
    pub phase: Word,
    /// The reason why the plugin does not serve.
    pub trouble: Option<String>,
    /// The number of devices on the kubelet's list that may be given out.
    pub healthy: usize,
    /// The number of devices on the kubelet's list that may not be given out.
    pub unhealthy: usize,
}

/// One part of the node that can be ready or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartState {
    /// The phase of the part, in words.
    pub phase: Word,
    /// True if the part is ready.
    pub ready: bool,
    /// The last fault while the part is not ready; of a ready part, a note.
    pub trouble: Option<String>,
}

impl fmt::Display for PartState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.phase)?;
        self.trouble.iter().try_for_each(|trouble| write!(f, "; {trouble}"))
    }
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuView {
    /// Its UUID.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// Its PCI address.
    pub pci: String,
    /// The product name.
    pub model: Option<String>,
    /// Its NUMA node.
    pub numa: Option<u32>,
    /// Its rail.
    pub rail: Option<u32>,
    /// The API through which the node's GPUs are offered, on a node with DRA: `plugin` or `dra`; missing if a filter
    /// leaves the GPU out. A GPU that is held through the other API is unhealthy, and its reason names the holder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub door: Option<Word>,
    /// True if it or a device on it may be allocated; a cordon does not count.
    pub healthy: bool,
    /// The availability of the GPU now: `held`, `free`, `mig`, `unhealthy`, `cordoned`, `withheld`, `unknown`.
    pub availability: Availability,
    /// The reasons why it is unhealthy, in the order in which they began, and an operator's cordon.
    pub reasons: Vec<ReasonView>,
}

/// The kind of reason of a cordon ([`UnhealthyReason::label`]).
pub const CORDONED: &str = "cordoned";

/// One reason why a GPU is unhealthy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReasonView {
    /// The reason in words.
    pub reason: String,
    /// The kind of reason, as docs/health.md and the metrics name it.
    pub kind: Word,
    /// The time at which the reason began, in seconds since 1970.
    pub since: u64,
    /// The end of the reason: what an operator has to do, or what linkwise waits for.
    pub ends_with: Word,
}

/// Hardware that the node lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShortfallView {
    /// The GPU's UUID; null for the whole node.
    pub uuid: Option<String>,
    /// The GPU's PCI address; of a missing GPU the last known one.
    pub pci: Option<String>,
    /// The kind of shortfall, as the metrics name it.
    pub kind: Word,
    /// The shortfall in words.
    pub what: String,
    /// The time at which it was noticed, in seconds since 1970.
    pub since: u64,
}

/// One answer to a kubelet's GetPreferredAllocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChoiceView {
    /// The time in seconds since 1970.
    pub at: u64,
    /// The resource.
    pub resource: String,
    /// The number of GPUs that the kubelet requested.
    pub size: usize,
    /// The number of GPUs that could have been chosen.
    pub candidates: usize,
    /// The UUIDs of the chosen GPUs.
    pub gpus: Vec<String>,
    /// The reason for these GPUs, in words.
    pub why: String,
}

/// Computes the view of a snapshot, and of the process with its `plugins`. `process` has the facts that the state
/// lacks: the version, the node's name, the unready parts, the driver's release, the other parts, the last choices, and
/// the reason why the node is idle. That reason is shown only while there is neither a plugin nor DRA.
pub fn view(
    state: &NodeState,
    placements: &Placements,
    plugins: BTreeMap<ResourceName, PartState>,
    process: NodeView,
) -> NodeView {
    let gpus: Vec<GpuView> = state.gpus().iter().map(|status| GpuView::of(state, status)).collect();
    let offered = state.offers().resources();
    let is_idle = plugins.is_empty() && !state.has_dra();
    let resource = |(name, part): (ResourceName, PartState)| {
        let (healthy, unhealthy) = offered.get(&name).map(Resource::counts).unwrap_or_default();
        (name.to_string(), ResourceView { phase: part.phase, trouble: part.trouble, healthy, unhealthy })
    };
    let is_known = gpus.is_empty() || state.knows_holders();
    NodeView {
        idle: process.idle.filter(|_| is_idle),
        resources: plugins.into_iter().map(resource).collect(),
        allocations: is_known.then(|| placements.allocations.clone()),
        outlook: is_known.then(|| placements.outlook.clone()),
        problems: state.offers().faults().map(ToString::to_string).collect(),
        shortfalls: state.hardware().shortfalls().map(ShortfallView::of).collect(),
        warnings: state.hardware().warnings().iter().map(ToString::to_string).collect(),
        sums: Sums::of(state, placements, &gpus),
        gpus,
        ..process
    }
}

impl NodeView {
    /// The known allocations.
    pub fn held(&self) -> &[Allocation] {
        self.allocations.as_deref().unwrap_or_default()
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &str) -> Option<&GpuView> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }
}

impl Sums {
    fn of(state: &NodeState, placements: &Placements, gpus: &[GpuView]) -> Self {
        let devices = |resource: &Resource| {
            let (healthy, unhealthy) = resource.counts();
            Devices { healthy, unhealthy, reasons: resource.unhealthy() }
        };
        let resources = state.offers().resources().iter();
        let through_doors = state.topology().gpus().iter().filter(|_| state.has_dra());
        let door = |uuid: &GpuUuid| state.door(uuid).map_or("none", Door::label);
        let count = |availability| gpus.iter().filter(|gpu| gpu.availability == availability).count();
        let mut problems: BTreeMap<(String, &'static str), usize> = BTreeMap::new();
        for problem in state.offers().faults() {
            let (resource, label) = problem.labels();
            *problems.entry((resource.map(ToString::to_string).unwrap_or_default(), label)).or_default() += 1;
        }
        let odd = state.hardware().warnings().iter().filter_map(|warning| match warning {
            TopologyWarning::OddGpu { uuid, oddity, .. } => Some((uuid.to_string(), oddity.label())),
            _ => None,
        });
        Self {
            problems,
            odd: odd.collect(),
            devices: resources.map(|(name, resource)| (name.to_string(), devices(resource))).collect(),
            doors: through_doors.map(|gpu| (gpu.uuid.to_string(), door(&gpu.uuid))).collect(),
            gpus: Availability::ALL.map(|availability| (availability, count(availability))).into(),
            best: placements.outlook.iter().filter_map(|outlook| Some((outlook.size, outlook.best?))).collect(),
            free: placements.free.clone(),
            fragmentation: placements.fragmentation(),
        }
    }
}

impl GpuView {
    /// Its health in a word: `healthy`, `cordoned`, `partly` (healthy with a fault) or `unhealthy`.
    pub fn health(&self) -> &'static str {
        match (self.healthy, self.reasons.iter().all(|reason| reason.kind == CORDONED), self.reasons.is_empty()) {
            (true, _, true) => "healthy",
            (true, true, false) => CORDONED,
            (true, false, false) => "partly",
            (false, ..) => "unhealthy",
        }
    }

    fn of(state: &NodeState, status: &GpuStatus<'_>) -> Self {
        let GpuStatus { gpu, is_healthy, reasons, availability } = status;
        Self {
            uuid: gpu.uuid.to_string(),
            index: gpu.index,
            pci: gpu.pci.to_string(),
            model: gpu.model.clone(),
            numa: gpu.numa.map(|numa| numa.0),
            rail: gpu.rail,
            door: state.door(&gpu.uuid).filter(|_| state.has_dra()).map(Door::label).map(Into::into),
            healthy: *is_healthy,
            availability: *availability,
            reasons: reasons.iter().map(|(reason, since)| ReasonView::of(reason, *since)).collect(),
        }
    }
}

impl ReasonView {
    /// Describes a reason that began at this time.
    pub fn of(reason: &UnhealthyReason, since: Timestamp) -> Self {
        Self {
            reason: reason.to_string(),
            kind: reason.label().into(),
            since: since.as_secs(),
            ends_with: reason.ends_with().into(),
        }
    }
}

impl ShortfallView {
    /// Describes a shortfall.
    pub fn of(shortfall: &Shortfall) -> Self {
        let (uuid, pci) = shortfall.gpu.clone().unzip();
        Self {
            uuid: uuid.map(|uuid| uuid.to_string()),
            pci: pci.map(|pci| pci.to_string()),
            kind: shortfall.lack.label().into(),
            what: shortfall.to_string(),
            since: shortfall.since,
        }
    }
}

impl ChoiceView {
    /// Describes a choice that was made `at` this time, in seconds since 1970. `narrowed` is true if the kubelet did
    /// not offer all free devices.
    pub fn of(at: u64, resource: &ResourceName, report: &AllocationReport, narrowed: bool) -> Self {
        Self {
            at,
            resource: resource.to_string(),
            size: report.size,
            candidates: report.candidates,
            gpus: report.devices.iter().map(|gpu| gpu.uuid.to_string()).collect(),
            why: why(report, narrowed),
        }
    }
}

/// GPUs by NVML's indices: `GPUs 0-3, 6`.
pub fn gpu_names(indices: impl IntoIterator<Item = u32>) -> String {
    let mut indices: Vec<u32> = indices.into_iter().collect();
    indices.sort_unstable();
    match indices.as_slice() {
        [] => "no GPU".to_owned(),
        [one] => format!("GPU {one}"),
        several => format!("GPUs {}", ranges(several)),
    }
}

/// The percentage `100 * value / best`, rounded down and at most 100; `None` if either is unknown, or if `best` is 0.
pub fn percent(value: Option<u64>, best: Option<u64>) -> Option<u64> {
    let (value, best) = value.zip(best)?;
    u64::try_from(u128::from(value.min(best)).saturating_mul(100).checked_div(best.into())?).ok()
}

/// The property that a value measures; `None` for PCI addresses, which only decide between equal sets.
fn property(value: Value) -> Option<&'static str> {
    match value {
        Value::Collective => Some("bandwidth together"),
        Value::Remaining => Some("the GPUs left for others"),
        Value::Pairs => Some("bandwidth between pairs"),
        Value::Closeness => Some("closeness"),
        Value::Room => Some("whole groups left in a package"),
        Value::RemainingCloseness => Some("closeness of the GPUs left"),
        Value::Nics => Some("bandwidth of nearby NICs"),
        Value::RemainingPairs => Some("bandwidth between the GPUs left"),
        Value::PciAddresses => None,
    }
}

/// The reasons for the GPUs of a choice.
fn why(report: &AllocationReport, narrowed: bool) -> String {
    let fallback = report.fallback.map(|reason| match reason {
        FallbackReason::UnknownDevice => "In sorted order: the request names a device that this node does not have.",
        FallbackReason::Size => "In sorted order: no set of that size has all the devices that must be in it.",
    });
    let why = fallback.map_or_else(|| why_best(report), ToOwned::to_owned);
    if narrowed { why + " The kubelet offered fewer GPUs than were free." } else { why }
}

fn why_best(report: &AllocationReport) -> String {
    let mut why = String::new();
    if let Some(values) = report.values.filter(|_| report.devices.len() > 1) {
        why += &format!("{} GB/s ring bandwidth together. ", gigabytes(values.collective));
    }
    why += &match (report.exact, report.compared) {
        (_, 0 | 1) => "The only possible set".to_owned(),
        (true, sets) => format!("The best of {sets} sets"),
        (false, sets) => format!("The best found of {sets} sets"),
    };
    if let Some(second) = &report.runner_up {
        let theirs = gpu_names(second.devices.iter().map(|gpu| gpu.index));
        why += &match property(second.lost_at) {
            Some(property) => format!("; better than {theirs} in {property}"),
            None => format!("; as good as {theirs}, and first by PCI addresses"),
        };
        if let (Some(ours), Value::Collective | Value::Pairs) = (report.values, second.lost_at) {
            let [ours, theirs] = [ours, second.values]
                .map(|values| gigabytes(u64::try_from(values.get(second.lost_at)).unwrap_or_default()));
            why += &format!(" ({ours} GB/s to {theirs} GB/s)");
        }
    }
    why + "."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_rounded_down() {
        let of = |value, best| percent(Some(value), Some(best));
        assert_eq!((of(999, 1000), of(2, 1), of(1, 0)), (Some(99), Some(100), None));
        assert_eq!(of(u64::MAX - 1, u64::MAX), Some(99));
        assert_eq!((percent(None, Some(1)), percent(Some(1), None)), (None, None));
    }

    #[test]
    fn view_of_another_version_is_read() {
        let json = r#"{"new": {}, "version": "9", "gpus": [{"uuid": "GPU-a", "availability": "lent"}],
            "allocations": [{"pod": "p", "gpus": ["GPU-a"], "why": ["sick", "jealous"]}]}"#;
        use crate::publish::placement::Shortfall;
        let view: NodeView = serde_json::from_str(json).unwrap();
        assert_eq!(view.gpu("GPU-a").unwrap().availability, Availability::Unknown);
        let [held] = view.held() else { panic!("{view:?}") };
        assert_eq!((held.pod.as_str(), held.why.clone()), ("p", vec![Shortfall::Sick, Shortfall::Unknown]));
    }
}
