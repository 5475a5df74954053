//! The DRA manager's half of a kubelet: finds drivers by their registration sockets, prepares the claims of pods with
//! them, and follows their health streams (semantics read in the source of 1.34 to 1.36).
//!
//! Owns the cache of claims, which outlives a restart as the kubelet's checkpoint does, and the connections to drivers,
//! which do not. Used by the `demo` command and by integration tests. Like the rest of the box it knows the wire types
//! and nothing of linkwise.
//!
//! What it does not have: the API server. The kubelet reads claims there; here the caller names a pod's claims with the
//! drivers of their allocation, and is told when the kubelet would delete slices.

mod books;
mod endpoint;
mod state;
mod watcher;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
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

use super::life::lock;
use books::Books;
use endpoint::Driver;

/// How long `stop` waits for what it has cancelled.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Receives the name of a driver whose slices the kubelet deletes; `None`: those of all drivers, at its start.
pub type Wipe = Arc<dyn Fn(Option<&str>) + Send + Sync>;

/// How the DRA manager behaves. [`DraOptions::new`] gives a kubelet's own values.
#[derive(Clone)]
pub struct DraOptions {
    /// The folder of registration sockets; made where it is missing.
    pub registry: PathBuf,
    /// The folder below which the endpoints lie that drivers name: the root of the kubelet's host (`/`).
    pub host_root: PathBuf,
    /// How often the folder is walked. A kubelet has inotify, and reconciles every second (1 s).
    pub walk: Duration,
    /// Wait after the first registration that failed, then twice as long each time, up to 256 times (500 ms).
    pub retry: Duration,
    /// Deadline of GetInfo (1 s).
    pub info_timeout: Duration,
    /// Deadline of NotifyRegistrationStatus (5 s).
    pub notify_timeout: Duration,
    /// Deadline of Prepare and Unprepare (45 s).
    pub call_timeout: Duration,
    /// How long a driver may be without a connection before its slices are deleted (30 s).
    pub wipe_after: Duration,
    /// Wait before a connection or a health stream that ended is opened again (5 s).
    pub reconnect: Duration,
    /// Whether it opens health streams of what is advertised alone, v1 first (from 1.37); else v1alpha1 of every driver.
    pub advertised_health: bool,
    /// How long [`DraKubelet::wait`] waits (20 s).
    pub wait_timeout: Duration,
    /// Told when slices are deleted.
    pub wipe: Option<Wipe>,
}

impl DraOptions {
    /// A kubelet's own values.
    pub fn new(registry: impl Into<PathBuf>) -> Self {
        Self {
            registry: registry.into(),
            host_root: PathBuf::from("/"),
            walk: Duration::from_secs(1),
            retry: Duration::from_millis(500),
            info_timeout: Duration::from_secs(1),
            notify_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(45),
            wipe_after: Duration::from_secs(30),
            reconnect: Duration::from_secs(5),
            advertised_health: false,
            wait_timeout: Duration::from_secs(20),
            wipe: None,
        }
    }

    /// The same, without the waits that a test would only sit through.
    #[must_use]
    pub fn hasty(mut self) -> Self {
        let soon = Duration::from_millis(5);
        (self.walk, self.retry, self.reconnect) = (soon, soon, soon);
        self
    }
}

/// A claim as a pod names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// What the pod calls it.
    pub name: String,
    /// The claim.
    pub claim: ClaimRef,
    /// The drivers of its allocation.
    pub drivers: BTreeSet<String>,
}

/// What a container uses of a claim of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimUse {
    /// What the pod calls the claim.
    pub claim: String,
    /// One request of it; `None` for all.
    pub request: Option<String>,
}

/// A pod with claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodClaims {
    /// Unique on the node; stands for the UID.
    pub pod: String,
    /// Its claims.
    pub claims: Vec<PodClaim>,
    /// What each container uses.
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

/// Why a pod's claims are not prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub enum DraError {
    /// The kubelet is stopped.
    #[error("pod {0}: the kubelet is not running")]
    NotRunning(String),
    /// Another claim of this name is still prepared.
    #[error("old ResourceClaim with same name {name} and different UID {old} still exists")]
    OldClaim {
        /// `namespace/name`.
        name: String,
        /// The UID of the old one.
        old: String,
    },
    /// No such driver is registered.
    #[error("DRA driver {0} is not registered")]
    NoDriver(String),
    /// The call failed: all its claims are not prepared.
    #[error("{method} of {driver} failed")]
    Call {
        /// The method.
        method: &'static str,
        /// The driver.
        driver: String,
        /// Its answer.
        source: Box<tonic::Status>,
    },
    /// The driver did not answer in time.
    #[error("{method} of {driver} had no answer after {after:?}")]
    Timeout {
        /// The method.
        method: &'static str,
        /// The driver.
        driver: String,
        /// The deadline.
        after: Duration,
    },
    /// The driver's error for one claim.
    #[error("{method} failed for claim {claim}: {error}")]
    Claim {
        /// The method.
        method: &'static str,
        /// Its UID.
        claim: String,
        /// The driver's text.
        error: String,
    },
    /// An answer for a claim that was not asked for.
    #[error("{method}: unexpected claim {claim} in the answer")]
    Unexpected {
        /// The method.
        method: &'static str,
        /// Its UID.
        claim: String,
    },
    /// An answer that leaves claims out.
    #[error("{method} skipped {count} ResourceClaims")]
    Skipped {
        /// The method.
        method: &'static str,
        /// How many.
        count: usize,
    },
    /// A container uses a claim that its pod has not.
    #[error("container {container} uses the claim {claim}, which its pod has not")]
    UnknownClaim {
        /// The container.
        container: String,
        /// What it calls the claim.
        claim: String,
    },
}

/// [`DraKubelet::wait`] waited in vain.
#[derive(Debug, thiserror::Error)]
#[error("the awaited state did not come within {after:?}; the last one was {last:#?}")]
pub struct DraWaitError {
    /// How long it waited.
    pub after: Duration,
    /// What it saw last.
    pub last: Box<DraState>,
}

/// Reads the claims of containers.
#[derive(Clone)]
pub(crate) struct Lister(pub Arc<dyn Fn() -> Vec<podresources::PodResources> + Send + Sync>);

impl fmt::Debug for Lister {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lister")
    }
}

/// What outlives a restart, and what observers read.
struct Core {
    options: DraOptions,
    books: Mutex<Books>,
    state: watch::Sender<DraState>,
    /// Why registrations are refused, where they are.
    refusal: watch::Sender<Option<String>>,
    /// Pods are started and stopped one at a time.
    turn: tokio::sync::Mutex<()>,
}

/// One life of the kubelet.
struct Life {
    core: Arc<Core>,
    end: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
    /// The tasks of the connections to drivers.
    connections: TaskTracker,
    /// Registered endpoints, by driver, in the order in which they registered.
    drivers: Mutex<BTreeMap<String, Vec<Driver>>>,
}

/// A kubelet's DRA manager. End it with [`DraKubelet::stop`]; dropping it ends it too, without waiting for the end.
pub struct DraKubelet {
    core: Arc<Core>,
    life: Mutex<Option<Arc<Life>>>,
}

impl DraKubelet {
    /// Starts to look for drivers. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// The folder cannot be made.
    pub fn start(options: DraOptions) -> std::io::Result<Self> {
        let core = Core {
            options,
            books: Mutex::default(),
            state: watch::Sender::default(),
            refusal: watch::Sender::default(),
            turn: tokio::sync::Mutex::default(),
        };
        let this = Self { core: Arc::new(core), life: Mutex::default() };
        this.start_again()?;
        Ok(this)
    }

    /// Starts a kubelet that was stopped: it has its claims, and counts none of them as prepared. It deletes the slices
    /// of its node.
    ///
    /// # Errors
    ///
    /// The folder cannot be made.
    pub fn start_again(&self) -> std::io::Result<()> {
        let mut current = lock(&self.life);
        if current.is_some() {
            return Ok(());
        }
        std::fs::create_dir_all(&self.core.options.registry)?;
        if let Some(wipe) = &self.core.options.wipe {
            wipe(None);
        }
        let life = Arc::new(Life {
            core: Arc::clone(&self.core),
            end: CancellationToken::new(),
            tasks: Mutex::default(),
            connections: TaskTracker::new(),
            drivers: Mutex::default(),
        });
        life.core.change(|books| books.restarted());
        life.spawn(watcher::watch(Arc::clone(&life)));
        *current = Some(life);
        Ok(())
    }

    /// Ends all connections and tasks, and returns when they are gone.
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
    ///
    /// # Errors
    ///
    /// The folder cannot be made.
    pub async fn restart(&self) -> std::io::Result<()> {
        self.stop().await;
        self.start_again()
    }

    /// Prepares the claims of a pod, with one call for each driver, and returns the CDI devices of each container. Claims
    /// that are prepared already, by this pod or another, are not prepared again.
    ///
    /// # Errors
    ///
    /// The pod would not start; the kubelet tries again.
    pub async fn start_pod(&self, pod: &PodClaims) -> Result<BTreeMap<String, Vec<String>>, DraError> {
        let _turn = self.core.turn.lock().await;
        let life = self.life(&pod.pod)?;
        let batches = self.core.change(|books| books.add(pod))?;
        for (driver, claims) in batches {
            let answer = life
                .call(&driver, "NodePrepareResources", async |driver: Driver| driver.prepare(claims.clone()).await)
                .await?;
            self.core.change(|books| books.prepared(&driver, &claims, answer))?;
        }
        self.core.change(|books| books.cdi_devices(pod))
    }

    /// The pod has ended: claims that no other pod uses are unprepared.
    ///
    /// # Errors
    ///
    /// A claim could not be unprepared; the kubelet tries again.
    pub async fn stop_pod(&self, pod: &str) -> Result<(), DraError> {
        let _turn = self.core.turn.lock().await;
        let life = self.life(pod)?;
        for (driver, claims) in self.core.change(|books| books.last_uses(pod)) {
            let answer = life
                .call(&driver, "NodeUnprepareResources", async |driver: Driver| driver.unprepare(claims.clone()).await)
                .await?;
            books::check("NodeUnprepareResources", &claims, answer.iter().map(|(uid, entry)| (uid, &entry.error)))?;
        }
        self.core.change(|books| books.remove(pod));
        Ok(())
    }

    /// The pod was deleted by force: no list has it any more. Its claims stay until [`Self::stop_pod`] unprepares them,
    /// as a kubelet tries every minute.
    pub fn delete_by_force(&self, pod: &str) {
        self.core.change(|books| books.forget_pod(pod));
    }

    /// A reader of the claims of containers, as PodResources lists them; also while the kubelet is stopped.
    pub(crate) fn lister(&self) -> Lister {
        let core = Arc::clone(&self.core);
        Lister(Arc::new(move || lock(&core.books).listed()))
    }

    /// Counts no claim as prepared any more, as after a restart, and keeps its connections.
    pub fn forget_prepared(&self) {
        self.core.change(|books| books.restarted());
    }

    /// Refuses registrations from now on with this text; `None` ends that.
    pub fn refuse(&self, why: Option<&str>) {
        self.core.refusal.send_replace(why.map(str::to_owned));
    }

    /// What can be seen now.
    pub fn state(&self) -> DraState {
        self.core.state.borrow().clone()
    }

    /// Waits until the state is as wanted and gives it.
    ///
    /// # Errors
    ///
    /// It did not come in time.
    pub async fn wait(&self, mut wanted: impl FnMut(&DraState) -> bool) -> Result<DraState, DraWaitError> {
        let after = self.core.options.wait_timeout;
        let mut states = self.core.state.subscribe();
        let found = timeout(after, states.wait_for(|state| wanted(state))).await;
        match found {
            Ok(Ok(state)) => Ok(state.clone()),
            Ok(Err(_)) | Err(_) => Err(DraWaitError { after, last: Box::new(self.state()) }),
        }
    }

    fn life(&self, pod: &str) -> Result<Arc<Life>, DraError> {
        lock(&self.life).clone().ok_or_else(|| DraError::NotRunning(pod.to_owned()))
    }
}

impl Drop for DraKubelet {
    fn drop(&mut self) {
        if let Some(life) = lock(&self.life).take() {
            life.abandon();
        }
    }
}

impl Core {
    /// Changes the books and publishes what can be seen of the change.
    fn change<T>(&self, f: impl FnOnce(&mut Books) -> T) -> T {
        let mut books = lock(&self.books);
        let result = f(&mut books);
        let claims = books.seen();
        self.state.send_modify(|state| {
            state.running = true;
            state.claims = claims;
        });
        result
    }

    /// Changes what can be seen of a driver.
    fn driver(&self, name: &str, f: impl FnOnce(&mut DriverState)) {
        self.state.send_modify(|state| f(state.drivers.entry(name.to_owned()).or_default()));
    }
}

impl Life {
    /// Spawns a task of this life, which ends with it.
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

    /// Calls the endpoint of a driver that connected last.
    async fn call<T>(
        &self,
        name: &str,
        method: &'static str,
        call: impl AsyncFnOnce(Driver) -> Result<T, tonic::Status>,
    ) -> Result<T, DraError> {
        let driver = lock(&self.drivers).get(name).and_then(|of_name| {
            let connected = of_name.iter().rev().find(|driver| driver.is_connected());
            connected.or(of_name.last()).cloned()
        });
        let driver = driver.ok_or_else(|| DraError::NoDriver(name.to_owned()))?;
        let after = self.core.options.call_timeout;
        let failed = |source| DraError::Call { method, driver: name.to_owned(), source: Box::new(source) };
        match timeout(after, call(driver)).await {
            Ok(answer) => answer.map_err(failed),
            Err(_) => Err(DraError::Timeout { method, driver: name.to_owned(), after }),
        }
    }
}
