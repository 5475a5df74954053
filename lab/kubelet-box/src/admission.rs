//! Admits a pod: `affinity` gives the NUMA nodes, `selection` chooses the devices, `endpoint` calls the plugin, and
//! `devices` records the result.
//!
//! Called by `KubeletBox` only, one pod at a time. `Core::turn` is the only lock held across a call, and every call has
//! a deadline. The checks come in the order of the device manager (read in 1.33).

use std::sync::Arc;

use super::affinity::Affinity;
use super::endpoint::Plugin;
use super::errors::{AdmissionError, CallError};
use super::life::{Core, Life, lock};
use super::pod::{Admitted, AdmittedContainer, Allocation, Asked, Container, Grant, Place, Pod};
use super::selection::{Plan, Pool, Question, plan};
use super::state::Calls;
use super::topology_manager::{Policy, Scope, TopologyHint};

/// Admits the pod. A rejected pod holds nothing afterwards. If the kubelet ends during an admission, the pod holds what
/// it held before.
pub(super) async fn admit(life: &Arc<Life>, pod: &Pod, hint: Option<TopologyHint>) -> Result<Admitted, AdmissionError> {
    let core = &life.core;
    let _turn = core.turn.lock().await;
    let before = core.read(|book| book.pod(&pod.name));
    let admitted = allocate_all(life, pod, hint).await;
    if admitted.is_err() {
        core.change(|book| match life.end.is_cancelled() {
            true => book.restore_pod(&pod.name, before),
            false => drop(book.remove_pod(&pod.name)),
        });
    }
    admitted
}

/// Allocates for one container after the other. In scope container, the Topology Manager decides on a container after
/// the containers before it have their devices.
async fn allocate_all(life: &Arc<Life>, pod: &Pod, hint: Option<TopologyHint>) -> Result<Admitted, AdmissionError> {
    let core = &life.core;
    let manager = &core.options.topology_manager;
    let settle = |containers: &[Container]| {
        let hint = core.read(|book| Affinity { book, manager, pod: &pod.name, containers }.hint());
        hint.map(Some).map_err(AdmissionError::TopologyAffinity)
    };
    let mut hint = hint;
    let needs_hint = hint.is_none() && manager.policy != Policy::None;
    if needs_hint && manager.scope == Scope::Pod {
        hint = settle(&pod.containers)?;
    }
    let mut admitted = Admitted::default();
    for container in &pod.containers {
        if needs_hint && manager.scope == Scope::Container {
            hint = settle(std::slice::from_ref(container))?;
        }
        let granted = ContainerAdmission { life, pod: &pod.name, container, hint }.allocate().await?;
        admitted.containers.insert(container.name.clone(), granted);
    }
    Ok(admitted)
}

struct ContainerAdmission<'a> {
    life: &'a Arc<Life>,
    pod: &'a str,
    container: &'a Container,
    hint: Option<TopologyHint>,
}

impl ContainerAdmission<'_> {
    async fn allocate(&self) -> Result<AdmittedContainer, AdmissionError> {
        let core = &self.life.core;
        let mut granted = AdmittedContainer { hint: self.hint, ..AdmittedContainer::default() };
        let still_running = core.change(|book| {
            book.update_allocated();
            book.take_still_running(self.pod, &self.container.name)
        });
        for (resource, requested) in shuffled(core, self.container.requests.clone()) {
            let grant = match check(core, self.place(&resource), requested, still_running)? {
                Found::Held(allocation) => Grant { allocation, asked: None, reused: true },
                Found::Nothing => continue,
                Found::Pool(pool) => self.grant(self.place(&resource), requested, &pool).await?,
            };
            granted.resources.insert(resource, grant);
        }
        Ok(granted)
    }

    fn place(&self, resource: &str) -> Box<Place> {
        let (pod, container) = (self.pod.to_owned(), self.container.name.clone());
        Box::new(Place { pod, container, resource: resource.to_owned() })
    }

    async fn grant(&self, place: Box<Place>, requested: u32, pool: &Pool) -> Result<Grant, AdmissionError> {
        let (core, available) = (&self.life.core, pool.available.len());
        let needed = usize::try_from(requested).unwrap_or(usize::MAX);
        if available < needed {
            return Err(AdmissionError::Insufficient { place, requested, available });
        }
        let (devices, asked) = match plan(pool, needed, self.hint) {
            Plan::Take(devices) => (devices, None),
            Plan::Ask(question) => {
                let asked = ask(self.life, &place, &question, requested).await;
                let asked = asked.map_err(|source| AdmissionError::Preferred(place.clone(), source))?;
                let preferred = asked.as_ref().map_or(&[][..], |asked| &asked.preferred);
                (question.settle(preferred, &mut lock(&core.rng)), asked)
            }
        };
        let answer = match reach(self.life, &place.resource, "Allocate", |calls| &mut calls.allocate) {
            Ok(plugin) => plugin.allocate(shuffled(core, devices.clone())).await,
            Err(stopped) => Err(stopped),
        };
        let allocation = match answer {
            Ok(Some(allocation)) => allocation,
            Ok(None) => return Err(AdmissionError::EmptyResponse(place)),
            Err(source) => {
                return Err(AdmissionError::Allocate { place, devices: devices.into_iter().collect(), source });
            }
        };
        core.change(|book| book.commit(*place, allocation.clone()));
        Ok(Grant { allocation, asked, reused: false })
    }
}

/// The devices that the books have for a request.
enum Found {
    /// The container has its devices already.
    Held(Allocation),
    /// The container has no devices and gets none.
    Nothing,
    /// The container needs some of the devices of this pool.
    Pool(Pool),
}

fn check(core: &Core, place: Box<Place>, requested: u32, still_running: bool) -> Result<Found, AdmissionError> {
    core.read(|book| {
        let held = book.held.get(&place).cloned();
        if let Some(count) = held.as_ref().map(|allocation| allocation.devices.len())
            && u32::try_from(count) != Ok(requested)
        {
            return Err(AdmissionError::RequestChanged(place, requested, count));
        }
        // A container that still runs after a restart of the kubelet keeps its devices, healthy or not.
        if still_running {
            return Ok(held.map_or(Found::Nothing, Found::Held));
        }
        let (Some(healthy), Some(pool)) = (book.healthy(&place.resource), book.pool(&place.resource)) else {
            return Err(AdmissionError::Unregistered(place));
        };
        if healthy.is_empty() {
            return Err(AdmissionError::NoHealthyDevices(place));
        }
        let Some(allocation) = held else {
            return Ok(if requested == 0 { Found::Nothing } else { Found::Pool(pool) });
        };
        let devices: Vec<String> = allocation.devices.iter().filter(|id| !healthy.contains(*id)).cloned().collect();
        if !devices.is_empty() {
            return Err(AdmissionError::HeldUnhealthy(place, devices));
        }
        Ok(Found::Held(allocation))
    })
}

/// Calls GetPreferredAllocation if the plugin offers it.
async fn ask(life: &Life, place: &Place, question: &Question, size: u32) -> Result<Option<Asked>, CallError> {
    let endpoint = life.core.read(|book| book.endpoint(&place.resource));
    if !endpoint.is_some_and(|endpoint| endpoint.options.get_preferred_allocation_available) {
        return Ok(None);
    }
    let plugin = reach(life, &place.resource, "GetPreferredAllocation", |calls| &mut calls.preferred)?;
    let available = shuffled(&life.core, question.available.clone());
    let must_include = shuffled(&life.core, question.must_include.clone());
    let preferred = plugin.preferred(available.clone(), must_include.clone(), size).await?;
    Ok(Some(Asked { available, must_include, size, preferred }))
}

/// Returns the plugin of a resource if its endpoint is not stopped, and counts the coming call.
fn reach(
    life: &Life,
    resource: &str,
    method: &'static str,
    which: fn(&mut Calls) -> &mut u64,
) -> Result<Plugin, CallError> {
    let endpoint = life.core.read(|book| book.endpoint(resource)).filter(|endpoint| endpoint.stopped.is_none());
    let client = endpoint.and_then(|endpoint| endpoint.client);
    let plugin = client.and_then(|client| life.plugin(client)).ok_or(CallError::Stopped(method))?;
    life.core.change(|book| book.count(resource, which));
    Ok(plugin)
}

/// The items in a random order, as a kubelet reads its maps and sets.
fn shuffled<T: Clone>(core: &Core, items: impl IntoIterator<Item = T>) -> Vec<T> {
    lock(&core.rng).shuffled(items)
}
