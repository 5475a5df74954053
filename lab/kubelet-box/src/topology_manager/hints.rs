//! The hints of one resource: every set of NUMA nodes with enough devices, and the preferred ones among them.
//!
//! Called by `affinity`. Pure.

use super::TopologyManager;
use super::mask::NumaMask;

/// A set of NUMA nodes that could meet a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopologyHint {
    /// The nodes, or `None` if any node will do.
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
    /// The resource's name.
    pub resource: String,
    /// The number of requested devices.
    pub requested: usize,
    /// Every mask that can meet the request, possibly none, or `None` if the resource has no preference.
    pub hints: Option<Vec<TopologyHint>>,
    /// The fewest nodes that could meet the request if everything were healthy and free.
    pub fewest: u32,
}

/// The NUMA nodes of each device of one resource. A device that names no node has an empty mask.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceMasks {
    /// All devices, healthy or not, used or not.
    pub(crate) all: Vec<NumaMask>,
    /// The devices that the requesting containers hold, or else the healthy and free ones.
    pub(crate) available: Vec<NumaMask>,
}

/// The device manager's hints for a request. There is no preference if no device names a NUMA node.
pub(crate) fn device_hints(
    manager: &TopologyManager,
    resource: &str,
    requested: usize,
    devices: &DeviceMasks,
) -> ResourceHints {
    let nodes = manager.nodes();
    let mut fewest = nodes.count();
    let hints = devices.all.iter().any(|device| *device != NumaMask::default()).then(|| {
        let masks = nodes.within();
        let among = |all: &[NumaMask], mask: NumaMask| all.iter().filter(|device| mask.meets(**device)).count();
        let enough = masks.iter().filter(|mask| among(&devices.all, **mask) >= requested);
        fewest = enough.map(|mask| mask.count()).min().map_or(fewest, |least| least.min(fewest));
        let fits = masks.into_iter().filter(|mask| among(&devices.available, *mask) >= requested);
        fits.map(|mask| TopologyHint { mask: Some(mask), preferred: mask.count() == fewest }).collect()
    });
    ResourceHints { resource: resource.to_owned(), requested, hints, fewest }
}
