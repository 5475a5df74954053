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
    /// `unfail`, `unhang` and `uncrash` all end whatever the function does.
    NoFault {
        gpu: Selector,
        function: String,
    },
    CrashNow,
    /// Wait until the function was called this many times more.
    Calls {
        function: String,
        more: u64,
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
        !matches!(self, Self::Xid { .. } | Self::Ecc { .. } | Self::CrashNow | Self::Calls { .. })
    }
}

/// Where the kept commands of a control socket lie.
pub fn journal(socket: &Path) -> PathBuf {
    let mut name = OsString::from(socket);
    name.push(".journal");
    PathBuf::from(name)
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
            ["crash"] => Self::CrashNow,
            ["calls", function, more] => Self::Calls { function: name(function), more: number(more)? },
            ["crash", function] => Self::Fault { gpu: gpu("*"), function: name(function), fault: Fault::Crash },
            ["crash", which, function] => {
                Self::Fault { gpu: gpu(which), function: name(function), fault: Fault::Crash }
            }
            ["unfail" | "unhang" | "uncrash", function] => Self::NoFault { gpu: gpu("*"), function: name(function) },
            ["unfail" | "unhang" | "uncrash", which, function] | ["unfail", which, function, _] => {
                Self::NoFault { gpu: gpu(which), function: name(function) }
            }
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
        for line in ["", "xid", "xid 0 many", "explode", "mig 0", "mig 0 off"] {
            assert!(line.parse::<Command>().is_err(), "{line}");
        }
    }
}
