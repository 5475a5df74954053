//! What the tests share: an MPS root, the driver's two programs, a supervised resource.

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
    // Unmounted before the folder is removed: fields are dropped in this order.
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
            // No test has SELinux unless it names a folder that is there.
            selinuxfs: folder.path().join("none"),
            // Long where no test expects a timeout: other tests may have the processors.
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

    /// The folder of the programs, and of the files that say how they misbehave.
    pub fn bin(&self) -> PathBuf {
        self.folder.path().join("bin")
    }

    pub fn layout(&self) -> &Layout {
        &self.settings.layout
    }

    pub fn misbehave(&self, how: &str) {
        fs::write(self.bin().join(how), "").unwrap();
    }

    pub fn behave(&self, how: &str) {
        fs::remove_file(self.bin().join(how)).unwrap();
    }

    /// The GPUs, sorted, that nvidia-smi was called to set to this compute mode.
    pub fn modes(&self, mode: &str) -> Vec<String> {
        let mut gpus: Vec<String> = self.noted("modes");
        gpus.retain(|call| call.ends_with(&format!(" -c {mode}")));
        gpus.iter_mut().for_each(|call| *call = call.split(' ').nth(1).unwrap().to_owned());
        gpus.sort_unstable();
        gpus
    }

    /// The GPUs on record as set to EXCLUSIVE_PROCESS by us.
    pub fn exclusive(&self) -> Vec<String> {
        let entries = fs::read_dir(self.layout().exclusive()).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    /// The lines that one of the programs noted.
    pub fn noted(&self, what: &str) -> Vec<String> {
        let text = fs::read_to_string(self.bin().join(what)).unwrap_or_default();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    /// What the control daemon of a resource keeps.
    pub fn kept(&self, resource: &ResourceName, what: &str) -> String {
        let path = self.layout().pipe(resource).join("state").join(what);
        fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    }

    /// The process of a resource's control daemon.
    pub fn pid(&self, resource: &ResourceName) -> u32 {
        pid_in(&self.layout().pipe(resource).join("nvidia-cuda-mps-control.pid"))
    }

    /// One GPU in two shares, served.
    pub async fn serving(&self) -> Supervised {
        let mut gpu = self.supervise(shared("nvidia.com/gpu", [0], 2));
        gpu.serving().await;
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
    /// Ends the control daemons whose supervisor was killed, and what is mounted for them.
    fn drop(&mut self) {
        let _ = unmount_own_shms(self.layout(), |_| false);
        kill_groups(self.layout().root());
    }
}

/// The driver's programs in a folder, those of these tests.
pub fn link_programs(bin: &Path) {
    fs::create_dir_all(bin).unwrap();
    for program in ["nvidia-cuda-mps-control", "nvidia-smi"] {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mps").join(program);
        symlink(ours, bin.join(program)).unwrap();
    }
}

/// Ends the control daemons below an MPS root whose supervisor was killed.
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

/// A resource with its supervisor.
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
        timeout(LIMIT, self.events.recv()).await.expect("nothing happens").expect("the supervisor ended")
    }

    pub async fn serving(&mut self) {
        while !matches!(self.next().await, DaemonEvent::Serving) {}
    }

    /// The cause of the next failure, its sources included.
    pub async fn failure(&mut self) -> String {
        loop {
            if let DaemonEvent::Failed(why, _) = self.next().await {
                return words(&why);
            }
        }
    }

    /// The plugin's view.
    pub fn readiness(&self) -> Result<(), NotReady> {
        readiness(&self.layout, &self.name, &self.limits)
    }

    /// Ends it in order; returns why a compute mode is not set back.
    pub async fn end(mut self) -> Option<String> {
        self.shutdown.cancel();
        timeout(LIMIT, self.task).await.expect("it does not end").unwrap();
        let mut last = None;
        while let Some(event) = self.events.recv().await {
            last = Some(event);
        }
        match last {
            Some(DaemonEvent::Ended(why)) => why.map(|why| words(&why)),
            other => panic!("{other:?}"),
        }
    }
}

pub fn words(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// GPUs of 40 GiB in `replicas`, all that the node has.
pub fn shared(name: &str, gpus: impl IntoIterator<Item = u32>, replicas: u32) -> (&str, MpsShare) {
    let gpu = |index| MpsGpu { uuid: format!("GPU-{index}").parse().unwrap(), index, memory_mib: Some(40_960) };
    (name, MpsShare { replicas, gpus: gpus.into_iter().map(gpu).collect(), whole_node: true })
}

/// Why a resource is not ready.
pub fn waiting(readiness: Result<(), NotReady>) -> String {
    readiness.unwrap_err().to_string()
}

/// A folder below which everybody on this machine sees what is mounted, as below a `hostPath` volume with
/// `mountPropagation: Bidirectional`. A machine that is itself a container often shares none of its mounts.
#[derive(Debug)]
pub struct SharedFolder(PathBuf);

impl SharedFolder {
    pub fn new(folder: &Path) -> Self {
        let path = folder.to_str().unwrap();
        let made = [["--bind", path, path].as_slice(), &["--make-shared", path]].iter().all(|args| run("mount", args));
        assert!(made, "cannot mount {path} on itself, shared");
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

/// Whether a process runs; a zombie does not.
pub fn runs(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}
