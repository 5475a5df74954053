//! The binary: for now, the NVML child only.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use linkwise::nvml::agent;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|first| first != "nvml-agent") {
        eprintln!("usage: linkwise nvml-agent [--library PATH] [--poll-ms N]");
        return ExitCode::from(2);
    }
    let (mut library, mut poll) = (None, agent::POLL_INTERVAL);
    while let (Some(option), Some(value)) = (arguments.next(), arguments.next()) {
        match option.to_str() {
            Some("--library") => library = Some(PathBuf::from(value)),
            Some("--poll-ms") => {
                poll = value.to_str().and_then(|text| text.parse().ok()).map_or(poll, Duration::from_millis);
            }
            _ => return ExitCode::from(2),
        }
    }
    match agent::main(library.as_deref(), poll) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("linkwise nvml-agent: {:#}", anyhow::Error::from(error));
            ExitCode::FAILURE
        }
    }
}
