//! The node's slices at the API server.

use std::collections::BTreeSet;

use linkwise_core::publish::dra::ServerVersion;

/// The state of our pool at the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredPool {
    /// Set if the slices have the last wanted content, except fields that the server dropped.
    pub is_current: bool,
    /// The number of slices.
    pub slices: usize,
    /// Their generation.
    pub generation: u64,
    /// Set if the server drops taints (its release is too old, or its gate DRADeviceTaints is off): then unhealthy
    /// devices have to be left out.
    pub drops_taints: bool,
    /// Whether the server drops counters (its gate DRAPartitionableDevices is off): then a pool with counters is not
    /// written any further.
    pub drops_counters: bool,
    /// Whether the slices were listed, and the release read.
    pub is_read: bool,
    /// The server's release; `None` if the server does not tell it.
    pub version: Option<ServerVersion>,
    /// Set if the server drops `allowMultipleAllocations` (its gate DRAConsumableCapacity is off): then one claim has
    /// the whole device.
    pub drops_sharing: bool,
    /// The devices that the stored slices offer to new claims, by name; `None` before the slices were listed.
    pub offered: Option<BTreeSet<String>>,
    /// Set while nothing is written because the kubelet has not registered the DRA plugin.
    pub awaits_kubelet: bool,
    /// The reason why the slices are not current, if it is known.
    pub trouble: Option<String>,
}
