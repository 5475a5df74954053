//! What a test needs: where the shared library is, and a way to tell it what goes wrong.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::command::{self, Command};

/// The built shared library, found relative to the running test or binary.
///
/// # Panics
///
/// When it is not beside the executable, nor one folder above or in `deps` below.
pub fn library_path() -> PathBuf {
    let name = "libfake_nvml.so";
    let executable = std::env::current_exe().expect("the kernel names this executable");
    let folders = executable.ancestors().skip(1).take(2);
    let candidates = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    let found = candidates.into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name} near {}: build the package fake-nvml", executable.display()))
}

/// The test's end of the control socket.
#[derive(Clone, Debug)]
pub struct Control {
    socket: PathBuf,
}

impl Control {
    /// A control over the socket that `FAKE_NVML_CONTROL` names to the other process.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends one command and waits until it is done. With no process listening, a command that
    /// is kept (see the crate's page) is written down for the next process.
    ///
    /// # Errors
    ///
    /// The command was refused, or nobody listens and the command cannot wait.
    pub fn send(&self, line: &str) -> io::Result<()> {
        let command: Command = line.parse().map_err(io::Error::other)?;
        let journal = command::journal(&self.socket);
        let mut journal = OpenOptions::new().create(true).append(true).open(journal)?;
        journal.lock()?;
        match UnixStream::connect(&self.socket) {
            Ok(mut stream) => {
                writeln!(stream, "{line}")?;
                let mut answer = String::new();
                BufReader::new(stream).read_line(&mut answer)?;
                match answer.trim_end() {
                    "ok" => Ok(()),
                    "" if matches!(command, Command::CrashNow) => Ok(()),
                    "" => Err(io::Error::other(format!("'{line}': the process ended"))),
                    other => Err(io::Error::other(format!("'{line}': {other}"))),
                }
            }
            Err(_) if command.is_kept() => writeln!(journal, "{line}"),
            Err(error) => Err(io::Error::new(error.kind(), format!("'{line}': nobody listens: {error}"))),
        }
    }
}
