//! Shared by the tests: credentials for the API server's box, short pauses, and waiting for a state.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use linkwise_api_server_box::{ApiServerBox, Key, ResourceType};
use linkwise_cluster::{Access, ApiMetrics, ApiServer, Pace};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Pauses of milliseconds; objects are reasserted as rarely as in production.
pub const PACE: Pace = Pace {
    first: Duration::from_millis(5),
    longest: Duration::from_millis(20),
    write: Duration::from_millis(2),
    repair: Duration::from_millis(2),
    ..Pace::DEFAULT
};

/// The longest time that a test waits for a state.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The server, and a ServiceAccount's folder with a token that the server accepts.
pub struct Cluster {
    pub server: ApiServerBox,
    pub metrics: ApiMetrics,
    folder: TempDir,
}

impl Cluster {
    pub async fn start() -> Self {
        let (server, folder) = (ApiServerBox::start(&ResourceType::ALL).await, tempfile::tempdir().unwrap());
        server.accept_tokens(&["first"]);
        let cluster = Self { server, metrics: ApiMetrics::default(), folder };
        fs::write(cluster.folder().join("ca.crt"), cluster.server.ca()).unwrap();
        cluster.write_token("first");
        cluster
    }

    /// Starts a cluster with the node `n`.
    pub async fn of_node() -> Self {
        let cluster = Self::start().await;
        cluster.label_node("n", json!({}));
        cluster
    }

    pub fn slices(&self) -> Vec<Value> {
        self.server.objects(&ResourceType::RESOURCE_SLICES)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn write_token(&self, token: &str) {
        fs::write(self.folder().join("token"), token).unwrap();
    }

    pub fn access(&self) -> Access {
        Access::InCluster { url: self.server.url(), service_account: self.folder().to_owned() }
    }

    /// The environment of a container with access to the server. It trusts the cluster's CA only, because the image has
    /// no certificates.
    pub fn variables(&self) -> [(&'static str, OsString); 5] {
        let address = self.server.address();
        [
            ("KUBERNETES_SERVICE_HOST", address.ip().to_string().into()),
            ("KUBERNETES_SERVICE_PORT", address.port().to_string().into()),
            ("LINKWISE_SERVICE_ACCOUNT_DIR", self.folder().into()),
            ("SSL_CERT_FILE", "/none".into()),
            ("SSL_CERT_DIR", "/none".into()),
        ]
    }

    pub fn client(&self, pace: Pace) -> ApiServer {
        ApiServer::new(self.access(), pace, self.metrics.clone())
    }

    /// Creates a node, or changes its labels.
    pub fn label_node(&self, name: &str, labels: Value) {
        let node = json!({"metadata": {"labels": labels}, "status": {"phase": "left out by a metadata watch"}});
        self.server.put("kubelet", &node_key(name), node);
    }

    /// The number of requests of this method whose path or query contains this text.
    pub fn count(&self, method: &str, contains: &str) -> usize {
        let requests = self.server.requests();
        requests.iter().filter(|request| request.method == method && request.uri.contains(contains)).count()
    }
}

pub fn node_key(name: &str) -> Key {
    ResourceType::NODES.key(None, name)
}

/// A task that must run until the test ends or calls `end`.
pub struct Running {
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    pub fn of<F: Future<Output = ()> + Send + 'static>(work: impl FnOnce(CancellationToken) -> F) -> Self {
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(work(shutdown.clone()));
        Self { shutdown, task }
    }

    /// Shuts the task down, and waits for its end.
    pub async fn end(mut self) {
        self.shutdown.cancel();
        within(&mut self.task).await.unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let is_early = self.task.is_finished() && !self.shutdown.is_cancelled();
        assert!(!is_early || std::thread::panicking(), "the task ended before the test");
    }
}

/// A program with the environment of a pod of the node `n`, which has eight simulated V100.
pub fn on_dgx1(cluster: &Cluster, program: impl AsRef<OsStr>, sysfs: &Path) -> Command {
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx1-v100.yaml");
    let mut command = Command::new(program);
    command.env_clear().envs(cluster.variables()).env("NODE_NAME", "n").env("LINKWISE_SYSFS", sysfs);
    command.env("FAKE_NVML_MACHINE", machine).env("HWLOC_SYNTHETIC", "pack:2 numa:1 pu:2");
    command.env("LINKWISE_NVML_LIBRARY", fake_nvml::library_path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command
}

/// Another program with the environment of `command`.
pub fn like(command: &Command, program: impl AsRef<OsStr>) -> Command {
    let mut like = Command::new(program);
    like.env_clear().envs(command.as_std().get_envs().map(|(name, value)| (name, value.unwrap())));
    like.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    like
}

/// Awaits a future, which has to end within `WAIT_TIMEOUT`.
pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WAIT_TIMEOUT, future).await.expect("the awaited state did not come in time")
}

pub async fn until(mut holds: impl FnMut() -> bool) {
    within(async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// A folder like a mounted ConfigMap, with these files.
pub fn config_map(folder: &Path, files: &[(&str, &str)]) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
    folder.to_owned()
}
