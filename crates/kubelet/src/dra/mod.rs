//! The DRA plugin, by which the kubelet gives GPUs to pods with claims.
//!
//! Owns the checkpoints of prepared claims and two sockets: the registration socket, which the kubelet finds in
//! `plugins_registry`, and the socket of the services DRAPlugin and DRAResourceHealth. The node makes a [`Plugin`]
//! and owns the task that runs it; this module starts no task. Wire types stop at `session.rs`, `service.rs` and
//! `device_health.rs`. `registration` runs the life with the kubelet, with this plugin's `handshake`. The core
//! (`claims`) plans a claim's hardware, `claim_manager` carries the plan out, and `checkpoint` keeps it on disk.
//!
//! `api` has the channels to the rest of the program. A claim is read from the API server when it is prepared and in
//! sweeps, never when the kubelet unprepares it.

mod api;
mod checkpoint;
mod claim_manager;
mod device_health;
mod handshake;
mod life;
mod metrics;
mod service;
mod session;
mod turn;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::device_plugin::connect;
use crate::readiness::{Part, REGISTERED, Readiness};
use crate::registration::{Journal, Life};
use claim_manager::ClaimManager;
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::publish::injection::{HostDevices, InjectionOptions};
use linkwise_core::state::NodeState;
use linkwise_kubelet_api::pluginregistration::InfoRequest;
use linkwise_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use linkwise_system::right::Right;
use linkwise_system::uds::Callers;
use turn::ManagerTask;

pub use api::{CdiDevices, CdiLink, LedgerEntry, LedgerLink, MpsLink, MpsOrders, MpsServed, ReadClaim};
pub use checkpoint::{Checkpoint, has_any as has_checkpoints, parse as parse_checkpoint};
pub use linkwise_nvml::supervisor::{MigDone, MigRequest};
pub use metrics::PluginMetrics;
pub use session::is_registration_socket;
pub use turn::Handover;

/// The time in which our own socket has to answer: below 1 s, the least timeout of the kubelet's probe.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(900);

/// The plugin's settings.
#[derive(Clone)]
pub struct Settings {
    /// The DRA driver's name, such as `gpu.nvidia.com`.
    pub driver: String,
    /// The pool's name in our slices.
    pub pool: String,
    /// The kubelet's folder of registration sockets; the kubelet makes it.
    pub registry: PathBuf,
    /// The kubelet's folder of plugins; the socket with the services lies in a folder of its own below it. The path is
    /// sent to the kubelet, so it has to be the same on the host and here.
    pub plugins: PathBuf,
    /// The folder of checkpoints, kept across restarts: one file for each claim.
    pub checkpoints: PathBuf,
    /// The folder of CDI specs: each claim gets files there.
    pub cdi_folder: PathBuf,
    /// The kernel's id of this boot. If it is unknown, each repeated Prepare plans its claim again.
    pub boot: Option<String>,
    /// The operator's options; the GPUs themselves always come by CDI and UUID.
    pub injection: InjectionOptions,
    /// The host's devices beside its GPUs, as last scanned.
    pub host_devices: watch::Receiver<Arc<HostDevices>>,
    /// The devices as the node publishes them, for the metadata of claims.
    pub published: watch::Receiver<Option<Arc<Pool>>>,
    /// The node's CDI devices. Before the first scan, no claim is prepared.
    pub cdi: CdiLink,
    /// The channel for orders of MIG devices for claims; `None` if no MIG device can be made.
    pub mig: Option<mpsc::Sender<MigRequest>>,
    /// True if new MIG devices are made. If not, the MIG devices of claims are still destroyed.
    pub makes_mig: bool,
    /// The channels for MPS control daemons of claims; `None` if claims that ask for MPS are refused.
    pub mps: Option<MpsLink>,
    /// The longest time that a claim waits for its MPS control daemon.
    pub mps_timeout: Duration,
    /// The users that may call our sockets.
    pub callers: Callers,
    /// The API server's time to answer for one claim.
    pub claim_timeout: Duration,
    /// The longest time that a claim waits until a scan has found its devices.
    pub specs_timeout: Duration,
    /// True if the node's door is DRA. If not, only claims that are prepared already are prepared again and unprepared,
    /// and the kubelet finds sockets only while there are such claims.
    pub serves: bool,
    /// Reads claims from the API server. If `None`, no new claim is prepared; while DRA is off, the kubelet's lists
    /// then show which claims are over.
    pub read_claim: Option<ReadClaim>,
    /// The longest time that the preparation of one claim may take, disks included. The kubelet waits for 45 s.
    pub prepare_timeout: Duration,
    /// The time after which a list of holders without a claim shows that no container has it, counted from the claim's
    /// preparation or this process's start. The lists are read every 30 s at least.
    pub listed_within: Duration,
    /// The time between two reports of unchanged health: the kubelet forgets a report after 30 s.
    pub heartbeat: Duration,
    /// The time between two sweeps, which search for claims that are gone.
    pub sweep: Duration,
    /// The time after which new sockets replace those that the kubelet has not registered, or has no connection to: a
    /// kubelet may miss a file.
    pub offer_timeout: Duration,
    /// The time between two checks of the sockets while inotify reports nothing.
    pub poll: Duration,
    /// True if inotify is used. Without inotify, polling remains.
    pub inotify: bool,
    /// The longest pause between attempts; the first retry has no pause, the second at most 1/64 of this.
    pub longest_pause: Duration,
}

impl Settings {
    /// The usual settings for a pool of a driver, with the kubelet's folders below `/var/lib/kubelet`.
    pub fn new(driver: impl Into<String>, pool: impl Into<String>, checkpoints: impl Into<PathBuf>) -> Self {
        let kubelet = PathBuf::from("/var/lib/kubelet");
        let checkpoints = checkpoints.into();
        Self {
            driver: driver.into(),
            pool: pool.into(),
            registry: kubelet.join("plugins_registry"),
            plugins: kubelet.join("plugins"),
            checkpoints,
            cdi_folder: PathBuf::from("/var/run/cdi"),
            boot: None,
            injection: InjectionOptions::default(),
            host_devices: watch::channel(Arc::default()).1,
            published: watch::channel(None).1,
            cdi: watch::channel(Some(Arc::default())).1,
            mig: None,
            mps: None,
            mps_timeout: Duration::from_secs(15),
            makes_mig: false,
            callers: Callers::default(),
            claim_timeout: Duration::from_secs(15),
            specs_timeout: Duration::from_secs(15),
            serves: true,
            read_claim: None,
            prepare_timeout: Duration::from_secs(40),
            listed_within: Duration::from_secs(90),
            heartbeat: Duration::from_secs(15),
            sweep: Duration::from_secs(600),
            offer_timeout: Duration::from_secs(60),
            poll: Duration::from_secs(1),
            inotify: true,
            longest_pause: Duration::from_secs(16),
        }
    }
}

/// A phase of the plugin's life with the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// No GPU has been seen yet, or the host was not scanned; while DRA is off, no claim is left to unprepare.
    WaitingForGpus,
    /// There is no folder of registration sockets.
    WaitingForKubelet,
    /// Our sockets are being bound.
    Binding,
    /// Our sockets are served; the kubelet has not registered the plugin.
    Offered,
    /// The kubelet registered the plugin, and has not connected to its services yet.
    Accepted,
    /// The kubelet registered the plugin, and calls it.
    Registered,
    /// The kubelet had registered the plugin, and closed its connection.
    Disconnected,
    /// The session ended; its connections are closing.
    Ending,
    /// A session ended or could not begin; the next attempt follows after a pause.
    Pausing,
}

impl Phase {
    /// The phase in words, for /readyz and the log.
    pub fn words(self) -> &'static str {
        match self {
            Self::WaitingForGpus => "waiting for GPUs and a scan of the host",
            Self::WaitingForKubelet => "waiting for the kubelet's folder of registration sockets",
            Self::Binding => "binding our sockets",
            Self::Offered => "waiting for the kubelet to register the plugin",
            Self::Accepted => "registered, waiting for the kubelet to connect",
            Self::Registered => REGISTERED,
            Self::Disconnected => "registered, and the kubelet is away",
            Self::Ending => "ending the session, waiting for its connections to close",
            Self::Pausing => "pausing before the next attempt",
        }
    }
}

/// The reason why no claim can be prepared: the folder of checkpoints cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep checkpoints of claims in {}", .0.display())]
pub struct PluginError(PathBuf, #[source] std::io::Error);

/// The reporter of the plugin's events, to the log, the metrics and /readyz.
#[derive(Clone)]
struct Reporter {
    metrics: PluginMetrics,
    journal: Arc<Journal>,
    /// The registration socket, while it is served.
    socket: watch::Sender<Option<PathBuf>>,
}

impl Reporter {
    /// Reports an event between the plugin and the kubelet.
    fn report(&self, event: &Life<Phase>) {
        // The socket is removed now, though the session lives until its connections have closed.
        if matches!(event, Life::Phase(Phase::Ending)) {
            self.socket.send_replace(None);
        }
        self.metrics.life(event);
        self.journal.note(event);
    }
}

/// The state that the parts of a running plugin share.
#[derive(Clone)]
struct Shared {
    settings: Arc<Settings>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    reporter: Reporter,
    /// The claim manager, while this process has the right to touch claims.
    manager: watch::Sender<Option<Arc<ClaimManager>>>,
}

/// The DRA plugin of this node. Clones share what they report.
#[derive(Clone)]
pub struct Plugin {
    settings: Arc<Settings>,
    reporter: Reporter,
    phase: watch::Sender<Phase>,
    claims_right: watch::Sender<Option<Right>>,
}

impl Plugin {
    /// A plugin that does nothing until [`Self::run`].
    pub fn new(settings: Arc<Settings>, metrics: PluginMetrics, readiness: Readiness) -> Self {
        let journal = Arc::new(Journal::new(Part::DraPlugin, readiness));
        let reporter = Reporter { metrics, journal, socket: watch::Sender::default() };
        let (phase, claims_right) = (watch::Sender::new(Phase::WaitingForGpus), watch::Sender::new(None));
        Self { settings, reporter, phase, claims_right }
    }

    /// Follows the right to touch the node's claims. A task that writes for claims keeps a clone while it writes.
    pub fn claims_right(&self) -> watch::Receiver<Option<Right>> {
        self.claims_right.subscribe()
    }

    /// Follows the phase.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Calls GetInfo on the plugin's own registration socket, as the kubelet does. Returns false if no answer comes in
    /// time, true while no socket is served. The services' socket is not called: its connections count as the
    /// kubelet's.
    pub fn answers(&self) -> impl Future<Output = bool> + use<> {
        let socket = self.reporter.socket.borrow().clone();
        async move {
            let Some(socket) = socket else { return true };
            let info = async {
                let (channel, _) = connect(&socket).await.ok()?;
                RegistrationClient::new(channel).get_info(InfoRequest {}).await.ok()
            };
            timeout(ANSWER_TIMEOUT, info).await.is_ok_and(|answer| answer.is_some())
        }
    }

    /// Serves whenever it is this process's turn, until `shutdown`; then ends its connections, removes its sockets and
    /// returns. Claims stay prepared. While the folder of checkpoints cannot be used, no claim is prepared.
    pub async fn run(
        self,
        snapshot: watch::Receiver<Arc<NodeState>>,
        ledger: LedgerLink,
        handover: Handover,
        shutdown: CancellationToken,
    ) {
        let Self { settings, reporter, phase, claims_right } = self;
        let Handover { offers, claims: turn } = handover;
        let shared = Shared { settings, snapshot, reporter, manager: watch::Sender::new(None) };
        let registering = life::Registering { shared: shared.clone(), phase, offers, turn: turn.clone() };
        let manager_task = ManagerTask { shared, ledger, claims_right, turn };
        tokio::select! {
            biased;
            () = registering.run(&shutdown) => {}
            () = manager_task.run() => {}
        }
    }
}
