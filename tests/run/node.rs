//! The tests' fixtures: a folder with a machine in it, the process on that machine, and ways to wait for what it does.
//! Contains no test.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use fake_nvml::Control;
use linkwise_kubelet_box::{Allocation, Connections, KubeletBox, Options, Place, Pod, ResourceState};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::timeout;

pub const GPU: &str = "nvidia.com/gpu";

/// The time after which a wait has failed.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The pause between two looks at a state that sends no event.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The kinds of kubelets: up to 1.36, from 1.37.
pub const KUBELETS: [Connections; 2] = [Connections::ByResource, Connections::BySocket];

/// The PCI addresses of dgx1-v100's GPUs.
pub const DGX1_V100: [&str; 8] = [
    "0000:06:00.0",
    "0000:07:00.0",
    "0000:0a:00.0",
    "0000:0b:00.0",
    "0000:85:00.0",
    "0000:86:00.0",
    "0000:89:00.0",
    "0000:8a:00.0",
];

/// A machine, and the settings of linkwise on it.
pub struct Setup {
    folder: TempDir,
    pub program: PathBuf,
    /// The first argument, if there is one.
    pub subcommand: Option<&'static str>,
    /// True if all settings are passed as variables; the arguments of [`Self::arg`] are then left out.
    pub by_variables: bool,
    pub library: PathBuf,
    pub kubelet_socket: PathBuf,
    pub metrics_address: SocketAddr,
    args: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
}

impl Setup {
    /// A built-in machine's GPUs, on a host of two packages with a NUMA node each, without a PCI bus in its /sys.
    pub fn on(machine: &str) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("crates/host/src/machines/{machine}.yaml"));
        Self::new(|_| file)
    }

    /// A machine of the test's own.
    pub fn with(yaml: &str) -> Self {
        Self::new(|folder| {
            let file = folder.join("machine.yaml");
            std::fs::write(&file, yaml).unwrap();
            file
        })
    }

    fn new(machine: impl FnOnce(&Path) -> PathBuf) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("sys")).unwrap();
        let environment = vec![
            ("FAKE_NVML_MACHINE", machine(folder.path()).into()),
            ("FAKE_NVML_CONTROL", at("control").into()),
            ("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2".into()),
        ];
        let (library, kubelet_socket) = (fake_nvml::library_path(), at("k").join("kubelet.sock"));
        let args = vec!["--sysfs".into(), at("sys").into()];
        let program = env!("CARGO_BIN_EXE_linkwise").into();
        Self {
            program,
            subcommand: Some("run"),
            by_variables: false,
            library,
            kubelet_socket,
            metrics_address: ([127, 0, 0, 1], 0).into(),
            args,
            environment,
            folder,
        }
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn args<I: Into<OsString>>(mut self, args: impl IntoIterator<Item = I>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a configuration file of this text, in a folder of its own.
    pub fn config(self, text: &str) -> Self {
        let file = self.config_file();
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        replace(&file, text);
        self.arg("--config-file").arg(file)
    }

    pub fn config_file(&self) -> PathBuf {
        self.at("config/config.yaml")
    }

    /// Adds options such as `--nvml-poll-ms`.
    pub fn nvml_ms(self, options: &[(&str, u32)]) -> Self {
        self.args(options.iter().map(|(option, milliseconds)| format!("--nvml-{option}-ms={milliseconds}")))
    }

    pub fn env(mut self, variable: &'static str, value: &str) -> Self {
        self.environment.push((variable, value.into()));
        self
    }

    /// Adds variables, written as `NAME=VALUE`.
    pub fn variables(self, words: &'static str) -> Self {
        let pairs = words.split_whitespace().filter_map(|word| word.split_once('='));
        pairs.fold(self, |setup, (variable, value)| setup.env(variable, value))
    }

    /// Replaces the host by one that hwloc recorded.
    pub fn host(mut self, xml: &str) -> Self {
        self.environment.retain(|(variable, _)| *variable != "HWLOC_SYNTHETIC");
        self.env("HWLOC_XMLFILE", xml)
    }

    /// A path in this machine's folder.
    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Puts a GPU on the PCI bus, as the kernel lists it.
    pub fn on_bus(&self, pci: &str) {
        put_on_bus(&self.at("sys/bus"), pci);
    }

    /// Puts all GPUs of dgx1-v100 on the PCI bus: from then on a GPU that is missing there is unhealthy.
    pub fn all_on_bus(&self) {
        DGX1_V100.iter().for_each(|pci| put_on_bus(&self.at("bus"), pci));
        // In one step: a reader sees none of them or all.
        std::fs::create_dir_all(self.at("sys")).unwrap();
        std::fs::rename(self.at("bus"), self.at("sys/bus")).unwrap();
    }

    /// Puts a GPU on the PCI bus; reading its `vendor` file hangs.
    pub fn hung_on_bus(&self) {
        fifo(&self.at("sys/bus/pci/devices/0000:06:00.0/vendor"));
    }

    /// Sends a command to the fake NVML of every process, and a state to the journal.
    pub fn tell(&self, command: &str) {
        Control::new(self.at("control")).send(command).unwrap();
    }

    pub fn tell_all(&self, commands: &[&str]) {
        commands.iter().for_each(|command| self.tell(command));
    }

    /// [`Self::tell`] that returns its error.
    pub fn try_tell(&self, command: &str) -> std::io::Result<()> {
        Control::new(self.at("control")).send(command)
    }

    pub fn kubelet(&self) -> KubeletBox {
        self.kubelet_with(|_| {})
    }

    /// A kubelet on this machine, with options that the test changes.
    pub fn kubelet_with(&self, change: impl FnOnce(&mut Options)) -> KubeletBox {
        kubelet_in(self.kubelet_socket.parent().unwrap(), |options| {
            options.pod_resources = Some(self.pod_resources());
            change(options);
        })
    }

    /// The socket on which a kubelet on this machine serves PodResources.
    pub fn pod_resources(&self) -> PathBuf {
        self.at("p/kubelet.sock")
    }

    /// The admin socket of linkwise on this machine, if it is configured to serve one.
    pub fn admin_socket(&self) -> PathBuf {
        self.at("admin/admin.sock")
    }

    /// Our sockets in the kubelet's folder.
    pub fn sockets(&self) -> Vec<PathBuf> {
        sockets_in(self.kubelet_socket.parent().unwrap())
    }

    /// The command that starts linkwise on this machine.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        // The environment of the tests must not configure linkwise.
        command.env_clear();
        // Without this, linkwise as root would change the CDI folder of the host that runs the tests.
        command.env("LINKWISE_CDI_DIR", self.at("cdi"));
        command.args(self.subcommand);
        let (address, pod_resources) = (self.metrics_address.to_string(), self.pod_resources());
        let mut settings: Vec<(&str, &str, &OsStr)> = vec![
            ("--log-format", "LINKWISE_LOG_FORMAT", "json".as_ref()),
            ("--metrics-address", "LINKWISE_METRICS_ADDRESS", address.as_ref()),
            ("--kubelet-socket", "KUBELET_SOCKET", self.kubelet_socket.as_os_str()),
            ("--pod-resources-socket", "LINKWISE_POD_RESOURCES_SOCKET", pod_resources.as_os_str()),
            ("--nvml-library", "LINKWISE_NVML_LIBRARY", self.library.as_os_str()),
        ];
        settings.retain(|(_, _, value)| !value.is_empty());
        if self.by_variables {
            command.envs(settings.iter().map(|(_, variable, value)| (variable, value)));
            command.env("LINKWISE_SYSFS", self.at("sys"));
        } else {
            command.args(settings.iter().flat_map(|(flag, _, value)| [OsStr::new(*flag), *value])).args(&self.args);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Another command on this machine.
    pub fn tool(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().args(words);
        command.arg("--nvml-library").arg(&self.library).arg("--sysfs").arg(self.at("sys"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// `linkwise doctor` on this machine; more arguments can follow.
    pub fn doctor(&self) -> Command {
        let mut command = self.tool(&["doctor"]);
        command.arg("--kubelet-socket").arg(&self.kubelet_socket);
        command.arg("--admin-socket").arg(self.admin_socket());
        command.arg("--root").arg(self.folder.path());
        command.arg("--pod-resources-socket").arg(self.pod_resources());
        command
    }

    /// `linkwise admin` on this machine.
    pub fn admin(&self, order: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["admin", "--socket"]).arg(self.admin_socket()).args(order);
        command
    }

    pub fn spawn(&self) -> Process {
        Process::of(self.command())
    }

    /// Starts linkwise and waits until it is up.
    pub async fn start(self) -> Node {
        let process = self.spawn();
        let address = process.up().await;
        Node { setup: self, process, address }
    }

    /// Starts a kubelet and linkwise, and waits until linkwise is up.
    pub async fn start_beside_kubelet(self) -> (Node, KubeletBox) {
        let kubelet = self.kubelet();
        (self.start().await, kubelet)
    }

    /// Starts a kubelet and linkwise. Waits until the kubelet lists `gpus` healthy devices and linkwise is ready: the
    /// list can come before the answer to Register.
    pub async fn serve(self, gpus: usize) -> (Node, KubeletBox) {
        let (node, kubelet) = self.start_beside_kubelet().await;
        wait_registered(&kubelet, 1, gpus).await;
        node.ready(200, "ready").await;
        (node, kubelet)
    }
}

/// A kubelet with this folder, and with options that the test changes.
pub fn kubelet_in(folder: impl Into<PathBuf>, change: impl FnOnce(&mut Options)) -> KubeletBox {
    let mut options = Options::new(folder);
    (options.dial_retry, options.wait_timeout) = (Duration::from_millis(10), LIMIT);
    change(&mut options);
    KubeletBox::start(options).unwrap()
}

/// Waits until exactly these of eight GPUs, by their index on dgx1-v100, are unhealthy on the kubelet's list.
pub async fn wait_unhealthy(kubelet: &KubeletBox, gpus: &[u32]) {
    let wanted: BTreeSet<String> = gpus.iter().map(|index| uuid(1, *index)).collect();
    let state = kubelet.wait(|state| state.resources[GPU].unhealthy == wanted).await.unwrap();
    assert_eq!(state.resources[GPU].healthy.len(), 8 - gpus.len(), "{state:?}");
}

/// Admits a pod of one container, and returns its allocation.
pub async fn allocation(kubelet: &KubeletBox, pod: &str, resource: &str, count: u32) -> Allocation {
    let admitted = kubelet.admit(&Pod::single(pod, resource, count), None).await.unwrap();
    admitted.grant("main", resource).unwrap().allocation.clone()
}

/// The container `main` of a pod, with devices of a resource.
pub fn place(pod: &str, resource: &str) -> Place {
    let [pod, container, resource] = [pod, "main", resource].map(str::to_owned);
    Place { pod, container, resource }
}

/// Waits until the kubelet has taken at least this many registrations and lists `gpus` healthy devices.
pub async fn wait_registered(kubelet: &KubeletBox, times: u64, gpus: usize) -> ResourceState {
    let wanted = |state: &ResourceState| {
        let listed = state.connected && state.open_streams == 1 && state.healthy.len() == gpus;
        state.registrations >= times && listed
    };
    kubelet.wait(|state| wanted(&state.resources[GPU])).await.unwrap().resources[GPU].clone()
}

/// The command, started by a program: `words` are that program and its first arguments.
pub fn started_by(words: &[&str], command: &Command) -> Command {
    let command = command.as_std();
    let mut starter = Command::new(words[0]);
    starter.args(&words[1..]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => starter.env(name, value),
            None => starter.env_remove(name),
        };
    }
    starter.stdin(Stdio::null()).kill_on_drop(true);
    starter
}

/// Puts a GPU in a folder like /sys/bus.
pub fn put_on_bus(bus: &Path, pci: &str) {
    let device = bus.join("pci/devices").join(pci);
    std::fs::create_dir_all(&device).unwrap();
    std::fs::write(device.join("vendor"), "0x10de\n").unwrap();
    std::fs::write(device.join("class"), "0x030200\n").unwrap();
}

/// Our sockets in a kubelet's folder.
pub fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("linkwise-"));
    paths.sort();
    paths
}

/// Replaces a file in one step.
pub fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// Puts a pipe, whose reader waits for a writer, in the place of a file.
pub fn fifo(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let _ = std::fs::remove_file(path);
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Waits until a process reads the pipe, and opens its write end. The reader waits until that end is dropped.
pub async fn writer(path: &Path) -> File {
    // With this flag, opening the pipe fails at once while no process reads it.
    const O_NONBLOCK: i32 = 0o4000;
    until(async || OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(path)).await
}

/// Plays another program's server: gives the same answer to this many requests.
pub fn stranger(listener: UnixListener, times: usize, answer: &'static [u8]) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for stream in listener.incoming().take(times).map(Result::unwrap) {
            // Reads the whole head, because closing with unread bytes resets the connection.
            let mut lines = std::io::BufReader::new(&stream).lines().map_while(Result::ok);
            let _ = lines.find(String::is_empty);
            let _ = (&stream).write_all(answer);
        }
    })
}

/// Sets a soft limit of a process. The hard limit stays, because only root may raise it again.
pub fn limit(process: u32, limit: &str) {
    let set = std::process::Command::new("prlimit").args([format!("--{limit}"), format!("--pid={process}")]).status();
    assert!(set.unwrap().success());
}

/// A value in KiB from /proc/PID/status, if the process lives.
pub fn kib(process: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

#[derive(Default)]
struct Log {
    lines: Vec<String>,
    ended: bool,
}

/// A linkwise that has been started, and may end at any time.
pub struct Process {
    pub child: Child,
    log: watch::Receiver<Log>,
}

impl Process {
    /// Starts a command, and collects its standard error as the log.
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = watch::channel(Log::default());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                sender.send_modify(|log| log.lines.push(line));
            }
            sender.send_modify(|log| log.ended = true);
        });
        Self { child, log }
    }

    /// Waits for a log line.
    pub async fn logged(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        let find = |log: &Log| log.lines.iter().map(|line| parse(line)).find(|line| wanted(line));
        let mut log = self.log.clone();
        let seen = timeout(LIMIT, log.wait_for(|log| log.ended || find(log).is_some())).await;
        let last = || self.lines().split_off(self.lines().len().saturating_sub(20)).join("\n");
        let seen = seen.unwrap_or_else(|_| panic!("not logged in time; the last lines:\n{}", last())).unwrap();
        find(&seen).expect("the process ended without this line")
    }

    /// Waits until linkwise is up, and returns the address at which it serves metrics and probes.
    pub async fn up(&self) -> SocketAddr {
        let up = self.logged(|line| line["message"] == "linkwise is up").await;
        up["metrics"].as_str().unwrap().parse().unwrap()
    }

    /// Waits for a log line that contains this text.
    pub async fn said(&self, text: &str) -> Value {
        self.logged(|line| line.to_string().contains(text)).await
    }

    /// The number of lines so far with this text in them.
    pub fn count(&self, text: &str) -> usize {
        self.log.borrow().lines.iter().filter(|line| line.contains(text)).count()
    }

    pub fn lines(&self) -> Vec<String> {
        self.log.borrow().lines.clone()
    }

    /// Waits until linkwise ends; returns its status and the lines that are not JSON, which are for people.
    pub async fn ended(&mut self) -> (ExitStatus, Vec<String>) {
        let status = timeout(LIMIT, self.child.wait()).await.expect("linkwise did not end in time").unwrap();
        let mut log = self.log.clone();
        let seen = timeout(LIMIT, log.wait_for(|log| log.ended)).await.expect("its standard error stays open").unwrap();
        (status, seen.lines.iter().filter(|line| !line.starts_with('{')).cloned().collect())
    }

    /// Ends linkwise with SIGTERM, as kubelets do.
    pub async fn end(&mut self) {
        self.signal("TERM");
        let (status, last) = self.ended().await;
        assert!(status.success(), "{status}: {last:?}");
    }

    pub fn id(&self) -> u32 {
        self.child.id().unwrap()
    }

    pub fn signal(&self, name: &str) {
        signal(name, self.id());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let lines = self.lines();
        if std::thread::panicking() {
            // The test harness captures what this macro prints, and shows it only if the test fails.
            #[allow(clippy::print_stderr, reason = "the log explains the failure")]
            {
                eprintln!("the log of linkwise:\n{}", lines.join("\n"));
            }
            return;
        }
        assert_eq!(self.count("panicked"), 0, "{lines:#?}");
    }
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|_| Value::String(line.to_owned()))
}

pub fn signal(name: &str, process: u32) {
    let sent = std::process::Command::new("sh").args(["-c", &format!("kill -{name} {process}")]).status();
    assert!(sent.unwrap().success());
}

/// A linkwise that is up.
pub struct Node {
    pub setup: Setup,
    pub process: Process,
    pub address: SocketAddr,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// The answer to `GET path` at an address that must answer.
pub async fn get(address: SocketAddr, path: &str) -> Answer {
    try_get(address, path).await.unwrap()
}

/// The answer to `GET path` at an address.
pub async fn try_get(address: SocketAddr, path: &str) -> std::io::Result<Answer> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let text = timeout(LIMIT, exchange).await.expect("no answer in time")?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Ok(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

/// Waits until /readyz at an address answers with this status and with this text in it.
pub async fn ready(address: SocketAddr, status: u16, text: &str) -> Answer {
    let wanted = |answer: &Answer| answer.status == status && answer.body.contains(text);
    seen(async || get(address, "/readyz").await, wanted).await
}

impl Node {
    pub async fn get(&self, path: &str) -> Answer {
        get(self.address, path).await
    }

    pub async fn ready(&self, status: u16, text: &str) -> Answer {
        ready(self.address, status, text).await
    }

    /// Waits until the metrics meet a condition, and returns them.
    pub async fn metrics(&self, wanted: impl Fn(&str) -> bool) -> String {
        seen(async || self.get("/metrics").await.body, |text: &String| wanted(text)).await
    }

    /// Waits until a series exists and has this value.
    pub async fn metric(&self, series: &str, wanted: u64) {
        let ask = async || {
            let text = self.get("/metrics").await.body;
            let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse::<u64>().ok());
            if value == Some(wanted) { Ok(()) } else { Err((series, wanted, text)) }
        };
        until(ask).await;
    }

    /// Waits for an agent that is not among those known, and returns its process id.
    pub async fn agent(&self, known: &[u32]) -> u32 {
        until(async || self.agent_ids().into_iter().find(|child| !known.contains(child)).ok_or(known)).await
    }

    /// Ends the process; the machine stays.
    pub async fn end(mut self) -> Setup {
        self.process.end().await;
        self.setup
    }

    pub fn agent_ids(&self) -> Vec<u32> {
        children(self.process.id())
    }
}

/// Asks until the answer is `Ok`, and returns its value.
pub async fn until<T, E: std::fmt::Debug>(ask: impl AsyncFn() -> Result<T, E>) -> T {
    let mut last = None;
    let asking = async {
        let mut again = tokio::time::interval(POLL_INTERVAL);
        loop {
            again.tick().await;
            match ask().await {
                Ok(good) => return good,
                Err(bad) => last = Some(bad),
            }
        }
    };
    let found = timeout(LIMIT, asking).await.ok();
    found.unwrap_or_else(|| panic!("the wait has failed; the last answer: {last:?}"))
}

/// Looks until the value meets a condition, and returns the value.
pub async fn seen<T: std::fmt::Debug>(look: impl AsyncFn() -> T, wanted: impl Fn(&T) -> bool) -> T {
    let ask = async || {
        let seen = look().await;
        if wanted(&seen) { Ok(seen) } else { Err(seen) }
    };
    until(ask).await
}

/// The living children of a process.
pub fn children(parent: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_child = |id: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name in brackets may hold anything; state and parent follow it.
        let mut rest = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        rest.next().is_some_and(|state| state != "Z") && rest.next() == Some(&parent.to_string())
    };
    ids.filter(is_child).collect()
}

/// The id of a built-in machine's GPU: `machine` is 1 for dgx1-v100, 2 for dgx-h100.
pub fn uuid(machine: u32, index: u32) -> String {
    format!("GPU-{machine:08}-0000-4000-8000-{index:012}")
}

/// A machine file with GPUs of one model, by UUID, PCI address and further fields.
pub fn machine(gpus: &[(&str, &str, &str)]) -> String {
    let mut text = "version: 1\nname: test\nobserved:\n  gpus:\n".to_owned();
    for (index, (uuid, pci, more)) in gpus.iter().enumerate() {
        text += &format!(
            "    - {{index: {index}, uuid: {uuid}, pci: \"{pci}\", minor: {index}, model: H100, \
             compute_capability: \"9.0\", pcie: {{mts: 32000, width: 16}}{more}}}\n"
        );
    }
    text
}
