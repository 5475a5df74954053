//! Reads a container's or a pod's devices from the [`Book`], and lets the pure `topology_manager` choose their hint.
//!
//! Called by `admission` if the caller gives no hint and the policy is not none. Changes nothing.

use std::collections::BTreeMap;

use super::devices::Book;
use super::pod::{Container, Place};
use super::topology_manager::{
    DeviceMasks, NumaMask, Refusal, ResourceHints, Scope, TopologyHint, TopologyManager, device_hints, settle,
};

/// The containers of a pod that need a hint together: a single one in scope container.
pub(super) struct Affinity<'a> {
    pub(super) book: &'a Book,
    pub(super) manager: &'a TopologyManager,
    pub(super) pod: &'a str,
    pub(super) containers: &'a [Container],
}

impl Affinity<'_> {
    /// Returns one hint for all the containers, because a kubelet adds up their requests.
    pub(super) fn hint(&self) -> Result<TopologyHint, Box<Refusal>> {
        let resources = self.resources();
        let settled = settle(self.manager, &resources);
        if settled.admitted {
            return Ok(settled.hint);
        }
        let TopologyManager { policy, scope, .. } = *self.manager;
        let container = self.containers.first().filter(|_| scope == Scope::Container);
        let (pod, container) = (self.pod.to_owned(), container.map(|container| container.name.clone()));
        Err(Box::new(Refusal { pod, container, policy, resources }))
    }

    fn resources(&self) -> Vec<ResourceHints> {
        let as_usize = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
        let mut requested: BTreeMap<&str, usize> = BTreeMap::new();
        for (resource, count) in self.containers.iter().flat_map(|container| &container.requests) {
            *requested.entry(resource).or_default() += as_usize(*count);
        }
        requested.retain(|resource, _| self.book.is_known(resource));
        requested.into_iter().map(|(resource, count)| self.hints(resource, count)).collect()
    }

    fn hints(&self, resource: &str, requested: usize) -> ResourceHints {
        let numa = self.book.numa(resource);
        let mask = |id: &String| NumaMask::new(numa.and_then(|numa| numa.get(id)).into_iter().flatten().copied());
        let is_ours = |place: &Place| {
            let ours = self.containers.iter().any(|container| container.name == place.container);
            ours && place.pod == self.pod && place.resource == resource
        };
        let all = numa.into_iter().flat_map(|numa| numa.keys()).map(mask).collect();
        let held = self.book.held.iter().filter(|(place, _)| is_ours(place));
        let held: Vec<NumaMask> = held.flat_map(|(_, allocation)| &allocation.devices).map(mask).collect();
        let free: Vec<NumaMask> = self.book.pool(resource).iter().flat_map(|pool| &pool.available).map(mask).collect();
        let impossible = match held.len() {
            0 => free.len() < requested,
            held => held != requested,
        };
        let available = if held.is_empty() { free } else { held };
        let hints = device_hints(self.manager, resource, requested, &DeviceMasks { all, available });
        match hints.hints {
            Some(_) if impossible => ResourceHints { hints: Some(Vec::new()), ..hints },
            _ => hints,
        }
    }
}
