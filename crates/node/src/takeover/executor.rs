//! Carries out the actions of `takeover::machine`: holds the lock, speaks with the other process, turns the node's
//! plugins and files on and off, and keeps the time.
//!
//! A task of `linkwise run`. The module decides only when a condition is met: this node could serve, its plugins are
//! registered, they have ended.

mod attempts;
mod condition;
mod metrics;
mod place;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::duty::{Duty, Running};
use crate::keeper::{self, Keeper};
use crate::node::Node;
use crate::readiness::{Part, Readiness};
use crate::takeover::{Action, Connection, Input, Limits, Lock, Outcome, SOCKET, Stage, TakeoverMachine, Word};
use condition::{Could, Known, condition};
use linkwise_core::state::{HealthRecord, NodeState};
use linkwise_core::topology::NodeObservation;
use linkwise_kubelet::device_plugin::HeldCalls;
use linkwise_kubelet::dra::ClaimsTurn;
use linkwise_nvml::supervisor::Others;
use linkwise_system::clock::at;
use linkwise_system::right::Right;
use linkwise_system::uds::{self, Callers, Listener};
pub use metrics::TakeoverMetrics;
use place::Place;

/// The time between two attempts of a standby without a connection to connect, or to take the lock.
const LOOK: Duration = Duration::from_millis(20);
/// The time between two attempts of an owner that could not have the lock to take it.
const LOOK_AS_OWNER: Duration = Duration::from_secs(1);
/// The time for which a new owner may register its plugins once more.
const SETTLED: Duration = Duration::from_secs(3);
/// The time from the end of the owner's plugins until the kubelet has noticed it.
const SEEN_TO_END: Duration = Duration::from_millis(50);
/// The longest time for the other process to take a message.
const SAY_TIMEOUT: Duration = Duration::from_secs(1);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The position in which this process begins.
pub enum Position {
    /// The only process: it has no folder for a lock.
    Alone,
    /// The owner. It has no lock where the folder cannot have one, and tries on.
    Owner(Place, Option<Lock>),
    /// A process beside the owner; true if it takes over. `None` while the disk does not tell if there is an owner.
    Standby(Place, Option<bool>),
}

impl Position {
    /// Looks whether another process serves this node. `pod`: the UID of this process's pod.
    pub async fn at(folder: Option<&Path>, pod: &str) -> Self {
        let Some(folder) = folder.map(Path::to_owned) else { return Self::Alone };
        let mut place = Place::new(folder, pod);
        match place.try_take().await {
            Some(Ok(Some(mut lock))) => {
                place.write_owner(&mut lock);
                Self::Owner(place, Some(lock))
            }
            Some(Ok(None)) => {
                let takes_over = place.takes_over();
                Self::Standby(place, Some(takes_over))
            }
            Some(Err(error)) => {
                let folder = place.folder.display();
                tracing::info!(%folder, %error, "no lock can be had: another linkwise would not be noticed");
                Self::Owner(place, None)
            }
            None => {
                let folder = place.folder.display();
                tracing::warn!(%folder, "the state folder does not answer: another linkwise may serve this node");
                Self::Standby(place, None)
            }
        }
    }

    /// Starts the task in a node. Returns the turn of this process's DRA plugin, and a token that is cancelled when the
    /// process has handed over for good.
    pub fn spawn_in(self, node: &mut Node) -> (watch::Receiver<ClaimsTurn>, CancellationToken) {
        let handed_over = CancellationToken::new();
        // The series exist on every node.
        let metrics = node.metrics().register(TakeoverMetrics::register);
        let (place, lock, is_known, machine) = match self {
            Self::Alone => return (watch::channel(ClaimsTurn::Holds).1, handed_over),
            Self::Owner(place, lock) => (place, lock, true, TakeoverMachine::owner(Limits::default())),
            Self::Standby(place, successor) => {
                let machine = TakeoverMachine::standby(Limits::default(), successor == Some(true));
                (place, None, successor.is_some(), machine)
            }
        };
        let (claims, turn) = watch::channel(machine.claims());
        node.others.send_replace(if machine.may_end() { Others::None } else { Others::MayHandOver });
        if machine.stands_by() {
            node.stand_by();
        } else if lock.is_none() {
            // It may have to stand by yet.
            node.remember();
        }
        let task = Takeover {
            keeper: Keeper::of(Some(place.folder.clone())),
            place,
            lock,
            is_known,
            machine,
            claims,
            claims_held: node.claims_held.subscribe(),
            duties: node.duties.0.clone(),
            files: node.files.clone(),
            running: node.running.subscribe(),
            readiness: node.readiness.clone(),
            snapshot: node.snapshot(),
            calls: node.kubelet.calls.clone(),
            records: node.records.subscribe(),
            metrics,
            begin: Instant::now(),
            owning: Instant::now(),
            gap_begin: None,
            gap: Duration::ZERO,
            lost: None,
            asked: Instant::now(),
            could: Could::default(),
            others: node.others.clone(),
            failed: None,
            peer: None,
            passed: None,
            observed: node.observed.subscribe(),
            seen: Seen::NotPassed,
            passes_seen: false,
            listener: None,
            guests: FuturesUnordered::new(),
            handed_over: handed_over.clone(),
            shutdown: node.shutdown(),
        };
        node.spawn("takeover", task.run());
        (turn, handed_over)
    }
}

/// The message of a connected process and the lock with it, or the reason why no further message comes.
type Heard = io::Result<(Word, Option<OwnedFd>)>;

/// A connection after a wait, and its result.
type Guest = Pin<Box<dyn Future<Output = (Connection, Heard)> + Send>>;

/// The state machine, and the objects that its actions change.
struct Takeover {
    place: Place,
    lock: Option<Lock>,
    /// True if the disk has told whether there is an owner.
    is_known: bool,
    machine: TakeoverMachine,
    keeper: Keeper,
    claims: watch::Sender<ClaimsTurn>,
    claims_held: watch::Receiver<bool>,
    duties: mpsc::Sender<Duty>,
    files: watch::Sender<Option<Right>>,
    running: watch::Receiver<Running>,
    readiness: Readiness,
    snapshot: watch::Receiver<Arc<NodeState>>,
    calls: HeldCalls,
    records: watch::Receiver<Option<HealthRecord>>,
    metrics: TakeoverMetrics,
    begin: Instant,
    /// The moment at which this process became the owner.
    owning: Instant,
    /// The moment since when a plugin is not registered, as far as this process can tell.
    gap_begin: Option<Instant>,
    /// The earlier gaps of this takeover together.
    gap: Duration,
    /// The moment at which the owner's connection ended.
    lost: Option<Instant>,
    /// The moment at which the owner was asked.
    asked: Instant,
    could: Could,
    others: watch::Sender<Others>,
    /// The reason for which the last takeover failed.
    failed: Option<String>,
    /// The other process in a takeover; for a standby, the owner.
    peer: Option<Connection>,
    /// The record that the owner handed over.
    passed: Option<Option<Box<HealthRecord>>>,
    observed: watch::Receiver<Option<Arc<NodeObservation>>>,
    /// The GPUs as the owner whose place this process takes saw them last.
    seen: Seen,
    /// True if the standby takes the place of this process, and gets the GPUs as they were seen last.
    passes_seen: bool,
    listener: Option<Listener>,
    guests: FuturesUnordered<Guest>,
    handed_over: CancellationToken,
    shutdown: CancellationToken,
}

/// The GPUs that an owner passed on.
#[derive(Debug)]
enum Seen {
    NotPassed,
    Passed {
        seen: Box<NodeObservation>,
        away: bool,
    },
    /// The owner has seen GPUs, and this version does not know how.
    Unreadable,
}

enum Happened {
    Input(Input),
    Guest(Connection),
    /// A standby sent a message, or left.
    Said(Connection, Heard),
    Peer(Heard),
    /// A standby without a connection must look for an owner, and an owner without the lock for another.
    Look,
    /// All plugins of this process are registered, or one of them no longer is.
    Serves(bool),
}

impl Takeover {
    async fn run(mut self) -> Result<()> {
        if self.machine.stage() == Stage::Owning {
            if self.lock.is_some() {
                self.listen();
            }
        } else {
            self.metrics.standing_by.set(1);
            self.look().await?;
        }
        loop {
            let happened = self.next().await;
            match happened {
                Happened::Input(input) => self.feed(input).await?,
                Happened::Guest(connection) => self.welcome(connection),
                Happened::Said(connection, heard) => self.guest_said(connection, heard).await?,
                Happened::Peer(heard) => self.peer_said(heard).await?,
                Happened::Look => self.look().await?,
                Happened::Serves(serves) => self.serves(serves),
            }
        }
    }

    /// Waits for the next event. The timer comes last: messages that have arrived count before deadlines.
    async fn next(&mut self) -> Happened {
        let stage = self.machine.stage();
        let wake = self.machine.wake().map(|wake| self.begin + wake);
        let look = match stage {
            Stage::StandingBy if self.peer.is_none() => Some(LOOK),
            Stage::Owning if self.lock.is_none() => Some(LOOK_AS_OWNER),
            _ => None,
        };
        let listener = self.listener.as_ref().map(Listener::accept);
        let is_empty_handed = self.is_empty_handed();
        let known = Known { stage, could: self.could, serves: self.gap_begin.is_none(), is_empty_handed };
        let (snapshot, readiness) = (self.snapshot.clone(), self.readiness.clone());
        let ended = (self.running.clone(), self.claims_held.clone());
        let condition = condition(known, snapshot, readiness, ended, self.calls.clone());
        tokio::select! {
            biased;
            Some(heard) = OptionFuture::from(self.peer.as_mut().map(Connection::next)) => Happened::Peer(heard),
            Some((connection, heard)) = self.guests.next() => Happened::Said(connection, heard),
            Some(caller) = OptionFuture::from(listener) => match caller {
                Ok(caller) if caller.admitted => Happened::Guest(Connection::new(caller.stream)),
                Ok(_) => Happened::Input(Input::Tick),
                Err(_) => {
                    sleep(LOOK).await;
                    Happened::Input(Input::Tick)
                }
            },
            happened = condition => happened,
            Some(()) = OptionFuture::from(look.map(sleep)) => Happened::Look,
            () = at(wake) => Happened::Input(Input::Tick),
        }
    }

    /// Checks if the lock is free, and otherwise looks for the owner.
    async fn look(&mut self) -> Result<()> {
        let found = self.place.try_take().await;
        if self.machine.stage() == Stage::Owning {
            return self.look_as_owner(found).await;
        }
        match found {
            Some(Ok(Some(lock))) => {
                (self.lock, self.is_known) = (Some(lock), true);
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) if !self.is_known => {
                self.is_known = true;
                let successor = self.place.takes_over();
                self.feed(Input::Held { successor }).await?;
            }
            // The disk answers, and cannot have a lock: there is no owner that has it.
            Some(Err(error)) if !self.is_known => {
                tracing::info!(%error, "no lock can be had: another linkwise would not be noticed");
                self.is_known = true;
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) => {}
            Some(Err(error)) => tracing::debug!(%error, "the lock cannot be tried"),
            None => tracing::debug!("the lock cannot be tried in time"),
        }
        if !self.is_known {
            return Ok(());
        }
        if let Ok(Ok((stream, _))) = timeout(LOOK, uds::connect(&self.place.folder.join(SOCKET))).await {
            self.peer = Some(Connection::new(stream));
            self.feed(Input::Connected).await?;
        }
        Ok(())
    }

    /// The lock can be had at last: this process takes it, or stands by if another has it.
    async fn look_as_owner(&mut self, found: Option<io::Result<Option<Lock>>>) -> Result<()> {
        match found {
            Some(Ok(Some(lock))) => {
                tracing::info!("this process has the lock at last");
                self.lock = Some(lock);
                self.perform(Action::Listen).await
            }
            Some(Ok(None)) => {
                tracing::warn!("another linkwise has the lock");
                let successor = self.place.takes_over();
                self.feed(Input::Held { successor }).await
            }
            Some(Err(_)) | None => Ok(()),
        }
    }

    fn welcome(&self, mut connection: Connection) {
        self.guests.push(Box::pin(async move {
            let heard = connection.next().await;
            (connection, heard)
        }));
    }

    async fn guest_said(&mut self, connection: Connection, heard: Heard) -> Result<()> {
        match heard {
            Ok((Word::TakeOver { version, pod, joins }, _)) if self.may_hand_over() => {
                tracing::info!(version, pod, "another linkwise takes over");
                (self.peer, self.passes_seen) = (Some(connection), false);
                self.feed(Input::TakeOver { joins }).await?;
            }
            Ok((Word::TakePlace { .. }, _)) if !self.readiness.lacks_driver() => {
                self.answer(connection, Word::KeepPlace).await;
            }
            Ok((Word::TakePlace { version, pod }, _)) if self.may_hand_over() => {
                tracing::info!(version, pod, "another linkwise takes the place of this one; neither has the driver");
                (self.peer, self.passes_seen) = (Some(connection), true);
                self.feed(Input::TakeOver { joins: true }).await?;
            }
            Ok((Word::TakeOver { .. } | Word::TakePlace { .. }, _)) => {
                let why = "a takeover is under way, or was a moment ago".to_owned();
                self.answer(connection, Word::Refused { why }).await;
            }
            Ok(_) => self.welcome(connection),
            Err(_) => {}
        }
        Ok(())
    }

    async fn answer(&mut self, connection: Connection, word: Word) {
        let _ = timeout(SAY_TIMEOUT, connection.say(&word, None)).await;
        self.welcome(connection);
    }

    /// Returns true if another process can take over. After a takeover our plugins register once more: this must not
    /// come after the registrations of the next owner, which it would displace.
    fn may_hand_over(&self) -> bool {
        let settled = self.readiness.has_plugins(true) || self.owning.elapsed() > SETTLED;
        self.machine.stage() == Stage::Owning && settled
    }

    async fn peer_said(&mut self, heard: Heard) -> Result<()> {
        let input = match heard {
            Ok((Word::Record { record, seen, away }, Some(lock))) if self.machine.takes_record() => {
                self.lock = Some(Lock::passed(lock));
                self.seen = match serde_json::from_value(seen) {
                    Ok(None) => Seen::NotPassed,
                    Ok(Some(seen)) => Seen::Passed { seen, away },
                    Err(_) => Seen::Unreadable,
                };
                let record = Some(record).filter(|record| !record.is_null());
                let parsed = record.map(|record| keeper::parse(record.to_string().as_bytes()));
                self.passed = Some(parsed.and_then(Result::ok).map(Box::new));
                Input::Record
            }
            Ok((Word::Refused { why }, _)) => {
                tracing::info!(why, "the linkwise that serves this node does not hand over now");
                Input::Refused
            }
            Ok((Word::KeepPlace, _)) => {
                tracing::info!("the linkwise that serves this node has the driver, and keeps its place");
                Input::PlaceKept
            }
            Ok((Word::Agreed, _)) => Input::Agreed,
            Ok((Word::Joined, _)) => Input::TheyJoined,
            Ok((Word::Serving, _)) => Input::TheyServe,
            Ok((Word::Ended, _)) => Input::Ended,
            Ok((Word::Done, _)) => Input::TheyAreDone,
            Ok((Word::Failed { why }, _)) => {
                tracing::warn!(why, "the other linkwise gives up taking over");
                Input::TheyFailed
            }
            Ok((Word::Back { why }, _)) => {
                tracing::warn!(why, "the other linkwise takes back this node");
                Input::Back
            }
            Ok(_) => return Ok(()),
            Err(error) => {
                tracing::debug!(%error, "the other linkwise is gone");
                self.peer = None;
                Input::Lost
            }
        };
        self.feed(input).await
    }

    async fn feed(&mut self, input: Input) -> Result<()> {
        match input {
            Input::Able => self.could = Could::Serve,
            Input::Unable => self.could = Could::Not,
            Input::Connected => self.lost = None,
            Input::Lost => {
                self.lost = Some(Instant::now());
                self.calls.release(SEEN_TO_END);
            }
            Input::Ended | Input::Back => self.calls.release(SEEN_TO_END),
            _ => {}
        }
        let before = self.machine.stage();
        let actions = self.machine.step(input, self.begin.elapsed());
        let stage = self.machine.stage();
        if stage != before || matches!(input, Input::Able | Input::Unable | Input::Connected) {
            tracing::debug!(?stage, ?input, "takeover");
        }
        match stage {
            _ if stage == before => {}
            // The node is not ready yet: when a new pod is ready, the pod before it is ended, even in the middle of
            // handing over.
            Stage::Starting => self.readiness.add(Part::Predecessor, "ending its plugins"),
            Stage::Waiting => {}
            _ => self.readiness.remove(&Part::Predecessor),
        }
        self.show_others();
        for action in actions {
            self.perform(action).await?;
        }
        if stage != before && stage == Stage::Owning {
            self.owning = Instant::now();
        }
        self.metrics.standing_by.set(self.machine.stands_by().into());
        if input == Input::Lost && stage == Stage::StandingBy {
            // The end of the owner may free the lock a moment after it ends the connection.
            self.look_now().await?;
        }
        // Last: a DRA plugin that is registered already stays so where the owner died.
        let claims = self.machine.claims();
        self.claims.send_if_modified(|before| std::mem::replace(before, claims) != claims);
        Ok(())
    }

    /// Returns true if this process takes the place of an owner that offers nothing, and sees nothing itself.
    fn is_empty_handed(&self) -> bool {
        self.machine.takes_place() && matches!(self.seen, Seen::NotPassed)
    }

    /// Shows the part of the other process: NVML that cannot be initialised must not end a process that may still take
    /// over, or that offers what an owner saw.
    fn show_others(&self) {
        let others = match &self.seen {
            Seen::Passed { away, .. } if self.machine.takes_place() && !self.machine.stands_by() => {
                Others::HandedOver { away: *away }
            }
            _ if self.machine.may_end() => Others::None,
            _ => Others::MayHandOver,
        };
        self.others.send_if_modified(|before| std::mem::replace(before, others) != others);
    }

    /// Measures the time for which not every plugin is registered.
    fn serves(&mut self, serves: bool) {
        if !serves {
            self.gap_begin = Some(Instant::now());
        } else if let Some(begin) = self.gap_begin.take() {
            self.gap += begin.elapsed();
            if self.machine.stage() == Stage::Owning {
                self.metrics.gap.set(self.gap.as_secs_f64());
                tracing::info!(gap = ?self.gap, "every plugin is registered after the takeover");
            }
        }
    }

    /// Tries to take the lock several times in a row.
    async fn look_now(&mut self) -> Result<()> {
        for _ in 0..50 {
            if self.machine.stage() != Stage::StandingBy || self.peer.is_some() {
                break;
            }
            Box::pin(self.look()).await?;
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    async fn perform(&mut self, action: Action) -> Result<()> {
        match action {
            Action::SayTakeOver => {
                self.readiness.takeover_failed(None);
                (self.asked, self.gap, self.gap_begin) = (Instant::now(), Duration::ZERO, None);
                let (version, pod) = (VERSION.to_owned(), self.place.pod.clone());
                self.say(Word::TakeOver { version, pod, joins: true }).await;
            }
            Action::SayTakePlace => {
                self.readiness.takeover_failed(None);
                (self.asked, self.gap, self.gap_begin) = (Instant::now(), Duration::ZERO, None);
                let (version, pod) = (VERSION.to_owned(), self.place.pod.clone());
                self.say(Word::TakePlace { version, pod }).await;
            }
            Action::SayAgreed => self.say(Word::Agreed).await,
            Action::SayJoined => self.say(Word::Joined).await,
            Action::SayRecord => {
                let kept = self.records.borrow().clone();
                let record = kept.unwrap_or_else(|| self.snapshot.borrow().record());
                let record = serde_json::to_value(record).unwrap_or_default();
                let observed = self.observed.borrow().clone().filter(|_| self.passes_seen);
                let seen = observed.map(|seen| serde_json::to_value(&*seen).unwrap_or_default()).unwrap_or_default();
                self.say(Word::Record { record, seen, away: self.readiness.is_driver_away() }).await;
            }
            Action::SayServing => self.say(Word::Serving).await,
            Action::SayEnded => self.say(Word::Ended).await,
            Action::SayDone => self.say(Word::Done).await,
            Action::SayFailed => {
                let why = self.readiness.summary().err().unwrap_or_default().join("; ");
                self.failed = Some(why.clone());
                self.say(Word::Failed { why }).await;
            }
            Action::SayBack => self.say(Word::Back { why: "no answer in time".to_owned() }).await,
            Action::HangUp => self.peer = None,
            Action::Adopt => {
                let record = match self.passed.take() {
                    Some(record) => record,
                    None => self.keeper.read().await.map(Box::new),
                };
                let seen = match &self.seen {
                    Seen::Passed { seen, .. } if self.machine.takes_place() => Some(seen.clone()),
                    _ => None,
                };
                let inherits = seen.is_some();
                self.order(Duty::Adopt(record, seen)).await?;
                if inherits {
                    // Claims that wait go on next, and find the GPUs in the snapshot.
                    let sees = self.snapshot.wait_for(|state| !state.topology().gpus().is_empty());
                    let _ = timeout(SAY_TIMEOUT, sees).await;
                }
            }
            Action::Files(true) => drop(self.files.send_replace(Some(Right::new(())))),
            Action::Files(false) => {
                let writes = self.files.send_replace(None).map(|right| right.ended());
                OptionFuture::from(writes).await;
            }
            Action::Plugins(on) => self.order(Duty::Plugins(on)).await?,
            Action::Renew => self.order(Duty::Renew).await?,
            Action::Listen => {
                if let Some(lock) = &mut self.lock {
                    self.place.write_owner(lock);
                }
                if self.readiness.sees_nothing() {
                    // No plugin will start and end this part.
                    self.readiness.remove(&Part::Owner);
                }
                self.listen();
            }
            Action::LetGo => self.lock = None,
            Action::Retire => {
                self.listener = None;
                self.handed_over.cancel();
                self.shutdown.cancel();
            }
            Action::Report(outcome) => self.report(outcome),
        }
        Ok(())
    }

    async fn order(&mut self, duty: Duty) -> Result<()> {
        self.duties.send(duty).await.ok().context("the node takes no duties")
    }

    /// Sends a message to the other process; the lock goes with the record. If the process does not take it, the next
    /// read or a deadline shows that it is gone.
    async fn say(&mut self, word: Word) {
        let Some(peer) = &self.peer else { return };
        let lock = self.lock.as_ref().filter(|_| matches!(word, Word::Record { .. })).map(Lock::as_fd);
        if !matches!(timeout(SAY_TIMEOUT, peer.say(&word, lock)).await, Ok(Ok(()))) {
            tracing::debug!(?word, "the other linkwise takes no word");
        }
    }

    /// Starts to listen. The socket of the last owner may still exist.
    fn listen(&mut self) {
        let path = self.place.folder.join(SOCKET);
        let listening = match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => uds::listen(&path, Callers::default()),
        };
        match listening {
            Ok((file, listener)) => {
                // The next owner binds the path while this process may be ending.
                file.leave();
                self.listener = Some(listener);
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "no takeover socket: an upgrade will wait for this process's end");
            }
        }
    }

    fn report(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::TookOver => {
                self.metrics.count("took_over");
                self.metrics.gap.set(self.gap.as_secs_f64());
                tracing::info!(took = ?self.asked.elapsed(), gap = ?self.gap, "took over this node from another linkwise");
            }
            Outcome::Succeeded => {
                self.metrics.count("succeeded");
                // The gap lasts until every plugin is registered, which may be the case already.
                self.gap_begin.get_or_insert_with(|| self.lost.unwrap_or_else(Instant::now));
                tracing::info!("took over this node: the linkwise that served it has ended");
            }
            Outcome::Failed => {
                self.metrics.count("failed");
                let wait = self.machine.wake().map(|wake| wake.saturating_sub(self.begin.elapsed()));
                let again_in = Duration::from_secs((wait.unwrap_or_default() + Duration::from_millis(500)).as_secs());
                let why = self.failed.take().unwrap_or_else(|| "the other linkwise did not go on".to_owned());
                tracing::warn!(why, ?again_in, "could not take over this node, standing by again");
                self.readiness.takeover_failed(Some(format!("could not take over, again in {again_in:?}: {why}")));
            }
            Outcome::HandedOver => {
                self.metrics.count("handed_over");
                tracing::info!("another linkwise has taken over this node; idling until a signal");
            }
            Outcome::WentOn => {
                self.metrics.count("went_on");
                tracing::warn!("another linkwise could not take over this node, going on");
            }
        }
    }
}
