//! The binary `linkwise-lab`: reads the command line, runs the command, and prints an error once.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use linkwise_lab::demo::{self, DemoArgs};
use linkwise_lab::kit::{self, ContainerArgs, KitArgs};
use linkwise_lab::simulate::{self, SimulateArgs};
use linkwise_system::output::complain;

/// linkwise in a laboratory: a whole node in one process, and simulations of jobs.
#[derive(Debug, Parser)]
#[command(name = "linkwise-lab", version, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show a whole node in one process: a simulated machine, a kubelet, pods that come and go
    Demo(DemoArgs),
    /// Run linkwise on this machine's driver beside a kubelet in a box, and write a report (make gpu-kit)
    Kit(KitArgs),
    /// Run a command with the device nodes and mounts of a CDI device alone (a part of kit)
    #[command(hide = true)]
    KitContainer(ContainerArgs),
    /// Replay jobs on a machine or a cluster, and show what each policy or door gives them
    Simulate(SimulateArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Kit(args) => kit::run(&args),
        Command::KitContainer(args) => kit::run_container(&args),
        Command::Simulate(args) => simulate::run(&args),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    complain("linkwise-lab", [error]);
    ExitCode::FAILURE
}
