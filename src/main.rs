//! The binary: reads the command line, runs the command, prints its error once.

use std::process::ExitCode;

use linkwise::config::Cli;

fn main() -> ExitCode {
    linkwise::run_command(Cli::read().command)
}
