//! `linkwise-lab demo --step` as a child process, and the text that each step prints.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::browser::WAIT_TIMEOUT;
use crate::demo::KillOnDrop;

/// A demo that waits for Enter.
pub struct Demo {
    _process: KillOnDrop,
    input: ChildStdin,
    lines: Receiver<String>,
    pub url: String,
}

impl Demo {
    /// Starts the demo on a machine. It waits before its first step.
    pub fn start(machine: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise-lab"));
        command.args(["demo", "--step", "--machine", machine]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let (input, url) = (process.stdin.take().unwrap(), String::new());
        let mut demo = Self { _process: KillOnDrop(process), input, lines, url };
        let printed = demo.read_step();
        let url = printed.lines().find_map(|line| line.strip_prefix("The node's page: "));
        demo.url = url.unwrap_or_else(|| panic!("no address: {printed}")).to_owned();
        demo
    }

    /// Plays the next step. Returns the text that it prints.
    pub fn step(&mut self) -> String {
        self.input.write_all(b"\n").unwrap();
        self.read_step()
    }

    /// Reads the printed text until the demo waits for Enter or ends.
    fn read_step(&self) -> String {
        let mut printed = String::new();
        loop {
            match self.lines.recv_timeout(WAIT_TIMEOUT) {
                Ok(line) if line == "[press Enter]" => return printed,
                Ok(line) => printed += &format!("{line}\n"),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return printed,
                Err(error) => panic!("{error}: {printed}"),
            }
        }
    }
}
