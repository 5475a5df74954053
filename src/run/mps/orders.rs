//! The plugin's side of MPS for claims: hands the DRA plugin's orders to the daemons' process, and reports the daemons
//! that serve.
//!
//! The task writes one small file in a folder that it shares with that process, reads markers there, and starts no
//! program.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use linkwise_core::claims::MpsOrder;
use linkwise_core::once::Once;
use linkwise_core::state::{NodeState, ResourceName};
use linkwise_host::mps::{Layout, Limits, Orders, exclusive_gpus, keeps_own_shm, shm_of_ready};
use linkwise_kubelet::dra::{MpsLink, MpsOrders, MpsServed};
use linkwise_node::node::Node;

/// The time from one reading of the markers to the next: while a claim may wait for one, and while all daemons serve.
const POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// Starts the task that carries orders out; the way to order control daemons.
pub(in crate::run) fn spawn_orders(node: &mut Node, layout: &Layout) -> MpsLink {
    let ((orders, ordered), (served, serving)) = (watch::channel(None), watch::channel(None));
    node.spawn("MPS orders", follow_orders(layout.clone(), node.snapshot(), ordered, served));
    MpsLink { orders, served: serving }
}

/// Carries orders out as long as snapshots come.
async fn follow_orders(
    layout: Layout,
    mut snapshots: watch::Receiver<Arc<NodeState>>,
    mut orders: watch::Receiver<Option<MpsOrders>>,
    served: watch::Sender<Option<MpsServed>>,
) -> Result<()> {
    let (mut troubles, mut waiting, mut last) = (Once::new(), Once::new(), Turns::default());
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        let wanted = orders.borrow_and_update().clone();
        // Before the checkpoints are read and the GPUs are seen, the file of the last process stays.
        let wanted = wanted.filter(|_| !snapshot.topology().gpus().is_empty());
        let mut pause = None;
        if let Some(wanted) = wanted {
            let (layout, mut turns) = (layout.clone(), std::mem::take(&mut last));
            // A file system that hangs must not hold a thread that admissions need.
            let done = spawn_blocking(move || (carry_out(&layout, &snapshot, wanted, &mut turns), turns)).await;
            let (done, turns) = done.context("writing the MPS orders panicked")?;
            last = turns;
            for trouble in troubles.replace(done.trouble.iter().filter(|_| !done.daemons.is_empty()).cloned()) {
                tracing::warn!(trouble, "no MPS for claims");
            }
            let not_ready = done.daemons.iter().filter_map(|(name, state)| Some((name.clone(), state.clone().err()?)));
            for (daemon, why) in waiting.replace(not_ready) {
                tracing::info!(%daemon, why, "MPS daemon of claims not ready");
            }
            let is_settled = done.daemons.values().all(Result::is_ok) && done.exclusive.is_empty();
            if !done.daemons.is_empty() || !done.exclusive.is_empty() {
                pause = Some(if is_settled { POLL.1 } else { POLL.0 });
            }
            served.send_replace(Some(done));
        }
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() { return Ok(()) },
            changed = orders.changed() => if changed.is_err() { return Ok(()) },
            () = tokio::time::sleep(pause.unwrap_or_default()), if pause.is_some() => {}
        }
    }
}

/// The claims that have had daemons last. Another claim gets a daemon of the same name when that of the last one has
/// ended, and with it what the last left in shared memory.
#[derive(Debug, Default)]
struct Turns {
    /// The UIDs of the claims of each daemon.
    claims: BTreeMap<ResourceName, BTreeSet<String>>,
    /// The daemons whose last claims have ended.
    ending: BTreeSet<ResourceName>,
}

impl Turns {
    /// Takes the daemons out of the orders that have to end first; returns their names.
    fn take_out(
        &mut self,
        daemons: &mut BTreeMap<ResourceName, MpsOrder>,
        claims: BTreeMap<ResourceName, BTreeSet<String>>,
        is_there: impl Fn(&ResourceName) -> bool,
    ) -> Vec<ResourceName> {
        for (name, before) in std::mem::replace(&mut self.claims, claims) {
            match self.claims.get(&name) {
                Some(now) if !now.is_disjoint(&before) => {}
                // Nobody knows of which claims it is now.
                None if daemons.contains_key(&name) => drop(self.claims.insert(name, before)),
                _ => drop(self.ending.insert(name)),
            }
        }
        self.ending.retain(is_there);
        let waits: Vec<ResourceName> = self.ending.iter().filter(|name| daemons.contains_key(*name)).cloned().collect();
        daemons.retain(|name, _| !self.ending.contains(name));
        waits
    }
}

fn carry_out(layout: &Layout, snapshot: &NodeState, wanted: MpsOrders, turns: &mut Turns) -> MpsServed {
    let MpsOrders { revision, mut daemons, claims, keeps_others, lock: _lock } = wanted;
    if keeps_others {
        let before = Orders::read(layout).unwrap_or_default().daemons.into_iter();
        let others = before.filter(|(_, order)| !daemons.values().any(|wanted| wanted.overlaps(order)));
        daemons.extend(others.collect::<Vec<_>>());
    }
    let waits = turns.take_out(&mut daemons, claims, |name| keeps_own_shm(layout, name));
    let is_dra = |gpu: &linkwise_core::topology::GpuUuid| snapshot.is_with_dra(gpu);
    let gpus: BTreeSet<_> = snapshot.topology().gpus().iter().map(|gpu| gpu.uuid.clone()).filter(is_dra).collect();
    let orders = Orders { gpus, daemons };
    let written = orders.write(layout);
    let trouble = written.err().map(|error| {
        format!("cannot write orders for MPS control daemons to {}: {error}", layout.orders_folder().display())
    });
    let ready = |(name, limits): (ResourceName, Limits)| {
        let ready = shm_of_ready(layout, &name, &limits).map_err(|why| why.to_string());
        (name, ready)
    };
    let waits =
        waits.into_iter().map(|name| (name, Err("the daemon of the claim before has not ended yet".to_owned())));
    let daemons: BTreeMap<_, _> = orders.limits().into_iter().map(ready).chain(waits).collect();
    // This is read after the markers: a daemon that serves has its GPUs on record.
    let exclusive = exclusive_gpus(layout).unwrap_or_default().intersection(&orders.gpus).cloned().collect();
    MpsServed { revision, trouble, daemons, exclusive }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ResourceName {
        format!("dra.linkwise.dev/{text}").parse().unwrap()
    }

    #[test]
    fn next_claim_waits_until_the_last_ones_memory_is_gone() {
        let mut turns = Turns::default();
        let mut waits = |wanted: &[(&str, &[&str])], others: &[&str], there: &[&str]| {
            let order = MpsOrder { gpus: Vec::new(), thread_percentage: 100, exclusive: true };
            let names = wanted.iter().map(|(daemon, _)| *daemon).chain(others.iter().copied());
            let mut daemons: BTreeMap<_, _> = names.map(|daemon| (name(daemon), order.clone())).collect();
            let uids = |claims: &[&str]| claims.iter().map(|uid| (*uid).to_owned()).collect();
            let claims = wanted.iter().map(|(daemon, claims)| (name(daemon), uids(claims))).collect();
            let is_there = |daemon: &ResourceName| there.iter().any(|text| name(text) == *daemon);
            let waits = turns.take_out(&mut daemons, claims, is_there);
            assert!(waits.iter().all(|name| !daemons.contains_key(name)));
            waits.len()
        };
        assert_eq!(waits(&[("a", &["1"]), ("b", &["2"])], &[], &[]), 0, "the first");
        assert_eq!(waits(&[("a", &["1", "3"]), ("b", &["4"])], &[], &["a", "b"]), 1, "a is shared, b passes on");
        assert_eq!(waits(&[("a", &["3"]), ("b", &["4"])], &[], &["a", "b"]), 1, "b has not ended");
        assert_eq!(waits(&[("a", &["3"]), ("b", &["4"])], &[], &["a"]), 0);
        // The claim of a daemon ends and the next one comes later, but sooner than the daemon ends.
        assert_eq!(waits(&[("b", &["4"])], &[], &["a", "b"]), 0);
        assert_eq!(waits(&[("a", &["5"]), ("b", &["4"])], &[], &["a", "b"]), 1);
        assert_eq!(waits(&[("a", &["5"]), ("b", &["4"])], &[], &["b"]), 0);
        // A checkpoint that cannot be read hides the claim; the daemon stays.
        assert_eq!(waits(&[("b", &["4"])], &["a"], &["a", "b"]), 0);
        assert_eq!(waits(&[("a", &["5"]), ("b", &["4"])], &[], &["a", "b"]), 0);
    }
}
