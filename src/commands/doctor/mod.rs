//! `linkwise doctor`: finds the faults of this node, and names the remedies.
//!
//! Each check is a function that adds its findings. The checks run in the order in which a person would make them. The
//! doctor changes nothing on the node, calls NVML in the child process only, and waits for nothing longer than
//! --timeout, or 2 s if that is longer.

mod dra;
mod driver;
mod health;
mod host;
mod kubelet;
mod labels;

use std::fmt::{self, Write};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use tokio::time::timeout;

use super::{Progress, print};
use crate::config::settings::load;
use crate::config::{DoctorArgs, Flags, Format, Settings};
use driver::Nvml;
use linkwise_cluster::doctor::{ClusterFacts, ClusterQuestions, facts};
use linkwise_core::quote::quoted;
use linkwise_core::state::Door;
use linkwise_core::topology::{GpuObservation, NodeObservation, NodeTopology};
use linkwise_host::hwloc::{self, BusGpus, PciBus};

pub(super) use kubelet::resource as resource_of_socket;

/// The facts about the node that are known before the checks.
struct Node {
    args: DoctorArgs,
    limit: Duration,
    nvml: Nvml,
    /// The GPUs on the PCI bus: `None` if reading the bus hangs, `Some(None)` if sysfs has no PCI bus.
    bus: Option<Option<BusGpus>>,
    /// The version of the loaded kernel module.
    module: Option<String>,
    /// The settings of `run`; `None` if they cannot be read.
    settings: Option<Settings>,
}

impl Node {
    /// A path of the host, as this process sees it.
    fn at(&self, path: &str) -> PathBuf {
        below(&self.args.root, path)
    }
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// The files and folders in a folder, sorted by name.
fn entries(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

/// The files and folders in a folder, which need not exist. A folder that cannot be read becomes a finding, whose
/// advice names the folder's `contents`.
fn existing(found: &mut Findings, folder: &Path, contents: &str) -> Vec<PathBuf> {
    match entries(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            let advice = format!("run as uid 0 with the folder mounted, so that its {contents} can be checked");
            found.warning(format!("cannot read {}: {error}", folder.display()), &advice);
            Vec::new()
        }
        paths => paths.unwrap_or_default(),
    }
}

/// Asks the API server about this node; `None` without the node's name or an API server.
async fn cluster_facts(node: &Node) -> Option<Result<ClusterFacts, String>> {
    let Node { args, settings, limit, .. } = node;
    let node = args.node_name.clone().filter(|node| !node.is_empty())?;
    let access = args.api.access().ok()?;
    let events = settings.as_ref().is_some_and(|settings| settings.events.value);
    let dra = settings.as_ref().is_some_and(|settings| settings.dra_gpus.value == Door::Dra);
    let facts = timeout(*limit, facts(access, ClusterQuestions { node, dra, events })).await;
    Some(facts.map_err(|_| format!("no answer within {limit:?}")))
}

/// Runs the command. The exit code is 1 if any check failed.
pub async fn doctor(args: &DoctorArgs) -> Result<ExitCode> {
    let limit = Duration::from_secs(args.timeout);
    let progress = Progress::start("checking the PCI bus");
    let sysfs = args.host.sysfs.clone();
    let bus = blocking(limit, move || PciBus::default().gpus(&sysfs)).await;
    progress.step("checking the driver");
    let nvml = driver::ask(&args.host, limit).await;
    let module = below(&args.root, "proc/driver/nvidia/version");
    let module = blocking(limit, move || driver::module_version(&module)).await.flatten();
    let root = args.root.clone();
    let policy = blocking(limit, move || kubelet::policy(&root)).await.flatten();
    let settings = || Some(load(&Flags::default()).ok()?.settings);
    let settings = blocking(limit, settings).await.flatten();
    let node = Arc::new(Node { args: args.clone(), limit, nvml, bus, module, settings });

    let found = &mut Findings::default();
    driver::check(found, &node.nvml, node.bus.as_ref().and_then(Option::as_ref), node.module.as_deref());
    progress.step("checking the host's files");
    guarded(found, &node, "device nodes", host::device_nodes).await;
    guarded(found, &node, "permissions", host::permissions).await;
    guarded(found, &node, "sysfs", host::sysfs).await;

    progress.step("checking the topology");
    let sysfs = args.host.sysfs.clone();
    let assembled = blocking(limit, move || hwloc::observe(&sysfs)).await.map(|(host, failures)| {
        // NVML's failed calls are left out, because the check of the GPUs reports them.
        let gpus = node.nvml.gpus().to_vec();
        let observed = NodeObservation { gpus, host, failures, ..NodeObservation::default() };
        let (topology, warnings) = NodeTopology::assemble(&observed);
        (observed, topology, warnings)
    });
    found.check = "topology";
    match &assembled {
        Some((observed, _, warnings)) => host::topology(found, observed, warnings),
        None => add_hang(found, limit),
    }
    progress.step("checking the kubelet");
    kubelet::check(found, &args.kubelet_socket, &args.pod_resources_socket, limit).await;
    progress.step("checking the node's files");
    guarded(found, &node, "container runtime", host::container_runtime).await;
    guarded(found, &node, "labels", labels::check).await;
    guarded(found, &node, "DRA", dra::check).await;
    progress.step("checking the API server");
    let (features, slices, rights) = match cluster_facts(&node).await {
        Some(Ok(ClusterFacts { features, dra, kubelet, events })) => {
            kubelet::version(found, kubelet.as_deref());
            (Some(features), dra, events)
        }
        Some(Err(why)) => (Some(Err(why.clone())), None, Some(Err(why))),
        None => (None, None, None),
    };
    dra::node_features(found, &node, features);
    if let Some(facts) = slices {
        dra::slices(found, facts, policy.as_ref());
    }
    dra::event_rights(found, &node, rights);
    if let Some((observed, topology, _)) = &assembled {
        kubelet::topology_manager(found, observed, topology, (args.numa_hints, policy.as_ref()));
    }
    let host = assembled.map(|(observed, ..)| observed.host).unwrap_or_default();
    progress.step("checking the GPUs' health");
    health::check_gpus(found, &node, host).await;

    drop(progress);
    let report = Report::new(&found.found);
    print(&match args.format {
        Format::Text => report.text(),
        Format::Json => serde_json::to_string_pretty(&report)? + "\n",
    })?;
    Ok(if report.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs a function that may hang in the kernel, on a thread that the end of the process does not wait for; `None` if it
/// hangs.
async fn blocking<T: Send + 'static>(limit: Duration, look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    timeout(limit, tokio::task::spawn_blocking(look)).await.ok()?.ok()
}

/// Runs a check that may hang.
async fn guarded(found: &mut Findings, node: &Arc<Node>, name: &'static str, check: fn(&mut Findings, &Node)) {
    found.check = name;
    let (mut own, seen) = (Findings { check: name, found: Vec::new() }, Arc::clone(node));
    let looking = move || {
        check(&mut own, &seen);
        own.found
    };
    match blocking(node.limit, looking).await {
        Some(own) => found.found.extend(own),
        None => add_hang(found, node.limit),
    }
}

/// Adds the finding of a check that did not end in time.
fn add_hang(found: &mut Findings, limit: Duration) {
    let advice = "a file or a device hangs in the kernel: look for its address in dmesg, and reboot the node";
    found.failed(format!("no answer within {limit:?}"), advice);
}

fn name(gpu: &GpuObservation) -> String {
    format!("GPU {} ({}, {})", gpu.index, gpu.pci, gpu.uuid)
}

/// Untrusted names in quotes, in one line.
fn names(names: &[String]) -> String {
    names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
}

/// The most findings of one kind that are listed one by one. If there are more, the first stands for all.
const MAX_LISTED: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    /// linkwise works, but could work better.
    Warning,
    /// GPUs are not offered, or not all of them, until an operator acts.
    Failed,
    /// The check could not be made, or does not apply here.
    Skipped,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// The check that found it.
    check: &'static str,
    status: Status,
    what: String,
    /// The remedy.
    advice: Option<String>,
    /// The common text of findings of several GPUs or files.
    #[serde(skip)]
    kind: Option<String>,
}

impl Finding {
    /// Returns true if both are of one kind and differ in their subject only.
    fn is_like(&self, other: &Self) -> bool {
        self.kind.is_some()
            && (self.check, self.status, &self.kind, &self.advice)
                == (other.check, other.status, &other.kind, &other.advice)
    }
}

#[derive(Debug, Default)]
struct Findings {
    /// The check of the next finding.
    pub check: &'static str,
    pub found: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, status: Status, kind: Option<String>, what: impl Into<String>, advice: Option<&str>) {
        let (what, advice) = (what.into(), advice.map(str::to_owned));
        self.found.push(Finding { check: self.check, status, what, advice, kind });
    }

    pub fn ok(&mut self, what: impl Into<String>) {
        self.add(Status::Ok, None, what, None);
    }

    pub fn warning(&mut self, what: impl Into<String>, advice: &str) {
        self.add(Status::Warning, None, what, Some(advice));
    }

    pub fn failed(&mut self, what: impl Into<String>, advice: &str) {
        self.add(Status::Failed, None, what, Some(advice));
    }

    pub fn skipped(&mut self, what: impl Into<String>, advice: Option<&str>) {
        self.add(Status::Skipped, None, what, advice);
    }

    /// The value of a fact. An unknown fact becomes a finding, with the reason and the command by which a person reads
    /// it.
    pub fn known<T>(&mut self, fact: Result<T, String>, unknown: &str, by_hand: &str) -> Option<T> {
        fact.map_err(|why| self.skipped(format!("{unknown}: {why}"), Some(by_hand))).ok()
    }

    /// Adds one of possibly many findings that differ only in their subject: `what` names the subject, `kind` does not.
    pub fn each(&mut self, status: Status, kind: impl Into<String>, what: impl Into<String>, advice: &str) {
        self.add(status, Some(kind.into()), what, Some(advice));
    }
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
    ok: usize,
    warnings: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    /// Lists findings in the order of the checks.
    pub fn new(found: &[Finding]) -> Self {
        let mut findings: Vec<Finding> = Vec::new();
        for finding in found {
            let (what, count) = (&finding.what, found.iter().filter(|other| finding.is_like(other)).count());
            if count <= MAX_LISTED {
                findings.push(finding.clone());
            } else if !findings.iter().any(|other| finding.is_like(other)) {
                findings.push(Finding { what: format!("{what} (and {} like it)", count - 1), ..finding.clone() });
            }
        }
        let count = |status| findings.iter().filter(|finding| finding.status == status).count();
        let (ok, warnings) = (count(Status::Ok), count(Status::Warning));
        let (failed, skipped) = (count(Status::Failed), count(Status::Skipped));
        Self { findings, ok, warnings, failed, skipped }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut check = "";
        for finding in &self.findings {
            // Writing to a String cannot fail.
            if finding.check != check {
                check = finding.check;
                let _ = writeln!(text, "{check}");
            }
            let _ = writeln!(text, "  {:<8} {}", finding.status, finding.what);
            if let Some(advice) = &finding.advice {
                let _ = writeln!(text, "           -> {advice}");
            }
        }
        let Self { ok, warnings, failed, skipped, .. } = self;
        let warnings = linkwise_core::words::count(*warnings, "warning");
        let _ = writeln!(text, "\n{ok} ok, {warnings}, {failed} failed, {skipped} skipped");
        text
    }
}
