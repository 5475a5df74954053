//! The DRA manager's half of a kubelet: finds drivers by their registration sockets, prepares the claims of pods with
//! them, and follows their health streams (semantics read in the source of 1.34 to 1.36).
//!
//! Owns the cache of claims, which outlives a restart as a kubelet's checkpoint does, and the connections to drivers,
//! which do not outlive it. Used by the demo, the GPU kit, benchmarks and tests. Like the rest of the box, this
//! module knows the wire types and nothing of linkwise.
//!
//! The API server is absent. A kubelet reads claims there. Here the caller names a pod's claims with the drivers of
//! their allocation, and learns by a callback when the kubelet would delete slices.

mod books;
mod endpoint;
mod state;
mod watcher;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_kubelet_api::podresources;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use endpoint::{DialError, authority};
pub use state::{ClaimState, DeviceHealth, DraState, DriverState};

use super::errors::{WaitError, wait_for};
use super::life::{STOP_TIMEOUT, lock};
use books::Books;
use endpoint::Driver;

/// The deadline of Prepare and Unprepare.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// Receives the name of the driver whose slices the kubelet deletes, or `None` for all drivers at the kubelet's start.
pub type Wipe = Arc<dyn Fn(Option<&str>) + Send + Sync>;

/// The behaviour of the DRA manager. [`DraOptions::new`] gives the defaults.
#[derive(Clone)]
pub struct DraOptions {
    /// The folder of registration sockets; created if it is missing.
    pub registry: PathBuf,
    /// The time between two walks through that folder. A kubelet reconciles every second, which is too long for most
    /// tests (pkg/kubelet/pluginmanager: `loopSleepDuration` in plugin_manager.go, `Run` in reconciler.go).
    pub reconcile: Duration,
    /// The root of the kubelet's host (`/`). The paths of the endpoints that drivers name lie below it.
    pub host_root: PathBuf,
    /// The time without a connection after which a driver's slices are deleted (30 s).
    pub wipe_after: Duration,
    /// True if the kubelet opens only health streams that a driver advertises, v1 first (from 1.37). False if it opens
    /// the v1alpha1 stream of every driver.
    pub advertised_health: bool,
    /// The shortest pause before a failed pod is started again (10 s: kubelet.go, `backOffPeriod`). The longest is 1.5
    /// times as long (pod_workers.go, `workerBackOffPeriodJitterFactor`).
    pub back_off: Duration,
    /// The longest time that [`DraKubelet::wait`] waits (20 s).
    pub wait_timeout: Duration,
    /// Called when slices are deleted.
    pub wipe: Option<Wipe>,
}

impl DraOptions {
    /// A kubelet's own values, except for `reconcile` and `wait_timeout`.
    pub fn new(registry: impl Into<PathBuf>) -> Self {
        Self {
            registry: registry.into(),
            reconcile: watcher::RETRY_DELAY,
            host_root: PathBuf::from("/"),
            wipe_after: Duration::from_secs(30),
            advertised_health: false,
            back_off: Duration::from_secs(10),
            wait_timeout: Duration::from_secs(20),
            wipe: None,
        }
    }
}

/// A claim as a pod names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A claim of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodClaim {
    /// The pod's name for the claim.
    pub name: String,
    /// The claim.
    pub claim: ClaimRef,
    /// The drivers of its allocation.
    pub drivers: BTreeSet<String>,
}

/// The part of a pod's claim that a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimUse {
    /// The pod's name for the claim.
    pub claim: String,
    /// One request of the claim; `None` for all.
    pub request: Option<String>,
}

/// A pod with claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodClaims {
    /// The pod's name, unique on the node; stands for the UID.
    pub pod: String,
    /// Its claims.
    pub claims: Vec<PodClaim>,
    /// The claims that each container uses.
    pub containers: BTreeMap<String, Vec<ClaimUse>>,
}

impl PodClaims {
    /// A pod with one container, `main`, that uses all of one claim of one driver.
    pub fn single(pod: &str, claim: ClaimRef, driver: &str) -> Self {
        let drivers = BTreeSet::from([driver.to_owned()]);
        let uses = vec![ClaimUse { claim: "gpus".to_owned(), request: None }];
        Self {
            pod: pod.to_owned(),
            claims: vec![PodClaim { name: "gpus".to_owned(), claim, drivers }],
            containers: BTreeMap::from([("main".to_owned(), uses)]),
        }
    }
}

/// The reason why a pod's claims are not prepared or not unprepared.
#[derive(Debug, thiserror::Error)]
pub enum DraError {
    /// The driver's error for one claim.
    #[error("{method} failed for claim {claim}: {error}")]
    Claim {
        /// The method.
        method: &'static str,
        /// The claim's UID.
        claim: String,
        /// The driver's text.
        error: String,
    },
    /// Any other reason.
    #[error("{0}")]
    Other(String),
}

/// Reads the claims of containers.
#[derive(Clone)]
pub(crate) struct Lister(pub Arc<dyn Fn() -> Vec<podresources::PodResources> + Send + Sync>);

impl fmt::Debug for Lister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lister")
    }
}

/// The state that outlives a restart, and the visible state.
struct Core {
    options: DraOptions,
    books: Mutex<Books>,
    state: watch::Sender<DraState>,
    /// The error for registrations while they are refused, or `None` while they are accepted.
    refusal: watch::Sender<Option<String>>,
}

/// One run of the kubelet, from its start to its stop.
struct Life {
    core: Arc<Core>,
    end: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
    /// The tasks of the connections to drivers.
    connections: TaskTracker,
    /// The registered endpoints by driver, in the order of their registrations.
    drivers: Mutex<BTreeMap<String, Vec<Driver>>>,
}

/// A kubelet's DRA manager. End it with [`DraKubelet::stop`]; dropping it ends it too, without waiting for the end.
pub struct DraKubelet {
    core: Arc<Core>,
    life: Mutex<Option<Arc<Life>>>,
}

impl DraKubelet {
    /// Starts to look for drivers. Must be called within a tokio runtime. Fails if the folder cannot be made.
    pub fn start(options: DraOptions) -> std::io::Result<Self> {
        let (books, state, refusal) = Default::default();
        let core = Core { options, books, state, refusal };
        let this = Self { core: Arc::new(core), life: Mutex::default() };
        this.start_again()?;
        Ok(this)
    }

    /// Starts a stopped kubelet again. It knows its claims, but counts none of them as prepared. It deletes the slices
    /// of its node. Fails if the folder cannot be made.
    pub fn start_again(&self) -> std::io::Result<()> {
        let mut current = lock(&self.life);
        if current.is_some() {
            return Ok(());
        }
        std::fs::create_dir_all(&self.core.options.registry)?;
        if let Some(wipe) = &self.core.options.wipe {
            wipe(None);
        }
        let (end, tasks, connections, drivers) = Default::default();
        let life = Arc::new(Life { core: Arc::clone(&self.core), end, tasks, connections, drivers });
        life.core.change(|books| books.restarted());
        life.core.state.send_modify(|state| state.running = true);
        life.spawn(watcher::watch(Arc::clone(&life)));
        *current = Some(life);
        Ok(())
    }

    /// Ends all connections and tasks. Returns when they have ended, or after 5 s.
    pub async fn stop(&self) {
        let Some(life) = lock(&self.life).take() else { return };
        life.abandon();
        let mut tasks = std::mem::take(&mut *lock(&life.tasks));
        let all = async {
            while tasks.join_next().await.is_some() {}
            life.connections.wait().await;
        };
        let _ = timeout(STOP_TIMEOUT, all).await;
        self.core.state.send_modify(|state| {
            state.running = false;
            state.drivers.values_mut().for_each(DriverState::ended);
        });
    }

    /// [`DraKubelet::stop`], then [`DraKubelet::start_again`].
    pub async fn restart(&self) -> std::io::Result<()> {
        self.stop().await;
        self.start_again()
    }

    /// Prepares the claims of a pod, with one call for each driver, and returns the CDI devices of each container.
    /// Claims that are already prepared, for this pod or another, are not prepared again. As in a kubelet, other pods
    /// may be started and stopped meanwhile (pkg/kubelet/cm/dra/manager.go: `prepareResources` calls drivers without
    /// the lock of its cache). After an error a kubelet tries again, as [`DraKubelet::start_pod_at_last`] does.
    pub async fn start_pod(&self, pod: &PodClaims) -> Result<BTreeMap<String, Vec<String>>, DraError> {
        let life = self.life(&pod.pod)?;
        let batches = self.core.change(|books| books.add(pod))?;
        let asked: Vec<ClaimRef> = batches.values().flatten().cloned().collect();
        for (driver, claims) in batches {
            let answer = life.call(&driver, "NodePrepareResources", |driver| driver.prepare(claims.clone())).await?;
            self.core.change(|books| books.answered(&driver, &claims, answer))?;
        }
        self.core.change(|books| {
            books.prepared(&asked);
            books.cdi_devices(pod)
        })
    }

    /// The CDI devices with which the containers of a running pod start again, from the kubelet's cache without a call
    /// (`GetResources` in pkg/kubelet/cm/dra/manager.go). Fails if the kubelet does not know a claim.
    pub fn restarted_containers(&self, pod: &PodClaims) -> Result<BTreeMap<String, Vec<String>>, DraError> {
        self.core.change(|books| books.cdi_devices(pod))
    }

    /// [`DraKubelet::start_pod`] until it succeeds, with a kubelet's pauses between attempts.
    pub async fn start_pod_at_last(&self, pod: &PodClaims) -> BTreeMap<String, Vec<String>> {
        loop {
            match self.start_pod(pod).await {
                Ok(containers) => return containers,
                Err(_) => tokio::time::sleep(jittered(self.core.options.back_off)).await,
            }
        }
    }

    /// Unprepares those claims of an ended pod that no other pod uses. After an error a kubelet tries again.
    pub async fn stop_pod(&self, pod: &str) -> Result<(), DraError> {
        let life = self.life(pod)?;
        for (driver, claims) in self.core.change(|books| books.last_uses(pod)) {
            let answer =
                life.call(&driver, "NodeUnprepareResources", |driver| driver.unprepare(claims.clone())).await?;
            books::check("NodeUnprepareResources", &claims, answer.iter().map(|(uid, entry)| (uid, &entry.error)))?;
        }
        self.core.change(|books| books.remove(pod));
        Ok(())
    }

    /// Deletes the pod by force, so that PodResources no longer lists it. Its claims stay until [`Self::stop_pod`]
    /// unprepares them, which a kubelet tries every minute.
    pub fn delete_by_force(&self, pod: &str) {
        self.core.change(|books| books.forget_pod(pod));
    }

    /// Returns a reader of the claims of containers, as PodResources lists them. The reader also works while the
    /// kubelet is stopped.
    pub(crate) fn lister(&self) -> Lister {
        let core = Arc::clone(&self.core);
        Lister(Arc::new(move || lock(&core.books).listed()))
    }

    /// Loses the cache of claims, as a kubelet does that restarts without its file `dra_manager_state`. Nothing is
    /// unprepared, and the connections stay.
    pub fn lose_state(&self) {
        self.core.change(|books| *books = Books::default());
    }

    /// Counts no claim as prepared any more, as after a restart, but keeps the connections.
    pub fn forget_prepared(&self) {
        self.core.change(|books| books.restarted());
    }

    /// Refuses registrations from now on with this text, or accepts them again with `None`.
    pub fn refuse(&self, why: Option<&str>) {
        self.core.refusal.send_replace(why.map(str::to_owned));
    }

    /// The behaviour of the DRA manager.
    pub fn options(&self) -> &DraOptions {
        &self.core.options
    }

    /// The present visible state.
    pub fn state(&self) -> DraState {
        self.core.state.borrow().clone()
    }

    /// Waits until the state is as wanted and returns it. Fails after the timeout of the options.
    pub async fn wait(&self, wanted: impl FnMut(&DraState) -> bool) -> Result<DraState, WaitError<DraState>> {
        wait_for(&self.core.state, self.core.options.wait_timeout, wanted).await
    }

    fn life(&self, pod: &str) -> Result<Arc<Life>, DraError> {
        lock(&self.life).clone().ok_or_else(|| DraError::Other(format!("pod {pod}: the kubelet is not running")))
    }
}

/// Makes a pause longer by a random part of up to half of it (apimachinery's `wait.Jitter`).
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 512;
    pause + pause * u32::try_from(random).unwrap_or_default() / 1024
}

impl Drop for DraKubelet {
    fn drop(&mut self) {
        if let Some(life) = lock(&self.life).take() {
            life.abandon();
        }
    }
}

impl Core {
    /// Changes the books and publishes the visible change.
    fn change<T>(&self, f: impl FnOnce(&mut Books) -> T) -> T {
        let mut books = lock(&self.books);
        let result = f(&mut books);
        let claims = books.seen();
        self.state.send_modify(|state| state.claims = claims);
        result
    }

    /// Changes the visible state of a driver.
    fn driver(&self, name: &str, f: impl FnOnce(&mut DriverState)) {
        self.state.send_modify(|state| f(state.drivers.entry(name.to_owned()).or_default()));
    }
}

impl Life {
    /// Spawns a task that ends with this run.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let end = self.end.clone();
        if !end.is_cancelled() {
            lock(&self.tasks).spawn(async move { end.run_until_cancelled(task).await.unwrap_or_default() });
        }
    }

    fn abandon(&self) {
        self.end.cancel();
        lock(&self.drivers).clear();
        self.connections.close();
    }

    /// Calls the driver's endpoint that registered last, among the connected ones if there are any.
    async fn call<T, F: Future<Output = Result<T, tonic::Status>>>(
        &self,
        name: &str,
        method: &'static str,
        call: impl FnOnce(Driver) -> F,
    ) -> Result<T, DraError> {
        let driver = lock(&self.drivers).get(name).and_then(|of_name| {
            let connected = of_name.iter().rev().find(|driver| driver.is_connected());
            connected.or(of_name.last()).cloned()
        });
        let driver = driver.ok_or_else(|| DraError::Other(format!("DRA driver {name} is not registered")))?;
        match timeout(CALL_TIMEOUT, call(driver)).await {
            Ok(answer) => answer.map_err(|status| DraError::Other(format!("{method} of {name} failed: {status}"))),
            Err(_) => Err(DraError::Other(format!("{method} of {name} had no answer after {CALL_TIMEOUT:?}"))),
        }
    }
}
