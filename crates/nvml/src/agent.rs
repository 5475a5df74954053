//! The NVML agent's main: the hidden subcommand `linkwise nvml-agent`.
//!
//! Three threads: the main thread waits for events, one polls (`watch`), and one reads the parent's requests. The
//! thread that reads requests ends the process when the parent is gone or closes the socket, even if NVML hangs,
//! because it never calls NVML itself. The code is synchronous on purpose: the calls block.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::call::{CallError, Fault, LOAD, answer};
use super::calls::Calls;
use super::child::AgentCommand;
use super::events::{self, Waiting};
use super::gate::{DriverUse, RELEASED};
use super::protocol::{FromAgent, ToAgent, encode};
use super::watch::{Fingerprint, Watch};
use super::{full_scan, library, raw};
use linkwise_core::errors::chain;
use linkwise_system::lock;

/// The time from one poll to the next.
pub const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The call that initialises NVML.
pub const INIT: &str = "nvmlInit_v2";

/// The names of the driver's library: the first as drivers install it, the second as development packages do.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// The connection to the parent, for all threads.
pub struct Parent(Mutex<UnixStream>);

impl Parent {
    /// Sends a whole message. If that fails, this process ends.
    pub fn send(&self, message: &FromAgent) {
        let line = encode(message).unwrap_or_else(|error| give_up("cannot send to the parent", &error));
        // A thread that panicked while writing has left half a line. The parent will refuse it.
        let mut stream = lock(&self.0);
        match stream.write_all(&line) {
            Ok(()) => {}
            // The parent is gone: this is the usual end of the process.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                raw::exit_now(0)
            }
            Err(error) => give_up("cannot reach the parent", &error),
        }
    }

    /// Ends this process with a reason, which the parent logs.
    pub fn leave(&self, error: CallError) -> ! {
        self.send(&FromAgent::Leaving(error));
        raw::exit_now(1)
    }
}

/// Prints a line to standard error by one write, because the driver's library prints there too.
pub fn print_error(what: &str) {
    let _ = io::stderr().write_all(format!("linkwise nvml-agent: {what}\n").as_bytes());
}

/// Ends this process after an error, from any of its threads.
fn give_up(what: &str, error: &dyn std::error::Error) -> ! {
    print_error(&format!("{what}: {}", chain(error)));
    raw::exit_now(1)
}

/// Runs until the parent is gone. `command` is the [`AgentCommand`] as JSON. If the driver is released, or the library
/// does not load or initialise, the parent gets the reason, and the process ends with code 1.
pub fn main(command: &str) -> anyhow::Result<()> {
    let command: AgentCommand = serde_json::from_str(command).context("cannot read the argument of 'nvml-agent'")?;
    let sockets = inherited_socket().and_then(|socket| Ok((socket.try_clone()?, socket)));
    let (reading, socket) = sockets.context("cannot use standard input as the socket to the parent")?;
    let parent = Arc::new(Parent(Mutex::new(socket)));
    let (request_sender, requests) = mpsc::channel();
    let own_requests = request_sender.clone();
    let listening = move || {
        listen(reading, &request_sender);
        raw::exit_now(0)
    };
    thread::Builder::new().name("parent".into()).spawn(listening).context("cannot start the request thread")?;

    let calls = Calls::new(Arc::clone(&parent), command.calls.as_deref());
    let opened = enter(&command).and_then(|entered| Ok((entered, load(&command, &calls)?)));
    // `_driver` is kept until the process ends, so that the gate counts this process as a user of the driver.
    let ((_driver, turn), (library, nvml)) = opened.unwrap_or_else(|error| parent.leave(error));
    // NVML lives as long as the process, which never shuts it down: a shutdown can hang, and the end of the process is
    // enough.
    let nvml: &'static Nvml = Box::leak(Box::new(nvml));
    let listed = full_scan::list(nvml, &calls, &command.skip);
    drop(turn);
    // The registration comes before the scan, so that no event is lost between the two.
    let (gpus, waiting) = (Arc::clone(&listed.gpus), Arc::<Waiting>::default());
    let set = events::register(nvml, &calls, &gpus, &waiting);
    let mut watch = Watch {
        nvml,
        library,
        parent: Arc::clone(&parent),
        calls,
        command,
        gpus: Arc::default(),
        missing: Vec::new(),
        registered: listed.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        waiting: Arc::clone(&waiting),
        unoffered: BTreeMap::new(),
        seen: Fingerprint::default(),
    };
    watch.begin(listed);
    let watching = thread::Builder::new().name("watch".into());
    let watching = watching.spawn(move || watch.run(&requests)).context("cannot start the polling thread")?;
    if let Some(set) = set {
        events::listen(&set, &gpus, &parent, &waiting, &own_requests, || !watching.is_finished());
    }
    // If no GPU has events, this thread has no work. A panic of the polling thread has been printed.
    let _ = watching.join();
    bail!("the polling thread ended")
}

fn inherited_socket() -> io::Result<UnixStream> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // This fails if standard input is not a socket.
    socket.peer_addr()?;
    Ok(socket)
}

/// Passes the parent's requests on until the parent closes the socket. An unreadable request ends the process.
fn listen(socket: UnixStream, requests: &mpsc::Sender<ToAgent>) {
    for message in serde_json::Deserializer::from_reader(socket).into_iter() {
        match message {
            // The receiver ends only with the process: a failed send means that it is ending.
            Ok(message) => drop(requests.send(message)),
            Err(error) if error.is_io() || error.is_eof() => return,
            Err(error) => give_up("cannot read the parent's request", &error),
        }
    }
}

/// Enters the node's gate, and waits for the turn to initialise NVML. On nodes with MIG, programs that initialised and
/// shut down NVML at the same moment have hung the driver (NVIDIA/k8s-device-plugin#466).
fn enter(command: &AgentCommand) -> Result<(Option<DriverUse>, Option<File>), CallError> {
    let Some(gate) = &command.gate else { return Ok((None, None)) };
    let driver = gate.enter().map_err(|released| CallError::in_words(RELEASED, released))?;
    Ok((Some(driver), gate.init_turn()))
}

/// Loads the library that the operator chose. Without one, tries the driver's root, then the dynamic linker's path;
/// an error after the loading ends the search. Each agent searches the root again: the driver may be installed late.
fn load(command: &AgentCommand, calls: &Calls) -> Result<(PathBuf, Nvml), CallError> {
    let candidates = match &command.library {
        Some(root) if root.is_dir() => vec![library::under(root).unwrap_or_else(|usual| usual)],
        Some(library) => vec![library.clone()],
        None => {
            let in_root = command.driver_root.as_deref().and_then(|root| library::under(root).ok());
            in_root.into_iter().chain(LIBRARIES.map(PathBuf::from)).collect()
        }
    };
    let mut load_error = None;
    for library in candidates {
        match init(&library, calls) {
            Ok(nvml) => return Ok((library, nvml)),
            Err(error) if error.fault() == Fault::Library => drop(load_error.get_or_insert(error)),
            Err(error) => return Err(error),
        }
    }
    let load_error = load_error.unwrap_or_else(|| CallError::in_words(LOAD, "no library to load"));
    let root = match &command.library {
        Some(library) => Some(library).filter(|root| root.is_dir()),
        None => command.driver_root.as_ref(),
    };
    let Some(root) = root else { return Err(load_error) };
    let (why, root, folders) = (&load_error.reason, root.display(), library::FOLDERS.join(", "));
    Err(CallError::in_words(LOAD, format_args!("{why}; searched below the driver's root {root}: {folders}")))
}

fn init(library: &Path, calls: &Calls) -> Result<Nvml, CallError> {
    let cannot_load = |reason: &str| {
        let library = library.display();
        // The dynamic linker's message begins with the name too.
        let reason = reason.strip_prefix(&format!("{library}: ")).unwrap_or(reason);
        CallError::in_words(LOAD, format_args!("cannot load {library}: {reason}"))
    };
    // nvml-wrapper loads and initialises the library in one step.
    let opened = calls.raw(INIT, || match Nvml::builder().lib_path(library.as_os_str()).init() {
        Err(NvmlError::LibloadingError(error)) => Err(cannot_load(&error.to_string())),
        result => answer(INIT, result),
    });
    opened?.ok_or_else(|| cannot_load("it has no working nvmlInit_v2"))
}
