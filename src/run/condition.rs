//! The node's condition: `linkwise run` makes it from the latest view of the node and hands it to its writer; `linkwise
//! clear-condition` removes it from all nodes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::FutureExt;
use linkwise_cluster::{ApiMetrics, ApiServer, NodeConditionSettings, NodeConditionWriter, Pace, clear_condition};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::config::{ClearConditionArgs, Settings};
use linkwise_core::publish::Condition;
use linkwise_core::publish::view::PartState;
use linkwise_core::state::NodeState;
use linkwise_core::words::count;
use linkwise_node::node::Node;
use linkwise_node::readiness::Part;
use linkwise_node::views::Views;
use linkwise_nvml::supervisor::{Idle, boot};
use linkwise_system::clock::at;
use linkwise_system::output::print;
use linkwise_system::right::Right;
use linkwise_system::{files, send_if_new};

/// The file in the state folder with the node and the boot for which the startup taints were removed.
const UNTAINTED: &str = "startup_taints";

/// The most bytes that are read of this file, which has two UUIDs.
const MAX_UNTAINTED: u64 = 256;

/// The shortest time between two conditions. A node's GPUs and parts change in bursts.
const MIN_INTERVAL: Duration = Duration::from_millis(250);

/// The time in which a process has to begin to serve, before the condition reports that it does not.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts the tasks that write the node's condition, if the settings ask for it.
pub(super) fn spawn_in(
    node: &mut Node,
    settings: &Settings,
    (name, state_dir): (Option<&str>, Option<&Path>),
    api: Option<&ApiServer>,
) {
    if !settings.node_condition.value {
        return;
    }
    let (Some(api), Some(name)) = (api, name.filter(|name| !name.is_empty())) else {
        tracing::warn!("cannot write the node condition: it needs the API server and --node-name (NODE_NAME)");
        return;
    };
    let file = state_dir.map(|folder| folder.join(UNTAINTED));
    let kept = file.as_ref().and_then(|file| files::read(file, MAX_UNTAINTED).ok());
    let kept = kept.and_then(|text| String::from_utf8(text).ok());
    let boot = boot().unwrap_or_default();
    let was_ready = kept.as_ref().is_some_and(|kept| kept.split(' ').next() == Some(&boot));
    let condition = NodeConditionSettings {
        node: name.to_owned(),
        kind: settings.node_condition_type.value.clone(),
        startup_taints: settings.startup_taints.value.clone(),
        boot,
        untainted: kept,
    };
    node.metrics().register(|registry| api.metrics().register_in(registry));
    let (sender, wanted) = watch::channel(None);
    let keep = move |mark: &str| keep(file.as_ref(), mark);
    let writer = NodeConditionWriter::new(api.another(), condition, keep).run(wanted, node.shutdown());
    let inputs = Inputs {
        snapshot: node.snapshot(),
        parts: node.readiness.news(),
        idle: node.readiness.idle().subscribe(),
        files: node.files(),
        views: node.views.clone(),
        expected: settings.expect_gpus.value,
        was_ready,
    };
    node.spawn("node condition", follow(inputs, sender));
    node.spawn_until_done("node condition's writer", writer.map(Ok));
}

/// Stores the mark, so that the next process does not remove a taint that an operator put back.
fn keep(file: Option<&PathBuf>, mark: &str) {
    let Some(file) = file else { return };
    if let Err(error) = files::write(file, mark.as_bytes(), 0o600) {
        let file = file.display();
        tracing::warn!(%file, %error, "cannot store that startup taints are removed, the next process may remove them");
    }
}

/// The inputs from which the condition is made.
struct Inputs {
    snapshot: watch::Receiver<Arc<NodeState>>,
    parts: watch::Receiver<BTreeMap<Part, PartState>>,
    idle: watch::Receiver<Idle>,
    files: watch::Receiver<Option<Right>>,
    views: Views,
    expected: Option<usize>,
    /// Set if the node was ready once since its boot.
    was_ready: bool,
}

/// Publishes the condition while this process has the right to write for the node; at other times another linkwise
/// does. If the node was ready before this process, a condition that only reports the start is held back for
/// [`START_TIMEOUT`], so that a restart or a rollout changes nothing.
async fn follow(mut inputs: Inputs, condition: watch::Sender<Option<Arc<Condition>>>) -> Result<()> {
    let mut held_back_until = inputs.was_ready.then(|| Instant::now() + START_TIMEOUT);
    loop {
        inputs.snapshot.mark_unchanged();
        inputs.parts.mark_unchanged();
        inputs.idle.mark_unchanged();
        let is_writer = inputs.files.borrow_and_update().is_some();
        let made = is_writer.then(|| Arc::new(Condition::of(&inputs.views.for_operator(), inputs.expected)));
        let is_news = made.as_ref().is_some_and(|made| !made.is_starting());
        held_back_until.take_if(|until| is_news || *until <= Instant::now());
        send_if_new(&condition, made.filter(|_| held_back_until.is_none()));
        sleep(MIN_INTERVAL).await;
        tokio::select! {
            () = at(held_back_until) => {}
            changed = inputs.snapshot.changed() => changed.context("the node's state is gone")?,
            changed = inputs.parts.changed() => changed.context("the node's parts are gone")?,
            changed = inputs.idle.changed() => changed.context("the driver's task is gone")?,
            changed = inputs.files.changed() => changed.context("the takeover's task is gone")?,
        }
    }
}

/// Removes the condition from all nodes, after an uninstallation.
pub async fn clear(args: &ClearConditionArgs) -> Result<()> {
    let server = ApiServer::new(args.api.access()?, Pace::DEFAULT, ApiMetrics::default());
    let cleared = clear_condition(server, &args.kind).await.context("cannot remove the condition from all nodes")?;
    Ok(print(&format!("condition {} removed from {}\n", args.kind, count(cleared, "node")))?)
}
