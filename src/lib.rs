//! linkwise: a topology-aware Kubernetes device plugin for NVIDIA GPUs.
//!
//! Layers, from the inside out (ARCHITECTURE.md has the picture, `tests/architecture.rs` holds it):
//! `topology`, `allocation`, `state` and `publish` are pure; the adapters around them know the core and
//! never each other; `runtime`, `demo` and `commands` put them together.

pub mod admin;
pub mod cdi;
pub mod commands;
pub mod config;
pub mod demo;
pub mod dra;
pub mod files;
pub mod grpc;
pub mod hwloc;
pub mod inotify;
pub mod kubelet;
pub mod labels;
pub mod machines;
pub mod metrics;
pub mod mps;
pub mod nvml;
pub mod picture;
mod registration;
pub mod runtime;
pub mod takeover;
pub mod uds;

pub use linkwise_core::{
    allocation, backoff, claims, errors, names, once, publish, quantity, quote, state, topology, words,
};

use std::io::Write;
use std::process::ExitCode;

use config::Command;

/// Runs a command and reports its error: all of the binary, and most of `linkwise-cluster`, which has clients of the API
/// server.
pub fn run(command: Command, clients: runtime::ApiClients<'_>) -> ExitCode {
    let result = match command {
        Command::Run(args) => runtime::run(&args, clients),
        // It has an API server and a scheduler, which this program cannot speak to.
        Command::Demo(args) if args.dra => Err(runtime::become_cluster_program()),
        Command::Demo(args) => demo::run(&args),
        Command::Topology(args) => runtime::block_on(commands::topology(&args)),
        Command::Allocate(args) => runtime::block_on(commands::allocate(&args)),
        // It has the model of kube-scheduler's allocator, which this program does not.
        Command::Simulate(args) if args.cluster.nodes.is_some() => Err(runtime::become_cluster_program()),
        Command::Simulate(args) => runtime::block_on(commands::simulate(&args)),
        Command::Snapshot(args) => runtime::block_on(commands::snapshot(&args)),
        Command::Config(args) => commands::config(&args),
        Command::Doctor(args) => match runtime::doctor(&args, clients.doctor) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Labels(args) if args.node.node.is_some() => runtime::block_on(commands::labels(&args)),
        Command::Labels(args) => runtime::labels(&args, clients.labels),
        Command::Dra(args) => runtime::block_on(commands::dra(&args)),
        Command::Claim(args) => commands::claim(&args),
        Command::Admin(args) => runtime::block_on(commands::admin(&args)),
        Command::Top(args) => runtime::block_on(commands::top(&args)),
        Command::Wait(args) => runtime::block_on(commands::wait(&args)),
        Command::MpsControlDaemon(args) => match runtime::mps_control_daemon(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        // It speaks to the API server, or writes what no running node has to map.
        Command::ConfigManager(_) | Command::Completions(_) | Command::Man(_) => Err(runtime::become_cluster_program()),
        Command::NvmlAgent(args) => nvml::agent::main(&args.command).map_err(Into::into),
    };
    result.map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS)
}

/// Prints an error with its causes.
pub fn failed(error: &anyhow::Error) -> ExitCode {
    // Nobody is left to tell where standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "linkwise: {error:#}");
    ExitCode::FAILURE
}
