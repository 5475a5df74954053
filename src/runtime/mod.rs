//! `linkwise run`: builds everything, owns every task, turns effects into calls.
//!
//! A composition root. `node` holds the one loop that writes the inventory, and the plugins; `driver`
//! keeps the NVML child alive; this file starts and ends them. A task that ends unexpectedly ends the process, with
//! its cause.

mod clock;
mod driver;
mod idle;
mod keeper;
mod log;
mod node;
mod observe;
mod operator;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::Local;
use crate::config::{HostArgs, OnNvmlLoss, RunArgs};
use crate::kubelet;
use crate::nvml::Limits;
use crate::nvml::child::AgentCommand;

pub use driver::look;
pub use keeper::HealthSettings;
pub use log::log_to_stderr;
pub use node::{Node, NodeSettings};

/// Threads of the runtime. Two, so that a slow write of the log does not hold up an admission.
const THREADS: usize = 2;

/// Device nodes that every container with a GPU needs, where the node has them.
const CONTROL_NODES: [&str; 4] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// Runs a future on a runtime of our own.
pub fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let result = runtime.block_on(future);
    // Dropping it would wait for threads that hang in the kernel.
    runtime.shutdown_background();
    result
}

/// Serves this node until it is told to end.
pub fn run(args: &RunArgs) -> Result<()> {
    let _log = log_to_stderr(&args.log.log, args.log.log_format)?;
    block_on(serve(args))
}

async fn serve(args: &RunArgs) -> Result<()> {
    // First of all: a container's first process does not even die of a signal that it does not listen for.
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut let_go = signal(SignalKind::user_defined1()).context("cannot listen for SIGUSR1")?;
    let mut take_up = signal(SignalKind::user_defined2()).context("cannot listen for SIGUSR2")?;
    let admin = args.admin_socket.as_deref().map(Local::bind).transpose()?;
    let mut kubelet = kubelet::Settings::new(args.kubelet_socket.clone());
    kubelet.pod_resources_socket = Some(args.pod_resources_socket.clone());
    kubelet.callers = kubelet::Callers::and(args.allowed_uids.iter().copied());
    kubelet.device_nodes =
        args.pass_device_specs.then(|| CONTROL_NODES.iter().map(PathBuf::from).filter(|node| node.exists()).collect());
    let beside = || args.kubelet_socket.parent().map(PathBuf::from);
    let health = HealthSettings {
        xids: args.xids.policy(),
        await_first_poll: false,
        state_dir: args.state_dir.clone().or_else(beside),
        sysfs: Some(args.host.sysfs.clone()),
    };
    let settings =
        NodeSettings { kubelet, metrics_address: args.metrics_address, numa_hints: args.numa_hints.into(), health };
    for (variable, passed_over) in args.xids.passed_over() {
        tracing::warn!(variable, passed_over, "no XID; passed over");
    }
    let mut node = Node::start(settings).await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), metrics = %node.metrics_address(), "linkwise is up");
    let release = operator::Release::new(Arc::clone(node.metrics()));
    let milliseconds = Duration::from_millis;
    let driver = driver::Driver {
        command: AgentCommand {
            poll: milliseconds(args.nvml.nvml_poll_ms),
            limits: Limits { start: milliseconds(args.nvml.nvml_start_ms), call: milliseconds(args.nvml.nvml_call_ms) },
            ..agent_command(&args.host)
        },
        settings: driver::Settings {
            unhealthy_when_away: args.nvml.on_nvml_loss == OnNvmlLoss::Unhealthy,
            pause: milliseconds(args.nvml.nvml_pause_ms),
            grace: milliseconds(args.nvml.nvml_grace_ms),
            trial: milliseconds(args.nvml.nvml_trial_ms),
        },
        release: release.clone(),
        sysfs: args.host.sysfs.clone(),
        fail_on_init_error: args.fail_on_init_error,
        events: node.events(),
        metrics: Arc::clone(node.metrics()),
        idle: node.idle_reason(),
    };
    let shutdown = node.shutdown();
    node.spawn("NVML driver", driver.run(shutdown.clone()));
    if let Some(admin) = admin {
        let (orders, shutdown) = (operator::orders(&node, &release), shutdown.clone());
        node.spawn("admin socket", async move {
            admin.serve(orders, shutdown).await;
            Ok(())
        });
    }
    node.spawn("signals", async move {
        let name = loop {
            tokio::select! {
                _ = terminate.recv() => break "SIGTERM",
                _ = interrupt.recv() => break "SIGINT",
                _ = let_go.recv() => release.wish(true),
                _ = take_up.recv() => release.wish(false),
                () = shutdown.cancelled() => return Ok(()),
            }
        };
        tracing::info!(signal = name, "ending");
        shutdown.cancel();
        Ok(())
    });
    node.serve().await
}

/// How to start the process that speaks to NVML: this binary.
pub fn agent_command(host: &HostArgs) -> AgentCommand {
    // The link leads to the binary that runs, also after its file was replaced; current_exe would name a file
    // that is gone.
    AgentCommand { library: host.nvml_library.clone(), ..AgentCommand::new("/proc/self/exe") }
}
