//! The control socket's server: a thread inside the process that loaded the library.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
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
    for line in lasting(&file)?.0 {
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

/// The whole lines of a journal that still count, and the length in bytes of all of them: each order about MIG writes a
/// whole layout, which replaces the one before. Only one is in memory, since thousands are 25 MB and an agent's memory is
/// bounded.
fn lasting(journal: &File) -> io::Result<(Vec<String>, u64)> {
    let gpu = |line: &str| line.strip_prefix("mig ").and_then(|rest| Some(rest.split_once(' ')?.0.to_owned()));
    let (mut journal, mut kept, mut length) = (BufReader::new(journal), Vec::<String>::new(), 0);
    loop {
        let mut line = String::new();
        let bytes = journal.read_line(&mut line)?;
        // A line that is being written is read with the next ones.
        if !line.ends_with('\n') {
            return Ok((kept, length));
        }
        length += bytes as u64;
        if let Some(replaced) = gpu(&line) {
            kept.retain(|before| gpu(before).as_ref() != Some(&replaced));
        }
        kept.push(line);
    }
}

/// The MIG layouts that the journal has got since they were read last: one driver serves all processes.
pub fn layouts() -> Vec<(Selector, Act)> {
    /// The part of the journal that was read, in bytes.
    static READ: Mutex<u64> = Mutex::new(0);
    let Some(journal) = JOURNAL.get() else { return Vec::new() };
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if std::fs::metadata(journal).map_or(0, |found| found.len()) <= *read {
        return Vec::new();
    }
    let more = File::open(journal).and_then(|mut file| {
        file.seek(SeekFrom::Start(*read))?;
        lasting(&file)
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
