//! The plugin's side of MPS: reports to the snapshot which control daemons are ready, apart from admissions.
//!
//! The task reads small files in a folder that it shares with the daemons' process, and starts no program.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::{mpsc, watch};

use linkwise_core::once::Once;
use linkwise_core::state::{Event, MpsShare, NodeState, ResourceName};
use linkwise_host::mps::{Layout, NotReady, readiness};
use linkwise_nvml::supervisor::Idle;

/// The time from one reading of the markers to the next: a lock that ends makes no event in a folder. A small file for
/// each resource.
const POLL: Duration = Duration::from_secs(1);

/// Polls the daemons' markers as long as snapshots come; `idle` gets the reason why no GPU is offered, for /readyz.
pub(in crate::run) async fn follow_daemons(
    layout: Layout,
    mut snapshots: watch::Receiver<Arc<NodeState>>,
    events: mpsc::Sender<Event>,
    idle: watch::Sender<Idle>,
) -> Result<()> {
    let mut logged = Once::new();
    let mut ready: BTreeMap<ResourceName, MpsShare> = BTreeMap::new();
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        let (layout, current) = (layout.clone(), Arc::clone(&snapshot));
        // A file system that hangs must not hold a thread that admissions need.
        let polled = tokio::task::spawn_blocking(move || poll(&layout, &current)).await;
        let polled = polled.context("the poll of the MPS markers panicked")?;
        for (resource, readiness) in logged.replace(polled.clone()) {
            let Err(why) = readiness else {
                tracing::info!(%resource, "MPS daemon ready, offering the resource");
                continue;
            };
            let why = why.to_string();
            tracing::warn!(%resource, why, "MPS daemon not ready, not offering the resource");
            let reason = format!("{resource}: its MPS control daemon is not ready: {why}");
            idle.send_replace(Idle::Waiting(reason));
        }
        let mut shares = snapshot.mps_shares().clone();
        shares.retain(|resource, _| polled.get(resource) == Some(&Ok(())));
        if shares != ready {
            ready = shares;
            events.send(Event::MpsReady(ready.clone())).await.context("no task takes events any more")?;
        }
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() { return Ok(()) },
            () = tokio::time::sleep(POLL), if !polled.is_empty() => {}
        }
    }
}

fn poll(layout: &Layout, snapshot: &NodeState) -> BTreeMap<ResourceName, Result<(), NotReady>> {
    let mut polled = BTreeMap::new();
    for (resource, limits) in super::wanted(layout, snapshot.mps_shares()) {
        let ready = limits.map_err(NotReady::from).and_then(|limits| readiness(layout, &resource, &limits));
        polled.insert(resource, ready);
    }
    polled
}
