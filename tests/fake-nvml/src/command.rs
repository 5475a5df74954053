//! The control socket's language.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::machine::Mig;

/// What a call does instead of answering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answer this return code.
    Code(u32),
    /// Block until the rule is gone.
    Hang,
    /// The same, and every other call with it: as one that holds the library's lock.
    Hold,
    /// Abort the process.
    Crash,
}

/// Which GPU a command is about, as it was written: an index, a UUID or `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(pub String);

/// One line of the control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Xid {
        gpu: Selector,
        code: u64,
        gpu_instance: Option<u32>,
        compute_instance: Option<u32>,
    },
    Ecc {
        gpu: Selector,
    },
    Lost {
        gpu: Selector,
    },
    Back {
        gpu: Selector,
    },
    Fault {
        gpu: Selector,
        function: String,
        fault: Fault,
    },
    /// `unfail`, `unhang`, `unhold` and `uncrash` all end whatever the function does.
    NoFault {
        gpu: Selector,
        function: String,
    },
    CrashNow,
    /// From now on a wait fails while a GPU of its set is lost, as NVML's reference has it.
    LossEndsWaits,
    /// So many XID events at once.
    Storm {
        gpu: Selector,
        code: u64,
        events: usize,
    },
    /// The row remapping: pending, failed.
    Rows {
        gpu: Selector,
        pending: bool,
        failed: bool,
    },
    /// The volatile uncorrectable ECC errors.
    Uncorrectable {
        gpu: Selector,
        errors: u64,
    },
    Link {
        gpu: Selector,
        link: u32,
        up: bool,
    },
    /// The fabric's state and status, NVML's numbers.
    Fabric {
        gpu: Selector,
        state: u32,
        status: u32,
    },
    /// The GPU is not there, or is again.
    Present {
        gpu: Selector,
        present: bool,
    },
    /// The driver's version.
    Driver {
        version: String,
    },
    /// From now on so many MiB leak a second.
    Leak {
        mib: usize,
    },
    /// A language runtime is started: see `memory`.
    Runtime,
    /// Wait until the function was called this many times more.
    Calls {
        function: String,
        more: u64,
    },
    /// Wait until a call of the function is blocked by `hang` or `hold`.
    Blocked {
        function: String,
    },
    Init {
        code: u32,
    },
    Recovery {
        gpu: Selector,
        action: u32,
    },
    /// The GPU is in this MIG layout from now on.
    Mig {
        gpu: Selector,
        mig: Mig,
    },
}

impl Command {
    /// Whether the next process starts with it too.
    pub fn is_kept(&self) -> bool {
        let passing = [
            matches!(self, Self::Xid { .. } | Self::Ecc { .. } | Self::Storm { .. }),
            matches!(self, Self::CrashNow | Self::Calls { .. } | Self::Blocked { .. }),
        ];
        !passing.contains(&true)
    }
}

/// Where the kept commands of a control socket lie.
pub fn journal(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".journal");
    PathBuf::from(name)
}

/// Where one process listens: several may have the library loaded at a time.
pub fn process(socket: &Path, id: u32) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(format!(".{id}"));
    PathBuf::from(name)
}

/// Whether a path is where a process listens.
pub fn is_process_of(path: &Path, socket: &Path) -> bool {
    let id = path.extension().and_then(|id| id.to_str()).and_then(|id| id.parse().ok());
    id.is_some_and(|id| process(socket, id) == path)
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let gpu = |word: &str| Selector(word.to_owned());
        let name = |word: &str| word.to_owned();
        Ok(match words[..] {
            ["xid", which, code] => {
                Self::Xid { gpu: gpu(which), code: number(code)?, gpu_instance: None, compute_instance: None }
            }
            ["xid", which, code, gi] => {
                let gpu_instance = Some(number(gi)?);
                Self::Xid { gpu: gpu(which), code: number(code)?, gpu_instance, compute_instance: None }
            }
            ["xid", which, code, gi, ci] => {
                let (gpu_instance, compute_instance) = (Some(number(gi)?), Some(number(ci)?));
                Self::Xid { gpu: gpu(which), code: number(code)?, gpu_instance, compute_instance }
            }
            ["ecc", which] => Self::Ecc { gpu: gpu(which) },
            ["lost", which] => Self::Lost { gpu: gpu(which) },
            ["back", which] => Self::Back { gpu: gpu(which) },
            ["fail", which, function, code] => {
                Self::Fault { gpu: gpu(which), function: name(function), fault: Fault::Code(number(code)?) }
            }
            ["hang", function] => Self::Fault { gpu: gpu("*"), function: name(function), fault: Fault::Hang },
            ["hang", which, function] => Self::Fault { gpu: gpu(which), function: name(function), fault: Fault::Hang },
            ["hold", which, function] => Self::Fault { gpu: gpu(which), function: name(function), fault: Fault::Hold },
            ["storm", which, code, events] => {
                Self::Storm { gpu: gpu(which), code: number(code)?, events: number(events)? }
            }
            ["rows", which, pending, failed] => {
                Self::Rows { gpu: gpu(which), pending: number(pending)?, failed: number(failed)? }
            }
            ["uncorrectable", which, errors] => Self::Uncorrectable { gpu: gpu(which), errors: number(errors)? },
            ["link", which, link, to @ ("up" | "down")] => {
                Self::Link { gpu: gpu(which), link: number(link)?, up: to == "up" }
            }
            ["fabric", which, state, status] => {
                Self::Fabric { gpu: gpu(which), state: number(state)?, status: number(status)? }
            }
            [to @ ("add" | "remove"), which] => Self::Present { gpu: gpu(which), present: to == "add" },
            ["driver", version] => Self::Driver { version: name(version) },
            ["crash"] => Self::CrashNow,
            ["loss-ends-waits"] => Self::LossEndsWaits,
            ["calls", function, more] => Self::Calls { function: name(function), more: number(more)? },
            ["blocked", function] => Self::Blocked { function: name(function) },
            ["crash", function] => Self::Fault { gpu: gpu("*"), function: name(function), fault: Fault::Crash },
            ["crash", which, function] => {
                Self::Fault { gpu: gpu(which), function: name(function), fault: Fault::Crash }
            }
            ["unfail" | "unhang" | "unhold" | "uncrash", function] => {
                Self::NoFault { gpu: gpu("*"), function: name(function) }
            }
            ["unfail" | "unhang" | "unhold" | "uncrash", which, function] | ["unfail", which, function, _] => {
                Self::NoFault { gpu: gpu(which), function: name(function) }
            }
            ["runtime"] => Self::Runtime,
            ["leak", mib] => Self::Leak { mib: number(mib)? },
            ["init", code] => Self::Init { code: number(code)? },
            ["recovery", which, action] => Self::Recovery { gpu: gpu(which), action: number(action)? },
            ["mig", which, ref layout @ ..] if !layout.is_empty() => {
                let layout = serde_saphyr::from_str(&layout.join(" "));
                Self::Mig { gpu: gpu(which), mig: layout.map_err(|error| error.to_string())? }
            }
            _ => return Err(format!("'{line}' is no command")),
        })
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("'{word}' is no number here"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_commands_and_refuses_others() {
        let xid: Command = "xid 1 79 2".parse().unwrap();
        let expected =
            Command::Xid { gpu: Selector("1".into()), code: 79, gpu_instance: Some(2), compute_instance: None };
        assert_eq!(xid, expected);
        assert!(!xid.is_kept());
        assert!("lost 1".parse::<Command>().unwrap().is_kept());
        assert_eq!("crash".parse(), Ok(Command::CrashNow));
        assert!("crash 0 nvmlDeviceGetName".parse::<Command>().unwrap().is_kept());
        let layout = "mig 0 {enabled: true, devices: [{index: 0, uuid: MIG-1, gpu_instance: 1, compute_instance: 0, \
                      gpu_slices: 1, compute_slices: 1, memory_mib: 4864}]}";
        let Ok(Command::Mig { mig, .. }) = layout.parse() else { panic!("{layout}") };
        assert_eq!((mig.enabled, mig.instance(1)), (true, mig.device(0)));
        assert!(!"storm 0 31 1000".parse::<Command>().unwrap().is_kept());
        for line in ["link 0 1 sideways", "", "xid", "xid 0 many", "explode", "mig 0", "mig 0 off"] {
            assert!(line.parse::<Command>().is_err(), "{line}");
        }
    }
}
