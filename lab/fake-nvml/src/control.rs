//! The control socket's server: a thread inside the process that loaded the library.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::command::{self, Act, Command, Selector};
use crate::state::{self, FAKE};

/// The journal; set when there is a control socket.
static JOURNAL: OnceLock<PathBuf> = OnceLock::new();

/// Binds the socket, replays the commands kept for this machine, and serves in a thread of its own.
///
/// This thread locks the journal before it binds the socket and until it has read the journal; a client locks the
/// journal while it sends. So a command is either answered here or found in the journal, and is never lost.
pub fn start(socket: &Path) -> io::Result<()> {
    let journal = command::journal(socket);
    // A process has one socket.
    let _ = JOURNAL.set(journal.clone());
    let file = OpenOptions::new().create(true).append(true).read(true).open(&journal)?;
    file.lock()?;
    let socket = command::process(socket, std::process::id());
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    for line in std::fs::read_to_string(&journal)?.lines() {
        match line.parse() {
            Ok(command) => state::apply(&command).unwrap_or_else(|error| eprintln!("fake-nvml: {line}: {error}")),
            Err(error) => eprintln!("fake-nvml: {error}"),
        }
    }
    state::lock().runs = true;
    file.unlock()?;
    thread::Builder::new().name("fake-nvml".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    })?;
    Ok(())
}

/// The MIG layouts in the journal, where it has grown since they were read last: one driver serves all processes.
pub fn layouts() -> Vec<(Selector, Act)> {
    /// The journal's length when the layouts were read last.
    static READ: AtomicU64 = AtomicU64::new(0);
    let Some(journal) = JOURNAL.get() else { return Vec::new() };
    let length = std::fs::metadata(journal).map_or(0, |found| found.len());
    if READ.swap(length, Ordering::Relaxed) == length {
        return Vec::new();
    }
    let text = std::fs::read_to_string(journal).unwrap_or_default();
    let layouts = text.lines().filter(|line| line.starts_with("mig "));
    let layouts = layouts.filter_map(|line| match line.parse() {
        Ok(Command::Gpu(which, layout)) => Some((which, layout)),
        _ => None,
    });
    layouts.collect()
}

/// Writes a command to the journal, for the next process. Without a control socket there is no journal.
pub fn keep(line: &str) -> io::Result<()> {
    let Some(journal) = JOURNAL.get() else { return Ok(()) };
    let mut file = OpenOptions::new().create(true).append(true).open(journal)?;
    file.lock()?;
    writeln!(file, "{line}")
}

fn serve(stream: UnixStream) {
    let Ok(mut answers) = stream.try_clone() else { return };
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let done = line.parse().and_then(|command| {
            if matches!(command, Command::CrashNow) {
                std::process::abort();
            }
            state::apply(&command)
        });
        FAKE.changed.notify_all();
        let sent = match done {
            Ok(()) => writeln!(answers, "ok"),
            Err(error) => writeln!(answers, "error {error}"),
        };
        if sent.is_err() {
            return;
        }
    }
}
