//! The binary `linkwise-cluster`: what of linkwise speaks to the API server. `linkwise` becomes it where that is asked
//! for, and the image links NVIDIA's `config-manager` to it.

use std::io::Write;
use std::process::ExitCode;

use linkwise::config::{Cli, Command};
use linkwise_cluster::config_manager;

fn main() -> ExitCode {
    let result = match Cli::read().command {
        Command::ConfigManager(args) => config_manager::run(&args),
        _ => Err(anyhow::anyhow!("linkwise-cluster runs config-manager only; run linkwise for everything else")),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    // Nobody is left to tell where standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "linkwise: {error:#}");
    ExitCode::FAILURE
}
