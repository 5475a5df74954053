//! Events about pods in `linkwise run`: makes the due events from the latest snapshot and hands them to their writer.
//!
//! Admissions do not wait for them. The writer takes the latest list when it is done with the previous one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::FutureExt;
use linkwise_cluster::{ApiServer, EventWriter};
use linkwise_system::send_if_new;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::config::Settings;
use linkwise_core::publish::PodEvent;
use linkwise_core::publish::placement::Placements;
use linkwise_core::state::NodeState;
use linkwise_node::node::Node;
use linkwise_system::right::Right;

/// The shortest time between two lists of events. Admissions in that time are in the next list.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the tasks that write events about the pods of a node, if the settings ask for it.
pub(super) fn spawn_in(node: &mut Node, settings: &Settings, name: Option<&str>, api: Option<&ApiServer>) {
    if !settings.events.value {
        return;
    }
    let Some(api) = api else {
        let why = "KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig is given";
        tracing::warn!(why, "cannot write events: they need the API server");
        return;
    };
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        tracing::warn!("cannot write events: they need --node-name (NODE_NAME)");
        return;
    };
    let (sender, due) = watch::channel(Arc::default());
    node.metrics().register(|registry| api.metrics().register_in(registry));
    let writer = EventWriter::new(api.another(), name.to_owned()).run(due, node.shutdown());
    node.spawn("events", follow(node.snapshot(), node.files(), settings.events_below.value, sender));
    node.spawn_until_done("events' writer", writer.map(Ok));
}

/// Publishes the due events until the node's state ends. Publishes none before this process has the right to write for
/// the node, because another linkwise does so until then.
async fn follow(
    mut snapshot: watch::Receiver<Arc<NodeState>>,
    mut right: watch::Receiver<Option<Right>>,
    below: u8,
    due: watch::Sender<Arc<Vec<PodEvent>>>,
) -> Result<()> {
    loop {
        right.wait_for(Option::is_some).await.context("the takeover's task is gone")?;
        let state = Arc::clone(&snapshot.borrow_and_update());
        // On a machine of 64 GPUs this takes milliseconds.
        let made =
            spawn_blocking(move || PodEvent::of(&Placements::of(&state), state.ledger().by_container(), below)).await;
        let made = made.context("making events panicked")?;
        send_if_new(&due, Arc::new(made));
        sleep(MIN_INTERVAL).await;
        snapshot.changed().await.context("the node's state is gone")?;
    }
}
