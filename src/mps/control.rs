//! Speaks to a control daemon: one command to the standard input of one nvidia-cuda-mps-control, one answer.
//!
//! Called by `daemon`. Every question has a deadline, after which the process that asked is killed; every error names
//! the command and what came back.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::quote::{one_line, quoted};

/// The longest answer that is read, in bytes.
const LONGEST: u64 = 8 << 10;

/// How to reach one control daemon.
#[derive(Clone, Debug)]
pub struct Control {
    /// nvidia-cuda-mps-control.
    pub program: PathBuf,
    /// What tells it which daemon is meant: variables added to the inherited environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// How long it may take to answer.
    pub deadline: Duration,
}

/// Why a command was not answered, or not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// Its path.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The pipes to it broke.
    #[error("'{command}': cannot speak to nvidia-cuda-mps-control")]
    Io {
        /// The command.
        command: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No answer in time.
    #[error("'{command}': no answer from nvidia-cuda-mps-control within {after:?}")]
    Late {
        /// The command.
        command: String,
        /// The deadline.
        after: Duration,
    },
    /// It answered with a failure.
    #[error("'{command}': nvidia-cuda-mps-control failed ({status}): {}", one_line(output))]
    Failed {
        /// The command.
        command: String,
        /// The exit code or the signal.
        status: ExitStatus,
        /// What it said.
        output: String,
    },
    /// A limit reads back as another than was set.
    #[error("'{command}' answered {}, not {wanted}: the limit does not hold", quoted(answer))]
    NotHeld {
        /// The command.
        command: String,
        /// What it said.
        answer: String,
        /// What should have come.
        wanted: String,
    },
}

impl Control {
    /// Asks; the answer is what was printed, without the white space around it.
    ///
    /// # Errors
    ///
    /// See [`ControlError`]; the process that asked has ended or is being killed.
    pub async fn ask(&self, command: &str) -> Result<String, ControlError> {
        let program = || self.program.clone();
        let mut process = Command::new(&self.program)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| ControlError::Start { program: program(), source })?;
        let (stdin, stdout, stderr) = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let talk = async {
            if let Some(mut stdin) = stdin {
                // One that reads nothing says why by what it prints.
                let _ = stdin.write_all(format!("{command}\n").as_bytes()).await;
            }
            let (out, err) = tokio::try_join!(text(stdout), text(stderr))?;
            Ok((process.wait().await?, out, err))
        };
        let said = timeout(self.deadline, talk).await;
        let command = || command.to_owned();
        match said {
            Err(_) => Err(ControlError::Late { command: command(), after: self.deadline }),
            Ok(Err(source)) => Err(ControlError::Io { command: command(), source }),
            Ok(Ok((status, out, _))) if status.success() => Ok(out),
            Ok(Ok((status, out, err))) => {
                let output = [out, err].into_iter().filter(|said| !said.is_empty()).collect::<Vec<_>>().join("; ");
                Err(ControlError::Failed { command: command(), status, output })
            }
        }
    }

    /// Asks, and takes no answer but one that `holds`; `wanted` says which, for people.
    pub(super) async fn expect_that(
        &self,
        command: &str,
        wanted: String,
        holds: impl FnOnce(&str) -> bool,
    ) -> Result<(), ControlError> {
        let answer = self.ask(command).await?;
        if holds(&answer) { Ok(()) } else { Err(ControlError::NotHeld { command: command.to_owned(), answer, wanted }) }
    }
}

async fn text(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(LONGEST).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Whether an answer such as `25.0` is this many percent.
pub(super) fn is_percentage(answer: &str, percent: u32) -> bool {
    let (whole, fraction) = answer.split_once('.').unwrap_or((answer, "0"));
    whole.parse() == Ok(percent) && !fraction.is_empty() && fraction.bytes().all(|digit| digit == b'0')
}

/// Whether an answer such as `512M` or `19G` is this much memory. Drivers show whole GiB from 1 GiB on, rounded down:
/// 20350 MiB reads back as `19G`.
pub(super) fn is_memory(answer: &str, mib: u64) -> bool {
    let digits = answer.bytes().take_while(u8::is_ascii_digit).count();
    let Some((number, unit)) = answer.split_at_checked(digits) else { return false };
    let shown = match unit.trim_start() {
        "M" | "MB" | "MiB" => mib,
        "G" | "GB" | "GiB" => mib / 1024,
        _ => return false,
    };
    number.parse() == Ok(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_read_back_as_drivers_show_them() {
        for (answer, percent) in [("25.0", 25), ("100", 100), ("2.00", 2)] {
            assert!(is_percentage(answer, percent), "{answer}");
        }
        for (answer, percent) in [("100.0", 25), ("25.5", 25), ("", 25), ("25.", 25), ("Error", 25), ("-25.0", 25)] {
            assert!(!is_percentage(answer, percent), "{answer}");
        }
        for (answer, mib) in [("512M", 512), ("19G", 20_350), ("20350M", 20_350), ("1G", 1024), ("19 GB", 20_350)] {
            assert!(is_memory(answer, mib), "{answer}");
        }
        for (answer, mib) in
            [("", 512), ("0G", 512 << 10), ("20G", 20_350), ("G", 0), ("512", 512), ("512K", 512), ("é", 1)]
        {
            assert!(!is_memory(answer, mib), "{answer}");
        }
        assert!(!is_memory("99999999999999999999999M", 1));
    }
}
