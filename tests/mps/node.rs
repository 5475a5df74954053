//! Shared by the tests: an MPS root, stand-ins for the driver's two programs, and a task that supervises a resource.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use linkwise_core::state::{MpsGpu, MpsShare, ResourceName};
use linkwise_host::mps::{
    DaemonEvent, Layout, Limits, NotReady, Pace, Programs, Settings, readiness, supervise, unmount_own_shms,
};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::run::node::LIMIT;

/// A node with the driver's programs and an MPS root.
pub struct Node {
    // Fields are dropped in this order, so that the mount is gone before the folder is removed.
    _shared: Option<SharedFolder>,
    folder: TempDir,
    pub settings: Settings,
}

impl Node {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        link_programs(&bin);
        fs::create_dir(folder.path().join("root")).unwrap();
        let settings = Settings {
            layout: Layout::new(folder.path().join("root")),
            programs: Programs { control: bin.join("nvidia-cuda-mps-control"), smi: bin.join("nvidia-smi") },
            // A missing folder means that SELinux is off.
            selinuxfs: folder.path().join("none"),
            // Long timeouts, because other tests may use the processors. Tests that expect a timeout set a short one.
            pace: Pace {
                answer: LIMIT,
                start: LIMIT,
                quit: LIMIT,
                probe: Duration::from_millis(20),
                first_pause: Duration::from_millis(10),
                longest_pause: Duration::from_millis(100),
            },
        };
        let shared = cfg!(may_mount).then(|| SharedFolder::new(&folder.path().join("root")));
        Self { _shared: shared, folder, settings }
    }

    /// The folder of the programs, and of the files that make them misbehave.
    pub fn bin(&self) -> PathBuf {
        self.folder.path().join("bin")
    }

    pub fn layout(&self) -> &Layout {
        &self.settings.layout
    }

    pub fn misbehave(&self, fault: &str) {
        fs::write(self.bin().join(fault), "").unwrap();
    }

    pub fn behave(&self, fault: &str) {
        fs::remove_file(self.bin().join(fault)).unwrap();
    }

    /// The GPUs, sorted, for which nvidia-smi was called with this compute mode.
    pub fn modes(&self, mode: &str) -> Vec<String> {
        let mut gpus: Vec<String> = self.noted("modes");
        gpus.retain(|call| call.ends_with(&format!(" -c {mode}")));
        gpus.iter_mut().for_each(|call| *call = call.split(' ').nth(1).unwrap().to_owned());
        gpus.sort_unstable();
        gpus
    }

    /// The GPUs on record as set to EXCLUSIVE_PROCESS by linkwise.
    pub fn exclusive(&self) -> Vec<String> {
        let entries = fs::read_dir(self.layout().exclusive()).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    /// The lines that the programs wrote to a file.
    pub fn noted(&self, what: &str) -> Vec<String> {
        let text = fs::read_to_string(self.bin().join(what)).unwrap_or_default();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    /// A value in the state of a resource's control daemon.
    pub fn kept(&self, resource: &ResourceName, what: &str) -> String {
        let path = self.layout().pipe(resource).join("state").join(what);
        fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    }

    pub fn pid(&self, resource: &ResourceName) -> u32 {
        pid_in(&self.layout().pipe(resource).join("nvidia-cuda-mps-control.pid"))
    }

    /// Supervises a resource of one GPU in two shares, and waits until it is served.
    pub async fn start_serving(&self) -> Supervised {
        let mut gpu = self.supervise(shared("nvidia.com/gpu", [0], 2));
        gpu.wait_serving().await;
        gpu
    }

    pub fn supervise(&self, (name, share): (&str, MpsShare)) -> Supervised {
        let (settings, name) = (self.settings.clone(), name.parse::<ResourceName>().unwrap());
        let (limits, shutdown) = (Limits::of(&share), CancellationToken::new());
        let (sender, events) = mpsc::channel(1000);
        let layout = settings.layout.clone();
        let task = tokio::spawn({
            let (name, limits, shutdown) = (name.clone(), limits.clone(), shutdown.clone());
            let report = move |event| sender.try_send(event).unwrap();
            async move { supervise(&settings, &name, &limits, &shutdown, report).await }
        });
        Supervised { layout, name, limits, shutdown, events, task }
    }
}

impl Drop for Node {
    /// Unmounts the shared memory of the control daemons that the test left running, and kills them.
    fn drop(&mut self) {
        let _ = unmount_own_shms(self.layout(), |_| false);
        kill_groups(self.layout().root());
    }
}

/// Links the stand-ins for the driver's programs into a folder.
pub fn link_programs(bin: &Path) {
    fs::create_dir_all(bin).unwrap();
    for program in ["nvidia-cuda-mps-control", "nvidia-smi"] {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mps").join(program);
        symlink(ours, bin.join(program)).unwrap();
    }
}

/// Kills the process groups of the control daemons that left a pid file below an MPS root.
pub fn kill_groups(root: &Path) {
    let domains = fs::read_dir(root).into_iter().flatten().flatten();
    let resources = domains.filter_map(|domain| fs::read_dir(domain.path()).ok()).flatten().flatten();
    for resource in resources {
        let pid = fs::read_to_string(resource.path().join("pipe/nvidia-cuda-mps-control.pid"));
        if let Ok(group) = pid.map(|pid| format!("-{}", pid.trim())) {
            let _ = std::process::Command::new("kill").args(["-9", "--", &group]).stderr(Stdio::null()).status();
        }
    }
}

/// A resource, and the task that runs [`supervise`] for it.
pub struct Supervised {
    layout: Layout,
    pub name: ResourceName,
    pub limits: Limits,
    shutdown: CancellationToken,
    events: mpsc::Receiver<DaemonEvent>,
    task: JoinHandle<()>,
}

impl Supervised {
    pub async fn next(&mut self) -> DaemonEvent {
        timeout(LIMIT, self.events.recv()).await.expect("an event comes in time").expect("the task runs")
    }

    pub async fn wait_serving(&mut self) {
        while !matches!(self.next().await, DaemonEvent::Serving) {}
    }

    /// The cause of the next failure, its sources included.
    pub async fn failure(&mut self) -> String {
        loop {
            if let DaemonEvent::Failed(why, _) = self.next().await {
                return chain(&why);
            }
        }
    }

    /// The readiness that the plugin sees.
    pub fn readiness(&self) -> Result<(), NotReady> {
        readiness(&self.layout, &self.name, &self.limits)
    }

    /// Shuts the task down; returns the error if a compute mode could not be restored.
    pub async fn end(mut self) -> Option<String> {
        self.shutdown.cancel();
        timeout(LIMIT, self.task).await.expect("the task ends in time").unwrap();
        let mut last = None;
        while let Some(event) = self.events.recv().await {
            last = Some(event);
        }
        match last {
            Some(DaemonEvent::Ended(why)) => why.map(|why| chain(&why)),
            other => panic!("{other:?}"),
        }
    }
}

pub fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A resource with `replicas` shares of the node's GPUs, which have 40 GiB each.
pub fn shared(name: &str, gpus: impl IntoIterator<Item = u32>, replicas: u32) -> (&str, MpsShare) {
    let gpu = |index| MpsGpu { uuid: format!("GPU-{index}").parse().unwrap(), index, memory_mib: Some(40_960) };
    (name, MpsShare { replicas, gpus: gpus.into_iter().map(gpu).collect(), whole_node: true })
}

pub fn why_not_ready(readiness: Result<(), NotReady>) -> String {
    readiness.unwrap_err().to_string()
}

/// A folder below which mounts propagate to the whole machine, as below a `hostPath` volume with
/// `mountPropagation: Bidirectional`. It is mounted because a test machine that is a container often shares no mounts.
#[derive(Debug)]
pub struct SharedFolder(PathBuf);

impl SharedFolder {
    pub fn new(folder: &Path) -> Self {
        let path = folder.to_str().unwrap();
        let made = [["--bind", path, path].as_slice(), &["--make-shared", path]].iter().all(|args| run("mount", args));
        assert!(made, "cannot make {path} a shared mount");
        Self(folder.to_owned())
    }
}

impl Drop for SharedFolder {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.0.to_str().unwrap()]);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    std::process::Command::new(program).args(args).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

pub fn pid_in(path: &Path) -> u32 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Returns true if a process runs; a zombie does not.
pub fn runs(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}
