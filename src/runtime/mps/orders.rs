//! The plugin's side of MPS for claims: hands the DRA plugin's orders to the daemons' process, and reports what serves.
//!
//! It writes one small file in a folder that it shares with that process, reads markers there, and starts no program.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::dra::{MpsOrders, MpsServed};
use crate::errors::chain;
use crate::mps::{Layout, Limits, Orders, exclusive_gpus, readiness};
use crate::once::Once;
use crate::state::{Door, NodeState, ResourceName};

/// How often the markers are read while a claim may wait for one, and while all is as it should be.
const POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// Carries orders out as long as the snapshots come.
pub(in crate::runtime) async fn follow_orders(
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

/// Takes back what a process with DRA ordered before, once this process writes the node's files (`files`). Without DRA all
/// GPUs are the device plugin's. Never ends: a task of the node that ends, ends the process.
pub(in crate::runtime) async fn withdraw_orders(layout: Layout, mut files: watch::Receiver<bool>) -> Result<()> {
    if files.wait_for(|writes| *writes).await.is_ok() {
        let done = spawn_blocking(move || Orders::default().write(&layout)).await;
        if let Err(error) = done.context("removing the MPS orders panicked")? {
            tracing::warn!(error = chain(&error), "the MPS orders of claims that are gone cannot be removed");
        }
    }
    std::future::pending().await
}

fn carry_out(layout: &Layout, snapshot: &NodeState, wanted: MpsOrders) -> MpsServed {
    let MpsOrders { revision, daemons } = wanted;
    let is_dra = |gpu: &crate::topology::GpuUuid| snapshot.door(gpu).is_some_and(Door::is_dra);
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
    // Read after the markers: a daemon that serves has its GPUs on record.
    let exclusive = exclusive_gpus(layout).unwrap_or_default().intersection(&orders.gpus).cloned().collect();
    MpsServed { revision, trouble, daemons, exclusive }
}
