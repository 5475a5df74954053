//! The binary: reads the command line, hands it to the command, says once what went wrong.

use std::process::ExitCode;

use linkwise::config::Cli;
use linkwise::runtime::ApiClients;

fn main() -> ExitCode {
    linkwise::run(Cli::read().command, ApiClients::default())
}
