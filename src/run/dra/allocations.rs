//! Follows GPUs that leave DRA, or are to be shared otherwise, at the API server: tells the state which devices the
//! stored slices offer to new claims, and which claims have these GPUs allocated.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use linkwise_cluster::{AllocationReader, StoredPool};
use linkwise_core::backoff::Backoff;
use linkwise_core::state::{Event, NodeState};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// The pauses between two lists of all claims while claims have such GPUs allocated.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(300)];

/// Tells the state which devices the stored slices offer, again where the state was made anew.
pub(super) async fn follow_slices(
    mut stored: watch::Receiver<StoredPool>,
    mut snapshot: watch::Receiver<Arc<NodeState>>,
    events: mpsc::Sender<Event>,
) -> Result<()> {
    loop {
        let offered = stored.borrow_and_update().offered.clone();
        let is_known = snapshot.borrow_and_update().offered_by_slices() == offered.as_ref();
        if let Some(devices) = offered.filter(|_| !is_known) {
            events.send(Event::SlicesStored(devices)).await.context("the node takes no events")?;
        }
        tokio::select! {
            changed = stored.changed() => changed.context("the API server's client is gone")?,
            changed = snapshot.changed() => changed.context("the node's state is gone")?,
        }
    }
}

/// Tells the state which claims have the GPUs about which it asks.
pub(super) async fn follow_claims(
    mut reader: AllocationReader,
    mut snapshot: watch::Receiver<Arc<NodeState>>,
    events: mpsc::Sender<Event>,
) -> Result<()> {
    let [first, longest] = PAUSES;
    let mut pauses = Backoff::new(first, longest);
    loop {
        let asks = snapshot.wait_for(|state| !state.awaiting_allocations().is_empty()).await;
        let gpus = asks.context("the node's state is gone")?.awaiting_allocations();
        let asked = gpus.clone();
        let pause = match reader.read().await {
            Ok(claims) => {
                events.send(Event::Allocations { gpus, claims }).await.context("the node takes no events")?;
                pauses.failed()
            }
            Err(pause) => pause,
        };
        let others = snapshot.wait_for(|state| state.awaiting_allocations() != asked);
        if let Ok(others) = timeout(pause, others).await {
            others.context("the node's state is gone")?;
            pauses.reset();
        }
    }
}
