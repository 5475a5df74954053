//! One life of the kubelet, from start to stop: its plugin connections and all of its tasks.
//!
//! `Core` is what outlives a restart (books, options, seed) and what observers read; `Life` ends
//! with `stop`. `registration` calls [`Life::connect`], `admission` takes plugins from here,
//! `KubeletBox` starts and ends it. No task is spawned anywhere else in the box.
//!
//! The order of steps around a connection is the device manager's (read at 1.33, the same up to
//! 1.36), its gaps included: a connection is current from before it is dialled, and whoever ends
//! disconnects the current one of its resource.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::devices::{Book, ClientId, StopStamp};
use super::endpoint::Plugin;
use super::errors::{BoxError, DialError};
use super::rng::Rng;
use super::state::State;
use super::{Fault, Options};

/// How long `stop` waits for what it has cancelled.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A lock whose holder panicked still guards plain values: go on with them.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What outlives a restart.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) options: Options,
    book: Mutex<Book>,
    pub(super) rng: Mutex<Rng>,
    pub(super) state: watch::Sender<Arc<State>>,
    pub(super) fault: watch::Sender<Fault>,
    /// Pods are admitted one at a time.
    pub(super) turn: tokio::sync::Mutex<()>,
}

impl Core {
    pub(super) fn new(options: Options) -> Self {
        let rng = Mutex::new(Rng::new(options.seed));
        let (state, fault) = (watch::Sender::default(), watch::Sender::new(Fault::None));
        Self { options, book: Mutex::default(), rng, state, fault, turn: tokio::sync::Mutex::default() }
    }

    /// Reads the books.
    pub(super) fn read<T>(&self, f: impl FnOnce(&Book) -> T) -> T {
        f(&lock(&self.book))
    }

    /// Changes the books and publishes what can be seen of the change.
    pub(super) fn change<T>(&self, f: impl FnOnce(&mut Book) -> T) -> T {
        let mut book = lock(&self.book);
        let result = f(&mut book);
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

/// One life of the kubelet.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) core: Arc<Core>,
    /// Cancelled when the process ends.
    pub(super) end: CancellationToken,
    /// Open connections. One whose resource was registered again stays here, as it does in a kubelet.
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

    /// Spawns a task of this life; it is dropped unrun where the life has ended.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        if !self.end.is_cancelled() {
            tasks.spawn(task);
        }
    }

    /// Registers and dials a plugin, asks for its options and starts its stream.
    pub(super) async fn connect(self: &Arc<Self>, resource: &str, endpoint: &str) -> Result<(), DialError> {
        let options = &self.core.options;
        let path = options.dir.join(endpoint);
        let id = self.core.change(|book| book.register_client(resource));
        let deadline = Instant::now() + options.dial_timeout;
        let connected = async {
            let plugin = Plugin::dial(&path, options, self.connections.clone(), self.end.child_token()).await?;
            lock(&self.plugins).insert(id, plugin.clone());
            self.core.change(|book| book.count(resource, |calls| &mut calls.options));
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = plugin.options(left).await;
            Ok((answer.map_err(|source| DialError::Options { path: path.clone(), source })?, plugin))
        };
        match connected.await {
            Ok((options, plugin)) => {
                self.core.change(|book| book.plugin_connected(resource, id, options));
                self.spawn(Arc::clone(self).follow(resource.to_owned(), id, plugin));
                Ok(())
            }
            Err(error) => {
                // By name: if another registration came meanwhile, it is that one which is forgotten.
                self.core.change(|book| book.deregister_client(resource));
                lock(&self.plugins).remove(&id);
                Err(error)
            }
        }
    }

    /// Follows one stream to its end, then disconnects the current connection of the resource.
    async fn follow(self: Arc<Self>, resource: String, id: ClientId, plugin: Plugin) {
        tokio::select! {
            biased;
            () = self.end.cancelled() => return,
            () = plugin.closed() => {}
            () = self.receive(&resource, id, &plugin) => {}
        }
        drop(plugin);
        self.disconnect(&resource, Some(id));
    }

    async fn receive(&self, resource: &str, id: ClientId, plugin: &Plugin) {
        self.core.change(|book| book.count(resource, |calls| &mut calls.list_and_watch));
        let Ok(mut stream) = plugin.list_and_watch().await else { return };
        self.core.change(|book| book.stream_opened(resource, id));
        while let Ok(Some(message)) = stream.message().await {
            if *self.core.fault.borrow() != Fault::Forget {
                self.core.change(|book| book.list(resource, message.devices));
            }
        }
    }

    /// Gives up the current connection of a resource, whichever it is, because the stream of
    /// `ended` is over or without a cause. Says whether there was one.
    pub(super) fn disconnect(self: &Arc<Self>, resource: &str, ended: Option<ClientId>) -> bool {
        let Some((id, stamp)) = self.core.change(|book| book.disconnect(resource, ended)) else { return false };
        if let Some(plugin) = lock(&self.plugins).remove(&id) {
            plugin.close();
        }
        if let Some(stamp) = stamp {
            self.expire_later(resource.to_owned(), stamp);
        }
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

    /// The plugin behind an endpoint, unless its connection was given up.
    pub(super) fn plugin(&self, client: ClientId) -> Option<Plugin> {
        lock(&self.plugins).get(&client).cloned()
    }

    /// Tells everything to end, without waiting for it.
    pub(super) fn abandon(&self) {
        self.end.cancel();
        lock(&self.plugins).clear();
        self.connections.close();
    }

    /// Ends the life and waits until its tasks and connections are gone.
    pub(super) async fn finish(&self) -> Result<(), BoxError> {
        self.abandon();
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        let mut outcome = Ok(());
        let all = async {
            while let Some(ended) = tasks.join_next().await {
                match ended {
                    Err(source) if source.is_panic() => outcome = Err(BoxError::Task { source }),
                    Ok(()) | Err(_) => {}
                }
            }
            self.connections.wait().await;
        };
        let in_time = timeout(STOP_TIMEOUT, all).await.is_ok();
        self.core.change(Book::ended);
        if in_time { outcome } else { Err(BoxError::Stuck { after: STOP_TIMEOUT }) }
    }
}
