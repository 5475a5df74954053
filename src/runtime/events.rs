//! Events about pods in `linkwise run`: which are due, made from each snapshot and handed to their writer, which only
//! `linkwise-cluster` has.
//!
//! Nothing waits for them: they are made beside the path of an admission, and the writer takes the last list when it
//! gets to it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::node::Node;
use crate::config::Settings;
use crate::publish::PodEvent;
use crate::publish::placement::Placements;
use crate::state::NodeState;

/// The pause between two looks at what pods have: what they have changes no faster.
const BETWEEN: Duration = Duration::from_secs(1);

/// What the writer of events is given.
pub struct EventsSide {
    /// The node's name.
    pub node: String,
    /// The events that are due now.
    pub due: watch::Receiver<Arc<Vec<PodEvent>>>,
}

/// Writes events until it is told to end, and registers its metrics.
pub type EventsClient =
    dyn Fn(EventsSide, &mut Registry, CancellationToken) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// Has events written about the pods of a node.
pub(super) fn spawn_in(node: &mut Node, settings: &Settings, name: Option<&str>, client: &EventsClient) {
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        tracing::warn!("--events needs --node-name (NODE_NAME): no events are written");
        return;
    };
    let (sender, due) = watch::channel(Arc::default());
    let (side, shutdown) = (EventsSide { node: name.to_owned(), due }, node.shutdown());
    let writer = node.metrics().register(|registry| client(side, registry, shutdown));
    node.spawn("events", follow(node.snapshot(), node.files(), settings.events_below.value, sender));
    node.spawn_until_done("events' writer", writer);
}

/// Says which events are due, as long as there is a state. None before this process writes for the node (`files`): another
/// linkwise does until then.
async fn follow(
    mut snapshot: watch::Receiver<Arc<NodeState>>,
    mut files: watch::Receiver<bool>,
    below: u8,
    due: watch::Sender<Arc<Vec<PodEvent>>>,
) -> Result<()> {
    loop {
        files.wait_for(|writes| *writes).await.context("the node's state is gone")?;
        let state = Arc::clone(&snapshot.borrow_and_update());
        // On a machine of 64 GPUs it takes milliseconds.
        let made = spawn_blocking(move || PodEvent::of(&Placements::of(&state), below)).await;
        let made = made.context("making events panicked")?;
        due.send_if_modified(|last| {
            let changed = **last != made;
            if changed {
                *last = Arc::new(made);
            }
            changed
        });
        sleep(BETWEEN).await;
        snapshot.changed().await.context("the node's state is gone")?;
    }
}
