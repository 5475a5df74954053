//! The binary `linkwise-cluster`: linkwise with a client of the API server. `linkwise` becomes it where that is asked
//! for, and the image links NVIDIA's `config-manager` to it.

use std::process::ExitCode;

use linkwise::config::{Cli, Command};
use linkwise::runtime::ApiClients;
use linkwise_cluster::{config_manager, demo, doctor, labels, run, simulate};

fn main() -> ExitCode {
    match Cli::read().command {
        Command::ConfigManager(args) => {
            config_manager::run(&args).map_or_else(|error| linkwise::failed(&error), |()| ExitCode::SUCCESS)
        }
        Command::Demo(args) if args.dra => demo::run(&args),
        Command::Simulate(args) if args.cluster.nodes.is_some() => simulate::run(&args),
        Command::Labels(args) => labels::run(args),
        Command::Run(args) => run::run(args),
        Command::Doctor(args) => doctor::run(args),
        command => linkwise::run(command, ApiClients::default()),
    }
}
