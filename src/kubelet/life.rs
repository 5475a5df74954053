//! Executes the machine's decisions: checks the files, serves the session, makes the calls, keeps the time.
//!
//! A [`Plugin`] is one resource's. All its work is done in the task of [`Plugin::run`], which the runtime owns; only
//! tonic's connections have tasks of their own, which the session ends. `machine` alone decides what to do next.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::machine::{Action, Input, Limits, Machine, Moment};
use super::session::{Held, Session};
use super::{Occurrence, Phase, Report, Settings, Sources, pod_resources, register, unname};
use crate::errors::chain;
use crate::inotify::Changes;
use crate::state::{NodeState, ResourceName};
use crate::uds::FileId;

/// How long open connections may take to close when a session ends. No call is under way for longer, and kubelets up to
/// 1.36 do not close that of a plugin that another one has replaced: then this process may have to serve again soon.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(50);

/// The plugin of one resource.
pub struct Plugin {
    resource: ResourceName,
    settings: Arc<Settings>,
    sources: Sources,
    phase: watch::Sender<Phase>,
}

/// A plugin cannot run: the path of the kubelet's socket has no folder.
#[derive(Debug, Error)]
#[error("'{}' is not the path of a kubelet socket", .0.display())]
pub struct NoFolder(PathBuf);

impl Plugin {
    /// A plugin that does nothing until [`Self::run`].
    pub fn new(resource: ResourceName, settings: Arc<Settings>, sources: Sources) -> Self {
        Self { resource, settings, sources, phase: watch::Sender::new(Phase::WaitingForKubelet) }
    }

    /// Follows the phase.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Serves until `shutdown`, of the process or of this resource alone; then ends its streams and connections,
    /// removes its socket and returns.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), NoFolder> {
        let Self { resource, settings, sources, phase } = self;
        let socket = &settings.kubelet_socket;
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned);
        let folder = folder.ok_or_else(|| NoFolder(socket.clone()))?;
        let Sources { snapshot, observer, renew } = sources;
        let named = resource.clone();
        let life = Life {
            changes: Changes::of(&folder, settings.poll, settings.inotify),
            machine: Machine::new(Limits {
                register: settings.register_timeout,
                stream: settings.stream_timeout,
                confirm: settings.confirm_timeout,
                close: CLOSE_TIMEOUT,
                longest_pause: settings.longest_pause,
            }),
            report: Arc::new(move |occurrence| observer(&named, occurrence)),
            begin: Instant::now(),
            session: None,
            calls: FuturesUnordered::new(),
            resource,
            settings,
            snapshot,
            renew,
            phase,
            folder,
        };
        life.live(&shutdown).await;
        Ok(())
    }
}

/// The machine, and what it acts on.
struct Life {
    resource: ResourceName,
    settings: Arc<Settings>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    report: Report,
    renew: watch::Receiver<u64>,
    phase: watch::Sender<Phase>,
    folder: PathBuf,
    begin: Instant,
    machine: Machine,
    changes: Changes,
    session: Option<Session>,
    /// What was begun and has no answer yet; a bind that succeeded answers with its session too.
    calls: FuturesUnordered<Held<(Input, Option<Session>)>>,
}

impl Life {
    async fn live(mut self, shutdown: &CancellationToken) {
        (self.report)(Occurrence::Phase(self.machine.phase()));
        self.check();
        let mut ending = false;
        while !self.machine.is_over() {
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !ending => {
                    ending = true;
                    self.feed(Input::Shutdown);
                }
                input = self.next() => match input {
                    None => self.check(),
                    // The files explain best why a stream or a server ended.
                    Some(input @ (Input::Streams(_) | Input::ServerEnded(_))) => {
                        self.check();
                        self.feed(input);
                    }
                    Some(input) => self.feed(input),
                },
            }
        }
    }

    /// The next input; `None`: the files are to be checked. The timer comes last: after a suspension of this process,
    /// answers that have arrived count before deadlines that have passed.
    async fn next(&mut self) -> Option<Input> {
        let timer = self.machine.wake().map(|wake| tokio::time::sleep_until(self.begin + wake));
        let session = self.session.as_mut().map(Session::next);
        tokio::select! {
            biased;
            () = self.changes.next() => None,
            Ok(()) = self.renew.changed() => Some(Input::Renew),
            Some((answer, bound)) = self.calls.next() => {
                self.session = bound.or(self.session.take());
                Some(answer)
            }
            Some(happened) = OptionFuture::from(session) => {
                self.session.take_if(|_| matches!(happened, Input::Closed));
                Some(happened)
            }
            Some(()) = OptionFuture::from(timer) => Some(Input::Tick),
        }
    }

    fn check(&mut self) {
        let settings = &self.settings;
        // inotify watches or file descriptors may have been exhausted.
        let unwatched = settings.inotify && !self.changes.has_inotify();
        if unwatched || !self.changes.follows(&self.folder) {
            self.changes = Changes::of(&self.folder, settings.poll, settings.inotify);
        }
        let socket = &settings.kubelet_socket;
        let kubelet = FileId::of_socket(socket).ok_or_else(|| absence(&self.folder, socket));
        let own = self.session.as_ref().is_some_and(Session::has_socket);
        let predecessor = self.session.as_mut().is_some_and(Session::has_predecessor);
        self.feed(Input::Checked { kubelet, own, predecessor });
    }

    fn feed(&mut self, input: Input) {
        let moment = Moment { now: self.begin.elapsed(), jitter: random() };
        let (machine, actions) = self.machine.clone().step(input, moment);
        self.machine = machine;
        for action in actions {
            self.perform(action);
        }
        let phase = self.machine.phase();
        if self.phase.send_replace(phase) != phase {
            (self.report)(Occurrence::Phase(phase));
        }
    }

    /// Registers our socket by one of its names, or reports why it has none.
    fn register(&self, name: Result<String, String>) {
        let Some(session) = &self.session else { return };
        let (resource, settings) = (self.resource.clone(), Arc::clone(&self.settings));
        let kubelet = Arc::clone(&session.kubelet);
        self.calls.push(Box::pin(async move {
            let answer = match name {
                Ok(name) => register::register(&settings.kubelet_socket, &name, &resource, &kubelet).await,
                Err(error) => return (Input::Registered(Err(error)), None),
            };
            (Input::Registered(answer.map_err(|error| chain(&error))), None)
        }));
    }

    fn perform(&mut self, action: Action) {
        let (resource, settings) = (self.resource.clone(), Arc::clone(&self.settings));
        match action {
            Action::Bind => {
                let (snapshot, report) = (self.snapshot.clone(), Arc::clone(&self.report));
                self.calls.push(Box::pin(async move {
                    match Session::begin(resource, settings, snapshot, report, random()).await {
                        Ok(mut session) => (Input::Bound(Ok(session.has_predecessor())), Some(session)),
                        Err(error) => (Input::Bound(Err(chain(&error))), None),
                    }
                }));
            }
            Action::Register => {
                let Some(session) = &self.session else { return };
                self.register(Ok(session.name.clone()));
            }
            Action::Renew => {
                let Some(session) = &mut self.session else { return };
                let name = session.rename(&settings, &resource, random());
                self.register(name.map_err(|error| format!("our socket cannot have another name: {error}")));
            }
            Action::Unname => {
                self.calls.push(Box::pin(async move {
                    let answer = unname::unname(&settings, &resource, random()).await;
                    (Input::Unnamed(answer.map_err(|error| chain(&error))), None)
                }));
            }
            Action::Ask => {
                let snapshot = self.snapshot.clone();
                self.calls.push(Box::pin(async move {
                    let socket = settings.pod_resources_socket.as_deref();
                    (Input::Listed(pod_resources::listing(socket, &snapshot, &resource).await), None)
                }));
            }
            Action::End => {
                self.calls.clear();
                if let Some(session) = &mut self.session {
                    session.end();
                }
            }
            Action::Cut => {
                if let Some(session) = &self.session {
                    session.cut();
                }
            }
            Action::ReportWaiting(why) => (self.report)(Occurrence::Waiting(why)),
            Action::ReportRegistered(result) => (self.report)(Occurrence::Registered(result)),
            Action::ReportEnded(why) => (self.report)(Occurrence::Ended(why)),
            Action::ReportUnnamed(result) => (self.report)(Occurrence::Unnamed(result)),
        }
    }
}

/// Why there is no kubelet.sock.
fn absence(folder: &Path, socket: &Path) -> String {
    if !folder.is_dir() {
        format!("there is no folder {}", folder.display())
    } else if socket.symlink_metadata().is_ok() {
        format!("{} is not a socket", socket.display())
    } else {
        format!("there is no {}", socket.display())
    }
}

/// A random number, which the standard library seeds its hashers with.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
