//! Runs containers by runc, each on an overlay of the image's root file system.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command as StdCommand, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::helm::repository;
use crate::rights::report_skipped;
use crate::rootfs::{run, unpacked};

/// A container that runs or has ended. Dropping it kills its processes.
pub struct Container {
    /// The name of the container in its pod.
    pub name: String,
    id: String,
    folder: PathBuf,
    process: Child,
}

/// The status and the output of a command in a container.
#[derive(Debug)]
pub struct Printed {
    pub status: ExitStatus,
    pub out: String,
    pub error: String,
}

impl Container {
    /// Starts a container with its files in `folder`. `configuration` is OCI's, without the path of its root.
    pub fn start(name: &str, folder: PathBuf, mut configuration: Value) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let id = format!("linkwise-{}-{}-{name}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        for part in ["upper", "work", "root"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        let at = |part: &str| folder.join(part).display().to_string();
        let layers =
            format!("lowerdir={},upperdir={},workdir={}", unpacked().folder.display(), at("upper"), at("work"));
        run("mount", ["-t", "overlay", "overlay", "-o", &layers, &at("root")]);
        configuration["ociVersion"] = json!("1.0.2");
        configuration["root"]["path"] = json!(at("root"));
        if has_cgroups() {
            configuration["linux"]["cgroupsPath"] = json!(format!("/{id}"));
        } else if let Some(resources) = configuration["linux"].as_object_mut() {
            report_skipped("memory limits: runc cannot set them here");
            resources.remove("resources");
        }
        fs::write(folder.join("config.json"), configuration.to_string()).unwrap();
        let log = || File::options().create(true).append(true).open(folder.join("log")).unwrap();
        let mut command = Command::from(runc());
        command.args(["run", "--bundle"]).arg(&folder).arg(&id);
        let process = command.stdin(Stdio::null()).stdout(log()).stderr(log()).spawn().unwrap();
        Self { name: name.to_owned(), id, folder, process }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// The exit status; `None` while the container runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().unwrap()
    }

    pub async fn wait_end(&mut self) -> ExitStatus {
        self.process.wait().await.unwrap()
    }

    /// The process id of its first process on the host; `None` before its start.
    pub fn pid(&self) -> Option<u64> {
        let output = runc().args(["state", &self.id]).output().unwrap();
        let state: Value = serde_json::from_slice(&output.stdout).ok()?;
        state["pid"].as_u64().filter(|pid| *pid != 0)
    }

    /// Runs a command in the container, as `kubectl exec` does.
    pub async fn exec(&self, command: &[&str]) -> Printed {
        let output = Command::from(runc()).args(["exec", &self.id]).args(command).output().await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Printed { status: output.status, out: text(&output.stdout), error: text(&output.stderr) }
    }

    pub fn signal(&self, name: &str) {
        let _ = runc().args(["kill", &self.id, name]).output();
    }

    /// The memory limit of its cgroup, if this machine has cgroups.
    pub fn memory_limit(&self) -> Option<u64> {
        self.memory("memory.limit_in_bytes", "memory.max")?.trim().parse().ok()
    }

    /// The number of its processes that the kernel killed for want of memory, if this machine has cgroups.
    pub fn oom_kills(&self) -> Option<u64> {
        let counters = self.memory("memory.oom_control", "memory.events")?;
        counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
    }

    /// The text of a file of its memory cgroup, of version 1 or 2.
    fn memory(&self, version1: &str, version2: &str) -> Option<String> {
        let (one, two) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let places = [one.join(&self.id).join(version1), two.join(&self.id).join(version2)];
        places.iter().find_map(|place| fs::read_to_string(place).ok())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = runc().args(["delete", "--force", &self.id]).output();
        let _ = StdCommand::new("umount").arg("--lazy").arg(self.folder.join("root")).output();
    }
}

fn runc() -> StdCommand {
    let program = repository("target/tools/runc");
    assert!(program.exists(), "no runc: run `make tools`");
    let mut command = StdCommand::new(program);
    command.arg("--root").arg(repository("target/image/runc")).stdin(Stdio::null());
    command
}

/// Returns true if runc can make a cgroup that limits memory.
fn has_cgroups() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let namespaces = json!([{"type": "mount"}, {"type": "pid"}]);
        let id = format!("linkwise-{}-probe", std::process::id());
        let configuration = json!({
            "ociVersion": "1.0.2",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["true"], "env": ["PATH=/usr/bin"], "cwd": "/"},
            "root": {"path": unpacked().folder, "readonly": true},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "linux": {
                "namespaces": namespaces, "cgroupsPath": format!("/{id}"), "resources": {"memory": {"limit": 64 << 20}},
            },
        });
        fs::write(folder.path().join("config.json"), configuration.to_string()).unwrap();
        runc().args(["run", "--bundle"]).arg(folder.path()).arg(&id).output().unwrap().status.success()
    })
}

/// The last lines of a log, for a message.
pub fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// Returns true if a path is a folder or a link to one.
pub fn is_folder(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| it.is_dir())
}
