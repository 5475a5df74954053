//! The node's labels while linkwise runs: made from each snapshot, sent to their publishers, written to the file that
//! NFD reads.
//!
//! Tasks of `linkwise run`, and of a process of its own (`labels_program`). If NVML is unavailable, or if a file
//! cannot be written, the previous labels stay. No other part waits for these tasks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use linkwise_system::send_if_new;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::config::{Interval, RunArgs, Settings};
use linkwise_core::backoff::Backoff;
use linkwise_core::publish::labels::{HostFacts, LabelFacts, LabelProblem, LabelSettings, labels};
use linkwise_core::reported::Reported;
use linkwise_core::state::{DriverVersions, NodeState};
use linkwise_core::topology::{NodeObservation, NodeTopology};
use linkwise_host::labels::{LabelMetrics, LabelsFile, host, own_fabric};
use linkwise_node::node::Node;
use linkwise_nvml::supervisor::Idle;
use linkwise_system::files;
use linkwise_system::right::Right;

/// The labels of a node by key, as they are published.
pub type NodeLabels = Arc<BTreeMap<String, String>>;

/// A channel of labels; `None` before the first.
pub type LabelsWatch = watch::Receiver<Option<NodeLabels>>;

/// The longest time for reading the host's files; after it, the facts that were read last stay.
const FILES_TIMEOUT: Duration = Duration::from_secs(5);

/// The shortest time between two readings or comparisons of files.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest and the longest pause after a write that failed.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The labels' settings, from the settings and the node's name.
pub(super) fn settings_of(settings: &Settings, node: Option<&str>) -> LabelSettings {
    LabelSettings {
        timestamp: (!settings.gfd_no_timestamp.value).then(now),
        clique: settings.gpu_clique_label.value,
        own_fabric: node.filter(|node| !node.is_empty()).map(own_fabric),
    }
}

/// The labels of a machine that was observed once, and the problems with them.
pub fn labels_of(
    observed: &NodeObservation,
    settings: &Settings,
    host: &HostFacts,
    of_labels: &LabelSettings,
) -> (BTreeMap<String, String>, Vec<LabelProblem>) {
    let (topology, _) = NodeTopology::assemble(observed);
    let (versions, plan) = (&DriverVersions::of(observed), &settings.plan());
    labels(LabelFacts { topology: &topology, versions, plan, host, settings: of_labels })
}

/// The present time, in seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Starts the task that writes the node's labels to the file, if its settings ask for that.
pub(super) fn spawn_in(node: &mut Node, settings: &Settings, args: &RunArgs) {
    // The series exist on every node.
    let metrics = node.metrics().register(LabelMetrics::register);
    if !settings.write_labels_file.value {
        return;
    }
    let (sender, labels) = watch::channel(None);
    let seen = (node.snapshot(), node.readiness.idle().subscribe());
    let source = LabelSource::of(settings, (args.node_name.as_deref(), &args.host.sysfs), seen, metrics.clone());
    let (file, interval) = (LabelsFile::new(&settings.gfd_output_file.value), settings.gfd_sleep_interval.value);
    let writer = FileWriter { file, interval, metrics, files: node.files() };
    node.spawn("labels", source.run(sender));
    node.spawn("labels' file", writer.run(labels));
}

/// The task that makes a node's labels.
pub(super) struct LabelSource {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    /// The reason why the node is idle; it shows whether a node has no GPU, or none is known yet.
    pub idle: watch::Receiver<Idle>,
    pub settings: LabelSettings,
    pub machine_type_file: PathBuf,
    pub sysfs: PathBuf,
    /// The time from one reading of the host's files to the next.
    pub interval: Interval,
    pub metrics: LabelMetrics,
}

impl LabelSource {
    /// The source by these settings, for a node of this name with this /sys.
    pub fn of(
        settings: &Settings,
        (node, sysfs): (Option<&str>, &Path),
        (snapshot, idle): (watch::Receiver<Arc<NodeState>>, watch::Receiver<Idle>),
        metrics: LabelMetrics,
    ) -> Self {
        Self {
            snapshot,
            idle,
            settings: settings_of(settings, node),
            machine_type_file: settings.gfd_machine_type_file.value.clone(),
            sysfs: sysfs.to_owned(),
            interval: settings.gfd_sleep_interval.value,
            metrics,
        }
    }

    /// Sends the labels whenever they change.
    pub async fn run(mut self, labels: watch::Sender<Option<NodeLabels>>) -> Result<()> {
        let (mut reported, mut unknown) = (Reported::new(), Reported::new());
        let at_start = self.idle.borrow().clone();
        let (mut host, mut reading) = (HostFacts::default(), None);
        loop {
            host = self.host(&mut reading).await.unwrap_or(host);
            let read_again = sleep(self.interval.at_least(MIN_INTERVAL));
            tokio::pin!(read_again);
            loop {
                if let Some((made, problems)) = self.make(&host) {
                    let dropped = problems.iter().filter(|problem| matches!(problem, LabelProblem::Dropped { .. }));
                    self.metrics.made(made.len(), dropped.count());
                    report(&mut reported, problems);
                    send_if_new(&labels, Some(Arc::new(made)));
                    unknown.clear();
                } else if let Idle::Waiting(cause) = self.idle.borrow().clone()
                    && Idle::Waiting(cause.clone()) != at_start
                    && !unknown.replace([cause.clone()]).is_empty()
                {
                    tracing::warn!(cause, "GPUs of this node unknown, keeping the previous labels");
                }
                tokio::select! {
                    changed = self.snapshot.changed() => changed.context("the node's state is gone")?,
                    changed = self.idle.changed() => changed.context("the driver's task is gone")?,
                    () = &mut read_again => break,
                }
            }
        }
    }

    /// The labels; `None` while the GPUs are unknown.
    fn make(&mut self, host: &HostFacts) -> Option<(BTreeMap<String, String>, Vec<LabelProblem>)> {
        let state = Arc::clone(&self.snapshot.borrow_and_update());
        let has_none = matches!(*self.idle.borrow_and_update(), Idle::NoGpu(_));
        let is_known = has_none || !state.topology().gpus().is_empty();
        let facts = LabelFacts {
            topology: state.topology(),
            versions: state.hardware().versions(),
            plan: state.offers().plan(),
            host,
            settings: &self.settings,
        };
        is_known.then(|| labels(facts))
    }

    /// Reads the host's facts. While a reading hangs, no second one begins.
    async fn host(&self, reading: &mut Option<JoinHandle<HostFacts>>) -> Option<HostFacts> {
        let (machine_type_file, sysfs) = (self.machine_type_file.clone(), self.sysfs.clone());
        let running = reading.get_or_insert_with(|| spawn_blocking(move || host(&machine_type_file, &sysfs)));
        let facts = timeout(FILES_TIMEOUT, running).await.ok()?;
        *reading = None;
        facts.ok()
    }
}

/// Logs problems, each once as long as it lasts.
pub(super) fn report(reported: &mut Reported<LabelProblem>, problems: Vec<LabelProblem>) {
    for problem in reported.replace(problems) {
        tracing::warn!("{problem}");
    }
}

/// The task that writes labels to the file that NFD reads.
pub(super) struct FileWriter {
    pub file: LabelsFile,
    /// The time from one comparison of the file with the labels to the next.
    pub interval: Interval,
    pub metrics: LabelMetrics,
    /// The right to write the file, while this process has it.
    pub files: watch::Receiver<Option<Right>>,
}

impl FileWriter {
    /// Follows the labels. The file stays when the task is aborted.
    pub async fn run(mut self, mut labels: LabelsWatch) -> Result<()> {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let usual = if self.file.is_file() { self.interval } else { Interval::Infinite };
        loop {
            let right = self.files.borrow_and_update().clone();
            let latest = labels.borrow_and_update().clone();
            let again = match latest.zip(right) {
                Some(latest) => self.write(latest, &mut backoff).await.map_or(usual, Interval::Every),
                None => Interval::Infinite,
            };
            tokio::select! {
                changed = labels.changed() => changed.context("the labels are gone")?,
                Ok(()) = self.files.changed() => {}
                () = sleep(again.at_least(MIN_INTERVAL)) => {}
            }
        }
    }

    /// Writes once; after a failure, returns the time until the next attempt.
    async fn write(&self, (labels, right): (NodeLabels, Right), backoff: &mut Backoff) -> Option<Duration> {
        let (file, count) = (self.file.clone(), labels.len());
        match files::blocking_with(right, move || file.write(&labels)).await {
            Ok(changed) => {
                if changed {
                    self.metrics.written(true);
                    tracing::info!(file = %self.file, labels = count, "labels written");
                } else if backoff.is_failing() {
                    tracing::info!(file = %self.file, "the labels' file is correct again");
                }
                self.metrics.correct_at(now());
                backoff.reset();
                None
            }
            Err(error) => {
                self.metrics.written(false);
                let (is_news, file) = (!backoff.is_failing(), &self.file);
                let again_in = backoff.failed();
                if is_news {
                    tracing::warn!(%file, %error, ?again_in, "cannot write labels, keeping the previous ones");
                } else {
                    tracing::debug!(%file, %error, ?again_in, "cannot write labels, keeping the previous ones");
                }
                Some(again_in)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::state::{Event, NumaHints, Timestamp};

    /// The channels of a running source.
    struct World {
        snapshots: watch::Sender<Arc<NodeState>>,
        _idle: watch::Sender<Idle>,
        labels: LabelsWatch,
    }

    fn world() -> World {
        let state = Arc::new(NodeState::new(NumaHints::default()));
        let (snapshots, idle) = (watch::Sender::new(state), watch::Sender::new(Idle::Waiting("no scan yet".into())));
        let source = LabelSource {
            snapshot: snapshots.subscribe(),
            idle: idle.subscribe(),
            settings: LabelSettings::default(),
            machine_type_file: PathBuf::new(),
            sysfs: PathBuf::from("/nowhere"),
            interval: Interval::Infinite,
            metrics: LabelMetrics::default(),
        };
        let (sender, labels) = watch::channel(None);
        tokio::spawn(source.run(sender));
        World { snapshots, _idle: idle, labels }
    }

    fn scanned(machine: &str) -> Arc<NodeState> {
        let observed = linkwise_host::machines::load(machine).unwrap().observed;
        Arc::new(NodeState::default().apply(Event::Observed(Box::new(observed)), Timestamp::ZERO).0)
    }

    async fn wait_for_labels(labels: &mut LabelsWatch, wanted: impl Fn(&BTreeMap<String, String>) -> bool) {
        let found = labels.wait_for(|labels| labels.as_deref().is_some_and(&wanted));
        drop(timeout(Duration::from_secs(20), found).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn labels_follow_the_snapshot_and_stay_while_it_is_empty() {
        let mut world = world();
        world.snapshots.send_replace(scanned("dgx-h100"));
        wait_for_labels(&mut world.labels, |labels| labels["nvidia.com/gpu.count"] == "8").await;
        // NVML came back without GPUs, which is no reason to remove the labels from the node; then another machine
        // comes.
        world.snapshots.send_replace(Arc::new(NodeState::default()));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.labels.borrow().as_deref().unwrap()["nvidia.com/gpu.count"], "8");
        world.snapshots.send_replace(scanned("dgx2-v100"));
        wait_for_labels(&mut world.labels, |labels| labels["nvidia.com/gpu.count"] == "16").await;
    }

    #[tokio::test]
    async fn removed_file_is_back_at_the_next_comparison() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        let (sender, labels) = watch::channel(Some(NodeLabels::default()));
        let interval = Interval::Every(Duration::from_millis(10));
        let writer = FileWriter {
            file: LabelsFile::new(&path),
            interval,
            metrics: LabelMetrics::default(),
            files: watch::channel(Some(Right::default())).1,
        };
        let task = tokio::spawn(writer.run(labels));
        for _ in 0..2 {
            let removed = async {
                while std::fs::remove_file(&path).is_err() {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(20), removed).await.unwrap();
        }
        task.abort();
        drop(sender);
    }
}
