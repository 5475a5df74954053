//! What the tests stand on: an MPS root, the driver's two programs, a supervised resource. Knows no test.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use linkwise::mps::{Layout, Limits, Occurrence, Pace, Programs, Readiness, Settings, look, supervise};
use linkwise::state::{MpsGpu, MpsShare, ResourceName};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// After this long, what should have happened will not.
pub const LIMIT: Duration = Duration::from_secs(60);

/// How often something is looked at that cannot tell by itself.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A node with the driver's programs and an MPS root.
pub struct Node {
    folder: TempDir,
    pub settings: Settings,
}

impl Node {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        fs::create_dir(folder.path().join("root")).unwrap();
        for program in ["nvidia-cuda-mps-control", "nvidia-smi"] {
            let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mps").join(program);
            symlink(ours, bin.join(program)).unwrap();
        }
        let settings = Settings {
            layout: Layout::new(folder.path().join("root")),
            programs: Programs { control: bin.join("nvidia-cuda-mps-control"), smi: bin.join("nvidia-smi") },
            // Long where nothing is to go wrong: another test may have the processors.
            pace: Pace {
                answer: LIMIT,
                start: LIMIT,
                quit: LIMIT,
                probe: Duration::from_millis(20),
                pauses: (Duration::from_millis(10), Duration::from_millis(100)),
            },
        };
        Self { folder, settings }
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

    /// What one of the programs noted.
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

    pub fn supervise(&self, (name, share): (&str, MpsShare)) -> Supervised {
        let (settings, name) = (self.settings.clone(), name.parse::<ResourceName>().unwrap());
        let (limits, shutdown) = (Limits::of(&share), CancellationToken::new());
        let (tell, told) = mpsc::channel(1000);
        let layout = settings.layout.clone();
        let task = tokio::spawn({
            let (name, limits, shutdown) = (name.clone(), limits.clone(), shutdown.clone());
            async move { supervise(&settings, &name, &limits, &shutdown, |what| tell.try_send(what).unwrap()).await }
        });
        Supervised { layout, name, limits, shutdown, told, task }
    }
}

impl Drop for Node {
    /// Ends the control daemons whose supervisor was killed: nobody else does.
    fn drop(&mut self) {
        let Ok(domains) = fs::read_dir(self.layout().root()) else { return };
        let resources = domains.flatten().filter_map(|domain| fs::read_dir(domain.path()).ok()).flatten().flatten();
        for resource in resources {
            let pid = fs::read_to_string(resource.path().join("pipe/nvidia-cuda-mps-control.pid"));
            if let Ok(group) = pid.map(|pid| format!("-{}", pid.trim())) {
                let _ = std::process::Command::new("kill").args(["-9", "--", &group]).stderr(Stdio::null()).status();
            }
        }
    }
}

/// A resource with its supervisor.
pub struct Supervised {
    layout: Layout,
    pub name: ResourceName,
    pub limits: Limits,
    shutdown: CancellationToken,
    told: mpsc::Receiver<Occurrence>,
    task: JoinHandle<()>,
}

impl Supervised {
    pub async fn next(&mut self) -> Occurrence {
        timeout(LIMIT, self.told.recv()).await.expect("nothing happens").expect("the supervisor ended")
    }

    pub async fn serving(&mut self) {
        while !matches!(self.next().await, Occurrence::Serving) {}
    }

    /// The cause of the next failure, its sources included.
    pub async fn failure(&mut self) -> String {
        loop {
            if let Occurrence::Failed { why, .. } = self.next().await {
                return words(&*why);
            }
        }
    }

    /// The plugin's view.
    pub fn readiness(&self) -> Readiness {
        look(&self.layout, &self.name, &self.limits)
    }

    /// Ends it in order; gives what could not be put back.
    pub async fn end(mut self) -> Option<String> {
        self.shutdown.cancel();
        timeout(LIMIT, self.task).await.expect("it does not end").unwrap();
        let mut last = None;
        while let Some(what) = self.told.recv().await {
            last = Some(what);
        }
        match last {
            Some(Occurrence::Ended(why)) => why.map(|why| words(&*why)),
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

pub fn waiting(readiness: &Readiness) -> &str {
    match readiness {
        Readiness::Waiting { why } => why,
        Readiness::Ready => panic!("ready"),
    }
}

pub fn pid_in(path: &Path) -> u32 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Whether a process runs; one that has ended and that nobody has waited for does not.
pub fn runs(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

pub fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits for what cannot tell by itself.
pub async fn until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    timeout(LIMIT, wait).await.expect("it does not come about");
}
