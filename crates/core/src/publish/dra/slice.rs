//! [`Pool`]: packs devices into resource slices, within the limits of `resource.k8s.io/v1`.

use crate::prelude::*;

use serde::Serialize;

use super::{CounterSet, SliceDevice};
use crate::state::DRA_DRIVER;

/// The most devices of a slice (Kubernetes 1.36, `ResourceSliceMaxDevices`).
pub const MOST_DEVICES: usize = 128;

/// The most devices of a slice in which any has taints or consumes counters (1.35 and later,
/// `ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
pub const MOST_DEVICES_WITH_TAINTS: usize = 64;

/// The most counter sets of a slice (1.35 and later, `ResourceSliceMaxCounterSets`).
pub const MOST_COUNTER_SETS: usize = 8;

/// Everything that a node publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// The node's name.
    pub node: String,
    /// The pool's name, the driver's own, unique in the cluster.
    pub name: String,
    /// The counters that devices consume.
    pub counters: Vec<CounterSet>,
    /// The devices, the best first.
    pub devices: Vec<SliceDevice>,
}

/// The specification of one slice, by its JSON names (`ResourceSliceSpec`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SliceSpec {
    /// The DRA driver.
    pub driver: String,
    /// The node.
    pub node_name: String,
    /// The pool that it is a part of.
    pub pool: SlicePool,
    /// Its counters; a slice with counters has no devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared_counters: Vec<CounterSet>,
    /// Its devices; empty if the node has none. `None` in a slice of counters, where the API server refuses even an
    /// empty list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<SliceDevice>>,
}

/// The pool of a slice (`ResourcePool`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicePool {
    /// The pool's name.
    pub name: String,
    /// The generation of the pool to which this slice belongs; the scheduler reads only the newest.
    pub generation: u64,
    /// The number of the pool's slices.
    pub resource_slice_count: usize,
}

impl Pool {
    /// Makes the pool of a node: `<node>/gpu`, a name that no other driver's pool has. (kube-scheduler up to 1.36.3
    /// mixes up the counters of pools of one name.)
    pub fn new(node: impl Into<String>, devices: Vec<SliceDevice>) -> Self {
        let node = node.into();
        Self { name: format!("{node}/gpu"), node, counters: Vec::new(), devices }
    }

    /// The slices of one generation, in the order in which the scheduler is to read them: those with counters first.
    /// There is at least one slice with devices, because an empty slice shows that the driver works. If the devices fit
    /// there is only one, because Kubernetes up to 1.35 reads several in any order.
    ///
    /// If they do not fit, each slice has [`MOST_DEVICES_WITH_TAINTS`] devices even without taints, so that a taint
    /// moves no device to another slice.
    pub fn slices(&self, generation: u64) -> Vec<SliceSpec> {
        let is_limited = |device: &SliceDevice| !device.taints.is_empty() || !device.consumes_counters.is_empty();
        let fits_one = self.devices.len() <= MOST_DEVICES && !self.devices.iter().any(is_limited);
        let most = if fits_one { MOST_DEVICES } else { MOST_DEVICES_WITH_TAINTS };
        let counters = self.counters.chunks(MOST_COUNTER_SETS).map(|counters| (counters, &[][..]));
        let mut parts: Vec<(&[CounterSet], &[SliceDevice])> = counters.collect();
        parts.extend(self.devices.chunks(most).map(|devices| (&[][..], devices)));
        if self.devices.is_empty() {
            parts.push((&[], &[]));
        }
        let pool = SlicePool { name: self.name.clone(), generation, resource_slice_count: parts.len() };
        let slice = |(counters, devices): (&[CounterSet], &[SliceDevice])| SliceSpec {
            driver: DRA_DRIVER.to_owned(),
            node_name: self.node.clone(),
            pool: pool.clone(),
            shared_counters: counters.to_vec(),
            devices: counters.is_empty().then(|| devices.to_vec()),
        };
        parts.into_iter().map(slice).collect()
    }
}
