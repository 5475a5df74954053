//! The commands of the control socket.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nvml_wrapper_sys::bindings::{NVML_NVLINK_STATE_ACTIVE, NVML_NVLINK_STATE_INACTIVE, NVML_NVLINK_STATE_SLEEP};

use crate::machine::Mig;

/// The act of a call that does not answer as usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers this return code.
    Code(u32),
    /// Blocks until the rule is gone.
    Hang,
    /// Blocks like `Hang`, and blocks every other call too: as a call that holds the library's lock.
    Hold,
    /// Aborts the process.
    Crash,
}

/// The GPU that a command is about, as it was written: an index, a UUID or `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(pub String);

/// One line of the control socket. The crate's page says what each does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Gpu(Selector, Act),
    /// A fault of a function, or its end.
    Fault(Selector, String, Option<Fault>),
    CrashNow,
    LossEndsWaits,
    Driver(String),
    Leak(usize),
    Runtime,
    Calls(String, u64),
    Blocked(String),
    /// True if the state of a link is a field too.
    LinkFields(bool),
}

/// The act of a command on each GPU that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// A number of events, each of an XID and perhaps an instance.
    Xid(u64, [Option<u32>; 2], usize),
    Ecc,
    Lost(bool),
    /// It has fallen off the bus: no process that runs now reaches it again.
    Fallen,
    /// It works for the processes that start from now on. Refused while a process runs, if the flag is set.
    Reset(bool),
    Present(bool),
    Recovery(u32),
    Mig(Mig),
    /// The row remapping: pending, failed.
    Rows(bool, bool),
    Uncorrectable(u64),
    /// A link's number, and its state, `NVML_NVLINK_STATE_*`; `None` if NVML does not know the link.
    Link(u32, Option<u32>),
    /// The same state of all links from and to a GPU.
    Links(Option<u32>),
    /// The fabric's state, status and health mask.
    Fabric(u32, u32, u32),
}

impl Command {
    /// Returns true if the next process starts with the command too.
    pub fn is_kept(&self) -> bool {
        !matches!(self, Self::Gpu(_, Act::Xid(..) | Act::Ecc) | Self::CrashNow | Self::Calls(..) | Self::Blocked(_))
    }
}

/// The file with the kept commands of a control socket.
pub fn journal(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".journal");
    PathBuf::from(name)
}

/// The socket of one process: several processes may have the library loaded at a time.
pub fn process(socket: &Path, id: u32) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(format!(".{id}"));
    PathBuf::from(name)
}

/// Returns true if a path is the socket of a process.
pub fn is_process_of(path: &Path, socket: &Path) -> bool {
    let id = path.extension().and_then(|id| id.to_str()).and_then(|id| id.parse().ok());
    id.is_some_and(|id| process(socket, id) == path)
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let gpu = |which: &str, act| Self::Gpu(Selector(which.to_owned()), act);
        let fault =
            |which: &str, function: &str, fault| Self::Fault(Selector(which.to_owned()), function.to_owned(), fault);
        Ok(match words[..] {
            ["xid", which, code] => gpu(which, Act::Xid(number(code)?, [None, None], 1)),
            ["xid", which, code, gi] => gpu(which, Act::Xid(number(code)?, [Some(number(gi)?), None], 1)),
            ["xid", which, code, gi, ci] => {
                gpu(which, Act::Xid(number(code)?, [Some(number(gi)?), Some(number(ci)?)], 1))
            }
            ["storm", which, code, events] => gpu(which, Act::Xid(number(code)?, [None, None], number(events)?)),
            ["ecc", which] => gpu(which, Act::Ecc),
            [to @ ("lost" | "back"), which] => gpu(which, Act::Lost(to == "lost")),
            ["fall", which] => gpu(which, Act::Fallen),
            [to @ ("reset" | "revive"), which] => gpu(which, Act::Reset(to == "reset")),
            [to @ ("add" | "remove"), which] => gpu(which, Act::Present(to == "add")),
            ["recovery", which, action] => gpu(which, Act::Recovery(number(action)?)),
            ["mig", which, ref layout @ ..] if !layout.is_empty() => {
                let layout = serde_saphyr::from_str(&layout.join(" "));
                gpu(which, Act::Mig(layout.map_err(|error| error.to_string())?))
            }
            ["rows", which, pending, failed] => gpu(which, Act::Rows(number(pending)?, number(failed)?)),
            ["uncorrectable", which, errors] => gpu(which, Act::Uncorrectable(number(errors)?)),
            ["link", which, link, to] => gpu(which, Act::Link(number(link)?, link_state(to)?)),
            ["links", which, to] => gpu(which, Act::Links(link_state(to)?)),
            ["link-fields", to @ ("yes" | "no")] => Self::LinkFields(to == "yes"),
            ["fabric", which, state, status] => gpu(which, Act::Fabric(number(state)?, number(status)?, 0)),
            ["fabric", which, state, status, mask] => {
                gpu(which, Act::Fabric(number(state)?, number(status)?, number(mask)?))
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
            _ => return Err(format!("'{line}' is no command")),
        })
    }
}

fn link_state(word: &str) -> Result<Option<u32>, String> {
    match word {
        "up" => Ok(Some(NVML_NVLINK_STATE_ACTIVE)),
        "down" => Ok(Some(NVML_NVLINK_STATE_INACTIVE)),
        "sleep" => Ok(Some(NVML_NVLINK_STATE_SLEEP)),
        "absent" => Ok(None),
        _ => Err(format!("'{word}' is no state of a link")),
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("'{word}' is no number here"))
}
