//! Executes the machine's decisions: checks the files, serves the session, keeps the time; and sweeps the claims.
//!
//! All the plugin's work is done in the task of [`super::Plugin::run`], which the runtime owns; only tonic's connections
//! have tasks of their own, which the session ends. `machine` alone decides what to do next.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::door::Door;
use super::machine::{Action, Input, Limits, Machine, Moment};
use super::session::{Held, Session};
use super::{Observer, Occurrence, Phase, Settings};
use crate::errors::chain;
use crate::inotify::Changes;
use crate::state::NodeState;

/// How long open connections may take to close when a session ends; a shutdown has one second in all.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How often claims that are over are looked for while DRA is off: the kubelet's list alone tells.
const OFF_SWEEP: Duration = Duration::from_secs(2);

/// The machine, and what it acts on.
pub(super) struct Life {
    settings: Arc<Settings>,
    door: Arc<Door>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    observer: Observer,
    phase: watch::Sender<Phase>,
    begin: Instant,
    machine: Machine,
    changes: Changes,
    session: Option<Session>,
    /// A bind that was begun; one that succeeded answers with its session too.
    bind: Option<Held<Result<Session, String>>>,
}

impl Life {
    pub fn new(
        settings: Arc<Settings>,
        door: Arc<Door>,
        snapshot: watch::Receiver<Arc<NodeState>>,
        observer: Observer,
        phase: watch::Sender<Phase>,
    ) -> Self {
        Self {
            changes: Changes::of(&settings.registry, settings.poll, settings.inotify),
            machine: Machine::new(Limits {
                offer: settings.offer_timeout,
                close: CLOSE_TIMEOUT,
                longest_pause: settings.longest_pause,
            }),
            begin: Instant::now(),
            session: None,
            bind: None,
            settings,
            door,
            snapshot,
            observer,
            phase,
        }
    }

    /// Lives until `shutdown`; sweeps the claims meanwhile.
    pub async fn live(mut self, shutdown: &CancellationToken) {
        (self.observer)(Occurrence::Phase(self.machine.phase()));
        let (door, settings, mut snapshot) = (Arc::clone(&self.door), self.settings.clone(), self.snapshot.clone());
        let sweeps = async {
            // Lists tell of the claims of the last process from then on.
            let mut pause = settings.listed_within.min(settings.sweep);
            loop {
                let is_seen = |state: &NodeState| !state.topology().gpus().is_empty();
                let (was_known, was_seen) = {
                    let state = snapshot.borrow();
                    (state.ledger().is_known(), is_seen(&state))
                };
                door.sweep().await;
                // A sweep without the kubelet's list undoes nothing, one without the driver destroys no MIG device: the
                // next follows when there is one.
                let known = async {
                    let news =
                        |state: &Arc<NodeState>| !was_known && state.ledger().is_known() || !was_seen && is_seen(state);
                    if snapshot.wait_for(news).await.is_err() {
                        // The node is ending.
                        std::future::pending::<()>().await;
                    }
                };
                // Nobody may tell that a claim is over while DRA is off.
                let limit = if door.is_off() && door.has_records() { pause.min(OFF_SWEEP) } else { pause };
                if tokio::time::timeout(limit, known).await.is_err() && limit == pause {
                    pause = settings.sweep;
                }
            }
        };
        tokio::pin!(sweeps);
        let mut ready = Some(Box::pin(ready(self.snapshot.clone(), self.settings.specs_written.clone())));
        self.check();
        let mut ending = false;
        while !self.machine.is_over() {
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !ending => {
                    ending = true;
                    self.feed(Input::Shutdown);
                }
                Some(()) = OptionFuture::from(ready.as_mut()) => {
                    ready = None;
                    self.check();
                    self.feed(Input::Ready);
                }
                input = self.next() => match input {
                    None => self.check(),
                    Some(input) => self.feed(input),
                },
                () = &mut sweeps => {}
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
            Some(bound) = OptionFuture::from(self.bind.as_mut()) => {
                self.bind = None;
                Some(Input::Bound(bound.map(|bound| self.session = Some(bound))))
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
        if unwatched || !self.changes.follows(&settings.registry) {
            self.changes = Changes::of(&settings.registry, settings.poll, settings.inotify);
        }
        let folder = &settings.registry;
        let registry = if folder.is_dir() { Ok(()) } else { Err(format!("there is no folder {}", folder.display())) };
        let own = self.session.as_ref().is_some_and(Session::has_sockets);
        self.feed(Input::Checked { registry, own });
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
            (self.observer)(Occurrence::Phase(phase));
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Bind => {
                let (settings, door) = (Arc::clone(&self.settings), Arc::clone(&self.door));
                let (snapshot, observer) = (self.snapshot.clone(), Arc::clone(&self.observer));
                self.bind = Some(Box::pin(async move {
                    let session = Session::begin(settings, door, snapshot, observer, random()).await;
                    session.map_err(|error| chain(&error))
                }));
            }
            Action::End => {
                self.bind = None;
                if let Some(session) = &mut self.session {
                    session.end();
                }
            }
            Action::Cut => {
                if let Some(session) = &self.session {
                    session.cut();
                }
            }
            Action::ReportWaiting(why) => (self.observer)(Occurrence::Waiting(why)),
            Action::ReportRegistered(result) => (self.observer)(Occurrence::Registered(result)),
            Action::ReportEnded(why) => (self.observer)(Occurrence::Ended(why)),
        }
    }
}

/// Completes when GPUs have been seen and their CDI specs are written.
async fn ready(mut snapshot: watch::Receiver<Arc<NodeState>>, mut specs: watch::Receiver<bool>) {
    // An error means that the node is ending.
    let seen = snapshot.wait_for(|state| !state.topology().gpus().is_empty()).await.is_ok();
    if !seen || specs.wait_for(|written| *written).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// A random number, which the standard library seeds its hashers with.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
