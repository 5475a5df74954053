//! `linkwise demo`: a whole node in one process, on a simulated machine.
//!
//! A composition root: our node and a kubelet in a box, over real sockets and real gRPC in a temporary
//! folder. `script` says what happens, `show` what is printed of it. Nothing is simulated between the kubelet's
//! call and the plugin's answer.

mod script;
mod show;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::commands::{self, print};
use crate::config::{DemoArgs, LogFormat};
use crate::inventory::{Event, ResourceName};
use crate::kubelet;
use crate::kubelet_box::{KubeletBox, Options};
use crate::machines::Machine;
use crate::runtime::{self, Node, NodeSettings};
use crate::topology::NodeTopology;
use script::Script;

/// Runs the command.
pub fn run(args: &DemoArgs) -> Result<()> {
    runtime::log_to_stderr(&args.log, LogFormat::Text)?;
    let machine = commands::load(&args.machine)?;
    runtime::block_on(demo(args, machine))
}

async fn demo(args: &DemoArgs, machine: Machine) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("linkwise-").tempdir().context("cannot make a temporary folder")?;
    let kubelet = KubeletBox::start(Options::new(folder.path()))?;
    let settings = NodeSettings {
        kubelet: kubelet::Settings {
            // Nobody else uses this folder: nothing to wait for politely.
            longest_pause: Duration::from_secs(1),
            ..kubelet::Settings::new(folder.path().join(Options::SOCKET))
        },
        metrics_address: args.metrics_address,
    };
    let node = Node::start(settings).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    print(&(commands::machine_text(&machine) + "\n"))?;
    let events = node.events();
    let script = Script {
        topology: &topology,
        kubelet: &kubelet,
        events: events.clone(),
        inventory: node.inventory(),
        report: node.last_report(),
        resource: ResourceName::gpu(),
    };
    let (shutdown, address) = (node.shutdown(), node.metrics_address());
    let play = async {
        events.send(Event::Observed(Box::new(machine.observed.clone()))).await.context("the node ended")?;
        if topology.gpus().is_empty() {
            print("\nThis machine has no GPU: linkwise stays up, offers nothing, and /readyz says so.\n")?;
        } else {
            script.play().await?;
        }
        if args.hold { hold(address).await } else { Ok(()) }
    };
    let mut serve = std::pin::pin!(node.serve());
    let result = tokio::select! {
        ended = &mut serve => ended.and_then(|()| bail!("the node ended before the demo did")),
        played = play => {
            shutdown.cancel();
            serve.await.and(played)
        }
    };
    kubelet.stop().await?;
    result
}

/// Keeps serving until interrupted.
async fn hold(address: std::net::SocketAddr) -> Result<()> {
    print(&format!("\nServing until interrupted (Ctrl-C): http://{address}/metrics /livez /readyz\n"))?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
