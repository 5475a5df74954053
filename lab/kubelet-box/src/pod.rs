//! The input and the result of an admission, as plain values.
//!
//! Made by callers of [`super::KubeletBox`], by `admission` and by `endpoint`. Resource names and device ids are plain
//! strings here, because a kubelet knows no more about them.

use std::collections::BTreeMap;
use std::fmt;

use super::topology_manager::TopologyHint;
use linkwise_kubelet_api::v1beta1::{DeviceSpec, Mount};

/// A pod: containers that are admitted together or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// The pod's name, unique on the node; it also stands for the pod's UID.
    pub name: String,
    /// The containers, in the order of their admission.
    pub containers: Vec<Container>,
}

/// One container and the devices that it requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// The container's name, unique in the pod.
    pub name: String,
    /// The number of requested devices by resource name.
    pub requests: BTreeMap<String, u32>,
}

impl Pod {
    /// A pod without containers yet; see [`Pod::with_container`].
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), containers: Vec::new() }
    }

    /// A pod with one container, `main`, that requests `count` devices of one resource.
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
        self.containers.push(Container { name: name.into(), requests });
        self
    }
}

/// One resource of one container of one pod: the owner of an allocation.
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

/// The plugin's answer to Allocate, with the devices of the call. The kubelet keeps it while the container exists and
/// passes it to the container runtime at each start.
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
    /// The admitted containers by name.
    pub containers: BTreeMap<String, AdmittedContainer>,
}

/// An admitted container: its devices by resource name. A request for zero devices is not listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmittedContainer {
    /// The devices by resource name.
    pub resources: BTreeMap<String, Grant>,
    /// The Topology Manager's decision for the container, or the caller's hint; `None` if there is neither.
    pub hint: Option<TopologyHint>,
}

impl Admitted {
    /// The devices of one resource that one container got.
    pub fn grant(&self, container: &str, resource: &str) -> Option<&Grant> {
        self.containers.get(container)?.resources.get(resource)
    }
}

/// The devices of one resource that a container got, and the calls that led to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The devices and the plugin's answer.
    pub allocation: Allocation,
    /// The GetPreferredAllocation call, or `None` if the kubelet did not make it.
    pub asked: Option<Asked>,
    /// Set if the container held these devices already, so that no call was made.
    pub reused: bool,
}

/// One GetPreferredAllocation call. Lists are in the order in which they were sent or came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `available_deviceIDs`.
    pub available: Vec<String>,
    /// `must_include_deviceIDs`.
    pub must_include: Vec<String>,
    /// `allocation_size`.
    pub size: u32,
    /// All ids of the first container response, usable or not.
    pub preferred: Vec<String>,
}
