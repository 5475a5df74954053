//! The binary `linkwise-cluster`: what of linkwise speaks to the API server. `linkwise` becomes it where that is asked
//! for, and the image links NVIDIA's `config-manager` to it.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use linkwise::config::{Cli, Command};
use linkwise::nvml;
use linkwise_cluster::{config_manager, labels};

fn main() -> ExitCode {
    let result = match Cli::read().command {
        Command::ConfigManager(args) => config_manager::run(&args),
        Command::Labels(args) if args.node.node.is_none() => labels::run(*args),
        // The process that calls NVML, which `labels` starts from this program.
        Command::NvmlAgent(args) => {
            let poll = Duration::from_millis(args.poll_ms);
            nvml::agent::main(args.library.as_deref(), args.procfs, poll, args.memory_mib, &args.skip)
                .map_err(Into::into)
        }
        _ => Err(anyhow::anyhow!("linkwise-cluster runs labels and config-manager only; run linkwise for the rest")),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    // Nobody is left to tell where standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "linkwise: {error:#}");
    ExitCode::FAILURE
}
