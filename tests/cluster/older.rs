//! Upgrades from an older release and downgrades to it, with claims that outlive each change. LINKWISE_OLDER names the
//! older program, which `make test-upgrade OLDER=COMMIT` builds.

use std::path::PathBuf;
use std::time::Duration;

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::Connections;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::cluster::support::like;
use crate::dra::cluster::mig;
use crate::dra::cluster::node::Node;
use crate::dra::cluster::takeover::{World, wait_ready};
use crate::run::node::{Process, until};

/// The number of upgrades, each of which a downgrade follows.
const ROUND_TRIPS: usize = 3;

#[allow(clippy::disallowed_methods, reason = "the environment names the older program")]
pub fn older_program() -> PathBuf {
    std::env::var_os("LINKWISE_OLDER").expect("LINKWISE_OLDER is not set: run make test-upgrade").into()
}

/// The older program with the arguments and environment of `command`.
fn as_older(command: &Command) -> Command {
    let mut older = like(command, older_program());
    older.args(command.as_std().get_args());
    older
}

fn older_of_gpus(node: &Node) -> Command {
    as_older(&node.program())
}

fn older_of_mig(node: &Node) -> Command {
    as_older(&mig::program(node))
}

/// The way in which the next process replaces the previous one.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// The next process takes over while the previous one runs, as in a rollout with a surge.
    Surged,
    /// The previous process ends before the next starts.
    Restarted,
    /// The previous process is killed before the next starts.
    Killed,
}

/// Replaces the running process, and returns the next one once it is ready.
async fn change(world: &World, mut running: Process, change: Change, uid: &str) -> Process {
    if let Change::Restarted | Change::Killed = change {
        running.signal(if matches!(change, Change::Killed) { "KILL" } else { "TERM" });
        running.ended().await;
    }
    let (next, address) = world.start(uid).await;
    wait_ready(address).await;
    if let Change::Surged = change {
        running.signal("TERM");
        let (status, last) = running.ended().await;
        assert!(status.success(), "{uid}: {status}: {last:?}");
    }
    next
}

/// Switches between the programs while claims of each set come and go. At each switch a pod keeps the device `kept`.
async fn upgrade_and_downgrade(mut world: World, programs: [fn(&Node) -> Command; 2], kept: &'static str, how: Change) {
    world.is_patient = true;
    world.command = programs[0];
    let mut running = world.first().await;
    let end = CancellationToken::new();
    let mut load = world.load(&end);
    for switch in 1..=2 * ROUND_TRIPS {
        let (node, pod) = (&world.node, format!("kept-{switch}"));
        let claim = node.claim(&pod, &[kept]);
        let given = node.start_pod(&pod, &claim).await;
        world.command = programs[switch % 2];
        running = change(&world, running, how, &format!("pod-{switch}")).await;
        world.wait_more_claims(&format!("{how:?} {switch}")).await;
        assert!(load.try_join_next().is_none(), "{how:?} {switch}");
        // The kubelet prepares the claim again, as after its own restart; the pod keeps its devices.
        assert_eq!(node.start_pod(&pod, &claim).await, given, "{how:?} {switch}");
        node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), &pod));
        until(async || node.dra.stop_pod(&pod).await).await;
    }
    end.cancel();
    load.join_all().await;
    world.wait_over().await;
}

#[tokio::test]
#[ignore = "needs LINKWISE_OLDER: make test-upgrade"]
async fn upgrade_and_way_back_lose_no_claim() {
    for how in [Change::Surged, Change::Restarted, Change::Killed] {
        let world = World::of_gpus(Connections::ByResource, Duration::from_secs(1)).await;
        let world = World { sets: vec![vec!["gpu-4"], vec!["gpu-5", "gpu-6"]], ..world };
        upgrade_and_downgrade(world, [older_of_gpus, Node::program], "gpu-7", how).await;
    }
}

#[tokio::test]
#[ignore = "needs LINKWISE_OLDER: make test-upgrade"]
async fn upgrade_and_way_back_keep_claimed_mig_devices() {
    for how in [Change::Surged, Change::Restarted, Change::Killed] {
        let world = World::of_mig(Connections::ByResource, Duration::from_secs(1)).await;
        let world = World { sets: vec![vec!["gpu-1"], vec![mig::OTHER]], ..world };
        upgrade_and_downgrade(world, [older_of_mig, mig::program], mig::DEVICE, how).await;
    }
}
