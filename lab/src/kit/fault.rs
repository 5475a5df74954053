//! Programs that fault on a GPU on purpose, and the XIDs that linkwise counts for them.

use std::path::Path;
use std::process::Stdio;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::program::{HARMLESS, Linkwise, Metrics};
use super::{Report, TIMEOUT};

/// The longest time from the end of a faulting program until its XID is counted.
pub(super) const XID_TIMEOUT: Duration = Duration::from_secs(20);

/// A command, and the XID that it causes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub xid: u64,
    pub words: Vec<String>,
}

impl FromStr for Fault {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (xid, command) = text.split_once('=').ok_or("expected XID=COMMAND")?;
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let xid = xid.parse().map_err(|_| "the XID is not a number")?;
        if words.is_empty() { Err("the command is empty") } else { Ok(Self { xid, words }) }
    }
}

impl Fault {
    /// The command as it runs on this machine, outside of a container.
    pub fn plain(&self) -> Command {
        let (program, rest) = self.words.split_first().map_or(("", [].as_slice()), |(first, rest)| (first, rest));
        let mut command = Command::new(program);
        command.args(rest);
        command
    }

    /// Runs the command. If it fails, the error has the last line that it printed.
    pub async fn cause(&self) -> Result<()> {
        let mut command = self.plain();
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = timeout(TIMEOUT, command.output()).await.context("the fault takes too long")??;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let last = text.lines().next_back().unwrap_or_default();
        ensure!(output.status.success(), "{} ({}): {last}", self.name(), output.status);
        Ok(())
    }

    /// The name of the program, and its arguments.
    fn name(&self) -> String {
        let program = self.words.first().and_then(|path| Path::new(path).file_name()).unwrap_or_default();
        let arguments = self.words.iter().skip(1).map(String::as_str);
        [&*program.to_string_lossy()].into_iter().chain(arguments).collect::<Vec<_>>().join(" ")
    }
}

/// Causes a fault. Returns true if its XID is counted in time.
pub(super) async fn cause_and_check(fault: &Fault, metrics: Metrics) -> Result<bool> {
    let known = metrics.count(fault.xid, None).await?;
    fault.cause().await?;
    let counted = async {
        while metrics.count(fault.xid, None).await? == known {
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    Ok(matches!(timeout(XID_TIMEOUT, counted).await, Ok(Ok(()))))
}

/// Runs a command that faults, and writes its output to a file. Reports as a promise that the command succeeds, and
/// that linkwise logs its XID as harmless and counts it for `gpu` (`None`: for any GPU). Returns the output.
pub(super) async fn run(
    report: &Report,
    linkwise: &Linkwise,
    fault: &Fault,
    (file, gpu): (&str, Option<&str>),
    mut command: Command,
) -> Result<String> {
    let counted = async || linkwise.metrics().count(fault.xid, gpu).await;
    let (before, logged) = (counted().await?, linkwise.logged(HARMLESS));
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await.context("the fault takes too long")?;
    let output = output.with_context(|| format!("cannot start {}", fault.name()))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    report.write(file, &text)?;
    let noticed = timeout(XID_TIMEOUT, async {
        while counted().await? == before || linkwise.logged(HARMLESS) == logged {
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    });
    let is_noticed = matches!(noticed.await, Ok(Ok(())));
    let (status, xid, now) = (output.status, fault.xid, counted().await?);
    let on_gpu = gpu.map(|gpu| format!(" for {gpu}")).unwrap_or_default();
    let name = fault.name();
    let line = format!("{name} ({status}): its XID {xid} is logged and counted{on_gpu}: {before}, then {now}");
    report.promise(is_noticed && output.status.success(), &line)?;
    if !is_noticed {
        report.note(false, &format!("all counted XIDs: {:?}", linkwise.metrics().xids().await?))?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_has_an_xid_and_a_command() {
        let fault: Fault = "31=/kit/bin/fault mmu".parse().unwrap();
        assert_eq!((fault.xid, fault.name()), (31, "fault mmu".to_owned()));
        for text in ["/kit/bin/fault", "x=fault", "31= "] {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
    }
}
