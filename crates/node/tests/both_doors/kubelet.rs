//! A model of the kubelet: its records and its lists. Its device manager chooses from a list that may be old, and
//! records a pod a moment after the device plugin has answered. The first list of a new kubelet has no container: only
//! its checkpoint has the devices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{ClaimedDevice, Health, Holdings, NodeState};

use super::books::Part;

/// The longest time from the answer to Allocate until the kubelet's records have the device. linkwise asks at most once
/// a second (`MIN_ASK_INTERVAL` of `device_plugin::pod_resources`), so the second list after the answer has it.
pub const BOOKED_WITHIN: Duration = Duration::from_millis(900);

/// The devices that a pod got from the device plugin.
#[derive(Clone, Debug)]
pub struct Devices {
    pub resource: String,
    pub ids: Vec<String>,
    /// True if an init container had the devices and has ended, so that only the checkpoint lists them.
    pub by_init: bool,
    /// The time of the answer to Allocate; `None` once the devices are in the kubelet's records.
    pub granted: Option<Duration>,
    /// True if the pod has ended: the kubelet forgets it with the next list.
    pub ended: bool,
}

#[derive(Debug, Default)]
pub struct Kubelet {
    pub runs: bool,
    /// The number of lists since the kubelet started. The first has no running pod.
    pub lists: u32,
    /// The healthy ids of each resource, as the device plugin sent them last.
    pub healthy: BTreeMap<String, BTreeSet<String>>,
    pub pods: BTreeMap<String, Devices>,
    /// The names of the devices of each prepared claim whose pod runs.
    pub claims: BTreeMap<String, Vec<String>>,
}

impl Kubelet {
    /// Takes the list of the device plugin's stream.
    pub fn follow(&mut self, snapshot: &NodeState) {
        self.healthy.clear();
        for (name, resource) in snapshot.offers().resources() {
            let healthy = resource.devices().iter().filter(|(_, device)| device.health == Health::Healthy);
            let ids = healthy.map(|(id, _)| id.as_str().to_owned()).collect();
            self.healthy.insert(name.as_str().to_owned(), ids);
        }
    }

    /// The ids of a resource that a pod can get.
    pub fn free(&self, resource: &str) -> Vec<String> {
        let held = |id: &&String| {
            !self.pods.values().any(|pod| pod.resource == resource && pod.ids.iter().any(|held| held == *id))
        };
        self.healthy.get(resource).into_iter().flatten().filter(held).cloned().collect()
    }

    /// Restarts the kubelet. Pods that are not in its records yet are lost; returns them.
    pub fn restart(&mut self) -> Vec<String> {
        let lost: Vec<String> =
            self.pods.iter().filter(|(_, pod)| pod.granted.is_some()).map(|(name, _)| name.clone()).collect();
        self.pods.retain(|_, pod| pod.granted.is_none());
        self.healthy.clear();
        (self.runs, self.lists) = (true, 0);
        lost
    }

    /// The list with which the kubelet answers now, its checkpoint included.
    pub fn list(&mut self) -> Option<Holdings> {
        if !self.runs {
            return None;
        }
        let is_new = self.lists == 0;
        self.lists += 1;
        self.pods.retain(|_, pod| !pod.ended);
        let mut holdings = Holdings { is_first: is_new, ..Holdings::default() };
        for pod in self.pods.values().filter(|pod| pod.granted.is_none()) {
            let ids = pod.ids.iter().map(|id| (pod.resource.parse().unwrap(), DeviceId::from(id.clone())));
            if pod.by_init || is_new {
                holdings.init_containers.extend(ids);
            } else {
                holdings.containers.extend(ids);
            }
        }
        if !is_new {
            for (name, devices) in &self.claims {
                holdings.claims.extend(devices.iter().map(|device| ClaimedDevice {
                    claim: format!("default/{name}"),
                    driver: super::DRIVER.to_owned(),
                    pool: super::POOL.to_owned(),
                    device: device.clone(),
                    cdi_names: vec![Part::of_device(device).uuid()],
                }));
            }
        }
        Some(holdings)
    }
}
