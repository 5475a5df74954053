//! [`Holdings`]: the devices that pods of this node hold, as the kubelet lists them, as plain values. The kubelet
//! adapter makes them; the ledger finds the hardware behind the devices' names.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::ResourceName;
use crate::allocation::DeviceId;

/// A resource and an id of it, as in the device plugin API.
pub type ResourceDevice = (ResourceName, DeviceId);

/// Everything that pods of this node hold, as the kubelet lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Devices of running containers (PodResources).
    pub containers: BTreeSet<ResourceDevice>,
    /// Devices that only the kubelet's checkpoint lists: those of init containers that have ended, in pods that have
    /// not. The checkpoint may also still list a pod that has just ended.
    pub init_containers: BTreeSet<ResourceDevice>,
    /// Devices of DRA claims (PodResources, `dynamic_resources`).
    pub claims: BTreeSet<ClaimedDevice>,
    /// The part of `containers` and `claims` that each running container has. It is shown to people and decides
    /// nothing.
    pub by_container: BTreeMap<ContainerName, ContainerHoldings>,
    /// True if another process of linkwise may still give devices to pods: this list gives no GPU to DRA.
    pub is_early: bool,
    /// True if the kubelet may have started since the previous list: a kubelet's first list lacks pods that run.
    pub is_first: bool,
}

/// A container, by the names under which the kubelet lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerName {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container in it.
    pub container: String,
}

/// The most containers that are noted: more than any node has, and each adds several series to the metrics.
const MAX_CONTAINERS: usize = 4096;

/// The devices and claims of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerHoldings {
    /// Its devices, by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// The devices of its claims.
    pub claims: BTreeSet<ClaimedDevice>,
    /// The UID of its pod. The kubelet's checkpoint names it only for pods with devices of the device plugin API.
    pub pod_uid: Option<String>,
}

impl Holdings {
    /// Returns true if an id of a resource is held.
    pub fn has(&self, key: &ResourceDevice) -> bool {
        self.containers.contains(key) || self.init_containers.contains(key)
    }

    /// Adds the holdings of a container to [`Self::by_container`], also if it is there already. After 4096 containers
    /// it adds no other.
    pub fn add(&mut self, name: ContainerName, holdings: ContainerHoldings) {
        let ContainerHoldings { devices, claims, pod_uid } = holdings;
        if devices.is_empty() && claims.is_empty()
            || self.by_container.len() >= MAX_CONTAINERS && !self.by_container.contains_key(&name)
        {
            return;
        }
        let known = self.by_container.entry(name).or_default();
        known.claims.extend(claims);
        known.pod_uid = known.pod_uid.take().or(pod_uid);
        for (resource, ids) in devices {
            known.devices.entry(resource).or_default().extend(ids);
        }
    }
}

impl FromIterator<ResourceDevice> for Holdings {
    /// Makes holdings of running containers, and nothing else.
    fn from_iter<I: IntoIterator<Item = ResourceDevice>>(containers: I) -> Self {
        Self { containers: containers.into_iter().collect(), ..Self::default() }
    }
}

/// A device that a DRA claim holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimedDevice {
    /// `namespace/name` of the claim.
    pub claim: String,
    /// The DRA driver.
    pub driver: String,
    /// The pool, which belongs to one driver and one node. Another DRA driver of the same name has another pool.
    pub pool: String,
    /// The device's name in the driver's pool, such as `gpu-0` (the 0 of /dev/nvidia0) or `gpu-0-mig-1g10gb-19-0`.
    pub device: String,
    /// The parts of its CDI names after `=`; these are UUIDs if the driver names CDI devices by UUID.
    pub cdi_names: Vec<String>,
}
