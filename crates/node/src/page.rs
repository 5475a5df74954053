//! The node's page: its sources, and the times of rendering. It is rendered on request, on a thread of its own, at most
//! four times a second.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;

use super::readiness::Readiness;
use crate::admin::{AllocationState, Choice, Page, Slots, State, View};
use crate::metrics::PlacementReader;
use linkwise_core::state::{ContainerName, Door, NodeState, gpu_behind, gpu_of};
use linkwise_core::topology::NodeObservation;

/// The age up to which a page is reused: it limits the cost of any number of readers.
const FRESH: Duration = Duration::from_millis(250);
/// The number of choices that are remembered.
const CHOICES: usize = 6;

/// The sources of the page.
#[derive(Clone)]
pub struct Pages {
    placements: PlacementReader,
    readiness: Readiness,
    told: Arc<Told>,
    rendered: Arc<AsyncMutex<Rendered>>,
}

/// The facts that the node reports for the page.
#[derive(Default)]
struct Told {
    choices: Mutex<VecDeque<Choice>>,
    observed: Mutex<Arc<NodeObservation>>,
    name: OnceLock<String>,
    is_released: OnceLock<watch::Receiver<bool>>,
}

/// The last page, and the letters of pods on it.
#[derive(Default)]
struct Rendered {
    slots: Slots,
    last: Option<(Instant, Arc<Page>)>,
}

impl Pages {
    /// Pages of a node with these placements and this readiness.
    pub fn new(placements: PlacementReader, readiness: Readiness) -> Self {
        Self { placements, readiness, told: Arc::default(), rendered: Arc::default() }
    }

    /// Records a choice; the oldest is forgotten.
    pub fn chosen(&self, choice: Choice) {
        let mut choices = lock(&self.told.choices);
        choices.truncate(CHOICES - 1);
        choices.push_front(choice);
    }

    /// Records a scan of the machine.
    pub fn observed(&self, observed: &NodeObservation) {
        *lock(&self.told.observed) = Arc::new(observed.clone());
    }

    /// Records the node's name; the first one stays.
    pub fn named(&self, name: String) {
        let _ = self.told.name.set(name);
    }

    /// Follows the operator's order to release the driver; only the first channel is followed.
    pub fn follow_release(&self, is_released: watch::Receiver<bool>) {
        let _ = self.told.is_released.set(is_released);
    }

    /// The page: the last one while it is fresh, otherwise a new one. One page is rendered at a time, even if clients
    /// come and go.
    pub fn page(&self) -> BoxFuture<'static, Option<Arc<Page>>> {
        let pages = self.clone();
        async move {
            let mut rendered = Arc::clone(&pages.rendered).lock_owned().await;
            if let Some((at, page)) = &rendered.last
                && at.elapsed() < FRESH
            {
                return Some(Arc::clone(page));
            }
            // The lock moves into the task: a reader who leaves makes no room for another rendering.
            let rendering = tokio::task::spawn_blocking(move || {
                let page = Arc::new(Page::render(&pages.view(), &mut rendered.slots));
                rendered.last = Some((Instant::now(), Arc::clone(&page)));
                page
            });
            rendering.await.ok()
        }
        .boxed()
    }

    /// Adds the GPUs that this machine does not show any more but that containers hold. Metrics and the admin socket
    /// leave them out; to a person they explain an unhealthy device.
    fn add_gone(&self, snapshot: &NodeState, allocations: &mut Vec<AllocationState>) {
        let (topology, offered) = (snapshot.topology(), snapshot.offers().resources());
        for (holder, holdings) in snapshot.ledger().by_container() {
            for (resource, ids) in holdings.devices.iter().filter(|(resource, _)| offered.contains_key(resource)) {
                let unknown = ids.iter().filter(|id| gpu_of(topology, id).is_none());
                let gone: BTreeSet<String> = unknown.filter_map(|id| gpu_behind(topology, id)).collect();
                if gone.is_empty() {
                    continue;
                }
                let ContainerName { namespace, pod, container } = self.placements.shown_name(holder);
                let resource = resource.to_string();
                let is_it = |held: &AllocationState| {
                    (&held.namespace, &held.pod, &held.container, &held.resource)
                        == (&namespace, &pod, &container, &resource)
                };
                match allocations.iter_mut().find(|held| is_it(held)) {
                    Some(held) => held.gpus.extend(gone),
                    None => allocations.push(AllocationState {
                        namespace,
                        pod,
                        container,
                        resource,
                        door: Door::Plugin.label().into(),
                        gpus: gone.into_iter().collect(),
                        ..AllocationState::default()
                    }),
                }
            }
        }
    }

    fn view(&self) -> View {
        // Without the names of pods, if they are hidden: any client may read the page.
        let (snapshot, placements) = self.placements.shown();
        let is_released = self.told.is_released.get().is_some_and(|released| *released.borrow());
        let mut state = State::of(&snapshot, &placements, &self.readiness, is_released);
        if let Some(allocations) = &mut state.allocations {
            self.add_gone(&snapshot, allocations);
        }
        View {
            node: self.told.name.get().cloned(),
            state,
            ready: self.readiness.summary(),
            choices: lock(&self.told.choices).iter().cloned().collect(),
            observed: Arc::clone(&lock(&self.told.observed)),
            topology: Arc::clone(snapshot.topology()),
        }
    }
}

/// Locks the mutex. Only whole values are written under these locks: a panic elsewhere leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use linkwise_core::state::Event;
    use linkwise_nvml::supervisor::Idle;

    /// The pages of a DGX-1 without other facts.
    fn pages() -> Pages {
        let observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
        let pages_observed = observed.clone();
        let (state, _) = NodeState::default().apply(Event::Observed(Box::new(observed)), Duration::ZERO);
        let (_, snapshot) = watch::channel(Arc::new(state));
        let metrics = Metrics::new("1.2.3", snapshot);
        let readiness = Readiness::new(Idle::Waiting("no scan yet".to_owned()));
        let pages = Pages::new(metrics.placements().clone(), readiness);
        pages.observed(&pages_observed);
        pages
    }

    #[tokio::test]
    async fn readers_at_once_share_pages() {
        let pages = pages();
        let answers = futures_util::future::join_all((0..500).map(|_| pages.page())).await;
        let mut rendered: Vec<*const Page> = answers.iter().flatten().map(Arc::as_ptr).collect();
        assert_eq!(rendered.len(), 500);
        rendered.dedup();
        assert!(rendered.len() < 50, "{} pages", rendered.len());
        // A reader who leaves does not delay the next.
        drop(pages.page());
        assert!(pages.page().await.is_some());
    }

    #[test]
    fn only_the_last_choices_are_kept() {
        let pages = pages();
        let (snapshot, _) = pages.placements.shown();
        let all =
            || snapshot.offers().of(&linkwise_core::state::ResourceName::gpu()).map(|(id, _)| id.clone()).collect();
        let request =
            linkwise_core::allocation::AllocationRequest { available: all(), must_include: Vec::new(), size: 2 };
        let (_, report) = snapshot.preferred(&linkwise_core::state::ResourceName::gpu(), &request);
        let report = Arc::new(report);
        for at in 0..100 {
            let resource = "nvidia.com/gpu".to_owned();
            pages.chosen(Choice { at, resource, report: Arc::clone(&report), narrowed: false });
        }
        let kept: Vec<u64> = pages.view().choices.iter().map(|choice| choice.at).collect();
        assert_eq!(kept, [99, 98, 97, 96, 95, 94]);
    }
}
