//! `linkwise run` with DRA switched on and off while it runs, or without an API server. Also the link `config-manager`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn link_named_config_manager_runs_config_manager() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("config-manager");
    symlink(env!("CARGO_BIN_EXE_linkwise"), &link).unwrap();
    let output = Command::new(&link).env_clear().arg("--oneshot").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("NODE_NAME"), "{error}");
}

/// `linkwise run` with this configuration file on a host without GPUs. Nothing answers at the API server's address.
fn run(folder: &tempfile::TempDir, config: &str) -> Command {
    let at = |name: &str| folder.path().join(name);
    for folder in ["sys", "account"] {
        let _ = fs::create_dir(at(folder));
    }
    fs::write(at("account/token"), "t").unwrap();
    fs::write(at("config.yaml"), config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    command.arg("run").env_clear().env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("KUBERNETES_SERVICE_PORT", "1");
    command.env("LINKWISE_SYSFS", at("sys")).env("KUBELET_SOCKET", at("kubelet.sock")).env("NODE_NAME", "n");
    command.env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0").env("CONFIG_FILE", at("config.yaml"));
    command.env("LINKWISE_STATE_DIR", at("state")).env("LINKWISE_NVML_LIBRARY", at("no-library"));
    command.env("LINKWISE_SERVICE_ACCOUNT_DIR", at("account")).env("LINKWISE_CDI_DIR", at("cdi"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

const NO_DRA: &str = "version: v1\n";
const EVENTS: &str = "version: v1\nlinkwise: {events: {write: true}}\n";
const DRA: &str = "version: v1\nlinkwise: {dra: {gpus: all}}\n";

/// The time after which a process is killed. Its log ends then, so that a test that waits for a line fails.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// A process and its log. Dropping `_alive` stops the thread that kills the process after the timeout.
struct Running {
    process: Child,
    log: std::io::Lines<BufReader<std::process::ChildStderr>>,
    _alive: mpsc::Sender<()>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut process = command.spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap()).lines();
        let id = rustix::process::Pid::from_child(&process);
        let (alive, end) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            if end.recv_timeout(KILL_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
        });
        Self { process, log, _alive: alive }
    }

    /// Waits for the next line that contains `words`.
    fn wait_for_line(&mut self, words: &str) -> String {
        let found = self.log.by_ref().map(Result::unwrap).find(|line| line.contains(words));
        found.unwrap_or_else(|| panic!("no line with '{words}'"))
    }

    /// Waits until linkwise serves; returns its metrics.
    fn metrics_once_up(&mut self) -> String {
        let line = self.wait_for_line("linkwise is up");
        let (_, address) = line.split_once("metrics=").unwrap();
        let mut stream = TcpStream::connect(address.trim()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut metrics = String::new();
        stream.read_to_string(&mut metrics).unwrap();
        assert!(metrics.contains("linkwise_takeovers"), "{metrics}");
        metrics
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn events_without_an_api_server_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = Running::start(run(&folder, EVENTS).env_remove("KUBERNETES_SERVICE_HOST"));
    running.wait_for_line("linkwise is up");
    running.wait_for_line("cannot write events: they need the API server");
}

#[test]
fn change_of_door_keeps_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let mut running = Running::start(&mut run(&folder, NO_DRA));
    assert!(!running.metrics_once_up().contains("linkwise_dra_"));
    fs::write(&file, DRA).unwrap();
    running.wait_for_line("GPUs are to go through the other door");
    assert!(running.metrics_once_up().contains("linkwise_dra_"));
    assert!(running.process.try_wait().unwrap().is_none());
    // The way back keeps the process, too.
    fs::write(&file, NO_DRA).unwrap();
    running.wait_for_line("GPUs are to go through the other door");
    assert!(!running.metrics_once_up().contains("linkwise_dra_"));
    assert!(running.process.try_wait().unwrap().is_none());
}

#[test]
fn sigterm_during_change_to_dra_ends_the_process() {
    // The pauses let SIGTERM arrive at different moments while one door ends and the other starts.
    for spins in [0, 1_000, 100_000, 1_000_000] {
        let folder = tempfile::tempdir().unwrap();
        let mut running = Running::start(&mut run(&folder, NO_DRA));
        running.wait_for_line("linkwise is up");
        fs::write(folder.path().join("config.yaml"), DRA).unwrap();
        running.wait_for_line("GPUs are to go through the other door");
        (0..spins).for_each(|_| std::hint::spin_loop());
        let id = rustix::process::Pid::from_child(&running.process);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        // The log ends with the process.
        assert!(running.log.by_ref().map(Result::unwrap).count() < 100);
        assert!(running.process.wait().unwrap().success(), "{spins}");
    }
}

#[test]
fn change_to_dra_without_an_api_server_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = Running::start(run(&folder, NO_DRA).env_remove("KUBERNETES_SERVICE_HOST"));
    running.wait_for_line("linkwise is up");
    fs::write(folder.path().join("config.yaml"), DRA).unwrap();
    running.wait_for_line("GPUs cannot go through DRA, they stay with the device plugin");
    assert!(running.process.try_wait().unwrap().is_none());
}
