//! Executes the state machine's decisions: checks the files, serves the session, makes the calls, keeps the time.
//!
//! All the work of a plugin is done in the task of [`Executor::run`], which the node owns; only tonic's connections
//! have tasks of their own, which the session ends. The state machine alone decides on actions.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::machine::{Action, Handshake, Input, RegistrationMachine};
use super::servers::{BindError, BoxedFuture, Servers};
use linkwise_core::errors::chain;
use linkwise_system::grpc::{Refusal, Rpc};
use linkwise_system::inotify::Changes;

/// An event in the life of any plugin, for the log and the metrics.
#[derive(Clone, Debug)]
pub enum Life<P> {
    /// The phase changed.
    Phase(P),
    /// The reason why the plugin is not registered.
    Waiting(String),
    /// A registration succeeded, or the cause of a failed one.
    Registered(Result<(), String>),
    /// The reason why a session with the kubelet ended or did not begin.
    Ended(String),
    /// A connection to a socket of ours was not served.
    Refused(Refusal),
    /// An RPC ended.
    Rpc(Rpc),
}

/// A plugin that registers with the kubelet.
pub trait Registrant: Send {
    /// The part of its life in which the two plugins differ.
    type Handshake: Handshake;
    /// Its session with the kubelet.
    type Session: Session<Self::Handshake>;

    /// Reports an event.
    fn report(&self, event: Life<PhaseOf<Self>>);

    /// Looks for the kubelet; the error says why there is none.
    fn kubelet(&self) -> Result<KubeletOf<Self>, String>;

    /// Binds and serves the sockets, with a random number in their names.
    fn bind(&self, random: u64) -> BoxedFuture<Result<Begun<Self>, BindError>>;

    /// Begins an action of the handshake. Returns the call that it makes, if any; the call's result is an input.
    fn perform(
        &self,
        action: <Self::Handshake as Handshake>::Action,
        session: &mut Self::Session,
    ) -> Option<BoxedFuture<Input<Self::Handshake>>>;

    /// Waits for the next input from outside the session. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = <Self::Handshake as Handshake>::Input> + Send;
}

/// The phases of a plugin.
type PhaseOf<R> = <<R as Registrant>::Handshake as Handshake>::Phase;
/// The kubelet as a plugin finds it.
type KubeletOf<R> = <<R as Registrant>::Handshake as Handshake>::Kubelet;
/// A new session, and the facts that its bind has found.
type Begun<R> = (<<R as Registrant>::Handshake as Handshake>::Bound, <R as Registrant>::Session);
/// A call in progress. It results in an input; a bind that succeeds results in its session too.
type Call<R> = BoxedFuture<(Input<<R as Registrant>::Handshake>, Option<<R as Registrant>::Session>)>;

/// Sockets of a plugin that are served.
pub trait Session<H: Handshake>: Send + 'static {
    /// The sockets and their servers.
    fn servers(&mut self) -> &mut Servers;

    /// The other facts that a check of the files finds. Without a session, no socket is bound.
    fn others(session: Option<&mut Self>) -> H::Others;

    /// Waits for the next input. Cancel-safe. The servers accept connections only while this is awaited.
    fn next(&mut self) -> impl Future<Output = Input<H>> + Send;
}

/// The kubelet's folder, and the ways in which it is watched.
#[derive(Clone, Debug)]
pub struct Watching {
    /// The folder.
    pub folder: PathBuf,
    /// The longest time between two checks.
    pub poll: Duration,
    /// True if inotify is used. Without inotify, polling remains.
    pub inotify: bool,
}

impl Watching {
    fn begin(&self) -> Changes {
        Changes::of(&self.folder, self.poll, self.inotify)
    }
}

/// A plugin's state machine, with the session and the calls that it controls.
pub struct Executor<R: Registrant> {
    registrant: R,
    machine: RegistrationMachine<R::Handshake>,
    phase: watch::Sender<PhaseOf<R>>,
    watching: Watching,
    changes: Changes,
    begin: Instant,
    session: Option<R::Session>,
    calls: FuturesUnordered<Call<R>>,
}

impl<R: Registrant> Executor<R> {
    /// An executor that does nothing until [`Self::run`].
    pub fn new(
        registrant: R,
        machine: RegistrationMachine<R::Handshake>,
        phase: watch::Sender<PhaseOf<R>>,
        watching: Watching,
    ) -> Self {
        let (changes, begin, calls) = (watching.begin(), Instant::now(), FuturesUnordered::new());
        Self { registrant, machine, phase, watching, changes, begin, session: None, calls }
    }

    /// Serves until `shutdown`; then removes its sockets, ends its streams and connections, and returns. The timer is
    /// polled last, so that after a suspension of this process, answers that have arrived count before deadlines that
    /// have passed.
    pub async fn run(mut self, shutdown: &CancellationToken) {
        self.registrant.report(Life::Phase(self.machine.phase()));
        self.check();
        let mut is_ending = false;
        while !self.machine.is_over() {
            let timer = self.machine.wake().map(|wake| tokio::time::sleep_until(self.begin + wake));
            let session = self.session.as_mut().map(Session::next);
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !is_ending => {
                    is_ending = true;
                    self.feed(Input::Shutdown);
                }
                () = self.changes.next() => self.check(),
                input = self.registrant.next() => self.check_and_feed(Input::Own(input)),
                Some((answer, bound)) = self.calls.next() => {
                    self.session = bound.or(self.session.take());
                    self.feed(answer);
                }
                Some(happened) = OptionFuture::from(session) => {
                    self.session.take_if(|_| matches!(happened, Input::Closed));
                    match happened {
                        Input::Own(_) | Input::ServerEnded(_) => self.check_and_feed(happened),
                        _ => self.feed(happened),
                    }
                }
                Some(()) = OptionFuture::from(timer) => self.feed(Input::Tick),
            }
        }
    }

    /// Checks the files, then feeds an input: a kubelet that restarted or a socket that is gone is a better cause in a
    /// report than the stream or server that ended with it.
    fn check_and_feed(&mut self, input: Input<R::Handshake>) {
        self.check();
        self.feed(input);
    }

    fn check(&mut self) {
        // Watches or file descriptors may have been exhausted when inotify was tried last.
        let unwatched = self.watching.inotify && !self.changes.has_inotify();
        if unwatched || !self.changes.follows(&self.watching.folder) {
            self.changes = self.watching.begin();
        }
        let kubelet = self.registrant.kubelet();
        let has_sockets = self.session.as_mut().is_some_and(|session| session.servers().has_sockets());
        let others = R::Session::others(self.session.as_mut());
        self.feed(Input::Checked { kubelet, has_sockets, others });
    }

    fn feed(&mut self, input: Input<R::Handshake>) {
        for action in self.machine.step(input, self.begin.elapsed()) {
            self.perform(action);
        }
        let phase = self.machine.phase();
        if self.phase.send_replace(phase) != phase {
            self.registrant.report(Life::Phase(phase));
        }
    }

    fn perform(&mut self, action: Action<<R::Handshake as Handshake>::Action>) {
        match action {
            Action::Bind => {
                let bind = self.registrant.bind(random());
                self.calls.push(Box::pin(async move {
                    match bind.await {
                        Ok((bound, session)) => (Input::Bound(Ok(bound)), Some(session)),
                        Err(error) => (Input::Bound(Err(chain(&error))), None),
                    }
                }));
            }
            Action::Own(action) => {
                let call = self.session.as_mut().and_then(|session| self.registrant.perform(action, session));
                self.calls.extend(call.map(|call| -> Call<R> { Box::pin(async { (call.await, None) }) }));
            }
            Action::End => {
                self.calls.clear();
                self.session.iter_mut().for_each(|session| session.servers().end());
            }
            Action::Cut => self.session.iter_mut().for_each(|session| session.servers().cut()),
            Action::ReportWaiting(why) => self.registrant.report(Life::Waiting(why)),
            Action::ReportRegistered(result) => self.registrant.report(Life::Registered(result)),
            Action::ReportEnded(why) => self.registrant.report(Life::Ended(why)),
        }
    }
}

/// A random number, from the seeds of the standard library's hashers.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
