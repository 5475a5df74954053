//! `linkwise admin`: sends an order to the `linkwise run` on this host, over its admin socket.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{print, top};
use crate::config::{AdminArgs, AdminOrder, Format};
use linkwise_core::publish::view::NodeView;
use linkwise_core::quote::one_line;
use linkwise_core::state::Cordon;
use linkwise_system::uds;

/// The longest time for an answer. An order to release the driver may take 10 s, because the agent has to end first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest time for an answer with the state, which linkwise has in memory. If linkwise ends, the connection closes
/// sooner.
pub(super) const STATE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes: the state of a node with many GPUs has some 100 KB.
const MAX_ANSWER: u64 = 16 << 20;

/// Runs the command.
pub async fn admin(args: &AdminArgs) -> Result<()> {
    let mut body = String::new();
    let line = match &args.order {
        AdminOrder::State { format: Format::Text } => {
            return Ok(print(&top::state_text(&args.socket).await?)?);
        }
        AdminOrder::Cordon { gpu, reason, by, evict } => {
            let by = by.clone().unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
            body = serde_json::to_string(&Cordon { by, why: reason.clone(), evict: *evict })?;
            format!("POST /gpus/{gpu}/cordon")
        }
        AdminOrder::Uncordon { gpu } => format!("POST /gpus/{gpu}/uncordon"),
        AdminOrder::State { format: Format::Json } => "GET /state".to_owned(),
        AdminOrder::Release => "POST /driver/release".to_owned(),
        AdminOrder::Accept => "POST /hardware/accept".to_owned(),
        AdminOrder::Resume => "POST /driver/resume".to_owned(),
        AdminOrder::Clear { gpu } => format!("POST /gpus/{gpu}/clear"),
    };
    let mut answer = order(&args.socket, &line, &body, ANSWER_TIMEOUT).await?;
    if args.order == AdminOrder::Release {
        for process in gpu_users(Path::new("/proc")) {
            answer += &format!("another process has GPUs open: {process}\n");
        }
    }
    Ok(print(&answer)?)
}

/// The processes that have GPUs open, as far as this process may see them: id, name and device nodes.
fn gpu_users(procfs: &Path) -> Vec<String> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let gpu = |file: PathBuf| {
        let file = fs::read_link(file).ok()?;
        let number = file.to_str()?.strip_prefix("/dev/nvidia")?;
        number.parse::<u32>().ok().map(|_| file.display().to_string())
    };
    let user = |process: PathBuf| {
        let id: u32 = process.file_name()?.to_str()?.parse().ok()?;
        let mut gpus: Vec<String> = entries(&process.join("fd")).filter_map(gpu).collect();
        gpus.sort();
        gpus.dedup();
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        (!gpus.is_empty()).then(|| format!("{id} {} ({})", name.trim_end(), gpus.join(", ")))
    };
    let mut users: Vec<String> = entries(procfs).filter_map(user).collect();
    users.sort();
    users
}

/// The state of the linkwise on this host.
pub(super) async fn state(socket: &Path, limit: Duration) -> Result<NodeView> {
    let answer = order(socket, "GET /state", "", limit).await?;
    serde_json::from_str(&answer).with_context(|| format!("another program answers on {}", socket.display()))
}

/// Sends an order, and returns the body of the answer.
async fn order(socket: &Path, line: &str, body: &str, limit: Duration) -> Result<String> {
    let at = socket.display();
    let answer = timeout(limit, send(socket, line, body)).await;
    let text = answer.with_context(|| format!("no answer on {at} within {limit:?}"))?;
    let text = text.with_context(|| format!("cannot ask linkwise on {at} (its --admin-socket)"))?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(head.starts_with("HTTP/1."), "another program answers on {at}");
    if status != "200" {
        bail!("{}", one_line(body));
    }
    Ok(body.to_owned())
}

async fn send(socket: &Path, line: &str, body: &str) -> std::io::Result<String> {
    let (mut stream, _) = uds::connect(socket).await?;
    let head = format!("{line} HTTP/1.1\r\nHost: linkwise\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    let request = format!("{head}\r\n{body}");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut text).await?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn processes_with_open_gpus_are_named() {
        let proc = tempfile::tempdir().unwrap();
        let process = |id: &str, name: &str, files: &[&str]| {
            let folder = proc.path().join(id);
            fs::create_dir_all(folder.join("fd")).unwrap();
            fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
            files.iter().enumerate().for_each(|(fd, to)| symlink(to, folder.join(format!("fd/{fd}"))).unwrap());
        };
        process(
            "17",
            "dcgm-exporter",
            &["/dev/null", "/dev/nvidia1", "/dev/nvidia0", "/dev/nvidia0", "/dev/nvidiactl"],
        );
        process("18", "bash", &["/dev/nvidia-uvm", "/dev/nvidiactl", "/tmp/dev/nvidia0"]);
        process("self", "bash", &["/dev/nvidia0"]);
        assert_eq!(gpu_users(proc.path()), ["17 dcgm-exporter (/dev/nvidia0, /dev/nvidia1)"]);
    }
}
