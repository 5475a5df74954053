//! The plugin's side of MPS: tells the snapshot which control daemons are ready. Off the path of admissions.
//!
//! It reads small files in a folder that it shares with the daemons' process, and starts and asks nobody.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::mps::{Layout, Readiness, look};
use crate::runtime::idle::Idle;
use crate::state::{Event, MpsShare, NodeState, ResourceName};

/// How often it is looked: a lock that is given up makes no event in a folder. A small file for each resource.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Looks at the daemons' markers.
pub(in crate::runtime) struct Watch {
    pub layout: Layout,
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    pub events: mpsc::Sender<Event>,
    /// Why there is nothing to offer, for /readyz.
    pub idle: watch::Sender<Idle>,
}

impl Watch {
    /// Lives until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) -> Result<()> {
        shutdown.run_until_cancelled(self.live()).await.unwrap_or(Ok(()))
    }

    async fn live(mut self) -> Result<()> {
        let mut told: BTreeMap<ResourceName, Readiness> = BTreeMap::new();
        let mut ready: BTreeMap<ResourceName, MpsShare> = BTreeMap::new();
        loop {
            let snapshot = Arc::clone(&self.snapshot.borrow_and_update());
            let (layout, seen) = (self.layout.clone(), Arc::clone(&snapshot));
            // A disk in trouble would hold a thread that admissions need.
            let now = tokio::task::spawn_blocking(move || readiness(&layout, &seen)).await;
            let now = now.context("the look at the MPS daemons broke off")?;
            for (resource, readiness) in now.iter().filter(|(resource, now)| told.get(*resource) != Some(*now)) {
                match readiness {
                    Readiness::Ready => tracing::info!(%resource, "its MPS daemon is ready: it is offered"),
                    Readiness::Waiting { why } => {
                        tracing::warn!(%resource, why, "its MPS daemon is not ready: it is not offered");
                        let reason = format!("{resource}: its MPS control daemon is not ready: {why}");
                        self.idle.send_replace(Idle::Waiting(reason));
                    }
                }
            }
            let shares = snapshot.mps_shares().iter();
            let shares = shares.filter(|(resource, _)| now.get(*resource) == Some(&Readiness::Ready));
            let shares = shares.map(|(resource, share)| (resource.clone(), share.clone())).collect();
            if shares != ready {
                ready = shares;
                self.events.send(Event::MpsReady(ready.clone())).await.context("nobody takes events any more")?;
            }
            told = now;
            tokio::select! {
                changed = self.snapshot.changed() => if changed.is_err() { return Ok(()) },
                () = tokio::time::sleep(LOOK_AGAIN), if !told.is_empty() => {}
            }
        }
    }
}

fn readiness(layout: &Layout, snapshot: &NodeState) -> BTreeMap<ResourceName, Readiness> {
    let look = |(resource, limits): (ResourceName, _)| {
        let readiness = match limits {
            Ok(limits) => look(layout, &resource, &limits),
            Err(error) => Readiness::Waiting { why: format!("{error}") },
        };
        (resource, readiness)
    };
    super::wanted(layout, snapshot).into_iter().map(look).collect()
}
