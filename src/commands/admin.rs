//! `linkwise admin`: sends an order to the agent on this host, over its admin socket.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::print;
use crate::config::{AdminArgs, AdminOrder};
use linkwise_system::uds;

/// The longest time for an answer: the order to release the driver waits 10 s for a process to end.
const ANSWER: Duration = Duration::from_secs(20);
/// The longest answer that is read, in bytes: the state of a node with many GPUs has some 100 KB.
const LONGEST: u64 = 16 << 20;

/// Runs the command.
pub async fn admin(args: &AdminArgs) -> Result<()> {
    let line = match &args.order {
        AdminOrder::State => "GET /state".to_owned(),
        AdminOrder::Release => "POST /driver/release".to_owned(),
        AdminOrder::Resume => "POST /driver/resume".to_owned(),
        AdminOrder::Clear { gpu } => format!("POST /gpus/{gpu}/clear"),
    };
    Ok(print(&order(&args.socket, &line, ANSWER).await?)?)
}

/// The body of the answer to an order.
pub(super) async fn order(socket: &Path, line: &str, limit: Duration) -> Result<String> {
    let at = socket.display();
    let answer = timeout(limit, ask(socket, line)).await;
    let text = answer.with_context(|| format!("no answer on {at} within {limit:?}"))?;
    let text = text.with_context(|| format!("cannot ask linkwise on {at} (its --admin-socket)"))?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).unwrap_or_default();
    ensure!(head.starts_with("HTTP/1."), "what answers on {at} is no linkwise");
    if status != "200" {
        bail!("{}", body.trim_end());
    }
    Ok(body.to_owned())
}

async fn ask(socket: &Path, line: &str) -> std::io::Result<String> {
    let (mut stream, _) = uds::connect(socket).await?;
    let request = format!("{line} HTTP/1.1\r\nHost: linkwise\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.take(LONGEST).read_to_string(&mut text).await?;
    Ok(text)
}
