//! The node's labels while linkwise runs: made from each snapshot, sent to those who publish them, written to the file
//! that NFD reads.
//!
//! A task of `linkwise run`, and with `labels_program` a process of its own. NVML that is unavailable, a MIG layout that
//! is being changed, a file that cannot be written: the last labels stay, and nothing waits for these tasks.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::node::Node;
use super::readiness::Idle;
use crate::backoff::Backoff;
use crate::config::{Interval, Labels as Options, RunArgs, Settings};
use crate::labels::{LabelMetrics, LabelsFile, host, own_fabric};
use crate::once::Once;
use crate::publish::labels::{HostFacts, LabelFacts, LabelProblem, LabelSettings, labels};
use crate::state::NodeState;

/// The labels of a node by key, as they are published.
pub type NodeLabels = Arc<BTreeMap<String, String>>;

/// Labels as they are followed; `None` before the first.
pub type LabelsWatch = watch::Receiver<Option<NodeLabels>>;

/// How long the host's files may take; the facts that were read last stay.
const FILES: Duration = Duration::from_secs(5);

/// The shortest pause between two comparisons.
const SHORTEST: Duration = Duration::from_secs(1);

/// The pauses after a failed write.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What decides about the labels, by the settings and what the node is called.
pub(super) fn settings_of(settings: &Settings, node: Option<&str>) -> LabelSettings {
    let options = Options::of(settings);
    LabelSettings {
        timestamp: (!options.no_timestamp).then(now),
        clique: options.clique,
        own_fabric: node.filter(|node| !node.is_empty()).map(own_fabric),
    }
}

/// Now, in seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Has a node write its labels to the file, where its settings ask for that.
pub(super) fn spawn_in(node: &mut Node, settings: &Settings, args: &RunArgs) {
    // The series are there, on every node.
    let metrics = node.metrics().register(LabelMetrics::register);
    let options = Options::of(settings);
    if !options.file_from_run {
        return;
    }
    let (sender, labels) = watch::channel(None);
    let source = LabelSource {
        snapshot: node.snapshot(),
        idle: node.readiness.idle().subscribe(),
        settings: settings_of(settings, args.node_name.as_deref()),
        machine_type_file: options.machine_type_file,
        sysfs: args.host.sysfs.clone(),
        interval: options.interval,
        metrics: metrics.clone(),
    };
    let file = LabelsFile::new(&options.output_file);
    let writer = FileWriter { file, interval: options.interval, metrics, files: node.files() };
    node.spawn("labels", source.run(sender));
    node.spawn("labels' file", writer.run(labels));
}

/// Makes labels of what is known.
pub(super) struct LabelSource {
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    /// Whether a node without GPUs is one for good.
    pub idle: watch::Receiver<Idle>,
    pub settings: LabelSettings,
    pub machine_type_file: PathBuf,
    pub sysfs: PathBuf,
    /// How often the host's files are read again.
    pub interval: Interval,
    pub metrics: LabelMetrics,
}

impl LabelSource {
    /// Sends the labels whenever they change.
    pub async fn run(mut self, labels: watch::Sender<Option<NodeLabels>>) -> Result<()> {
        let (mut reported, mut unknown) = (Once::new(), Once::new());
        let begin = self.idle.borrow().clone();
        let (mut host, mut reading) = (HostFacts::default(), None);
        loop {
            host = self.host(&mut reading).await.unwrap_or(host);
            let read_again = pause(self.interval);
            tokio::pin!(read_again);
            loop {
                if let Some((made, problems)) = self.make(&host) {
                    self.metrics.made(made.len(), problems.iter().filter(|problem| is_dropped(problem)).count());
                    report(&mut reported, problems);
                    labels.send_if_modified(|before| {
                        let differs = before.as_deref() != Some(&made);
                        if differs {
                            *before = Some(Arc::new(made));
                        }
                        differs
                    });
                    unknown.clear();
                } else if let Idle::Waiting(cause) = self.idle.borrow().clone()
                    && Idle::Waiting(cause.clone()) != begin
                    && !unknown.replace([cause.clone()]).is_empty()
                {
                    tracing::warn!(cause, "it is unknown which GPUs this node has: the labels stay as they are");
                }
                tokio::select! {
                    changed = self.snapshot.changed() => changed.context("the node's state is gone")?,
                    changed = self.idle.changed() => changed.context("the NVML driver is gone")?,
                    () = &mut read_again => break,
                }
            }
        }
    }

    /// The labels; `None` while it is unknown which GPUs there are.
    fn make(&mut self, host: &HostFacts) -> Option<(BTreeMap<String, String>, Vec<LabelProblem>)> {
        let state = Arc::clone(&self.snapshot.borrow_and_update());
        let has_none = matches!(*self.idle.borrow_and_update(), Idle::NoGpu(_));
        let known = has_none || !state.topology().gpus().is_empty();
        let facts = LabelFacts {
            topology: state.topology(),
            versions: state.hardware().versions(),
            plan: state.offers().plan(),
            host,
            settings: &self.settings,
        };
        known.then(|| labels(facts))
    }

    /// The host's facts. No second reading begins beside one that hangs.
    async fn host(&self, reading: &mut Option<JoinHandle<HostFacts>>) -> Option<HostFacts> {
        let (machine_type_file, sysfs) = (self.machine_type_file.clone(), self.sysfs.clone());
        let running = reading.get_or_insert_with(|| spawn_blocking(move || host(&machine_type_file, &sysfs)));
        let facts = timeout(FILES, running).await.ok()?;
        *reading = None;
        facts.ok()
    }
}

fn is_dropped(problem: &LabelProblem) -> bool {
    matches!(problem, LabelProblem::Dropped { .. })
}

/// Logs what is odd, once as long as it stands.
pub(super) fn report(reported: &mut Once<LabelProblem>, problems: Vec<LabelProblem>) {
    for problem in reported.replace(problems) {
        tracing::warn!("{problem}");
    }
}

async fn pause(interval: Interval) {
    match interval {
        // 0 and mere nanoseconds are valid, and would keep a core busy.
        Interval::Every(time) => sleep(time.max(SHORTEST)).await,
        Interval::Infinite => std::future::pending().await,
    }
}

/// Keeps the file as the labels are.
pub(super) struct FileWriter {
    pub file: LabelsFile,
    /// How often the file is compared with the labels.
    pub interval: Interval,
    pub metrics: LabelMetrics,
    /// Whether the file is this process's to write.
    pub files: watch::Receiver<bool>,
}

impl FileWriter {
    /// Follows the labels. The file stays when this is broken off.
    pub async fn run(mut self, mut labels: LabelsWatch) -> Result<()> {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let usual = if self.file.is_file() { self.interval } else { Interval::Infinite };
        loop {
            let writes = *self.files.borrow_and_update();
            let latest = labels.borrow_and_update().clone().filter(|_| writes);
            let again = match latest {
                Some(latest) => self.write(latest, &mut backoff).await?.map_or(usual, Interval::Every),
                None => Interval::Infinite,
            };
            tokio::select! {
                changed = labels.changed() => changed.context("the labels are gone")?,
                Ok(()) = self.files.changed() => {}
                () = pause(again) => {}
            }
        }
    }

    /// Writes once; returns when to try again where that failed.
    async fn write(&self, labels: NodeLabels, backoff: &mut Backoff) -> Result<Option<Duration>> {
        let (file, count) = (self.file.clone(), labels.len());
        let written = spawn_blocking(move || file.write(&labels)).await.context("the write of labels broke off")?;
        match written {
            Ok(changed) => {
                if changed {
                    self.metrics.written(true);
                    tracing::info!(file = %self.file, labels = count, "labels written");
                } else if backoff.is_failing() {
                    tracing::info!(file = %self.file, "the labels' file is as it should be again");
                }
                self.metrics.is_written(now());
                backoff.reset();
                Ok(None)
            }
            Err(error) => {
                self.metrics.written(false);
                let news = !backoff.is_failing();
                let again_in = backoff.failed();
                if news {
                    tracing::warn!(file = %self.file, %error, ?again_in, "labels cannot be written, the last ones stay");
                } else {
                    tracing::debug!(file = %self.file, %error, ?again_in, "labels cannot be written, the last ones stay");
                }
                Ok(Some(again_in))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Event, NumaHints, Timestamp};

    /// A source of this machine, and what it needs.
    struct World {
        snapshots: watch::Sender<Arc<NodeState>>,
        idle: watch::Sender<Idle>,
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
        World { snapshots, idle, labels }
    }

    fn scanned(machine: &str) -> Arc<NodeState> {
        let observed = crate::machines::load(machine).unwrap().observed;
        Arc::new(NodeState::default().apply(Event::Observed(Box::new(observed)), Timestamp::ZERO).0)
    }

    async fn waits(labels: &mut LabelsWatch, wanted: impl Fn(&BTreeMap<String, String>) -> bool) {
        let found = labels.wait_for(|labels| labels.as_deref().is_some_and(&wanted));
        drop(timeout(Duration::from_secs(20), found).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn labels_follow_the_snapshot_and_stay_while_it_is_empty() {
        let mut world = world();
        world.snapshots.send_replace(scanned("dgx-h100"));
        waits(&mut world.labels, |labels| labels["nvidia.com/gpu.count"] == "8").await;
        // NVML came back without GPUs, which is no reason to take the labels off the node; then another machine.
        world.snapshots.send_replace(Arc::new(NodeState::default()));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(world.labels.borrow().as_deref().unwrap()["nvidia.com/gpu.count"], "8");
        world.snapshots.send_replace(scanned("dgx2-v100"));
        waits(&mut world.labels, |labels| labels["nvidia.com/gpu.count"] == "16").await;
    }

    #[tokio::test]
    async fn node_without_gpus_has_labels_once_that_is_known() {
        let mut world = world();
        tokio::task::yield_now().await;
        assert!(world.labels.borrow().is_none());
        world.idle.send_replace(Idle::NoGpu("no NVIDIA GPU on the PCI bus".into()));
        waits(&mut world.labels, |labels| labels.is_empty()).await;
    }

    #[tokio::test]
    async fn file_is_written_again_once_its_folder_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let features = folder.path().join("features.d");
        std::fs::write(&features, "a file where a folder should be").unwrap();
        let path = features.join("gfd");
        let (file, metrics) = (LabelsFile::new(&path), LabelMetrics::default());
        let writer = FileWriter { file, interval: Interval::Infinite, metrics, files: watch::channel(true).1 };
        let labels = Arc::new(BTreeMap::from([("nvidia.com/gpu.count".to_owned(), "8".to_owned())]));
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        assert_eq!(writer.write(Arc::clone(&labels), &mut backoff).await.unwrap(), Some(PAUSES.0));
        assert_eq!(writer.write(Arc::clone(&labels), &mut backoff).await.unwrap(), Some(2 * PAUSES.0));
        std::fs::remove_file(&features).unwrap();
        assert_eq!(writer.write(labels, &mut backoff).await.unwrap(), None);
        assert_eq!(std::fs::read_to_string(path).unwrap(), "nvidia.com/gpu.count=8\n");
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
            files: watch::channel(true).1,
        };
        let task = tokio::spawn(writer.run(labels));
        for _ in 0..2 {
            let there = async {
                while std::fs::remove_file(&path).is_err() {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(20), there).await.unwrap();
        }
        task.abort();
        drop(sender);
    }
}
