//! Tests `admin release`, the order before a driver's upgrade, and `admin resume`. The driver itself does not change.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use linkwise_kubelet_box::{KubeletBox, State};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::plugin::is_as_before;
use super::program::Linkwise;
use super::{KitArgs, Report, TIMEOUT, fault};

/// The text that linkwise logs when an agent is up. An agent registers for NVML's events before that.
const UP: &str = "NVML available";

/// Gives both orders over the admin socket. `before` is the kubelet's state that must come back.
pub(super) async fn play(
    args: &KitArgs,
    report: &Report,
    linkwise: &Linkwise,
    socket: &Path,
    (kubelet, before): (&KubeletBox, &State),
) -> Result<()> {
    let admin = async |order: &str| {
        let mut command = Command::new(&args.linkwise);
        command.arg("admin").arg("--socket").arg(socket).arg(order).kill_on_drop(true);
        let output =
            timeout(TIMEOUT, command.output()).await.with_context(|| format!("admin {order} takes too long"))??;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim().replace('\n', "; ");
        report.promise(output.status.success(), &format!("admin {order} ({}): {text}", output.status))
    };
    let library = args.nvml_library.as_deref().and_then(|path| fs::canonicalize(path).ok());
    let in_use =
        || linkwise.processes().into_iter().filter(|process| uses_driver(*process, library.as_deref())).count();
    let (users, agents) = (in_use(), linkwise.logged(UP));
    admin("release").await?;
    let released = timeout(TIMEOUT, async {
        while in_use() > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    });
    let is_released = users > 0 && released.await.is_ok();
    let text = format!("processes with the driver's library or nodes: {users}, after the release {}", in_use());
    report.promise(is_released, &text)?;
    admin("resume").await?;
    let is_up = linkwise.wait_for_log(UP, agents + 1).await.is_ok();
    report.promise(is_up, &format!("NVML is available after the resume; processes using the driver: {}", in_use()))?;
    let is_kept = kubelet.wait(|now| is_as_before(before, now)).await.is_ok();
    report.promise(is_kept, "after the resume the kubelet has the same healthy devices, and the pod its own")?;
    match args.fault.first() {
        Some(fault) if is_up => {
            let is_counted = fault::cause_and_check(fault, linkwise.metrics()).await?;
            report.promise(is_counted, "an XID after the resume is counted")
        }
        _ => Ok(()),
    }
}

/// Returns true if a process has mapped the library or has opened one of the driver's device nodes.
fn uses_driver(process: u32, library: Option<&Path>) -> bool {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    let is_mapped = library.is_some_and(|library| maps.contains(&*library.to_string_lossy()));
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut nodes = files.filter_map(|file| fs::read_link(file.path()).ok());
    is_mapped || nodes.any(|node| node.to_string_lossy().starts_with("/dev/nvidia"))
}
