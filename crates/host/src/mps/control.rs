//! Commands to a control daemon. Each command goes to the standard input of an nvidia-cuda-mps-control of its own,
//! which prints the answer.
//!
//! Called by `daemon` and `supervise`. Every command has a deadline, after which the program is killed; every error
//! names the command, and the answer if there is one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use std::{fs, io};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

use super::daemon::{MpsError, Settings};
use super::limits::Limits;
use linkwise_core::quote::quoted;
use linkwise_core::state::ResourceName;

/// The shell script that runs in a new mount namespace: it mounts its first argument at /dev/shm, and executes the
/// others.
const IN_NAMESPACE: &str = "mount --bind \"$0\" /dev/shm && exec \"$@\"";

/// The control daemon of one resource, running or not.
#[derive(Clone, Debug)]
pub struct Control {
    program: PathBuf,
    /// The environment of nvidia-cuda-mps-control, as the daemon and for commands to it.
    environment: Vec<(&'static str, OsString)>,
    /// The shared memory that is mounted as the daemon's /dev/shm; `None` if the daemon has that of this process.
    shm: Option<PathBuf>,
    deadline: Duration,
}

/// The reason why a command to a control daemon failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program of the command failed or did not answer.
    #[error("cannot send '{0}'")]
    NoAnswer(String, #[source] ProgramError),
    /// A limit that was set reads back as another one: the command, its answer, and the answer that confirms the limit.
    #[error("'{}' answered {}, not {}: the limit does not hold", .0, quoted(.1), .2)]
    NotHeld(String, String, String),
}

impl Control {
    /// Prepares the control daemon of a resource: makes its folders. The folders stay, because running containers have
    /// them mounted.
    pub fn of(settings: &Settings, resource: &ResourceName, limits: &Limits) -> Result<Self, MpsError> {
        let (pipe, log) = (settings.layout.pipe(resource), settings.layout.log(resource));
        for path in [&pipe, &log] {
            fs::create_dir_all(path).map_err(|source| MpsError::Write(path.clone(), source))?;
        }
        let mut environment: Vec<(&str, OsString)> = vec![
            ("CUDA_MPS_PIPE_DIRECTORY", pipe.into()),
            ("CUDA_MPS_LOG_DIRECTORY", log.into()),
            // The daemon has to number GPUs as NVML does; CUDA's default is the fastest GPU first.
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into()),
        ];
        if limits.shown_only {
            let gpus: Vec<&str> = limits.gpus().map(|gpu| gpu.as_str()).collect();
            environment.push(("CUDA_VISIBLE_DEVICES", gpus.join(",").into()));
        }
        let shm = limits.own_shm.then(|| settings.layout.own_shm(resource));
        Ok(Self { program: settings.programs.control.clone(), environment, shm, deadline: settings.pace.answer })
    }

    /// The command that starts the daemon. A daemon with shared memory of its own runs in a mount namespace of its own,
    /// which receives later mounts of our container.
    pub(super) fn foreground(&self) -> Command {
        let mut command = Command::new(if self.shm.is_some() { Path::new("unshare") } else { &self.program });
        if let Some(shm) = &self.shm {
            command.args(["--mount", "--propagation", "slave", "sh", "-c", IN_NAMESPACE]);
            command.arg(shm).arg(&self.program);
        }
        command.arg("-f").envs(self.environment.clone());
        command
    }

    /// Sends a command; returns the answer.
    pub async fn send(&self, command: &str) -> Result<String, ControlError> {
        let mut program = Command::new(&self.program);
        let answer = run(program.envs(self.environment.clone()), &format!("{command}\n"), self.deadline).await;
        answer.map_err(|source| ControlError::NoAnswer(command.to_owned(), source))
    }
}

/// Returns true if an answer such as `25.0` is this many percent.
pub(super) fn is_percentage(answer: &str, percent: u32) -> bool {
    let (whole, fraction) = answer.split_once('.').unwrap_or((answer, "0"));
    whole.parse() == Ok(percent) && !fraction.is_empty() && fraction.bytes().all(|digit| digit == b'0')
}

/// Returns true if an answer such as `512M` or `19G` is this much memory. Drivers show whole GiB from 1 GiB on, rounded
/// down: 20350 MiB reads back as `19G`.
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

/// The longest output that is read, in bytes.
const MAX_OUTPUT: u64 = 8 << 10;

/// The reason why a program did not do its work.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ProgramError {
    #[error("cannot run {0}")]
    Run(String, #[source] io::Error),
    #[error("no answer from {0} within {1:?}")]
    TimedOut(String, Duration),
    #[error("{0} failed ({1}): {2}")]
    Failed(String, ExitStatus, String),
}

/// Runs a program to its end. Returns its output, without the white space around it. After an error the program has
/// ended or is being killed.
pub(super) async fn run(command: &mut Command, input: &str, within: Duration) -> Result<String, ProgramError> {
    let program =
        Path::new(command.as_std().get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let work = async {
        let mut process = command.spawn()?;
        let (stdin, stdout, stderr) = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        if let Some(mut stdin) = stdin {
            // A program that does not read its input prints the reason.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        let (stdout, stderr) = tokio::try_join!(text(stdout), text(stderr))?;
        Ok((process.wait().await?, stdout, stderr))
    };
    match timeout(within, work).await {
        Err(_) => Err(ProgramError::TimedOut(program, within)),
        Ok(Err(source)) => Err(ProgramError::Run(program, source)),
        Ok(Ok((status, stdout, _))) if status.success() => Ok(stdout),
        Ok(Ok((status, stdout, stderr))) => {
            let output = format!("{stdout}\n{stderr}").trim().replace('\n', "; ");
            Err(ProgramError::Failed(program, status, output))
        }
    }
}

async fn text(pipe: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(MAX_OUTPUT).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
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
