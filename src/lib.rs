//! linkwise: a topology-aware Kubernetes device plugin for NVIDIA GPUs.
//!
//! The program, as a library that its tests call: `config` reads the options, `run` and `commands` run the subcommands.
//! Everything else is a crate of its own (ARCHITECTURE.md has the picture).

pub mod commands;
pub mod config;
pub mod run;

use linkwise_system::block_on;
use linkwise_system::output::complain;

use std::process::ExitCode;

use config::Command;

/// Runs a command, and prints the error with which it fails.
pub fn run_command(command: Command) -> ExitCode {
    let result = match command {
        Command::Verify(args) => return exit_code(block_on(commands::verify(&args))),
        Command::Doctor(args) => return exit_code(block_on(commands::doctor(&args))),
        Command::MpsControlDaemon(args) => return exit_code(run::mps_control_daemon(&args)),
        Command::Run(args) => run::run(&args),
        Command::Topology(args) => block_on(commands::topology(&args)),
        Command::Allocate(args) => block_on(commands::allocate(&args)),
        Command::Expect(args) => block_on(commands::expect(&args)),
        Command::Snapshot(args) => block_on(commands::snapshot(&args)),
        Command::Config(args) => commands::config(&args),
        Command::Labels(args) if args.node.node.is_some() => block_on(commands::labels(&args)),
        Command::Labels(args) => run::labels(&args),
        Command::Dra(args) => block_on(commands::dra(&args)),
        Command::Claim(args) => commands::claim(&args),
        Command::Admin(args) => block_on(commands::admin(&args)),
        Command::Top(args) => block_on(commands::top(&args)),
        Command::Wait(args) => block_on(commands::wait(&args)),
        Command::ClearCondition(args) => block_on(run::clear_condition(&args)),
        Command::ConfigManager(args) => commands::config_manager(&args),
        Command::Completions(args) => commands::completions(&args),
        Command::Man(args) => commands::man(&args),
        Command::NvmlAgent(args) => linkwise_nvml::agent::main(&args.command),
    };
    exit_code(result.map(|()| ExitCode::SUCCESS))
}

/// The exit code of a command. Prints an error with its causes.
fn exit_code(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        complain("linkwise", [error]);
        ExitCode::FAILURE
    })
}
