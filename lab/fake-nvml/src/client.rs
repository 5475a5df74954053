//! The interface for tests: the path of the shared library, and the client of the control socket.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::command::{self, Command};

/// The path of the built shared library, found relative to the running executable.
///
/// # Panics
///
/// If the library is neither beside the executable, nor one folder above, nor in the folder `deps` of either.
pub fn library_path() -> PathBuf {
    let name = "libfake_nvml.so";
    let executable = std::env::current_exe().expect("the kernel knows the path of this executable");
    let folders = executable.ancestors().skip(1).take(2);
    let candidates = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    let found = candidates.into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name} near {}: build the package fake-nvml", executable.display()))
}

/// The client of a control socket.
#[derive(Clone, Debug)]
pub struct Control {
    socket: PathBuf,
}

impl Control {
    /// Makes a client of the processes whose `FAKE_NVML_CONTROL` names this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The path of the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a command to every process that listens, and waits for all answers. If the journal keeps the command (see
    /// the docs of the crate), the next process starts with it, even if no process listens now.
    ///
    /// # Errors
    ///
    /// Every process refused the command, or no process listens and the journal does not keep the command.
    pub fn send(&self, line: &str) -> io::Result<()> {
        let command: Command = line.parse().map_err(io::Error::other)?;
        let journal = command::journal(&self.socket);
        let mut journal = OpenOptions::new().create(true).append(true).open(journal)?;
        journal.lock()?;
        let (mut done, mut refused) = (false, None);
        for stream in self.listeners() {
            match ask(stream, line) {
                Ok(answer) if answer == "ok" => done = true,
                Ok(answer) if answer.is_empty() => done |= matches!(command, Command::CrashNow),
                Ok(answer) => refused = Some(io::Error::other(format!("'{line}': {answer}"))),
                // The process has ended in the meantime.
                Err(_) => {}
            }
        }
        match refused {
            Some(refused) if !done => Err(refused),
            _ if command.is_kept() => writeln!(journal, "{line}"),
            _ if done => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("'{line}': no process listens"))),
        }
    }

    /// Returns true if a process listens: it has called nvmlInit and runs.
    pub fn is_heard(&self) -> bool {
        !self.listeners().is_empty()
    }

    /// The number of processes that listen.
    pub fn processes(&self) -> usize {
        self.listeners().len()
    }

    fn listeners(&self) -> Vec<UnixStream> {
        let entries = self.socket.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
        let sockets = entries.map(|entry| entry.path()).filter(|path| command::is_process_socket(path, &self.socket));
        sockets.filter_map(|socket| UnixStream::connect(socket).ok()).collect()
    }
}

/// Sends a command to one process and returns the answer, which is empty if the process ends instead.
fn ask(mut stream: UnixStream, line: &str) -> io::Result<String> {
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    Ok(answer.trim_end().to_owned())
}
