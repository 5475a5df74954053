//! The device manager's books: the health of each device, the devices that each container holds, and the current plugin
//! connection of each resource.
//!
//! One `Book` lives in `life::Core`, behind its lock. Other modules write it through `Core::change`.
//! Pure: no I/O, no clock. `connections` repeats the odd ways in which kubelets tell a resource's connections apart.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::Connections;
use super::pod::{Allocation, Place};
use super::selection::{Ids, Pool};
use super::state::{Calls, ResourceState, State, Violation, ViolationKind};
use linkwise_kubelet_api::v1beta1 as wire;

mod connections;
mod snapshot;
#[cfg(test)]
mod tests;

pub(super) use connections::Client;
use connections::Clients;

/// The identity of one connection to a plugin, never reused.
pub(super) type ClientId = u64;
/// The identity of one stop of one endpoint, so that a late grace period ends nothing newer.
pub(super) type StopStamp = u64;

/// The devices that one pod holds.
type PodBook = BTreeMap<Place, Allocation>;

/// The longest device id that the API allows, in bytes.
const MAX_ID: usize = 63;

/// The endpoint of a registration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Endpoint {
    /// `None` for the placeholder that a kubelet starts with.
    pub(super) client: Option<ClientId>,
    pub(super) options: wire::DevicePluginOptions,
    pub(super) stopped: Option<StopStamp>,
}

#[derive(Debug, Default)]
struct Resource {
    /// Set from the resource's first device list, which may be empty, until the resource is removed.
    registered: bool,
    /// The endpoint that calls go to.
    endpoint: Option<Endpoint>,
    /// The endpoint of every connected socket; used from 1.37.
    by_socket: BTreeMap<String, Endpoint>,
    /// The visible state of the resource. `snapshot` adds what follows from other parts of the books.
    seen: ResourceState,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    /// The visible state, to which `snapshot` adds the resources.
    pub(super) seen: State,
    resources: BTreeMap<String, Resource>,
    /// The devices that containers hold. They outlive a restart, as in a kubelet's checkpoint file.
    pub(super) held: BTreeMap<Place, Allocation>,
    /// The devices that the kubelet has not yet taken from pods that have ended.
    ended: BTreeMap<Place, Allocation>,
    /// The devices in the checkpoint file.
    written: BTreeMap<Place, Allocation>,
    /// Set while a write of the checkpoint file is due.
    writes: bool,
    /// Containers that ran when the kubelet started: (pod, container).
    still_running: BTreeSet<(String, String)>,
    /// The connections of each resource, connecting ones included.
    clients: Clients,
    /// The open ListAndWatch streams, each with its resource.
    streams: BTreeMap<ClientId, String>,
    serial: u64,
}

impl Book {
    /// Empty books, of a kubelet that has never run.
    pub(super) fn new(connections: Connections) -> Self {
        Self { clients: Clients::new(connections), ..Self::default() }
    }

    fn resource(&mut self, name: &str) -> &mut Resource {
        self.resources.entry(name.to_owned()).or_default()
    }

    pub(super) fn next(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Removes the resource, because the grace period of this stop is over. Does nothing if the endpoint changed since.
    pub(super) fn expire(&mut self, resource: &str, stamp: StopStamp) {
        let Some(entry) = self.resources.get_mut(resource) else { return };
        if entry.endpoint.is_some_and(|endpoint| endpoint.stopped == Some(stamp)) {
            let ResourceState { registrations, calls, .. } = entry.seen;
            let seen = ResourceState { removed: true, registrations, calls, ..ResourceState::default() };
            *entry = Resource { seen, ..Resource::default() };
            self.writes = true;
        }
    }

    pub(super) fn stream_opened(&mut self, resource: &str, client: ClientId) {
        self.streams.insert(client, resource.to_owned());
    }

    /// Replaces the device list of the resource. The list may come over any stream of the resource.
    pub(super) fn list(&mut self, resource: &str, devices: Vec<wire::Device>) {
        let mut found = Vec::new();
        let mut violation = |id: &str, kind| {
            found.push(Violation { resource: resource.to_owned(), id: id.to_owned(), kind });
        };
        let entry = self.resource(resource);
        entry.registered = true;
        entry.seen.clear_list();
        for wire::Device { id, health, topology } in devices {
            if id.len() > MAX_ID {
                violation(&id, ViolationKind::IdTooLong);
                continue;
            }
            let ids = if health == "Healthy" { &mut entry.seen.healthy } else { &mut entry.seen.unhealthy };
            ids.insert(id.clone());
            if !matches!(health.as_str(), "Healthy" | "Unhealthy") {
                violation(&id, ViolationKind::UnknownHealth(health));
            }
            let nodes = topology.into_iter().flat_map(|topology| topology.nodes).map(|node| node.id).collect();
            if entry.seen.numa.insert(id.clone(), nodes).is_some() {
                violation(&id, ViolationKind::DuplicateId);
            }
        }
        for (place, allocation) in self.held.iter().filter(|(place, _)| place.resource == resource) {
            found.extend(self.resources.get(resource).into_iter().flat_map(|entry| vanished(entry, place, allocation)));
        }
        self.report(found);
        self.writes = true;
    }

    fn report(&mut self, found: Vec<Violation>) {
        for violation in found {
            if !self.seen.violations.contains(&violation) {
                self.seen.violations.push(violation);
            }
        }
    }

    /// Returns true if the resource's endpoint is not stopped and a device, free or not, is healthy.
    pub(super) fn is_usable(&self, resource: &str) -> bool {
        let usable = |entry: &Resource| {
            let stopped = entry.endpoint.is_none_or(|endpoint| endpoint.stopped.is_some());
            entry.registered && !stopped && !entry.seen.healthy.is_empty()
        };
        self.resources.get(resource).is_some_and(usable)
    }

    pub(super) fn endpoint(&self, resource: &str) -> Option<Endpoint> {
        self.resources.get(resource)?.endpoint
    }

    /// Counts a call that is about to be made.
    pub(super) fn count(&mut self, resource: &str, which: impl FnOnce(&mut Calls) -> &mut u64) {
        *which(&mut self.resource(resource).seen.calls) += 1;
    }

    /// The devices of a resource to choose from; `None` if the resource is not registered.
    pub(super) fn pool(&self, resource: &str) -> Option<Pool> {
        let entry = self.resources.get(resource).filter(|entry| entry.registered)?;
        let of_resource = self.held.iter().filter(|(place, _)| place.resource == resource);
        let in_use: Ids = of_resource.flat_map(|(_, allocation)| allocation.devices.iter().cloned()).collect();
        Some(Pool {
            available: entry.seen.healthy.difference(&in_use).cloned().collect(),
            numa: entry.seen.numa.clone(),
        })
    }

    /// The healthy ids of a resource; `None` if the resource is not registered.
    pub(super) fn healthy(&self, resource: &str) -> Option<&Ids> {
        self.resources.get(resource).filter(|entry| entry.registered).map(|entry| &entry.seen.healthy)
    }

    /// Returns true if a kubelet knows the resource as a device plugin's: it has a list, or a container holds a device.
    pub(super) fn is_known(&self, resource: &str) -> bool {
        let listed = self.resources.get(resource).is_some_and(|entry| entry.registered);
        listed || self.held.keys().any(|place| place.resource == resource)
    }

    /// The NUMA nodes of every device of the resource's last list.
    pub(super) fn numa(&self, resource: &str) -> Option<&BTreeMap<String, BTreeSet<i64>>> {
        self.resources.get(resource).map(|entry| &entry.seen.numa)
    }

    /// The devices that a container holds, by resource.
    pub(super) fn container(&self, pod: &str, container: &str) -> BTreeMap<String, Allocation> {
        let here = |place: &&Place| place.pod == pod && place.container == container;
        let held = self.held.iter().filter(|(place, _)| here(place));
        held.map(|(place, allocation)| (place.resource.clone(), allocation.clone())).collect()
    }

    /// Returns true if a kubelet that has just started found the container running. Only the first call returns true,
    /// because a second admission is a new container.
    pub(super) fn take_still_running(&mut self, pod: &str, container: &str) -> bool {
        self.still_running.remove(&(pod.to_owned(), container.to_owned()))
    }

    /// Records the devices that a container got, and a violation for each id that is no longer listed.
    pub(super) fn commit(&mut self, place: Place, allocation: Allocation) {
        let entry = self.resources.get(&place.resource);
        let found = entry.map(|entry| vanished(entry, &place, &allocation).collect()).unwrap_or_default();
        self.report(found);
        self.ended.remove(&place);
        self.held.insert(place, allocation);
        self.writes = true;
    }

    /// Frees the devices of a pod. Returns true if the pod held any.
    pub(super) fn remove_pod(&mut self, pod: &str) -> bool {
        self.still_running.retain(|(name, _)| name != pod);
        let held = std::mem::take(&mut self.held).into_iter();
        let (ended, held): (BTreeMap<_, _>, BTreeMap<_, _>) = held.partition(|(place, _)| place.pod == pod);
        let held_any = !ended.is_empty();
        self.held = held;
        self.ended.extend(ended);
        held_any
    }

    /// `UpdateAllocatedDevices` of the device manager: takes the devices from pods that have ended, in memory only. It
    /// runs when a pod with devices is admitted and when PodResources is listed (apis/podresources/server_v1.go).
    pub(super) fn update_allocated(&mut self) {
        self.ended.clear();
    }

    /// The text of the checkpoint file, if a kubelet would write it now: at each allocation, at each device list, and
    /// when a resource is removed (`writeCheckpoint` in pkg/kubelet/cm/devicemanager/manager.go).
    pub(super) fn checkpoint(&mut self) -> Option<String> {
        if !std::mem::take(&mut self.writes) {
            return None;
        }
        self.written = self.held.iter().chain(&self.ended).map(|(place, held)| (place.clone(), held.clone())).collect();
        let entries = self.written.iter().map(|(place, held)| {
            let numa = self.numa(&place.resource);
            let mut by_node: BTreeMap<String, Vec<&String>> = BTreeMap::new();
            for id in &held.devices {
                let node = numa.and_then(|numa| numa.get(id)?.first()).map_or(-1, |node| *node);
                by_node.entry(node.to_string()).or_default().push(id);
            }
            let (pod, container, resource) = (&place.pod, &place.container, &place.resource);
            json!({
                "PodUID": pod, "ContainerName": container, "ResourceName": resource,
                "DeviceIDs": by_node, "AllocResp": "",
            })
        });
        let entries: Vec<Value> = entries.collect();
        let registered = self.resources.iter().filter(|(_, entry)| entry.registered);
        let registered: BTreeMap<_, _> = registered.map(|(name, entry)| (name, &entry.seen.healthy)).collect();
        let data = json!({ "PodDeviceEntries": entries, "RegisteredDevices": registered });
        Some(json!({ "Data": data, "Checksum": 0 }).to_string())
    }

    /// The devices of a pod, for [`Book::restore_pod`].
    pub(super) fn pod(&self, pod: &str) -> PodBook {
        let held = self.held.iter().filter(|(place, _)| place.pod == pod);
        held.map(|(place, held)| (place.clone(), held.clone())).collect()
    }

    pub(super) fn restore_pod(&mut self, pod: &str, held: PodBook) {
        self.remove_pod(pod);
        self.ended.retain(|place, _| place.pod != pod);
        self.held.extend(held);
    }

    /// Drops all that is not in the checkpoint, because the kubelet's process has ended.
    pub(super) fn kubelet_ended(&mut self) {
        self.seen.running = false;
        self.clients.clear();
        self.streams.clear();
        self.still_running.clear();
        for entry in self.resources.values_mut() {
            entry.seen.clear_list();
            (entry.endpoint, entry.by_socket) = (None, BTreeMap::new());
        }
    }

    /// Starts a kubelet with these books as its checkpoint. Registered resources get a stopped endpoint. Returns the
    /// stamps of these stops. `containers_run` is true if the containers still run.
    pub(super) fn kubelet_started(&mut self, containers_run: bool) -> Vec<(String, StopStamp)> {
        self.seen.running = true;
        // The kubelet believes the file until its list of pods is complete.
        self.ended = self.written.clone();
        self.ended.retain(|place, _| !self.held.contains_key(place));
        if containers_run {
            self.still_running = self.held.keys().map(|p| (p.pod.clone(), p.container.clone())).collect();
        }
        let mut serial = self.serial;
        let mut stamps = Vec::new();
        for (name, entry) in self.resources.iter_mut().filter(|(_, entry)| entry.registered) {
            serial += 1;
            entry.endpoint = Some(Endpoint { stopped: Some(serial), ..Endpoint::default() });
            stamps.push((name.clone(), serial));
        }
        self.serial = serial;
        stamps
    }
}

/// The ids of an allocation that its resource no longer lists.
fn vanished(entry: &Resource, place: &Place, allocation: &Allocation) -> impl Iterator<Item = Violation> {
    let gone = allocation.devices.iter().filter(|id| !entry.seen.numa.contains_key(*id));
    gone.map(|id| Violation {
        resource: place.resource.clone(),
        id: id.clone(),
        kind: ViolationKind::VanishedWhileHeld(place.clone()),
    })
}
