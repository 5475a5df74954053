//! The binary `linkwise-cluster`: linkwise with a client of the API server. `linkwise` becomes it where that is asked
//! for, and the image links NVIDIA's `config-manager` to it.

use std::process::ExitCode;

use linkwise::config::{Cli, Command};
use linkwise::runtime::ApiClients;
use linkwise_cluster::{config_manager, demo, doctor, documents, labels, run, simulate};

fn main() -> ExitCode {
    let ended =
        |result: anyhow::Result<()>| result.map_or_else(|error| linkwise::failed(&error), |()| ExitCode::SUCCESS);
    match Cli::read().command {
        Command::ConfigManager(args) => ended(config_manager::run(&args)),
        Command::Completions(args) => ended(documents::completions(&args)),
        Command::Man(args) => ended(documents::man(&args)),
        Command::Demo(args) if args.dra => demo::run(&args),
        Command::Simulate(args) if args.cluster.nodes.is_some() => simulate::run(&args),
        Command::Labels(args) => labels::run(args),
        Command::Run(args) => run::run(args),
        Command::Doctor(args) => doctor::run(args),
        command => linkwise::run(command, ApiClients::default()),
    }
}
