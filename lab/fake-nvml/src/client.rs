//! The tools of a test: the path of the shared library, and a control that injects faults.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::command::{self, Command};

/// The built shared library, found relative to the running test or binary.
///
/// # Panics
///
/// If the library is not beside the executable, nor one folder above or in `deps` below.
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
    /// A control of another process, over the socket that its `FAKE_NVML_CONTROL` names.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends one command to every process that listens and waits until it is done. A command that is kept (see the
    /// crate's page) is also written down for the next process, even if no process listens now.
    ///
    /// # Errors
    ///
    /// Every process refused the command, or no process listens and the command cannot wait.
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
                // The process has ended meanwhile.
                Err(_) => {}
            }
        }
        match refused {
            Some(refused) if !done => Err(refused),
            _ if command.is_kept() => writeln!(journal, "{line}"),
            _ if done => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("'{line}': nobody listens"))),
        }
    }

    /// Returns true if any process listens.
    pub fn is_heard(&self) -> bool {
        !self.listeners().is_empty()
    }

    /// The number of processes that have loaded the library.
    pub fn processes(&self) -> usize {
        self.listeners().len()
    }

    fn listeners(&self) -> Vec<UnixStream> {
        let entries = self.socket.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
        let sockets = entries.map(|entry| entry.path()).filter(|path| command::is_process_of(path, &self.socket));
        sockets.filter_map(|socket| UnixStream::connect(socket).ok()).collect()
    }
}

/// Returns the answer to one command; empty if the command ends the process.
fn ask(mut stream: UnixStream, line: &str) -> io::Result<String> {
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    Ok(answer.trim_end().to_owned())
}
