//! The plugin's side of MPS: orders the control daemons of resources and of claims, and reports those that serve.
//!
//! One task writes one small file in a folder that it shares with the daemons' process, reads markers there, and starts
//! no program. An Allocate never waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;

use linkwise_core::claims::MpsOrder;
use linkwise_core::reported::Reported;
use linkwise_core::state::{Event, MpsShare, NodeState, ResourceName};
use linkwise_host::mps::{Layout, Limits, NotReady, Orders, exclusive_gpus, keeps_own_shm, readiness, shm_of_ready};
use linkwise_kubelet::dra::{MpsLink, MpsOrders, MpsServed};
use linkwise_node::node::Node;
use linkwise_nvml::supervisor::Idle;
use linkwise_system::right::Right;

/// The time from one reading of the markers to the next: a lock that ends makes no event in a folder.
const POLL: Duration = Duration::from_secs(1);

/// The time from one reading to the next while a claim may wait for a marker.
const CLAIM_POLL: Duration = Duration::from_millis(200);

/// Starts the task; returns the way to order control daemons for claims. `can_have_claims` is false on a node without a
/// state folder.
pub(in crate::run) fn spawn_in(node: &mut Node, layout: Layout, can_have_claims: bool) -> MpsLink {
    let first = (!can_have_claims).then(MpsOrders::default);
    let ((orders, ordered), (served, serving)) = (watch::channel(first), watch::channel(None));
    let task = OrdersTask {
        layout,
        snapshots: node.snapshot(),
        files: node.files(),
        events: node.events(),
        idle: node.readiness.idle().clone(),
        orders: ordered,
        served,
    };
    node.spawn("MPS", task.run());
    MpsLink { orders, served: serving }
}

/// The task that orders daemons, with its inputs and outputs.
struct OrdersTask {
    layout: Layout,
    snapshots: watch::Receiver<Arc<NodeState>>,
    /// The right to write the file, while this process serves the node.
    files: watch::Receiver<Option<Right>>,
    events: mpsc::Sender<Event>,
    /// Set to the reason why no GPU is offered, for /readyz.
    idle: watch::Sender<Idle>,
    orders: watch::Receiver<Option<MpsOrders>>,
    served: watch::Sender<Option<MpsServed>>,
}

struct Checked {
    /// The readiness of each resource that is shared by MPS.
    resources: BTreeMap<ResourceName, Result<(), NotReady>>,
    /// The control daemons of claims; `None` if their orders are unknown.
    claims: Option<MpsServed>,
    /// The reason why no control daemon gets an order.
    trouble: Option<String>,
}

impl OrdersTask {
    /// Writes orders and reports the daemons that serve, until one of its channels closes.
    async fn run(mut self) -> Result<()> {
        let (mut troubles, mut resources, mut claims) = (Reported::new(), Reported::new(), Reported::new());
        let (mut ready, mut last) = (BTreeMap::new(), DaemonClaims::default());
        loop {
            let snapshot = Arc::clone(&self.snapshots.borrow_and_update());
            let right = self.files.borrow_and_update().clone();
            let orders = self.orders.borrow_and_update().clone();
            let (layout, current, mut history) =
                (self.layout.clone(), Arc::clone(&snapshot), std::mem::take(&mut last));
            // A file system that hangs must not hold a thread that admissions need.
            let check =
                spawn_blocking(move || (write_and_check(&layout, &current, orders, right, &mut history), history))
                    .await;
            let (checked, history) = check.context("writing the MPS orders panicked")?;
            last = history;
            for trouble in troubles.replace(checked.trouble) {
                tracing::warn!(trouble, "MPS orders reach no daemon");
            }
            for (resource, readiness) in resources.replace(checked.resources.clone()) {
                self.show_readiness(&resource, readiness);
            }
            self.report(&snapshot, &checked.resources, &mut ready).await?;
            let mut pause = (!checked.resources.is_empty()).then_some(POLL);
            if let Some(served) = checked.claims {
                let not_ready = served.daemons.iter().filter_map(|(name, state)| Some((name, state.as_ref().err()?)));
                for (daemon, why) in claims.replace(not_ready.map(|(name, why)| (name.clone(), why.clone()))) {
                    tracing::info!(%daemon, why, "MPS daemon of claims not ready");
                }
                let is_settled = served.daemons.values().all(Result::is_ok) && served.exclusive.is_empty();
                if !served.daemons.is_empty() || !served.exclusive.is_empty() {
                    pause = Some(if is_settled { POLL } else { CLAIM_POLL });
                }
                self.served.send_replace(Some(served));
            }
            tokio::select! {
                changed = self.snapshots.changed() => if changed.is_err() { return Ok(()) },
                changed = self.orders.changed() => if changed.is_err() { return Ok(()) },
                changed = self.files.changed() => if changed.is_err() { return Ok(()) },
                () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
            }
        }
    }

    fn show_readiness(&self, resource: &ResourceName, readiness: Result<(), NotReady>) {
        let Err(why) = readiness else {
            tracing::info!(%resource, "MPS daemon ready, offering the resource");
            return;
        };
        let why = why.to_string();
        tracing::warn!(%resource, why, "MPS daemon not ready, not offering the resource");
        self.idle.send_replace(Idle::Waiting(format!("{resource}: its MPS control daemon is not ready: {why}")));
    }

    /// Reports the resources whose control daemon is ready, if they changed.
    async fn report(
        &self,
        snapshot: &NodeState,
        checked: &BTreeMap<ResourceName, Result<(), NotReady>>,
        ready: &mut BTreeMap<ResourceName, MpsShare>,
    ) -> Result<()> {
        let mut shares = snapshot.mps_shares().clone();
        shares.retain(|resource, _| checked.get(resource) == Some(&Ok(())));
        if shares != *ready {
            ready.clone_from(&shares);
            self.events.send(Event::MpsReady(shares)).await.context("no task takes events any more")?;
        }
        Ok(())
    }
}

/// The claims that had daemons at the last check. A daemon whose claims have all ended starts for other claims only
/// after it has ended and the old claims' data in shared memory is gone.
#[derive(Debug, Default)]
struct DaemonClaims {
    /// The UIDs of the claims of each daemon.
    claims: BTreeMap<ResourceName, BTreeSet<String>>,
    /// The daemons whose last claims have ended.
    ending: BTreeSet<ResourceName>,
}

impl DaemonClaims {
    /// Removes from the orders the daemons that have to end before they start again; returns their names.
    fn hold_back(
        &mut self,
        daemons: &mut BTreeMap<ResourceName, MpsOrder>,
        claims: BTreeMap<ResourceName, BTreeSet<String>>,
        keeps_memory: impl Fn(&ResourceName) -> bool,
    ) -> Vec<ResourceName> {
        for (name, before) in std::mem::replace(&mut self.claims, claims) {
            match self.claims.get(&name) {
                Some(now) if !now.is_disjoint(&before) => {}
                // It is unknown which claims the daemon has now.
                None if daemons.contains_key(&name) => drop(self.claims.insert(name, before)),
                _ => drop(self.ending.insert(name)),
            }
        }
        self.ending.retain(keeps_memory);
        let waits: Vec<ResourceName> = self.ending.iter().filter(|name| daemons.contains_key(*name)).cloned().collect();
        daemons.retain(|name, _| !self.ending.contains(name));
        waits
    }
}

/// Writes the orders, if this process has the right to, and reads which daemons serve.
fn write_and_check(
    layout: &Layout,
    snapshot: &NodeState,
    orders: Option<MpsOrders>,
    right: Option<Right>,
    history: &mut DaemonClaims,
) -> Checked {
    // Before the GPUs are seen, the file of the previous process stays.
    if snapshot.topology().gpus().is_empty() {
        return Checked { resources: BTreeMap::new(), claims: None, trouble: None };
    }
    let mut resources = BTreeMap::new();
    let limits = |(name, share): (&ResourceName, &MpsShare)| match layout.check(name) {
        Ok(()) => Some((name.clone(), Limits::of(share))),
        Err(error) => {
            resources.insert(name.clone(), Err(error.into()));
            None
        }
    };
    let shared: BTreeMap<ResourceName, Limits> = snapshot.mps_shares().iter().filter_map(limits).collect();
    let before = || Orders::read(layout).unwrap_or_default().daemons;
    let is_known = orders.is_some();
    let MpsOrders { revision, mut daemons, claims, keeps_others, right: _claims_right } = orders.unwrap_or_default();
    if keeps_others || !is_known {
        let others = before().into_iter().filter(|(_, order)| !daemons.values().any(|wanted| wanted.overlaps(order)));
        daemons.extend(others.collect::<Vec<_>>());
    }
    let waits =
        if is_known { history.hold_back(&mut daemons, claims, |name| keeps_own_shm(layout, name)) } else { Vec::new() };
    let gpus = snapshot.topology().gpus().iter().map(|gpu| gpu.uuid.clone());
    let gpus: BTreeSet<_> = gpus.filter(|gpu| snapshot.is_with_dra(gpu)).collect();
    let orders = Orders { gpus, daemons, resources: shared };
    let written = right.map_or(Ok(()), |_right| orders.write(layout));
    let trouble = written.err().map(|error| {
        format!("cannot write orders for MPS control daemons to {}: {error}", layout.orders_folder().display())
    });
    resources.extend(orders.resources.iter().map(|(name, limits)| (name.clone(), readiness(layout, name, limits))));
    let ready = |(name, limits): (ResourceName, Limits)| {
        let ready = shm_of_ready(layout, &name, &limits).map_err(|why| why.to_string());
        (name, ready)
    };
    let waits =
        waits.into_iter().map(|name| (name, Err("the daemon of the previous claim has not ended yet".to_owned())));
    let daemons: BTreeMap<_, _> = orders.of_claims().map(ready).chain(waits).collect();
    // These records are read after the markers, because a daemon records its GPUs before it serves.
    let exclusive = exclusive_gpus(layout).unwrap_or_default().intersection(&orders.gpus).cloned().collect();
    let has_orders = !daemons.is_empty() || !orders.resources.is_empty();
    let claims = is_known.then_some(MpsServed { revision, trouble: trouble.clone(), daemons, exclusive });
    Checked { resources, claims, trouble: trouble.filter(|_| has_orders) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::claims::MpsOrderGpu;
    use linkwise_core::state::{ResourcePlan, SharedResource, Sharing, SharingKind};
    use linkwise_host::machines;

    #[test]
    fn only_the_serving_process_writes_orders() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path());
        let shared = SharedResource::new(ResourceName::gpu(), 4);
        let plan = ResourcePlan { sharing: Some(Sharing::new(SharingKind::Mps, vec![shared])), ..Default::default() };
        let machine = machines::load("dgx1-v100").unwrap().observed;
        let mut state = NodeState::default();
        let check = |state: &NodeState, orders: Option<MpsOrders>, right: Option<Right>| {
            write_and_check(&layout, state, orders, right, &mut DaemonClaims::default()).trouble
        };
        let written = || Orders::read(&layout).unwrap();
        // The GPUs are unknown: the orders of the previous process stay.
        let gpus = vec![MpsOrderGpu { gpu: machine.gpus[0].uuid.clone(), mib: None }];
        let of_claim = MpsOrder { gpus, thread_percentage: 50, exclusive: true };
        let before = Orders { daemons: [(of_claim.name().unwrap(), of_claim)].into(), ..Orders::default() };
        before.write(&layout).unwrap();
        for event in [Event::Planned(Box::new(plan)), Event::Observed(Box::new(machine))] {
            assert_eq!(check(&state, Some(MpsOrders::default()), Some(Right::default())), None);
            assert_eq!(written(), before);
            state = state.apply(event, Duration::ZERO).0;
        }
        // A standby writes nothing.
        assert_eq!(check(&state, Some(MpsOrders::default()), None), None);
        assert_eq!(written(), before);
        // The orders of claims stay until their checkpoints are read.
        assert_eq!(check(&state, None, Some(Right::default())), None);
        assert_eq!((written().daemons, written().resources.len()), (before.daemons.clone(), 1));
        assert_eq!(check(&state, Some(MpsOrders::default()), Some(Right::default())), None);
        let limits = written().resources.remove(&ResourceName::gpu()).unwrap();
        assert_eq!((limits.thread_percentage, limits.memory.len(), written().daemons.len()), (25, 8, 0));
        // Without an MPS root the trouble names it.
        let nowhere = Layout::new(folder.path().join("nowhere"));
        let checked = write_and_check(&nowhere, &state, None, Some(Right::default()), &mut DaemonClaims::default());
        assert!(checked.trouble.unwrap().ends_with("the MPS root is not mounted"));
    }

    fn name(text: &str) -> ResourceName {
        format!("dra.linkwise.dev/{text}").parse().unwrap()
    }

    #[test]
    fn next_claim_waits_until_the_last_ones_memory_is_gone() {
        let mut history = DaemonClaims::default();
        let mut hold_back = |wanted: &[(&str, &[&str])], others: &[&str], there: &[&str]| {
            let order = MpsOrder { gpus: Vec::new(), thread_percentage: 100, exclusive: true };
            let names = wanted.iter().map(|(daemon, _)| *daemon).chain(others.iter().copied());
            let mut daemons: BTreeMap<_, _> = names.map(|daemon| (name(daemon), order.clone())).collect();
            let uids = |claims: &[&str]| claims.iter().map(|uid| (*uid).to_owned()).collect();
            let claims = wanted.iter().map(|(daemon, claims)| (name(daemon), uids(claims))).collect();
            let is_there = |daemon: &ResourceName| there.iter().any(|text| name(text) == *daemon);
            let waits = history.hold_back(&mut daemons, claims, is_there);
            assert!(waits.iter().all(|name| !daemons.contains_key(name)));
            waits.len()
        };
        assert_eq!(hold_back(&[("a", &["1"]), ("b", &["2"])], &[], &[]), 0, "the first");
        assert_eq!(hold_back(&[("a", &["1", "3"]), ("b", &["4"])], &[], &["a", "b"]), 1, "1 keeps a, 4 waits for b");
        assert_eq!(hold_back(&[("a", &["3"]), ("b", &["4"])], &[], &["a", "b"]), 1, "b has not ended");
        assert_eq!(hold_back(&[("a", &["3"]), ("b", &["4"])], &[], &["a"]), 0);
        // The claim of a daemon ends and the next one comes later, but sooner than the daemon ends.
        assert_eq!(hold_back(&[("b", &["4"])], &[], &["a", "b"]), 0);
        assert_eq!(hold_back(&[("a", &["5"]), ("b", &["4"])], &[], &["a", "b"]), 1);
        assert_eq!(hold_back(&[("a", &["5"]), ("b", &["4"])], &[], &["b"]), 0);
        // A checkpoint that cannot be read hides the claim; the daemon stays.
        assert_eq!(hold_back(&[("b", &["4"])], &["a"], &["a", "b"]), 0);
        assert_eq!(hold_back(&[("a", &["5"]), ("b", &["4"])], &[], &["a", "b"]), 0);
    }
}
