//! The visible state of the box: one immutable snapshot after every change.
//!
//! Built by `devices`, published by `life::Core`, read through `KubeletBox::state` and `KubeletBox::wait`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, Index};
use std::sync::LazyLock;

use super::pod::Place;

/// The whole box at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Set while the kubelet runs.
    pub running: bool,
    /// Register calls that have no answer yet.
    pub registering: usize,
    /// Register calls that were refused, for any reason.
    pub refused: u64,
    /// Every resource whose plugins the kubelet ever called.
    pub resources: Resources,
    /// The plugins' violations, in order.
    pub violations: Vec<Violation>,
}

/// Resources by name. A name that was never registered has an empty state, so that a predicate given to `wait` also
/// works before the plugin has registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources(pub(super) BTreeMap<String, ResourceState>);

static NEVER_SEEN: LazyLock<ResourceState> = LazyLock::new(ResourceState::default);

impl Index<&str> for Resources {
    type Output = ResourceState;
    fn index(&self, resource: &str) -> &ResourceState {
        self.0.get(resource).unwrap_or(&NEVER_SEEN)
    }
}

impl Deref for Resources {
    type Target = BTreeMap<String, ResourceState>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// One resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceState {
    /// Set while the current endpoint works: registered, not stopped, its ListAndWatch stream open.
    pub connected: bool,
    /// Open ListAndWatch streams, those of replaced registrations included.
    pub open_streams: usize,
    /// Set if the grace period after the endpoint's stop is over, so that the resource left the node's capacity.
    pub removed: bool,
    /// Registrations that succeeded.
    pub registrations: u64,
    /// Ids of devices that are healthy, used or not.
    pub healthy: BTreeSet<String>,
    /// Ids of devices that are not healthy, used or not.
    pub unhealthy: BTreeSet<String>,
    /// The NUMA nodes of every device of the last list. The set is empty if the plugin named none.
    pub numa: BTreeMap<String, BTreeSet<i64>>,
    /// The held ids by pod name and container name.
    pub allocated: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
    /// Calls that the kubelet made to the plugins of this resource.
    pub calls: Calls,
}

impl ResourceState {
    /// Forgets the last list.
    pub(super) fn clear_list(&mut self) {
        self.healthy.clear();
        self.unhealthy.clear();
        self.numa.clear();
    }

    /// The ids that pods hold, healthy or not.
    pub fn in_use(&self) -> BTreeSet<String> {
        self.allocated.values().flat_map(BTreeMap::values).flatten().cloned().collect()
    }

    /// The ids that a new pod could get: healthy and not in use.
    pub fn free(&self) -> BTreeSet<String> {
        self.healthy.difference(&self.in_use()).cloned().collect()
    }
}

/// The number of calls of each method of a plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// GetDevicePluginOptions.
    pub options: u64,
    /// ListAndWatch.
    pub list_and_watch: u64,
    /// GetPreferredAllocation.
    pub preferred: u64,
    /// Allocate.
    pub allocate: u64,
}

/// An act of a plugin that the API forbids or that can crash a kubelet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Resource name.
    pub resource: String,
    /// The id of the device.
    pub id: String,
    /// The kind of the violation.
    pub kind: ViolationKind,
}

/// A plugin's mistake about a device that it lists, or no longer lists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ViolationKind {
    /// The id is longer than the 63 bytes that the API allows, and the device was left out.
    IdTooLong,
    /// The id is in one list twice.
    DuplicateId,
    /// The health is neither `Healthy` nor `Unhealthy`, and the kubelet treats it as unhealthy.
    UnknownHealth(String),
    /// The device is no longer advertised although this container holds it.
    VanishedWhileHeld(Place),
}
