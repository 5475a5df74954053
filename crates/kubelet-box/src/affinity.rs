//! Asks every hint provider about a container or a pod and lets the Topology Manager settle: the books on one side,
//! the pure `topology_manager` on the other.
//!
//! Called by `admission` where the policy is not none. Reads the books, changes nothing.

use super::devices::Book;
use super::pod::{Container, Hint};
use super::topology_manager::{NumaMask, Refusal, ResourceHints, Scope, TopologyManager, Units, device_hints, settle};

/// The one hint for these containers of a pod, in scope container a single one: a kubelet adds up what they ask for.
pub(super) fn hint(
    book: &Book,
    manager: &TopologyManager,
    pod: &str,
    containers: &[Container],
) -> Result<Hint, Box<Refusal>> {
    let resources = hints(book, manager, pod, containers);
    let settled = settle(manager, &resources);
    if settled.admitted {
        return Ok(Hint { numa: settled.hint.mask.map(NumaMask::nodes), preferred: settled.hint.preferred });
    }
    let container = containers.first().filter(|_| manager.scope == Scope::Container);
    Err(Box::new(Refusal {
        pod: pod.to_owned(),
        container: container.map(|container| container.name.clone()),
        policy: manager.policy,
        scope: manager.scope,
        resources,
        settled: settled.hint,
    }))
}

fn hints(book: &Book, manager: &TopologyManager, pod: &str, containers: &[Container]) -> Vec<ResourceHints> {
    let names: Vec<&str> = containers.iter().map(|container| container.name.as_str()).collect();
    let mut resources: Vec<&String> = containers.iter().flat_map(|container| container.requests.keys()).collect();
    resources.sort_unstable();
    resources.dedup();
    let mut hints = Vec::new();
    for resource in resources.into_iter().filter(|resource| book.is_known(resource)) {
        let asked = containers.iter().filter_map(|container| container.requests.get(resource));
        let requested: usize = asked.map(|count| usize::try_from(*count).unwrap_or(usize::MAX)).sum();
        hints.push(of_devices(book, manager, pod, &names, resource, requested));
    }
    let whole = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
    let cpus: Vec<(&str, usize)> = containers.iter().map(|c| (c.name.as_str(), whole(c.cpus))).collect();
    hints.extend(book.cpus.hints(manager, pod, &cpus));
    hints
}

fn of_devices(
    book: &Book,
    manager: &TopologyManager,
    pod: &str,
    containers: &[&str],
    resource: &str,
    requested: usize,
) -> ResourceHints {
    let numa = book.numa(resource);
    let mask = |id: &String| {
        let nodes = numa.and_then(|numa| numa.get(id)).into_iter().flatten().copied();
        NumaMask::new(nodes)
    };
    let all = numa.into_iter().flat_map(|numa| numa.keys()).map(mask).collect();
    let held: Vec<NumaMask> = book.held_of(pod, containers, resource).map(mask).collect();
    let free: Vec<NumaMask> = book.pool(resource).iter().flat_map(|pool| &pool.available).map(mask).collect();
    let impossible = match held.len() {
        0 => free.len() < requested,
        held => held != requested,
    };
    let available = if held.is_empty() { free } else { held };
    let hints = device_hints(manager, resource, requested, &Units { all, available, reusable: Vec::new() });
    match hints.hints {
        Some(_) if impossible => ResourceHints { hints: Some(Vec::new()), ..hints },
        _ => hints,
    }
}
