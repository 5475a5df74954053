//! [`Holdings`]: what pods of this node hold, as the kubelet lists it. Plain values; the kubelet adapter makes them, and
//! the ledger makes hardware of the names in them.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::ResourceName;
use crate::allocation::DeviceId;

/// An id of a resource, as the device plugin API has it.
pub type ResourceDevice = (ResourceName, DeviceId);

/// Everything that pods of this node hold, as the kubelet lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Devices of running containers (PodResources).
    pub containers: BTreeSet<ResourceDevice>,
    /// Devices that only the kubelet's checkpoint lists: of init containers that have ended, in pods that have not. The
    /// checkpoint may also still list a pod that has just ended.
    pub init_containers: BTreeSet<ResourceDevice>,
    /// Devices of DRA claims (PodResources, `dynamic_resources`).
    pub claims: BTreeSet<ClaimedDevice>,
    /// What of `containers` and `claims` each running container has. It decides nothing: people are shown it.
    pub by_container: BTreeMap<ContainerName, ContainerHoldings>,
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

/// The most containers that are told apart: no node has as many, and each is some series of the metrics.
const MOST_CONTAINERS: usize = 4096;

/// What one container has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerHoldings {
    /// Its devices, by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// The devices of its claims.
    pub claims: BTreeSet<ClaimedDevice>,
}

impl Holdings {
    /// Whether an id of a resource is held.
    pub fn has(&self, key: &ResourceDevice) -> bool {
        self.containers.contains(key) || self.init_containers.contains(key)
    }

    /// Notes what a container has in [`Self::by_container`]; it may have been noted before. Beyond 4096 containers no
    /// further one is.
    pub fn add(&mut self, name: ContainerName, holdings: ContainerHoldings) {
        let ContainerHoldings { devices, claims } = holdings;
        if devices.is_empty() && claims.is_empty()
            || self.by_container.len() >= MOST_CONTAINERS && !self.by_container.contains_key(&name)
        {
            return;
        }
        let known = self.by_container.entry(name).or_default();
        known.claims.extend(claims);
        for (resource, ids) in devices {
            known.devices.entry(resource).or_default().extend(ids);
        }
    }
}

impl FromIterator<ResourceDevice> for Holdings {
    /// Devices of running containers, and nothing else.
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
    /// The pool, of one driver and one node: another DRA driver of the same name has another.
    pub pool: String,
    /// The device's name in the driver's pool, such as `gpu-0` (0: N of /dev/nvidiaN) or `gpu-0-mig-1g10gb-19-0`.
    pub device: String,
    /// What follows `=` in its CDI names; UUIDs, where the driver names CDI devices so.
    pub cdi_names: Vec<String>,
}
