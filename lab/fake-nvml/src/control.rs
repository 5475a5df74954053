//! The journal, and the server of the control socket: a thread inside the process that loaded the library.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use crate::command::{self, Action, Command, Selector};
use crate::state::{self, FAKE};

/// The path of the journal, if there is a control socket.
static JOURNAL: OnceLock<PathBuf> = OnceLock::new();

/// Binds the socket, replays the journal, and serves commands in a thread of its own.
///
/// The journal stays locked from before the socket is bound until the journal is read, and a client locks the journal
/// while it sends a command. No command is lost therefore: this process receives it or finds it in the journal.
pub fn start(socket: &Path) -> io::Result<()> {
    let journal = command::journal(socket);
    // A process starts only one server.
    let _ = JOURNAL.set(journal.clone());
    let file = OpenOptions::new().create(true).append(true).read(true).open(&journal)?;
    file.lock()?;
    let socket = command::process_socket(socket, std::process::id());
    match std::fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    for line in effective(&file)?.0 {
        match line.parse() {
            Ok(command) => state::apply(&command).unwrap_or_else(|error| eprintln!("fake-nvml: {line}: {error}")),
            Err(error) => eprintln!("fake-nvml: {error}"),
        }
    }
    state::lock().is_started = true;
    file.unlock()?;
    thread::Builder::new().name("fake-nvml".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    })?;
    Ok(())
}

/// The complete lines of a journal that still have an effect, and the length of all complete lines in bytes. A MIG
/// layout replaces the earlier layouts of its GPU. These are dropped while the journal is read, because thousands of
/// them take 25 MB, and the memory of an agent is bounded.
fn effective(journal: &File) -> io::Result<(Vec<String>, u64)> {
    let gpu = |line: &str| line.strip_prefix("mig ").and_then(|rest| Some(rest.split_once(' ')?.0.to_owned()));
    let (mut journal, mut lines, mut length) = (BufReader::new(journal), Vec::<String>::new(), 0);
    loop {
        let mut line = String::new();
        let bytes = journal.read_line(&mut line)?;
        // An incomplete line is read later, when its writer has finished.
        if !line.ends_with('\n') {
            return Ok((lines, length));
        }
        length += bytes as u64;
        if let Some(replaced) = gpu(&line) {
            lines.retain(|earlier| gpu(earlier).as_ref() != Some(&replaced));
        }
        lines.push(line);
    }
}

/// The MIG layouts that any process has added to the journal since the last call.
pub fn layouts() -> Vec<(Selector, Action)> {
    /// The length of the part that was read before, in bytes.
    static READ: Mutex<u64> = Mutex::new(0);
    let Some(journal) = JOURNAL.get() else { return Vec::new() };
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if std::fs::metadata(journal).map_or(0, |found| found.len()) <= *read {
        return Vec::new();
    }
    let more = File::open(journal).and_then(|mut file| {
        file.seek(SeekFrom::Start(*read))?;
        effective(&file)
    });
    let (lines, length) = more.unwrap_or_default();
    *read += length;
    let layouts = lines.iter().filter(|line| line.starts_with("mig "));
    let layouts = layouts.filter_map(|line| match line.parse() {
        Ok(Command::Gpu(which, layout)) => Some((which, layout)),
        _ => None,
    });
    layouts.collect()
}

/// Appends a command to the journal, if there is a control socket.
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
