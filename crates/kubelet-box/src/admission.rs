//! Admits a pod: `affinity` gives the NUMA nodes, `selection` decides, `endpoint` asks and orders, `devices` records.
//!
//! Called by `KubeletBox` only, one pod at a time. It holds no lock across a call, and every call it
//! makes has a deadline. The order of checks is that of the device manager, read at 1.33.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::affinity;
use super::endpoint::Plugin;
use super::errors::{AdmissionError, CallError};
use super::life::{Core, Life, lock};
use super::pod::{Admitted, AdmittedContainer, Allocation, Asked, Container, Grant, Hint, Place, Pod};
use super::selection::{Plan, Pool, plan};
use super::state::Calls;
use super::topology_manager::{CPU, NumaMask, Policy, Scope};

/// Admits the pod and starts its containers. A pod that is rejected holds nothing afterwards; one
/// whose admission was cut off by the end of the kubelet holds what it held before.
pub(super) async fn admit(life: &Arc<Life>, pod: &Pod, hint: Option<&Hint>) -> Result<Admitted, AdmissionError> {
    let core = &life.core;
    let _turn = core.turn.lock().await;
    let before = core.read(|book| (book.pod(&pod.name), book.cpus.all().get(&pod.name).cloned()));
    let admitted = match allocate_all(life, pod, hint).await {
        Ok(admitted) => admitted,
        Err(error) => {
            core.change(|book| match life.end.is_cancelled() {
                true => {
                    book.restore_pod(&pod.name, before.0);
                    book.cpus.restore_pod(&pod.name, before.1.unwrap_or_default());
                }
                false => drop(book.remove_pod(&pod.name)),
            });
            return Err(error);
        }
    };
    for container in &pod.containers {
        start(life, &pod.name, &container.name).await?;
    }
    Ok(admitted)
}

/// Every container in turn: in scope container each is settled when those before it have what they got.
async fn allocate_all(life: &Arc<Life>, pod: &Pod, hint: Option<&Hint>) -> Result<Admitted, AdmissionError> {
    let core = &life.core;
    let manager = &core.options.topology_manager;
    let settle = |containers: &[Container]| {
        let hint = core.read(|book| affinity::hint(book, manager, &pod.name, containers));
        hint.map(Some).map_err(AdmissionError::TopologyAffinity)
    };
    let mut hint = hint.cloned();
    let settles = hint.is_none() && manager.policy != Policy::None;
    if settles && manager.scope == Scope::Pod {
        hint = settle(&pod.containers)?;
    }
    let mut admitted = Admitted::default();
    for container in &pod.containers {
        if settles && manager.scope == Scope::Container {
            hint = settle(std::slice::from_ref(container))?;
        }
        let granted = allocate(life, &pod.name, container, hint.as_ref()).await?;
        admitted.containers.insert(container.name.clone(), granted);
    }
    Ok(admitted)
}

/// Starts a container that was admitted: PreStartContainer where the plugin asks for it, nothing else.
pub(super) async fn start(life: &Arc<Life>, pod: &str, container: &str) -> Result<(), AdmissionError> {
    let core = &life.core;
    for (resource, held) in core.read(|book| book.container(pod, container)) {
        let endpoint = core.read(|book| book.endpoint(&resource));
        if !endpoint.is_some_and(|endpoint| endpoint.options.pre_start_required) {
            continue;
        }
        let place = Place { pod: pod.to_owned(), container: container.to_owned(), resource };
        let outcome = match reach(life, &place.resource, "PreStartContainer", |calls| &mut calls.pre_start) {
            Ok(plugin) => plugin.pre_start(shuffled(core, held.devices)).await,
            Err(stopped) => Err(stopped),
        };
        outcome.map_err(|source| AdmissionError::PreStart { place: place.into(), source })?;
    }
    Ok(())
}

async fn allocate(
    life: &Arc<Life>,
    pod: &str,
    container: &Container,
    hint: Option<&Hint>,
) -> Result<AdmittedContainer, AdmissionError> {
    let mut granted = AdmittedContainer { hint: hint.cloned(), ..AdmittedContainer::default() };
    let still_running = life.core.change(|book| book.take_still_running(pod, &container.name));
    for (resource, requested) in shuffled(&life.core, container.requests.clone()) {
        let place = Place { pod: pod.to_owned(), container: container.name.clone(), resource: resource.clone() };
        if let Some(grant) = grant(life, place, requested, still_running, hint).await? {
            granted.resources.insert(resource, grant);
        }
    }
    granted.cpus = cpus(&life.core, pod, container, hint)?;
    Ok(granted)
}

/// CPUs of its own for a container that asks for some: after the devices, as in a kubelet.
fn cpus(core: &Core, pod: &str, container: &Container, hint: Option<&Hint>) -> Result<BTreeSet<u32>, AdmissionError> {
    let manager = &core.options.topology_manager;
    if container.cpus == 0 || !manager.static_cpus {
        return Ok(BTreeSet::new());
    }
    let mask = hint.and_then(|hint| hint.numa.as_ref()).map(|nodes| NumaMask::new(nodes.iter().copied()));
    let count = usize::try_from(container.cpus).unwrap_or(usize::MAX);
    let taken = core.change(|book| book.cpus.take(manager, (pod, &container.name), count, mask));
    taken.map_err(|available| {
        let (pod, container_name) = (pod.to_owned(), container.name.clone());
        let place = Place { pod, container: container_name, resource: CPU.to_owned() };
        AdmissionError::Insufficient { place: place.into(), requested: container.cpus, available }
    })
}

/// One resource of one container; `None` where it neither has nor needs any.
async fn grant(
    life: &Arc<Life>,
    place: Place,
    requested: u32,
    still_running: bool,
    hint: Option<&Hint>,
) -> Result<Option<Grant>, AdmissionError> {
    let core = &life.core;
    let pool = match check(core, &place, requested, still_running)? {
        Found::Held(allocation) => return Ok(Some(Grant { allocation, asked: None, reused: true })),
        Found::Nothing => return Ok(None),
        Found::Pool(pool) => pool,
    };
    let needed = usize::try_from(requested).unwrap_or(usize::MAX);
    let plan = plan(&pool, needed, hint).map_err(|shortage| AdmissionError::Insufficient {
        place: place.clone().into(),
        requested,
        available: shortage.0,
    })?;
    let (devices, asked) = match plan {
        Plan::Take(devices) => (devices, None),
        Plan::Ask(question) => {
            let sent = (shuffled(core, question.available.clone()), shuffled(core, question.must_include.clone()));
            let asked = ask(life, &place, sent, requested).await;
            let asked = asked.map_err(|source| AdmissionError::Preferred { place: place.clone().into(), source })?;
            let preferred = asked.as_ref().map_or(&[][..], |asked| &asked.preferred);
            (question.settle(preferred, &mut lock(&core.rng)), asked)
        }
    };
    let allocation = order(life, &place, &devices).await?;
    core.change(|book| book.commit(place, allocation.clone()));
    Ok(Some(Grant { allocation, asked, reused: false }))
}

enum Found {
    /// The container has its devices already.
    Held(Allocation),
    /// It has none and needs none.
    Nothing,
    /// It needs some of these.
    Pool(Pool),
}

fn check(core: &Core, place: &Place, requested: u32, still_running: bool) -> Result<Found, AdmissionError> {
    let resource = &place.resource;
    let place = || Box::new(place.clone());
    core.read(|book| {
        let held = book.held(&place()).cloned();
        if let Some(allocation) = &held {
            let count = allocation.devices.len();
            if u32::try_from(count) != Ok(requested) {
                return Err(AdmissionError::RequestChanged { place: place(), requested, held: count });
            }
        }
        // A container that the runtime still runs has its devices: nothing is looked at.
        if still_running {
            return Ok(held.map_or(Found::Nothing, Found::Held));
        }
        let (Some(healthy), Some(pool)) = (book.healthy(resource), book.pool(resource)) else {
            return Err(AdmissionError::Unregistered(place()));
        };
        if healthy.is_empty() {
            return Err(AdmissionError::NoHealthyDevices(place()));
        }
        let Some(allocation) = held else {
            return Ok(if requested == 0 { Found::Nothing } else { Found::Pool(pool) });
        };
        let sick: Vec<String> = allocation.devices.iter().filter(|id| !healthy.contains(*id)).cloned().collect();
        if !sick.is_empty() {
            return Err(AdmissionError::HeldUnhealthy { place: place(), devices: sick });
        }
        Ok(Found::Held(allocation))
    })
}

/// Asks for advice, where the plugin offers it.
async fn ask(
    life: &Arc<Life>,
    place: &Place,
    (available, must_include): (Vec<String>, Vec<String>),
    size: u32,
) -> Result<Option<Asked>, CallError> {
    let endpoint = life.core.read(|book| book.endpoint(&place.resource));
    if !endpoint.is_some_and(|endpoint| endpoint.options.get_preferred_allocation_available) {
        return Ok(None);
    }
    let plugin = reach(life, &place.resource, "GetPreferredAllocation", |calls| &mut calls.preferred)?;
    let preferred = plugin.preferred(available.clone(), must_include.clone(), size).await?;
    Ok(Some(Asked { available, must_include, size, preferred }))
}

/// Orders the devices.
async fn order(life: &Arc<Life>, place: &Place, devices: &BTreeSet<String>) -> Result<Allocation, AdmissionError> {
    let answer = match reach(life, &place.resource, "Allocate", |calls| &mut calls.allocate) {
        Ok(plugin) => plugin.allocate(shuffled(&life.core, devices.clone())).await,
        Err(stopped) => Err(stopped),
    };
    let answer = answer.map_err(|source| AdmissionError::Allocate {
        place: place.clone().into(),
        devices: devices.iter().cloned().collect(),
        source,
    })?;
    answer.ok_or_else(|| AdmissionError::EmptyResponse(place.clone().into()))
}

/// The plugin of a resource whose endpoint is not stopped; counts the call that is about to be made.
fn reach(
    life: &Life,
    resource: &str,
    method: &'static str,
    which: fn(&mut Calls) -> &mut u64,
) -> Result<Plugin, CallError> {
    let endpoint = life.core.read(|book| book.endpoint(resource)).filter(|endpoint| endpoint.stopped.is_none());
    let client = endpoint.and_then(|endpoint| endpoint.client);
    let plugin = client.and_then(|client| life.plugin(client)).ok_or(CallError::Stopped { method })?;
    life.core.change(|book| book.count(resource, which));
    Ok(plugin)
}

/// The items in the random order in which a kubelet reads its maps and sets.
fn shuffled<T: Clone>(core: &Core, items: impl IntoIterator<Item = T>) -> Vec<T> {
    lock(&core.rng).shuffled(items)
}
