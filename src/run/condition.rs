//! The node's condition: `linkwise run` makes it of each view of the node and hands it to its writer; `linkwise
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

/// The longest content of that file, in bytes: two UUIDs.
const MAX_UNTAINTED: u64 = 256;

/// The pause between two looks at the node. Its GPUs and parts change in bursts.
const BETWEEN: Duration = Duration::from_millis(250);

/// The time that a process has to begin to serve, before the condition says that it does not.
const START: Duration = Duration::from_secs(60);

/// Has the node's condition written, where the settings ask for that.
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
        tracing::warn!("node condition not written: it needs the API server and --node-name (NODE_NAME)");
        return;
    };
    let file = state_dir.map(|folder| folder.join(UNTAINTED));
    let kept = file.as_ref().and_then(|file| files::read(file, MAX_UNTAINTED).ok());
    let kept = kept.and_then(|text| String::from_utf8(text).ok());
    let boot = boot().unwrap_or_default();
    let was_ready = kept.as_ref().is_some_and(|kept| kept.split(' ').next() == Some(&boot));
    let of = NodeConditionSettings {
        node: name.to_owned(),
        kind: settings.node_condition_type.value.clone(),
        startup_taints: settings.startup_taints.value.clone(),
        boot,
        untainted: kept,
    };
    node.metrics().register(|registry| api.metrics().register_in(registry));
    let (sender, wanted) = watch::channel(None);
    let keep = move |mark: &str| keep(file.as_ref(), mark);
    let writer = NodeConditionWriter::new(api.another(), of, keep).run(wanted, node.shutdown());
    let looks = Looks {
        snapshot: node.snapshot(),
        parts: node.readiness.news(),
        idle: node.readiness.idle().subscribe(),
        files: node.files(),
        views: node.views.clone(),
        expected: settings.expect_gpus.value,
        was_ready,
    };
    node.spawn("node condition", follow(looks, sender));
    node.spawn_until_done("node condition's writer", writer.map(Ok));
}

/// Keeps the mark, so that the next process removes no taint that somebody put back.
fn keep(file: Option<&PathBuf>, mark: &str) {
    let Some(file) = file else { return };
    if let Err(error) = files::write(file, mark.as_bytes(), 0o600) {
        let file = file.display();
        tracing::warn!(%file, %error, "cannot write which startup taints are removed: the next process may do it again");
    }
}

/// What the condition is made of.
struct Looks {
    snapshot: watch::Receiver<Arc<NodeState>>,
    parts: watch::Receiver<BTreeMap<Part, PartState>>,
    idle: watch::Receiver<Idle>,
    files: watch::Receiver<Option<Right>>,
    views: Views,
    expected: Option<usize>,
    /// Set if the node was ready once since its boot.
    was_ready: bool,
}

/// Publishes the condition while this process writes for the node: before and after that another linkwise does. Where the
/// node was ready before, it is no news that a process begins to serve: a restart and a rollout change nothing.
async fn follow(mut looks: Looks, condition: watch::Sender<Option<Arc<Condition>>>) -> Result<()> {
    let mut held_back_until = looks.was_ready.then(|| Instant::now() + START);
    loop {
        looks.snapshot.mark_unchanged();
        looks.parts.mark_unchanged();
        looks.idle.mark_unchanged();
        let is_writer = looks.files.borrow_and_update().is_some();
        let made = is_writer.then(|| Arc::new(Condition::of(&looks.views.for_operator(), looks.expected)));
        let is_news = made.as_ref().is_some_and(|made| !made.is_starting());
        held_back_until.take_if(|until| is_news || *until <= Instant::now());
        send_if_new(&condition, made.filter(|_| held_back_until.is_none()));
        sleep(BETWEEN).await;
        tokio::select! {
            () = at(held_back_until) => {}
            changed = looks.snapshot.changed() => changed.context("the node's state is gone")?,
            changed = looks.parts.changed() => changed.context("the node's parts are gone")?,
            changed = looks.idle.changed() => changed.context("the driver's task is gone")?,
            changed = looks.files.changed() => changed.context("the takeover's task is gone")?,
        }
    }
}

/// Removes the condition from all nodes, as an uninstallation needs it.
pub async fn clear(args: &ClearConditionArgs) -> Result<()> {
    let server = ApiServer::new(args.api.access()?, Pace::DEFAULT, ApiMetrics::default());
    let cleared = clear_condition(server, &args.kind).await.context("cannot remove the condition from all nodes")?;
    Ok(print(&format!("condition {} removed from {}\n", args.kind, count(cleared, "node")))?)
}
