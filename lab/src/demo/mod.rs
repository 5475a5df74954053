//! `linkwise-lab demo`: a whole node in one process, on a simulated machine.
//!
//! A node of linkwise and a kubelet in a box talk over real sockets and real gRPC in a temporary folder. Nothing is
//! simulated between the kubelet's call and the plugin's answer. `script` is the sequence of events, `show` the text
//! about them, and `style` its colours. `dra` plays most of these events on a node that offers its GPUs through DRA.

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(feature = "cluster")]
mod dra;
#[cfg(feature = "cluster")]
mod manifests;
mod options;
mod script;
mod show;
mod style;

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use linkwise_core::state::Event;
use linkwise_core::topology::{HostObservation, NodeTopology};
use linkwise_host::machines::{self, Machine};
use linkwise_host::picture::machine_tree;
use linkwise_kubelet::device_plugin;
use linkwise_kubelet_box::{BoxError, KubeletBox, Options, Policy, TopologyManager};
use linkwise_node::node::{Node, NodeSettings};
use linkwise_system::block_on;
use linkwise_system::log::{LogFormat, log_to_stderr};
use linkwise_system::output::print_styled;
use linkwise_system::signals::LastSignals;

pub use options::DemoArgs;
use script::Script;
use style::Style;

#[cfg(feature = "cluster")]
pub use cluster::{WHOLE_GPUS, play as play_with_dra};

/// A function that prints text.
pub type Print<'a> = &'a (dyn Fn(&str) -> Result<()> + Sync);

/// The kubelet's PodResources socket, below the node's folder.
const POD_RESOURCES: &str = "pod-resources/kubelet.sock";

/// Runs the command.
pub fn run(args: &DemoArgs) -> Result<()> {
    if args.dra {
        #[cfg(feature = "cluster")]
        return on_terminal(args, async |machine, out| cluster::play(args, machine, out).await);
        #[cfg(not(feature = "cluster"))]
        bail!("--dra needs a cluster, and this program was built without one: cargo run -p linkwise-lab -- demo --dra");
    }
    on_terminal(args, async |machine, out| demo(args, machine, out).await)
}

/// Runs a demo on a terminal: finds its machine, and prints.
fn on_terminal(args: &DemoArgs, play: impl AsyncFnOnce(Machine, Print<'_>) -> Result<()>) -> Result<()> {
    let _log = log_to_stderr(&args.log, "kube_client", LogFormat::Text)?;
    let style = Style { colour: !args.no_color && std::io::stdout().is_terminal() };
    let machine = machines::load(&args.machine)?;
    block_on(play(machine, &move |text: &str| Ok(print_styled(&style.render(text))?)))
}

/// Runs the demo on a machine. `out` prints.
pub async fn demo(args: &DemoArgs, machine: Machine, out: Print<'_>) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("linkwise-").tempdir().context("cannot make a temporary folder")?;
    out(&format!("# {}\n", show::cut(&machine_tree(&machine))))?;
    let kubelet = start_kubelet(args, &machine.observed.host, folder.path(), out)?;
    let settings = device_plugin::Settings {
        // Long pauses are not needed, because no other plugin uses this folder.
        longest_pause: Duration::from_secs(1),
        pod_resources_socket: Some(folder.path().join(POD_RESOURCES)),
        ..device_plugin::Settings::new(folder.path().join(Options::SOCKET))
    };
    let (metrics_address, numa_hints) = (args.metrics_address, args.numa_hints);
    let node = Node::start(NodeSettings { metrics_address, numa_hints, ..NodeSettings::new(settings) }).await?;
    let (topology, _) = NodeTopology::assemble(&machine.observed);
    let events = node.events();
    let script = Script {
        machine: &machine,
        topology: &topology,
        kubelet: &kubelet,
        events: events.clone(),
        snapshot: node.snapshot(),
        report: node.last_report(),
        steps: args.step,
        print: out,
    };
    let address = node.metrics_address();
    if args.hold || args.step {
        out(&format!("The node's page: http://{address}/\n\n"))?;
    }
    let play = async {
        events.send(Event::Observed(Box::new(machine.observed.clone()))).await.context("the node ended")?;
        if topology.gpus().is_empty() {
            out("\nThis machine has no GPU: linkwise stays up, offers nothing, and /readyz says so.\n")?;
        } else {
            script.play().await?;
        }
        if args.hold { hold(address, out).await } else { Ok(()) }
    };
    let result = serve_during(node, play).await;
    kubelet.stop().await?;
    result
}

/// Serves the node until the play has ended.
async fn serve_during(node: Node, play: impl Future<Output = Result<()>>) -> Result<()> {
    let shutdown = node.shutdown();
    let mut serve = std::pin::pin!(node.serve());
    tokio::select! {
        ended = &mut serve => ended.and_then(|()| bail!("the node ended before the demo did")),
        played = play => {
            shutdown.cancel();
            serve.await.and(played)
        }
    }
}

/// Starts a kubelet with the requested Topology Manager, or without one if it would not work on this machine.
fn start_kubelet(args: &DemoArgs, host: &HostObservation, folder: &Path, out: Print<'_>) -> Result<KubeletBox> {
    let mut options = Options::new(folder);
    // The socket has a folder of its own, because a kubelet that starts removes every socket beside kubelet.sock.
    options.pod_resources = Some(folder.join(POD_RESOURCES));
    options.topology_manager =
        TopologyManager { policy: args.topology_manager_policy, scope: args.scope, numa_nodes: numa_nodes(host) };
    let TopologyManager { policy, scope, .. } = options.topology_manager;
    if policy != Policy::None {
        out(&format!("The kubelet's Topology Manager: policy {policy}, scope {scope}.\n"))?;
    }
    match KubeletBox::start(options.clone()) {
        Err(BoxError::Unsupported(why)) => {
            out(&format!("✗ {why}\n"))?;
            out("  Such a node runs without a Topology Manager, and so does the rest of this demo.\n")?;
            options.topology_manager.policy = Policy::None;
            Ok(KubeletBox::start(options)?)
        }
        started => Ok(started?),
    }
}

/// The NUMA nodes as a kubelet counts them: nodes without CPUs too, and node 0 if the host names no NUMA node.
pub fn numa_nodes(host: &HostObservation) -> Vec<i64> {
    match host.numa_nodes.as_slice() {
        [] => vec![0],
        nodes => nodes.iter().map(|numa| i64::from(numa.id.0)).collect(),
    }
}

/// Keeps the node serving until a signal ends the demo.
async fn hold(address: std::net::SocketAddr, out: Print<'_>) -> Result<()> {
    out(&format!("\nServing until interrupted (Ctrl-C): http://{address}/ (the page), /metrics /livez /readyz\n"))?;
    LastSignals::listen()?.recv().await;
    Ok(())
}
