//! The node's views: the [`NodeView`] that the admin socket, the page and the metrics print, and the page itself.
//!
//! Gathers what the loop knows and the state does not: readiness, the last choices, the node's name. The costly part is
//! computed once for a snapshot, at the first read; the page is rendered on request, on a thread of its own, at most
//! four times a second. No admission and no event waits for either.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;

use super::page::{Page, PodNumbers};
use super::readiness::{Part, Readiness};
use linkwise_core::publish::placement::{Allocation, Placements};
use linkwise_core::publish::view::{ChoiceView, NodeView, PartState, Sums, view};
use linkwise_core::state::{NodeState, ResourceName};
use linkwise_core::topology::NodeObservation;
use linkwise_system::lock;

/// The age up to which a page is reused: it limits the cost of any number of readers.
const MAX_PAGE_AGE: Duration = Duration::from_millis(250);
/// The most choices that are kept.
const MAX_CHOICES: usize = 6;

/// The sources of the node's views. Clones share them.
#[derive(Clone, Debug)]
pub struct Views {
    snapshot: watch::Receiver<Arc<NodeState>>,
    readiness: Readiness,
    facts: Arc<NodeFacts>,
    last: Arc<Mutex<Computed>>,
    rendered: Arc<AsyncMutex<Rendered>>,
}

/// The placements that were computed last.
#[derive(Debug, Default)]
struct Computed {
    /// Their snapshot: it keeps its address as long as this reference exists.
    of: Weak<NodeState>,
    placements: Arc<Placements>,
}

/// The facts that the node's parts report to the views.
#[derive(Debug, Default)]
struct NodeFacts {
    choices: Mutex<VecDeque<ChoiceView>>,
    observed: Mutex<Arc<NodeObservation>>,
    name: OnceLock<String>,
    is_released: OnceLock<watch::Receiver<bool>>,
    hides_pods: AtomicBool,
    stands_by: AtomicBool,
}

/// The last page, and the numbers of the pods on it.
#[derive(Debug, Default)]
struct Rendered {
    numbers: PodNumbers,
    last: Option<(Instant, Arc<Page>)>,
}

impl Views {
    /// Views of a node with this state and this readiness.
    pub fn new(snapshot: watch::Receiver<Arc<NodeState>>, readiness: Readiness) -> Self {
        let (facts, last, rendered) = Default::default();
        Self { snapshot, readiness, facts, last, rendered }
    }

    /// Records a choice, and forgets the oldest beyond `MAX_CHOICES`.
    pub fn chosen(&self, choice: ChoiceView) {
        let mut choices = lock(&self.facts.choices);
        choices.truncate(MAX_CHOICES - 1);
        choices.push_front(choice);
    }

    /// Records a scan of the machine.
    pub fn observed(&self, observed: &NodeObservation) {
        *lock(&self.facts.observed) = Arc::new(observed.clone());
    }

    /// Records the node's name; the first one stays.
    pub fn named(&self, name: String) {
        let _ = self.facts.name.set(name);
    }

    /// Follows the operator's order to release the driver; only the first channel is followed.
    pub fn follow_release(&self, is_released: watch::Receiver<bool>) {
        let _ = self.facts.is_released.set(is_released);
    }

    /// Hides the names of pods on the metrics port from now on.
    pub fn hide_pods(&self) {
        self.facts.hides_pods.store(true, Ordering::Relaxed);
    }

    /// Sets whether another linkwise serves this node. A standby exports no placements, and of the sums only devices
    /// and doors: each pod would count twice.
    pub fn stand_by(&self, stands_by: bool) {
        self.facts.stands_by.store(stands_by, Ordering::Relaxed);
    }

    /// The view for an operator of the node.
    pub fn for_operator(&self) -> NodeView {
        self.snapshot_and_view(false).1
    }

    /// The view for the metrics.
    pub(crate) fn for_metrics(&self) -> NodeView {
        let (_, mut view) = self.snapshot_and_view(true);
        if self.facts.stands_by.load(Ordering::Relaxed) {
            (view.allocations, view.outlook) = (None, None);
            let Sums { devices, doors, .. } = view.sums;
            view.sums = Sums { devices, doors, ..Sums::default() };
        }
        view
    }

    /// The page: the last one while it is fresh, otherwise a new one. One page is rendered at a time, even if readers
    /// leave. `None` if rendering fails.
    pub async fn page(&self) -> Option<Arc<Page>> {
        let (views, mut rendered) = (self.clone(), Arc::clone(&self.rendered).lock_owned().await);
        if let Some((at, page)) = &rendered.last
            && at.elapsed() < MAX_PAGE_AGE
        {
            return Some(Arc::clone(page));
        }
        // The lock moves into the task, so that no second rendering begins when the reader of this one leaves.
        let rendering = tokio::task::spawn_blocking(move || {
            let (snapshot, view) = views.snapshot_and_view(true);
            let observed = Arc::clone(&lock(&views.facts.observed));
            let page = Arc::new(Page::render(&view, (&observed, snapshot.topology()), &mut rendered.numbers));
            rendered.last = Some((Instant::now(), Arc::clone(&page)));
            page
        });
        rendering.await.ok()
    }

    /// The current snapshot with its view. On the port, which any client may read, the names of pods can be hidden.
    fn snapshot_and_view(&self, is_for_port: bool) -> (Arc<NodeState>, NodeView) {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let (plugins, process) = self.process();
        let mut view = view(&snapshot, &self.placements(&snapshot), plugins, process);
        if is_for_port && self.facts.hides_pods.load(Ordering::Relaxed) {
            for held in view.allocations.iter_mut().flatten() {
                held.pod = hidden_name(held);
            }
        }
        (snapshot, view)
    }

    fn placements(&self, snapshot: &Arc<NodeState>) -> Arc<Placements> {
        let mut last = lock(&self.last);
        if Weak::as_ptr(&last.of) != Arc::as_ptr(snapshot) {
            *last = Computed { of: Arc::downgrade(snapshot), placements: Arc::new(Placements::of(snapshot)) };
        }
        Arc::clone(&last.placements)
    }

    /// The device plugins' states, and a view that has only the fields that the node's state does not have.
    fn process(&self) -> (BTreeMap<ResourceName, PartState>, NodeView) {
        let (mut plugins, mut parts) = (BTreeMap::new(), BTreeMap::new());
        for (part, state) in self.readiness.all() {
            match part {
                Part::Plugin(resource) => drop(plugins.insert(resource, state)),
                part => drop(parts.insert(part.to_string(), state)),
            }
        }
        let process = NodeView {
            version: env!("CARGO_PKG_VERSION").into(),
            node: self.facts.name.get().cloned(),
            unready: self.readiness.summary().err().unwrap_or_default(),
            driver_released: self.facts.is_released.get().is_some_and(|released| *released.borrow()),
            idle: self.readiness.offers_nothing().or_else(|| Some(self.readiness.idle().borrow().reason().to_owned())),
            parts,
            choices: lock(&self.facts.choices).iter().cloned().collect(),
            ..NodeView::default()
        };
        (plugins, process)
    }
}

/// The pseudonym of a pod, by which its series stay apart and can be joined: `pod-` and 12 hexadecimal digits, the same
/// in every process and on every node.
fn hidden_name(held: &Allocation) -> String {
    let hash = Sha256::digest(format!("{}/{}", held.namespace, held.pod));
    let digits: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    format!("pod-{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::Event;
    use linkwise_nvml::supervisor::Idle;

    /// The views of a DGX-1 without other facts.
    fn views() -> Views {
        let observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
        let (state, _) = NodeState::default().apply(Event::Observed(Box::new(observed.clone())), Duration::ZERO);
        let (_, snapshot) = watch::channel(Arc::new(state));
        let views = Views::new(snapshot, Readiness::new(Idle::Waiting("no scan yet".to_owned())));
        views.observed(&observed);
        views
    }

    #[tokio::test]
    async fn readers_at_once_share_pages() {
        let views = views();
        // A reader who leaves while the page is rendered does not delay the next.
        assert!(futures_util::poll!(Box::pin(views.page())).is_pending());
        let answers = futures_util::future::join_all((0..500).map(|_| views.page())).await;
        let mut rendered: Vec<*const Page> = answers.iter().flatten().map(Arc::as_ptr).collect();
        assert_eq!(rendered.len(), 500);
        rendered.dedup();
        assert!(rendered.len() < 50, "{} pages", rendered.len());
    }

    #[test]
    fn placements_are_computed_once_for_a_snapshot() {
        let views = views();
        let snapshot = Arc::clone(&views.snapshot.borrow());
        let other = Arc::new(NodeState::clone(&snapshot));
        let first = views.placements(&snapshot);
        assert!(Arc::ptr_eq(&first, &views.placements(&snapshot)));
        assert!(!Arc::ptr_eq(&first, &views.placements(&other)));
    }

    #[test]
    fn only_the_last_choices_are_kept() {
        let views = views();
        (0..100).for_each(|at| views.chosen(ChoiceView { at, ..ChoiceView::default() }));
        let kept: Vec<u64> = views.for_operator().choices.iter().map(|choice| choice.at).collect();
        assert_eq!(kept, [99, 98, 97, 96, 95, 94]);
    }
}
