//! The binary: reads the command line, hands it to the command, says once what went wrong.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use linkwise::config::{Cli, Command};
use linkwise::{commands, demo, nvml, runtime};

fn main() -> ExitCode {
    let result = match Cli::read().command {
        Command::Run(args) => runtime::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Topology(args) => runtime::block_on(commands::topology(&args)),
        Command::Allocate(args) => runtime::block_on(commands::allocate(&args)),
        Command::Simulate(args) => runtime::block_on(commands::simulate(&args)),
        Command::Snapshot(args) => runtime::block_on(commands::snapshot(&args)),
        Command::Config(args) => commands::config(&args),
        Command::Doctor(args) => match runtime::block_on(commands::doctor(&args)) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Labels(args) if args.node.node.is_some() => runtime::block_on(commands::labels(&args)),
        Command::Labels(args) => runtime::labels(&args, None),
        Command::Admin(args) => runtime::block_on(commands::admin(&args)),
        Command::MpsControlDaemon(args) => match runtime::mps_control_daemon(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        // It speaks to the API server, which this program cannot.
        Command::ConfigManager(_) => Err(runtime::become_cluster_program()),
        Command::NvmlAgent(args) => {
            let poll = Duration::from_millis(args.poll_ms);
            nvml::agent::main(args.library.as_deref(), args.procfs, poll, args.memory_mib, &args.skip)
                .map_err(Into::into)
        }
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    // Nobody is left to tell where standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "linkwise: {error:#}");
    ExitCode::FAILURE
}
