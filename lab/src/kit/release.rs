//! linkwise releases the driver, as for an upgrade of it, and uses it again. The driver itself stays as it is.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::program::Linkwise;
use super::{KitArgs, LIMIT, Report, fault};

pub(super) async fn play(args: &KitArgs, report: &Report, linkwise: &Linkwise, socket: &Path) -> Result<()> {
    let order = async |what: &str| {
        let mut command = Command::new(&args.linkwise);
        command.arg("admin").arg("--socket").arg(socket).arg(what).kill_on_drop(true);
        let output =
            timeout(LIMIT, command.output()).await.with_context(|| format!("admin {what} takes too long"))??;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim().to_owned();
        report.promise(output.status.success(), &format!("admin {what} ({}): {said}", output.status))
    };
    let library = args.nvml_library.as_deref().and_then(|path| fs::canonicalize(path).ok());
    let in_use =
        || linkwise.processes().into_iter().filter(|process| uses_driver(*process, library.as_deref())).count();
    let before = in_use();
    order("release").await?;
    let released = wait_for(|| in_use() == 0).await;
    let text = format!("processes with the driver's library or nodes: {before}, after the release {}", in_use());
    report.promise(before > 0 && released, &text)?;
    order("resume").await?;
    let resumed = wait_for(|| in_use() == before).await;
    report.promise(resumed, &format!("the same after the resume: {}", in_use()))?;
    let Some(fault) = args.fault.first().filter(|_| resumed) else { return Ok(()) };
    // The new agent registers for events before it scans.
    linkwise.wait_for_log("NVML available", 2).await?;
    let known = linkwise.metrics().all_xids().await?;
    fault.cause().await?;
    let counted = async {
        while linkwise.metrics().all_xids().await? == known {
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    let is_counted = matches!(timeout(fault::NOTICED, counted).await, Ok(Ok(())));
    report.promise(is_counted, "an XID after the resume is counted")
}

/// Returns true if it becomes true in time.
async fn wait_for(is_so: impl Fn() -> bool) -> bool {
    let wait = async {
        while !is_so() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, wait).await.is_ok()
}

/// Returns true if a process has mapped the library, or has one of the driver's device nodes open.
fn uses_driver(process: u32, library: Option<&Path>) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    let is_mapped = library.is_some_and(|library| maps.contains(&*library.to_string_lossy()));
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut nodes = files.filter_map(|file| fs::read_link(file.path()).ok());
    is_mapped || nodes.any(|node| node.to_string_lossy().starts_with("/dev/nvidia"))
}
