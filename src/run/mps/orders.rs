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

use linkwise_core::errors::chain;
use linkwise_core::once::Once;
use linkwise_core::state::{Door, NodeState, ResourceName};
use linkwise_host::mps::{Layout, Limits, Orders, exclusive_gpus, readiness};
use linkwise_kubelet::dra::{MpsLink, MpsOrders, MpsServed};
use linkwise_node::node::Node;
use linkwise_system::right::Right;

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
    let (mut troubles, mut waiting) = (Once::new(), Once::new());
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        let wanted = orders.borrow_and_update().clone();
        // Before the checkpoints are read and the GPUs are seen, the file of the last process stays.
        let wanted = wanted.filter(|_| !snapshot.topology().gpus().is_empty());
        let mut pause = None;
        if let Some(wanted) = wanted {
            let layout = layout.clone();
            // A file system that hangs must not hold a thread that admissions need.
            let done = spawn_blocking(move || carry_out(&layout, &snapshot, wanted)).await;
            let done = done.context("writing the MPS orders panicked")?;
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

/// Withdraws the orders of an earlier process with DRA, once this process writes the node's files (`files`). Without
/// DRA all GPUs are the device plugin's. Never ends: a task that ends would end the node.
pub(in crate::run) async fn withdraw_orders(layout: Layout, mut files: watch::Receiver<Option<Right>>) -> Result<()> {
    let right = files.wait_for(Option::is_some).await.map(|right| right.clone());
    if let Ok(right) = right {
        let done = spawn_blocking(move || {
            let _right = right;
            Orders::default().write(&layout)
        });
        let done = done.await;
        if let Err(error) = done.context("removing the MPS orders panicked")? {
            tracing::warn!(error = chain(&error), "the MPS orders of claims that are gone cannot be removed");
        }
    }
    std::future::pending().await
}

fn carry_out(layout: &Layout, snapshot: &NodeState, wanted: MpsOrders) -> MpsServed {
    let MpsOrders { revision, mut daemons, keeps_others, lock: _lock } = wanted;
    if keeps_others {
        let before = Orders::read(layout).unwrap_or_default().daemons.into_iter();
        let others = before.filter(|(_, order)| !daemons.values().any(|wanted| wanted.overlaps(order)));
        daemons.extend(others.collect::<Vec<_>>());
    }
    let is_dra = |gpu: &linkwise_core::topology::GpuUuid| snapshot.door(gpu).is_some_and(Door::is_dra);
    let gpus: BTreeSet<_> = snapshot.topology().gpus().iter().map(|gpu| gpu.uuid.clone()).filter(is_dra).collect();
    let orders = Orders { gpus, daemons };
    let written = orders.write(layout);
    let trouble = written.err().map(|error| {
        format!("cannot write orders for MPS control daemons to {}: {error}", layout.orders_folder().display())
    });
    let ready = |(name, limits): (ResourceName, Limits)| {
        let ready = readiness(layout, &name, &limits).map_err(|why| why.to_string());
        (name, ready)
    };
    let daemons: BTreeMap<_, _> = orders.limits().into_iter().map(ready).collect();
    // This is read after the markers: a daemon that serves has its GPUs on record.
    let exclusive = exclusive_gpus(layout).unwrap_or_default().intersection(&orders.gpus).cloned().collect();
    MpsServed { revision, trouble, daemons, exclusive }
}
