//! One run of the kubelet, from its start to its stop: its plugin connections and all of its tasks.
//!
//! `Core` holds the state that outlives a restart (books, options, seed) and the visible state; `Life` ends with
//! `stop`. `registration` calls [`Life::connect`], `admission` takes plugins from here, and `KubeletBox` starts and
//! ends the run. Tasks are spawned through [`Life::spawn`] and by gRPC's connections. `dra` has a `Life` of its own.
//!
//! The steps around a connection come in a kubelet's order. The registration server knows a connection before it dials.
//! When a stream ends, the registration server looks up a connection again, forgets it and closes it. Only then does
//! the device manager stop the endpoint. Each step takes a lock of its own, so that a registration can come between any
//! two of them. `devices::connections` describes each step for each kind of kubelet.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::devices::{Book, Client, ClientId, StopStamp};
use super::dra::Lister;
use super::endpoint::Plugin;
use super::errors::{BoxError, DialError};
use super::gaps::Gaps;
use super::rng::Rng;
use super::state::State;
use super::{Fault, Options};

/// The device manager's checkpoint file, in the device-plugins folder (`kubeletDeviceManagerCheckpoint`).
const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// The longest time that `stop` waits for tasks and connections to end.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Locks the mutex, even if a holder panicked, because the mutex guards only plain values.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state that outlives a restart.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) options: Options,
    book: Mutex<Book>,
    pub(super) rng: Mutex<Rng>,
    pub(super) state: watch::Sender<Arc<State>>,
    pub(super) fault: watch::Sender<Fault>,
    /// Held during an admission, so that one pod is admitted at a time.
    pub(super) turn: tokio::sync::Mutex<()>,
    pub(super) gaps: Mutex<Gaps>,
    /// The claims that PodResources lists.
    pub(super) claims: Mutex<Option<Lister>>,
    /// The number of lists that PodResources gave.
    pub(super) lists: AtomicU64,
}

impl Core {
    pub(super) fn new(options: Options) -> Self {
        let rng = Mutex::new(Rng::new(options.seed));
        let (state, fault) = (watch::Sender::default(), watch::Sender::new(Fault::None));
        let book = Mutex::new(Book::new(options.connections));
        let (turn, gaps, claims, lists) = Default::default();
        Self { options, book, rng, state, fault, turn, gaps, claims, lists }
    }

    pub(super) fn read<T>(&self, f: impl FnOnce(&Book) -> T) -> T {
        f(&lock(&self.book))
    }

    /// Changes the books, writes a due checkpoint file, and publishes the visible change.
    pub(super) fn change<T>(&self, f: impl FnOnce(&mut Book) -> T) -> T {
        let mut book = lock(&self.book);
        let result = f(&mut book);
        if let Some(text) = book.checkpoint().filter(|_| self.options.writes_checkpoint) {
            // The lock is held, so that the file ends with the last state. Like a kubelet, the box goes on after an
            // error of the disk.
            let path = self.options.dir.join(CHECKPOINT);
            let draft = path.with_extension("draft");
            let _ = std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, &path));
        }
        let seen = book.snapshot();
        self.state.send_if_modified(|state| {
            let changed = **state != seen;
            if changed {
                *state = Arc::new(seen);
            }
            changed
        });
        result
    }
}

/// One run of the kubelet, from its start to its stop.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) core: Arc<Core>,
    /// Cancelled when the run ends.
    pub(super) end: CancellationToken,
    /// The open connections. A connection stays here after its resource is registered again, as it does in a kubelet.
    plugins: Mutex<BTreeMap<ClientId, Plugin>>,
    tasks: Mutex<JoinSet<()>>,
    /// The tasks of the connections to plugins.
    connections: TaskTracker,
}

impl Life {
    pub(super) fn new(core: Arc<Core>) -> Arc<Self> {
        let (end, connections) = (CancellationToken::new(), TaskTracker::new());
        Arc::new(Self { core, end, plugins: Mutex::default(), tasks: Mutex::default(), connections })
    }

    /// Spawns a task of this run. If the run has ended, the task is dropped.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        if !self.end.is_cancelled() {
            tasks.spawn(task);
        }
    }

    /// Registers and dials a plugin, gets its options and starts its stream.
    pub(super) async fn connect(self: &Arc<Self>, resource: &str, endpoint: &str) -> Result<(), DialError> {
        let options = &self.core.options;
        let path = options.dir.join(endpoint);
        let id = self.core.change(|book| book.register_client(resource, endpoint));
        let client = Client { id, socket: endpoint.to_owned() };
        let deadline = Instant::now() + options.dial_timeout;
        let connected = async {
            let plugin = Plugin::dial(&path, options, self.connections.clone(), self.end.child_token()).await?;
            lock(&self.plugins).insert(id, plugin.clone());
            self.core.change(|book| book.count(resource, |calls| &mut calls.options));
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = plugin.options(left).await;
            let options = answer.map_err(|source| DialError::Options { path: path.clone(), source })?;
            let taken = self.core.change(|book| book.plugin_connected(resource, &client, options));
            taken.map_err(|_| DialError::AlreadyConnected { path: path.clone() })?;
            Ok(plugin)
        };
        match connected.await {
            Ok(plugin) => {
                self.settle_gap(resource);
                self.spawn(Arc::clone(self).follow(resource.to_owned(), client, plugin));
                Ok(())
            }
            Err(error) => {
                // The books forget a connection by resource or by socket, be it another registration's. A connection
                // that was dialled stays open.
                self.core.change(|book| book.deregister_client(resource, endpoint));
                Err(error)
            }
        }
    }

    /// `runClient`: follows one stream to its end, then closes the connection that a lookup finds.
    async fn follow(self: Arc<Self>, resource: String, client: Client, plugin: Plugin) {
        tokio::select! {
            biased;
            () = self.end.cancelled() => return,
            () = plugin.closed() => {}
            () = self.receive(&resource, client.id, &plugin) => {}
        }
        drop(plugin);
        let since = Instant::now();
        // Every other task may go first, as a kubelet's goroutines may.
        yield_now().await;
        let Some(found) = self.core.read(|book| book.client(&resource, &client.socket)) else {
            return self.core.change(|book| book.stream_ended(client.id));
        };
        yield_now().await;
        self.close(&resource, &found);
        yield_now().await;
        self.disconnected(&resource, &found, Some(client.id), since);
    }

    async fn receive(&self, resource: &str, id: ClientId, plugin: &Plugin) {
        self.core.change(|book| book.count(resource, |calls| &mut calls.list_and_watch));
        let Ok(mut stream) = plugin.list_and_watch().await else { return };
        self.core.change(|book| book.stream_opened(resource, id));
        while let Ok(Some(message)) = stream.message().await {
            if *self.core.fault.borrow() != Fault::Forget {
                self.core.change(|book| book.list(resource, message.devices));
                self.settle_gap(resource);
            }
        }
    }

    /// `disconnectClient` and the first half of `Disconnect`: forgets the connection, then closes it.
    fn close(&self, resource: &str, client: &Client) {
        self.core.change(|book| book.deregister_client(resource, &client.socket));
        if let Some(plugin) = lock(&self.plugins).remove(&client.id) {
            plugin.close();
        }
    }

    /// The second half of `Disconnect`: the device manager stops the endpoint. Until then the ended stream counts as
    /// open.
    fn disconnected(self: &Arc<Self>, resource: &str, client: &Client, ended: Option<ClientId>, since: Instant) {
        let pick = |count: usize| lock(&self.core.rng).below(count);
        let stamp = self.core.change(|book| {
            ended.into_iter().for_each(|ended| book.stream_ended(ended));
            let was_usable = book.is_usable(resource);
            let stamp = book.plugin_disconnected(resource, &client.socket, pick)?;
            if was_usable {
                lock(&self.core.gaps).begin(resource, since);
            }
            Some(stamp)
        });
        let Some(stamp) = stamp else { return };
        self.expire_later(resource.to_owned(), stamp);
    }

    /// Ends the resource's open gap if the resource is usable again.
    fn settle_gap(&self, resource: &str) {
        self.core.read(|book| {
            if book.is_usable(resource) {
                lock(&self.core.gaps).end(resource, Instant::now());
            }
        });
    }

    /// Closes the resource's last registered connection before its stream ends. Returns false if there was none.
    pub(super) fn disconnect(self: &Arc<Self>, resource: &str) -> bool {
        let Some(client) = self.core.read(|book| book.last_client(resource)) else { return false };
        self.close(resource, &client);
        self.disconnected(resource, &client, None, Instant::now());
        true
    }

    /// Removes the resource when the grace period of this stop is over.
    pub(super) fn expire_later(self: &Arc<Self>, resource: String, stamp: StopStamp) {
        let life = Arc::clone(self);
        self.spawn(async move {
            tokio::select! {
                biased;
                () = life.end.cancelled() => {}
                () = sleep(life.core.options.grace) => life.core.change(|book| book.expire(&resource, stamp)),
            }
        });
    }

    /// The plugin behind an endpoint, unless its connection was closed.
    pub(super) fn plugin(&self, client: ClientId) -> Option<Plugin> {
        lock(&self.plugins).get(&client).cloned()
    }

    /// Cancels everything, without waiting for the end.
    pub(super) fn abandon(&self) {
        self.end.cancel();
        lock(&self.plugins).clear();
        self.connections.close();
    }

    /// Ends the run and waits until its tasks and connections have ended.
    pub(super) async fn finish(&self) -> Result<(), BoxError> {
        self.abandon();
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        let mut outcome = Ok(());
        let all = async {
            while let Some(ended) = tasks.join_next().await {
                match ended {
                    Err(source) if source.is_panic() => outcome = Err(BoxError::Task(source)),
                    Ok(()) | Err(_) => {}
                }
            }
            self.connections.wait().await;
        };
        let in_time = timeout(STOP_TIMEOUT, all).await.is_ok();
        self.core.change(Book::kubelet_ended);
        lock(&self.core.gaps).forget_open();
        if in_time { outcome } else { Err(BoxError::Stuck(STOP_TIMEOUT)) }
    }
}
