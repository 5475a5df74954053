//! What goes into an admission and what comes out of it, as plain values.
//!
//! Made by callers of [`super::KubeletBox`] and by `admission`; resource names and device ids are
//! plain strings here, because that is all a kubelet knows of them. No behaviour.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::topology_manager::TopologyHint;
use linkwise_kubelet_api::v1beta1::{DeviceSpec, Mount};

/// A pod: containers that are admitted together or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Unique on the node; stands for the UID.
    pub name: String,
    /// In the order in which they are admitted.
    pub containers: Vec<Container>,
}

/// One container and how many devices of which resource it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// Unique in the pod.
    pub name: String,
    /// Resource name to number of devices.
    pub requests: BTreeMap<String, u32>,
    /// How many CPUs it wants for itself: a container of a Guaranteed pod that asks for whole CPUs. 0 for any other.
    pub cpus: u32,
}

impl Pod {
    /// A pod without containers yet; see [`Pod::with_container`].
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), containers: Vec::new() }
    }

    /// A pod with one container, `main`, that wants `count` devices of one resource.
    pub fn single(name: impl Into<String>, resource: impl Into<String>, count: u32) -> Self {
        Self::new(name).with_container("main", [(resource, count)])
    }

    /// The same pod with one more container.
    #[must_use]
    pub fn with_container<R: Into<String>>(
        mut self,
        name: impl Into<String>,
        requests: impl IntoIterator<Item = (R, u32)>,
    ) -> Self {
        let requests = requests.into_iter().map(|(resource, count)| (resource.into(), count)).collect();
        self.containers.push(Container { name: name.into(), requests, cpus: 0 });
        self
    }

    /// The same pod, whose last container wants `count` CPUs for itself.
    #[must_use]
    pub fn with_cpus(mut self, count: u32) -> Self {
        if let Some(container) = self.containers.last_mut() {
            container.cpus = count;
        }
        self
    }
}

/// Whose devices are meant: one resource of one container of one pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// [`Pod::name`].
    pub pod: String,
    /// [`Container::name`].
    pub container: String,
    /// The resource name, for instance `nvidia.com/gpu`.
    pub resource: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {}, container {}, {}", self.pod, self.container, self.resource)
    }
}

/// The plugin's answer to Allocate, with the devices it was for: what the kubelet keeps for the
/// container's whole life and hands to the runtime at each start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// Device ids, sorted.
    pub devices: Vec<String>,
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Device nodes, in the plugin's order.
    pub device_specs: Vec<DeviceSpec>,
    /// Mounts, in the plugin's order.
    pub mounts: Vec<Mount>,
    /// Container annotations.
    pub annotations: BTreeMap<String, String>,
    /// Fully qualified CDI names, in the plugin's order.
    pub cdi_names: Vec<String>,
}

/// An admitted pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admitted {
    /// Container name to what it got.
    pub containers: BTreeMap<String, AdmittedContainer>,
}

/// An admitted container: resource name to what it got. A request for zero devices is not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmittedContainer {
    /// Resource name to what it got.
    pub resources: BTreeMap<String, Grant>,
    /// The CPUs it has for itself.
    pub cpus: BTreeSet<u32>,
    /// What the Topology Manager settled for it; `None` under policy none.
    pub hint: Option<TopologyHint>,
}

impl Admitted {
    /// What one container got of one resource.
    pub fn grant(&self, container: &str, resource: &str) -> Option<&Grant> {
        self.containers.get(container)?.resources.get(resource)
    }
}

/// What a container got of one resource, and how that came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The devices and the plugin's answer.
    pub allocation: Allocation,
    /// The GetPreferredAllocation call; `None` where the kubelet did not ask.
    pub asked: Option<Asked>,
    /// Whether the container held these devices already, so that no call was made.
    pub reused: bool,
}

/// One GetPreferredAllocation call, lists in the order in which they were sent or came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `available_deviceIDs`.
    pub available: Vec<String>,
    /// `must_include_deviceIDs`.
    pub must_include: Vec<String>,
    /// `allocation_size`.
    pub size: u32,
    /// The ids of the first container response, all of them, usable or not.
    pub preferred: Vec<String>,
}
