//! The commands of the control socket.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nvml_wrapper_sys::bindings::{NVML_NVLINK_STATE_ACTIVE, NVML_NVLINK_STATE_INACTIVE, NVML_NVLINK_STATE_SLEEP};

use crate::machine::Mig;

/// The behaviour of a call that does not answer as usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers this return code.
    Code(u32),
    /// Blocks until a command ends the fault.
    Hang,
    /// Blocks like `Hang`, and blocks every other call too, as if the call held a lock of the library.
    Hold,
    /// Aborts the process.
    Crash,
}

/// The GPUs that a command names: an index, a UUID, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(pub String);

/// A command, which is one line of the control socket. The docs of the crate explain each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Gpu(Selector, Action),
    /// A fault of a function, or its end.
    Fault(Selector, String, Option<Fault>),
    CrashNow,
    LossEndsWaits,
    Driver(String),
    Leak(usize),
    Runtime,
    Calls(String, u64),
    Blocked(String),
    /// True if the driver has the field with the state of a link.
    LinkFields(bool),
}

/// The action of a command on each GPU that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// An XID, the GPU instance and the compute instance of the event, and the number of such events.
    Xid(u64, [Option<u32>; 2], usize),
    Ecc,
    Lost(bool),
    /// The GPU falls off the bus: no running process can reach it again.
    Fallen,
    /// The GPU works again in later processes. If the flag is set, the command is refused while a process runs.
    Reset(bool),
    Present(bool),
    Recovery(u32),
    Mig(Mig),
    /// The row remapping: pending, failed.
    Rows(bool, bool),
    Uncorrectable(u64),
    /// The number of a link and its state, `NVML_NVLINK_STATE_*`; `None` if the link is not supported.
    Link(u32, Option<u32>),
    /// The state of all links from and to the GPU, as in `Link`.
    Links(Option<u32>),
    /// The fabric's state, status and health mask.
    Fabric(u32, u32, u32),
}

impl Command {
    /// Returns true if the journal keeps the command, so that the next process starts with it.
    pub fn is_kept(&self) -> bool {
        let is_event = matches!(self, Self::Gpu(_, Action::Xid(..) | Action::Ecc));
        !is_event && !matches!(self, Self::CrashNow | Self::Calls(..) | Self::Blocked(_))
    }
}

/// The journal of a control socket.
pub fn journal(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".journal");
    PathBuf::from(name)
}

/// The socket of one process, because several processes may have the library loaded at the same time.
pub fn process_socket(socket: &Path, id: u32) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(format!(".{id}"));
    PathBuf::from(name)
}

/// Returns true if a path is the socket of any process.
pub fn is_process_socket(path: &Path, socket: &Path) -> bool {
    let id = path.extension().and_then(|id| id.to_str()).and_then(|id| id.parse().ok());
    id.is_some_and(|id| process_socket(socket, id) == path)
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let gpu = |which: &str, action| Self::Gpu(Selector(which.to_owned()), action);
        let fault =
            |which: &str, function: &str, fault| Self::Fault(Selector(which.to_owned()), function.to_owned(), fault);
        Ok(match words[..] {
            ["xid", which, code] => gpu(which, Action::Xid(number(code)?, [None, None], 1)),
            ["xid", which, code, gi] => gpu(which, Action::Xid(number(code)?, [Some(number(gi)?), None], 1)),
            ["xid", which, code, gi, ci] => {
                gpu(which, Action::Xid(number(code)?, [Some(number(gi)?), Some(number(ci)?)], 1))
            }
            ["storm", which, code, events] => gpu(which, Action::Xid(number(code)?, [None, None], number(events)?)),
            ["ecc", which] => gpu(which, Action::Ecc),
            [word @ ("lost" | "back"), which] => gpu(which, Action::Lost(word == "lost")),
            ["fall", which] => gpu(which, Action::Fallen),
            [word @ ("reset" | "revive"), which] => gpu(which, Action::Reset(word == "reset")),
            [word @ ("add" | "remove"), which] => gpu(which, Action::Present(word == "add")),
            ["recovery", which, action] => gpu(which, Action::Recovery(number(action)?)),
            ["mig", which, ref layout @ ..] if !layout.is_empty() => {
                let layout = serde_saphyr::from_str(&layout.join(" "));
                gpu(which, Action::Mig(layout.map_err(|error| error.to_string())?))
            }
            ["rows", which, pending, failed] => gpu(which, Action::Rows(number(pending)?, number(failed)?)),
            ["uncorrectable", which, errors] => gpu(which, Action::Uncorrectable(number(errors)?)),
            ["link", which, link, state] => gpu(which, Action::Link(number(link)?, link_state(state)?)),
            ["links", which, state] => gpu(which, Action::Links(link_state(state)?)),
            ["link-fields", word @ ("yes" | "no")] => Self::LinkFields(word == "yes"),
            ["fabric", which, state, status] => gpu(which, Action::Fabric(number(state)?, number(status)?, 0)),
            ["fabric", which, state, status, mask] => {
                gpu(which, Action::Fabric(number(state)?, number(status)?, number(mask)?))
            }
            ["fail", which, function, code] => fault(which, function, Some(Fault::Code(number(code)?))),
            ["hang", function] => fault("*", function, Some(Fault::Hang)),
            ["hang", which, function] => fault(which, function, Some(Fault::Hang)),
            ["hold", which, function] => fault(which, function, Some(Fault::Hold)),
            ["crash"] => Self::CrashNow,
            ["crash", function] => fault("*", function, Some(Fault::Crash)),
            ["crash", which, function] => fault(which, function, Some(Fault::Crash)),
            ["unfail" | "unhang" | "unhold" | "uncrash", function] => fault("*", function, None),
            ["unfail" | "unhang" | "unhold" | "uncrash", which, function] | ["unfail", which, function, _] => {
                fault(which, function, None)
            }
            ["driver", version] => Self::Driver(version.to_owned()),
            ["loss-ends-waits"] => Self::LossEndsWaits,
            ["calls", function, more] => Self::Calls(function.to_owned(), number(more)?),
            ["blocked", function] => Self::Blocked(function.to_owned()),
            ["runtime"] => Self::Runtime,
            ["leak", mib] => Self::Leak(number(mib)?),
            ["init", "0"] => fault("*", "nvmlInit_v2", None),
            ["init", code] => fault("*", "nvmlInit_v2", Some(Fault::Code(number(code)?))),
            _ => return Err(format!("'{line}' is not a command")),
        })
    }
}

fn link_state(word: &str) -> Result<Option<u32>, String> {
    match word {
        "up" => Ok(Some(NVML_NVLINK_STATE_ACTIVE)),
        "down" => Ok(Some(NVML_NVLINK_STATE_INACTIVE)),
        "sleep" => Ok(Some(NVML_NVLINK_STATE_SLEEP)),
        "absent" => Ok(None),
        _ => Err(format!("'{word}' is not a state of a link")),
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("'{word}' is not a valid number"))
}
