//! `linkwise config-manager`: links the configuration that the node's label names, and signals the program that reads
//! it.
//!
//! This module owns two tasks: one follows the node, the other serves metrics if an address is set. As an init
//! container, config-manager selects once and ends. As a sidecar, it follows the label and the folder. If it cannot
//! select a configuration, it reports that, and the previous one stays.

mod choose;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, bail};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustix::process::{Pid, Signal, getpid, kill_process};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::config::{ConfigManagerArgs, ConfigManagerSettings};
use choose::choose;
use linkwise_cluster::{ApiMetrics, ApiServer, NodeLabels, Pace, follow_node};
use linkwise_core::reported::Reported;
use linkwise_node::admin::{Admin, Answers, Hosts};
use linkwise_system::inotify::FolderWatch;
use linkwise_system::lock;
use linkwise_system::metrics::new;
use linkwise_system::signals::LastSignals;

/// The time after which the folder and the link are compared without a notification.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The folder of the processes that may be signalled.
const PROCFS: &str = "/proc";

#[derive(Clone, Debug)]
struct Metrics {
    selected: Gauge,
    signals: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Metrics {
    fn register(registry: &mut Registry) -> Self {
        let selected = "1 while the configuration that the node's label or the default names is in place, 0 while none \
                        can be selected and the previous one stays";
        let signals = "Signals after a change of the configuration: sent, failed, or no_process if none has the name";
        Self { selected: new(registry, "config_selected", selected), signals: new(registry, "config_signals", signals) }
    }

    fn signalled(&self, outcome: &'static str) {
        self.signals.get_or_create(&[("outcome", outcome)]).inc();
    }
}

/// Runs config-manager: once, or until a signal ends it. Fails if an option is missing or wrong; or, with `--oneshot`,
/// if no configuration is in place at the end.
pub fn run(args: &ConfigManagerArgs) -> Result<()> {
    let _log = crate::run::start_log(&args.log)?;
    linkwise_system::block_on(serve(args))
}

async fn serve(args: &ConfigManagerArgs) -> Result<()> {
    let mut last_signals = LastSignals::listen()?;
    let settings = args.settings()?;
    let access = args.api.access()?;
    let mut registry = Registry::with_prefix("linkwise");
    let metrics = Metrics::register(&mut registry);
    let pace = Pace { first: Duration::from_millis(args.api_pause_ms), ..Pace::DEFAULT };
    let server = ApiServer::new(access, pace, ApiMetrics::register(&mut registry));
    let (sender, labels) = watch::channel(None);
    let mut tasks = JoinSet::new();
    tasks.spawn(follow_node(server, settings.node.clone(), sender));
    let problem = Arc::<Mutex<Option<String>>>::new(Mutex::new(Some("no label read yet".to_owned())));
    if let Some(address) = args.metrics_address {
        let admin =
            Admin::bind(address).with_context(|| format!("cannot listen on {address} for metrics and probes"))?;
        tracing::info!(metrics = %admin.address(), "config-manager is up");
        let hosts = Hosts::of_this_pod();
        hosts.add(&settings.node);
        let answers = answers(registry, Arc::clone(&problem), hosts);
        tasks.spawn(admin.serve(answers));
    }
    let folder = FolderWatch::of(&settings.source);
    let manager = Manager { settings, metrics, problem, problems: Reported::new(), selected: None };
    let result = tokio::select! {
        result = manager.work(labels, folder) => result,
        ended = tasks.join_next() => Err(anyhow::anyhow!("a task of config-manager ended: {ended:?}")),
        signal = last_signals.recv() => {
            tracing::info!(signal, "ending");
            Ok(())
        }
    };
    tasks.shutdown().await;
    result
}

fn answers(registry: Registry, problem: Arc<Mutex<Option<String>>>, hosts: Hosts) -> Answers {
    let text = move || {
        let mut text = String::new();
        encode(&mut text, &registry).ok().map(|()| text)
    };
    let ready = move || match lock(&problem).clone() {
        None => Ok("ready".to_owned()),
        Some(problem) => Err(vec![problem]),
    };
    Answers { metrics: Arc::new(text), ready: Arc::new(ready), hosts, page: None }
}

struct Manager {
    settings: ConfigManagerSettings,
    metrics: Metrics,
    /// The reason why config-manager is not ready; `None` when it is.
    problem: Arc<Mutex<Option<String>>>,
    /// The problem that was logged last.
    problems: Reported<String>,
    /// The configuration that was logged last; the inner `None` is the empty one.
    selected: Option<Option<String>>,
}

impl Manager {
    async fn work(mut self, mut labels: watch::Receiver<Option<NodeLabels>>, mut folder: FolderWatch) -> Result<()> {
        if self.settings.oneshot {
            return self.once(labels).await;
        }
        loop {
            let latest = labels.borrow_and_update().clone();
            if let Some(labels) = latest {
                let selected = self.select(&labels);
                self.report(selected);
            }
            tokio::select! {
                changed = labels.changed() => changed.context("the task that follows the node ended")?,
                () = folder.changed() => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Selects once. If a configuration is in place, no fault of the API server or the label keeps the other containers
    /// of the pod from starting.
    async fn once(&mut self, mut labels: watch::Receiver<Option<NodeLabels>>) -> Result<()> {
        let (node, mut logged) = (self.settings.node.clone(), false);
        let known = labels.wait_for(|labels| {
            if matches!(labels, Some(NodeLabels::Absent)) && !std::mem::replace(&mut logged, true) {
                tracing::warn!(node, "the cluster has no such node, waiting for it; check NODE_NAME");
            }
            matches!(labels, Some(NodeLabels::Of(_)))
        });
        let known = match self.settings.destination.exists() {
            true => tokio::time::timeout(self.settings.keep_after, known).await.ok(),
            false => Some(known.await),
        };
        let Some(known) = known else {
            tracing::warn!(node = self.settings.node, "node not read in time, keeping the configuration in place");
            return Ok(());
        };
        let known = known.context("the task that follows the node ended")?.clone().unwrap_or(NodeLabels::Absent);
        match self.select(&known) {
            Err(error) if !self.settings.destination.exists() => {
                bail!("no configuration selected by {}: {error:#}", self.settings.label)
            }
            selected => self.report(selected),
        }
        Ok(())
    }

    /// Selects the configuration of these labels, and signals its reader if the link changed.
    fn select(&mut self, labels: &NodeLabels) -> Result<()> {
        let settings = &self.settings;
        let NodeLabels::Of(labels) = labels else { bail!("the cluster has no node {}", settings.node) };
        let (source, destination) = (&settings.source, &settings.destination);
        let names =
            choose::names(source).with_context(|| format!("cannot list the configurations in {}", source.display()))?;
        let label = labels.get(&settings.label).map(String::as_str);
        let (name, why) = choose(label, &names, settings.default.as_deref(), &settings.fallbacks)?;
        let changed = choose::link(source, name.as_deref(), destination)
            .with_context(|| format!("cannot link {}", destination.display()))?;
        if changed || self.selected.as_ref() != Some(&name) {
            let configuration = name.as_deref().unwrap_or("(empty)");
            tracing::info!(configuration, why, changed, "configuration selected");
            self.selected = Some(name);
        }
        if changed {
            self.signal();
        }
        Ok(())
    }

    /// Signals the reader. A reader that is not running yet reads the new configuration when it starts.
    fn signal(&self) {
        let Some((process, signal)) = &self.settings.signal else { return };
        let found = match processes(Path::new(PROCFS), process) {
            Ok(found) => found,
            Err(error) => {
                self.metrics.signalled("failed");
                return tracing::warn!(process, %error, "cannot list processes, no signal sent");
            }
        };
        if found.is_empty() {
            self.metrics.signalled("no_process");
            tracing::warn!(process, "no such process to signal, it may start later; else check shareProcessNamespace");
        }
        for pid in found {
            let (id, sent) = (pid.as_raw_nonzero().get(), send(pid, *signal));
            self.metrics.signalled(if sent.is_ok() { "sent" } else { "failed" });
            match sent {
                Ok(()) => tracing::info!(process, pid = id, signal, "signal sent"),
                Err(error) => tracing::warn!(process, pid = id, signal, %error, "cannot send signal"),
            }
        }
    }

    fn report(&mut self, selected: Result<()>) {
        let problem = selected.err().map(|error| format!("{error:#}"));
        self.metrics.selected.set(i64::from(problem.is_none()));
        for error in self.problems.replace(problem.clone()) {
            let label = &self.settings.label;
            tracing::warn!(label, error, "no configuration selected, keeping the previous one");
        }
        *lock(&self.problem) = problem;
    }
}

/// The processes whose command line begins with this word. A path and a bare name are equal if their file names are:
/// NVIDIA's chart starts `mps-control-daemon` and names `/usr/bin/mps-control-daemon` as the process to signal. A
/// process that ends meanwhile is left out.
fn processes(procfs: &Path, word: &str) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(procfs)? {
        let entry = entry?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid.filter(|pid| *pid != getpid()) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
        if is_named(OsStr::from_bytes(first), OsStr::new(word)) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Returns true if a command line's first word names a program.
fn is_named(first: &OsStr, word: &OsStr) -> bool {
    let bare = |name: &OsStr| !name.as_bytes().contains(&b'/');
    let file = |name| Path::new(name).file_name();
    first == word || (!first.is_empty() && bare(first) != bare(word) && file(first) == file(word))
}

/// Sends a signal. An invalid signal number is refused.
fn send(pid: Pid, signal: i32) -> io::Result<()> {
    let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_is_found_by_its_first_word() {
        let procfs = tempfile::tempdir().unwrap();
        for (pid, line) in [
            ("7", "nvidia-device-plugin\0--config-file\0x\0"),
            ("8", "/usr/bin/nvidia-device-plugin\0"),
            ("9", "/proc/self/exe\0nvml-agent\0nvidia-device-plugin\0"),
            ("10", ""),
            ("11", "sh\0-c\0nvidia-device-plugin\0"),
            ("x", "nvidia-device-plugin\0"),
        ] {
            fs::create_dir(procfs.path().join(pid)).unwrap();
            fs::write(procfs.path().join(pid).join("cmdline"), line).unwrap();
        }
        // This process ended while its folder was read.
        fs::create_dir(procfs.path().join("12")).unwrap();
        let found = |word| {
            let mut found: Vec<i32> =
                processes(procfs.path(), word).unwrap().into_iter().map(|pid| pid.as_raw_nonzero().get()).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(found("nvidia-device-plugin"), [7, 8]);
        assert_eq!(found("/usr/bin/nvidia-device-plugin"), [7, 8]);
        assert_eq!(found("/opt/nvidia-device-plugin"), [7]);
        assert_eq!(found("gpu-feature-discovery"), [0; 0]);
        assert!(processes(&procfs.path().join("none"), "x").is_err());
    }
}
