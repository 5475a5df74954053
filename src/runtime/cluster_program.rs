//! `linkwise-cluster`, the program beside this one that speaks to the API server.
//!
//! It is a program of its own so that `linkwise run` maps no client of the API server. What needs one, or the model of
//! the scheduler or the writer of completions that are beside it, becomes that program: the same process, with the same
//! command line.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Error;

use crate::config::{AGENT_PROGRAM, command_line};

/// Its file name, in the folder of this program.
const NAME: &str = "linkwise-cluster";

/// Tells whether that program is there. It reads a file's metadata.
pub(super) fn is_there() -> bool {
    std::env::current_exe().is_ok_and(|this| this.with_file_name(NAME).is_file())
}

/// Becomes `linkwise-cluster`, with the command line of this process. The first word of it stays: by that word
/// config-manager finds the processes that it signals. Returns only where that failed, with the reason.
pub fn become_cluster_program() -> Error {
    let this = match std::env::current_exe() {
        Ok(this) => this,
        Err(error) => return Error::from(error).context("cannot find the folder of this program"),
    };
    let program = this.with_file_name(NAME);
    let mut words = command_line();
    let mut command = Command::new(&program);
    if let Some(name) = words.next() {
        command.arg0(name);
    }
    // The agent needs no client of the API server, and would keep its pages in memory.
    let error = command.args(words).env(AGENT_PROGRAM, this).exec();
    Error::from(error).context(format!(
        "cannot start {}, which has the client of the API server, the model of a scheduler and the manual",
        program.display()
    ))
}
