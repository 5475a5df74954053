//! The real program as a child process.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use linkwise_kubelet_box::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::{KitArgs, Report, TIMEOUT};

/// The text that linkwise logs for an XID that is not a fault of the GPU (docs/health.md), for instance 13 or 31.
pub(super) const HARMLESS: &str = "the XID is not a fault of the GPU";

/// A process of `linkwise run`. Dropping it kills the process.
pub(super) struct Linkwise {
    process: Child,
    id: u32,
    log: PathBuf,
    metrics: SocketAddr,
}

impl Linkwise {
    /// Starts linkwise with all its folders below `folder`, and returns when it is up. `suffix` becomes a part of
    /// the names of its log and of its file of NVML calls. `change` adds to the command.
    pub async fn start(args: &KitArgs, folder: &Path, suffix: &str, change: impl FnOnce(&mut Command)) -> Result<Self> {
        let at = |name: &str| folder.join(name);
        let log = args.report.join(format!("linkwise{suffix}.log"));
        let mut command = Command::new(&args.linkwise);
        command.arg("run").arg("--kubelet-socket").arg(at("kubelet").join(Options::SOCKET));
        command.arg("--pod-resources-socket").arg(at("pod-resources/kubelet.sock"));
        command.arg("--cdi-dir").arg(at("cdi")).arg("--admin-socket").arg(at("admin/admin.sock"));
        command.arg("--driver-root").arg(&args.driver_root).arg("--driver-root-ctr-path").arg(&args.driver_root);
        command.arg("--metrics-address=127.0.0.1:0");
        command.arg("--nvml-calls").arg(args.report.join(format!("nvml-calls{suffix}.tsv")));
        if let Some(library) = &args.nvml_library {
            command.arg("--nvml-library").arg(library);
        }
        // If the kit runs in a pod, linkwise must not talk to the API server of that cluster.
        command.env_remove("KUBECONFIG").env_remove("KUBERNETES_SERVICE_HOST");
        change(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log)?).kill_on_drop(true);
        let mut process = command.spawn().with_context(|| format!("cannot start {}", args.linkwise.display()))?;
        let id = process.id().context("linkwise has ended")?;
        let up = async {
            loop {
                if let Some(address) = address(&fs::read_to_string(&log).unwrap_or_default()) {
                    return address;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        let metrics = tokio::select! {
            address = timeout(TIMEOUT, up) => address.context("linkwise does not come up")?,
            ended = process.wait() => bail!("linkwise ended: {}; its log: {}", ended?, log.display()),
        };
        Ok(Self { process, id, log, metrics })
    }

    /// Waits for work that needs the process. Fails if the process ends first.
    pub async fn beside<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            ended = self.process.wait() => bail!("linkwise ended: {}; its log: {}", ended?, self.log.display()),
        }
    }

    /// The process itself, then its children: the agent.
    pub fn processes(&self) -> Vec<u32> {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.id)).unwrap_or_default();
        [self.id].into_iter().chain(children.split_whitespace().filter_map(|id| id.parse().ok())).collect()
    }

    /// The number of times that the log has this text.
    pub fn logged(&self, text: &str) -> usize {
        fs::read_to_string(&self.log).unwrap_or_default().matches(text).count()
    }

    pub fn metrics(&self) -> Metrics {
        Metrics(self.metrics)
    }

    /// Waits until the log has this text at least `times` times.
    pub async fn wait_for_log(&self, text: &str, times: usize) -> Result<()> {
        let logged = async {
            while self.logged(text) < times {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, logged).await.with_context(|| format!("{}: not {times} times '{text}'", self.log.display()))
    }

    /// Ends the process with SIGTERM, as a kubelet does.
    pub async fn stop(mut self, report: &Report) -> Result<()> {
        // `kill` belongs to the system, and may not run with the kit's libraries.
        let mut kill = Command::new("kill");
        kill.arg(self.id.to_string()).env_remove("LD_LIBRARY_PATH").status().await.context("kill")?;
        let ended = timeout(TIMEOUT, self.process.wait()).await.context("linkwise does not end")??;
        report.promise(ended.success(), &format!("linkwise ended: {ended}"))
    }
}

/// The metrics port of a linkwise process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metrics(SocketAddr);

impl Metrics {
    pub async fn text(self) -> Result<String> {
        let read = async {
            let mut stream = TcpStream::connect(self.0).await.context("cannot reach the metrics port")?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            anyhow::Ok(text)
        };
        timeout(TIMEOUT, read).await.context("the metrics port does not answer")?
    }

    /// The counts of XIDs by GPU and code.
    pub async fn xids(self) -> Result<BTreeMap<(String, u64), u64>> {
        Ok(xids(&self.text().await?))
    }

    /// The number of times that an XID is counted for `gpu` (`None`: for any GPU). The log cannot tell, because it does
    /// not name each repetition.
    pub async fn count(self, xid: u64, gpu: Option<&str>) -> Result<u64> {
        let xids = self.xids().await?;
        let is_meant = |uuid: &str, code| code == xid && gpu.is_none_or(|gpu| gpu == uuid);
        Ok(xids.iter().filter(|((uuid, code), _)| is_meant(uuid, *code)).map(|(_, count)| count).sum())
    }
}

/// The address of the metrics port in a log.
fn address(log: &str) -> Option<SocketAddr> {
    let line = log.lines().find(|line| line.contains("linkwise is up"))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("metrics=")?.trim_matches('"').parse().ok())
}

/// Reads the series `linkwise_xid_errors_total{uuid="GPU-...",xid="31"} 1`.
fn xids(metrics: &str) -> BTreeMap<(String, u64), u64> {
    let series = metrics.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix("linkwise_xid_errors_total{")?.split_once("} ")?;
        let label = |name: &str| {
            let value = labels.split(',').find_map(|label| label.strip_prefix(name))?;
            Some(value.trim_matches('"').to_owned())
        };
        Some(((label("uuid=")?, label("xid=")?.parse().ok()?), value.trim().parse().ok()?))
    });
    series.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_and_metrics_are_read() {
        let log = "... INFO linkwise is up version=\"0.1.0\" metrics=127.0.0.1:4711\n";
        assert_eq!(address(log), Some(([127, 0, 0, 1], 4711).into()));
        assert_eq!(address("... INFO metrics=127.0.0.1:4711"), None);
        let text = "linkwise_xid_errors_total{uuid=\"GPU-a\",xid=\"31\"} 2\nlinkwise_xid_errors_total{uuid=\"GPU-a\",\
                    xid=\"other\"} 1\nother{uuid=\"GPU-a\",xid=\"13\"} 1\n";
        assert_eq!(xids(text), BTreeMap::from([(("GPU-a".to_owned(), 31), 2)]));
    }
}
