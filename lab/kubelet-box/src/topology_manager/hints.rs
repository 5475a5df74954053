//! The hints of one resource: every set of NUMA nodes that has enough of it, and the preferred ones among them.
//!
//! Called by `admission`. Pure. One rule serves devices and CPUs; both are units that sit on NUMA nodes.

use super::mask::NumaMask;
use super::{NumaNode, TopologyManager};

/// The name under which the CPU manager hints.
pub(crate) const CPU: &str = "cpu";

/// A set of NUMA nodes from which a request could be met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopologyHint {
    /// The nodes; `None` if any node will do.
    pub mask: Option<NumaMask>,
    /// Set if no smaller set of nodes could ever meet the request.
    pub preferred: bool,
}

impl TopologyHint {
    /// A preferred hint for these NUMA nodes.
    pub fn on(nodes: impl IntoIterator<Item = i64>) -> Self {
        Self { mask: Some(NumaMask::new(nodes)), preferred: true }
    }
}

/// The hints of one resource for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceHints {
    /// The resource's name; `cpu` for CPUs.
    pub resource: String,
    /// The number of requested units.
    pub requested: usize,
    /// Every mask that can meet the request, possibly none. `None`: the resource has no preference.
    pub hints: Option<Vec<TopologyHint>>,
    /// The fewest nodes that could meet the request if everything were healthy and free.
    pub fewest: u32,
}

/// The units of one resource by the nodes they sit on. A unit that names no node is an empty mask.
#[derive(Clone, Debug, Default)]
pub(crate) struct Units {
    /// All units, healthy or not, used or not.
    pub(crate) all: Vec<NumaMask>,
    /// The healthy and free ones.
    pub(crate) available: Vec<NumaMask>,
    /// The units that the pod holds already. They have to be part of the result.
    pub(crate) reusable: Vec<NumaMask>,
}

/// The device manager's hints for a request: none if no device names a NUMA node.
pub(crate) fn device_hints(
    manager: &TopologyManager,
    resource: &str,
    requested: usize,
    devices: &Units,
) -> ResourceHints {
    let topology_aware = devices.all.iter().any(|device| *device != NumaMask::default());
    resource_hints(resource, manager.nodes(), requested, topology_aware.then_some(devices))
}

/// The static CPU manager's hints: only nodes that have CPUs.
pub(crate) fn cpu_hints(manager: &TopologyManager, requested: usize, cpus: &Units) -> ResourceHints {
    let with_cpus = manager.numa_nodes.iter().filter(|node| !node.cpus.is_empty());
    let nodes = NumaMask::new(with_cpus.map(|node: &NumaNode| node.id));
    resource_hints(CPU, nodes, requested, Some(cpus))
}

fn resource_hints(resource: &str, nodes: NumaMask, requested: usize, units: Option<&Units>) -> ResourceHints {
    let mut fewest = nodes.count();
    let hints = units.map(|units| {
        let masks = nodes.within();
        let enough = |mask: &&NumaMask| units.all.iter().filter(|unit| mask.meets(**unit)).count() >= requested;
        fewest = masks.iter().filter(enough).map(|mask| mask.count()).min().map_or(fewest, |least| least.min(fewest));
        let fits = masks.into_iter().filter(|mask| fits(*mask, requested, units));
        fits.map(|mask| TopologyHint { mask: Some(mask), preferred: mask.count() == fewest }).collect()
    });
    ResourceHints { resource: resource.to_owned(), requested, hints, fewest }
}

/// Returns true if the mask holds all units that have to be used again, and enough together with the available ones.
fn fits(mask: NumaMask, requested: usize, units: &Units) -> bool {
    let placed: Vec<&NumaMask> = units.reusable.iter().filter(|unit| **unit != NumaMask::default()).collect();
    let available = units.available.iter().filter(|unit| mask.meets(**unit)).count();
    placed.iter().all(|unit| mask.meets(**unit)) && placed.len() + available >= requested
}
