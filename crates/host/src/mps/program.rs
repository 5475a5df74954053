//! Runs the driver's and the system's small programs: one input, one output, a deadline.
//!
//! Called by `control`, `compute_mode` and `shm`. A program that is late is killed.

use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

/// The longest output that is read, in bytes.
const LONGEST: u64 = 8 << 10;

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
        pipe.take(LONGEST).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}
