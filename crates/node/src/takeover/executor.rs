//! Carries out what `takeover::machine` decides: holds the lock, speaks with the other process, gives the node's tasks
//! their duties and takes them back, and keeps the time.
//!
//! A task of `linkwise run`. The module decides only when the condition of a stage is met: this node could serve, its
//! plugins are registered, they have ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::keeper::{self, Keeper};
use crate::node::Node;
use crate::node::standby::Order;
use crate::readiness::Part;
use crate::takeover::condition::Facts;
use crate::takeover::lock::{Lock, Place};
use crate::takeover::machine::{Action, Duties, Input, Outcome, Stage, TakeoverMachine};
use crate::takeover::wire::{Asks, Connection, Word};
use crate::takeover::{SOCKET, VERSION};
use linkwise_core::state::HealthRecord;
use linkwise_core::topology::NodeObservation;
use linkwise_nvml::supervisor::Others;
use linkwise_system::clock::at;
use linkwise_system::files;
use linkwise_system::metrics::new;
use linkwise_system::right::Right;
use linkwise_system::uds::{self, Callers, Listener};

/// The time between two attempts of a standby without a connection to connect, or to take the lock.
const LOOK: Duration = Duration::from_millis(20);
/// The time between two attempts of an owner that could not have the lock to take it, and of a pod that has handed over.
const LOOK_SELDOM: Duration = Duration::from_secs(1);
/// The attempts to take the lock when the owner's connection has ended: its end may free the lock a moment later.
const LOOKS_AT_END: usize = 50;
/// The time from the end of the owner's plugins until the kubelet has noticed it.
const SEEN_TO_END: Duration = Duration::from_millis(50);
/// The longest time for the other process to take a message.
const SAY_TIMEOUT: Duration = Duration::from_secs(1);

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

    /// Starts the task in a node. Returns a token that is cancelled when the process has handed over for good.
    pub fn spawn_in(self, node: &mut Node) -> CancellationToken {
        let handed_over = CancellationToken::new();
        // The series exist on every node.
        let metrics = node.metrics().register(TakeoverMetrics::register);
        let (place, lock, takes_over, machine) = match self {
            Self::Alone => return handed_over,
            Self::Owner(place, lock) => {
                if lock.is_none() {
                    // It may have to stand by yet.
                    node.log_events();
                }
                (place, lock, Some(false), TakeoverMachine::owner())
            }
            Self::Standby(place, takes_over) => {
                node.stand_by();
                (place, None, takes_over, TakeoverMachine::standby(takes_over == Some(true)))
            }
        };
        let task = Takeover {
            keeper: Keeper::of(Some(place.folder.clone())),
            place,
            lock,
            takes_over,
            orders: node.order_sender.clone(),
            dra: node.offers_dra.clone(),
            claims: node.claims.clone(),
            claims_ends: Vec::new(),
            files: node.files.clone(),
            plugins: machine.duties().plugins,
            facts: Facts {
                snapshot: node.snapshot(),
                readiness: node.readiness.clone(),
                running: node.plugin_status.subscribe(),
                calls: node.kubelet.calls.clone(),
            },
            records: node.records.subscribe(),
            observed: node.observed.subscribe(),
            others: node.others.clone(),
            machine,
            metrics,
            begin: Instant::now(),
            owning: Instant::now(),
            asked: Instant::now(),
            failed: None,
            peer: None,
            passed: None,
            seen: None,
            passes_seen: false,
            listener: None,
            guests: FuturesUnordered::new(),
            handed_over: handed_over.clone(),
            shutdown: node.shutdown(),
        };
        task.show_others();
        node.spawn("takeover", task.run());
        handed_over
    }
}

/// The message of a connected process and the lock with it, or the reason why no further message comes.
type Heard = io::Result<(Word, Option<OwnedFd>)>;

/// A connection after a wait, and its result.
type Guest = Pin<Box<dyn Future<Output = (Connection, Heard)> + Send>>;

/// The state machine, and the objects that its actions and duties change.
struct Takeover {
    place: Place,
    lock: Option<Lock>,
    /// True if this process takes over from a living owner. `None` while the disk does not tell if there is one.
    takes_over: Option<bool>,
    machine: TakeoverMachine,
    keeper: Keeper,
    orders: mpsc::Sender<Order>,
    dra: watch::Sender<bool>,
    claims: watch::Sender<Option<Right>>,
    /// Each is cancelled when a right to touch claims that was taken back has ended.
    claims_ends: Vec<CancellationToken>,
    files: watch::Sender<Option<Right>>,
    /// True if the node was told last to have plugins.
    plugins: bool,
    facts: Facts,
    records: watch::Receiver<Option<HealthRecord>>,
    observed: watch::Receiver<Option<Arc<NodeObservation>>>,
    others: watch::Sender<Others>,
    metrics: TakeoverMetrics,
    begin: Instant,
    /// The moment at which this process became the owner.
    owning: Instant,
    /// The moment at which the owner was asked.
    asked: Instant,
    /// The reason for which the last takeover failed.
    failed: Option<String>,
    /// The other process in a takeover; for a standby, the owner.
    peer: Option<Connection>,
    /// The record that the owner handed over.
    passed: Option<Option<Box<HealthRecord>>>,
    /// The GPUs as the owner whose place this process takes saw them last, and true if its driver was away.
    seen: Option<(Box<NodeObservation>, bool)>,
    /// True if the standby takes the place of this process, and gets the GPUs as they were seen last.
    passes_seen: bool,
    listener: Option<Listener>,
    guests: FuturesUnordered<Guest>,
    handed_over: CancellationToken,
    shutdown: CancellationToken,
}

impl Takeover {
    async fn run(mut self) -> Result<()> {
        self.metrics.standing_by.set(self.machine.stands_by().into());
        if self.machine.stands_by() {
            self.look().await?;
        } else if self.lock.is_some() {
            self.listen();
        }
        loop {
            let stage = self.machine.stage();
            let wake = self.machine.wake().map(|wake| self.begin + wake);
            // A standby without a connection must look for an owner, and an owner without the lock for another.
            let look = match stage {
                Stage::StandingBy if self.peer.is_none() => {
                    Some(if self.takes_over == Some(false) { LOOK_SELDOM } else { LOOK })
                }
                Stage::Owning if self.lock.is_none() => Some(LOOK_SELDOM),
                _ => None,
            };
            let hands_over = stage == Stage::Owning && self.peer.is_none();
            let is_empty_handed = self.is_empty_handed();
            let condition = self.facts.clone().condition(&self.machine, is_empty_handed, self.claims_ends.clone());
            let (settled, guests) = (self.facts.clone().settled(self.owning), &mut self.guests);
            let requests = async {
                settled.await;
                guests.next().await
            };
            let listener = self.listener.as_ref().map(Listener::accept);
            // The timer comes last: messages that have arrived count before deadlines.
            tokio::select! {
                biased;
                Some(heard) = OptionFuture::from(self.peer.as_mut().map(Connection::next)) => {
                    self.peer_said(heard).await?;
                }
                Some((connection, heard)) = requests, if hands_over => self.guest_said(connection, heard).await?,
                Some(caller) = OptionFuture::from(listener) => match caller {
                    Ok(caller) if caller.is_admitted => self.welcome(Connection::new(caller.stream)),
                    Ok(_) => {}
                    Err(_) => sleep(LOOK).await,
                },
                input = condition => self.feed(input).await?,
                Some(()) = OptionFuture::from(look.map(sleep)) => self.look().await?,
                () = at(wake) => self.feed(Input::Tick).await?,
            }
        }
    }

    /// Checks if the lock is free, and otherwise looks for the owner.
    async fn look(&mut self) -> Result<()> {
        let found = self.place.try_take().await;
        let is_owner = self.machine.stage() == Stage::Owning;
        match found {
            Some(Ok(Some(lock))) if is_owner => {
                tracing::info!("this process has the lock at last");
                self.lock = Some(lock);
                self.listen();
                return Ok(());
            }
            Some(Ok(Some(lock))) => {
                self.lock = Some(lock);
                self.takes_over.get_or_insert(false);
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) if is_owner || self.takes_over.is_none() => {
                if is_owner {
                    tracing::warn!("another linkwise has the lock");
                }
                let successor = self.place.takes_over();
                self.takes_over = Some(successor);
                self.feed(Input::Held { successor }).await?;
            }
            _ if is_owner => return Ok(()),
            // The disk answers, and cannot have a lock: there is no owner that has it.
            Some(Err(error)) if self.takes_over.is_none() => {
                tracing::info!(%error, "no lock can be had: another linkwise would not be noticed");
                self.takes_over = Some(false);
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) => {}
            Some(Err(error)) => tracing::debug!(%error, "the lock cannot be tried"),
            None => tracing::debug!("the lock cannot be tried in time"),
        }
        if self.takes_over == Some(true)
            && let Ok(Ok((stream, _))) = timeout(LOOK, uds::connect(&self.place.folder.join(SOCKET))).await
        {
            self.peer = Some(Connection::new(stream));
            self.feed(Input::Connected).await?;
        }
        Ok(())
    }

    fn welcome(&self, mut connection: Connection) {
        self.guests.push(Box::pin(async move {
            let heard = connection.next().await;
            (connection, heard)
        }));
    }

    async fn guest_said(&mut self, connection: Connection, heard: Heard) -> Result<()> {
        match heard {
            Ok((Word::TakePlace(_), _)) if !self.facts.readiness.lacks_driver() => {
                let _ = timeout(SAY_TIMEOUT, connection.say(&Word::KeepPlace, None)).await;
                self.welcome(connection);
            }
            Ok((word @ (Word::TakeOver(_) | Word::TakePlace(_)), _)) => {
                tracing::info!(?word, "another linkwise takes over");
                (self.peer, self.passes_seen) = (Some(connection), matches!(word, Word::TakePlace(_)));
                self.feed(Input::TakeOver).await?;
            }
            Ok(_) => self.welcome(connection),
            Err(_) => {}
        }
        Ok(())
    }

    async fn peer_said(&mut self, heard: Heard) -> Result<()> {
        let input = match heard {
            Ok((Word::Agreed, _)) => Input::Agreed,
            Ok((Word::KeepPlace, _)) => {
                tracing::info!("the linkwise that serves this node has the driver, and keeps its place");
                Input::Refused
            }
            Ok((Word::Joined, _)) => Input::TheyJoined,
            Ok((Word::Record { record, seen, away }, Some(lock))) if self.machine.stage() == Stage::Receiving => {
                match serde_json::from_value::<Option<Box<NodeObservation>>>(seen) {
                    Ok(seen) => {
                        self.lock = Some(Lock::passed(lock));
                        self.seen = seen.map(|seen| (seen, away));
                        let record = Some(record).filter(|record| !record.is_null());
                        let parsed = record.map(|record| keeper::parse(record.to_string().as_bytes()));
                        self.passed = Some(parsed.and_then(Result::ok).map(Box::new));
                        Input::Record
                    }
                    Err(error) => {
                        self.failed = Some(format!("cannot read the GPUs of the linkwise before this one: {error}"));
                        Input::Refused
                    }
                }
            }
            Ok((Word::Serving, _)) => Input::TheyServe,
            Ok((Word::Back, _)) => {
                tracing::warn!("the other linkwise takes back this node");
                Input::Refused
            }
            Ok((Word::Ended, _)) => {
                self.say(Word::Done).await;
                self.peer = None;
                Input::Lost
            }
            Ok(_) => return Ok(()),
            Err(error) => {
                tracing::debug!(%error, "the other linkwise is gone");
                self.peer = None;
                // Before our DRA plugin's sockets go: calls may wait there.
                if self.machine.stands_by() && self.takes_free_lock().await { Input::Free } else { Input::Lost }
            }
        };
        self.feed(input).await
    }

    async fn takes_free_lock(&mut self) -> bool {
        for _ in 0..LOOKS_AT_END {
            match self.place.try_take().await {
                Some(Ok(Some(lock))) => {
                    self.lock = Some(lock);
                    return true;
                }
                Some(_) => sleep(Duration::from_millis(1)).await,
                None => break,
            }
        }
        false
    }

    async fn feed(&mut self, input: Input) -> Result<()> {
        if matches!(input, Input::Lost | Input::Refused) {
            self.facts.calls.release(SEEN_TO_END);
        }
        let before = self.machine.stage();
        let actions = self.machine.step(input, self.begin.elapsed());
        let (stage, duties) = (self.machine.stage(), self.machine.duties());
        if stage != before || matches!(input, Input::Sees(_) | Input::Connected) {
            tracing::debug!(?stage, ?input, "takeover");
        }
        match stage {
            _ if stage == before => {}
            // The node is not ready yet: when a new pod is ready, the pod before it is ended, even in the middle of
            // handing over.
            Stage::Starting => self.facts.readiness.add(Part::Predecessor, "ending its plugins"),
            Stage::Waiting => {}
            _ => self.facts.readiness.remove(&Part::Predecessor),
        }
        self.show_others();
        if (before, stage) == (Stage::Starting, Stage::StandingBy) {
            // Before the plugins end.
            let unready = self.facts.readiness.summary().err().unwrap_or_default();
            self.failed.get_or_insert_with(|| unready.join("; "));
        }
        self.withdraw(duties).await?;
        for action in actions {
            self.perform(action).await?;
        }
        self.grant(duties).await?;
        self.metrics.standing_by.set(self.machine.stands_by().into());
        match stage {
            Stage::StandingBy | Stage::Joining | Stage::Receiving => self.lock = None,
            Stage::Retired => {
                (self.lock, self.listener) = (None, None);
                self.handed_over.cancel();
                self.shutdown.cancel();
            }
            Stage::Owning if stage != before => {
                self.owning = Instant::now();
                if self.listener.is_none() && self.lock.is_some() {
                    self.listen();
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes back the duties that this process no longer has, and waits for the writes that were begun. Those for claims
    /// may take long: while draining, they are a condition, and this task hears the other process meanwhile.
    async fn withdraw(&mut self, duties: Duties) -> Result<()> {
        if self.plugins && !duties.plugins {
            self.plugins = false;
            self.order(Order::Plugins(false)).await?;
        }
        if !duties.claims
            && let Some(right) = self.claims.send_replace(None)
        {
            self.claims_ends.retain(|end| !end.is_cancelled());
            self.claims_ends.push(right.end());
        }
        if !duties.files {
            let end = self.files.send_replace(None).map(|right| right.end());
            for end in end.iter().chain(&self.claims_ends) {
                end.cancelled().await;
            }
        }
        Ok(())
    }

    async fn grant(&mut self, duties: Duties) -> Result<()> {
        let begins = |right: &mut Option<Right>| right.is_none() && right.replace(Right::default()).is_none();
        if duties.files {
            self.files.send_if_modified(begins);
        }
        if duties.plugins && !self.plugins {
            self.plugins = true;
            self.order(Order::Plugins(true)).await?;
        }
        if duties.claims {
            self.claims.send_if_modified(begins);
        }
        self.dra.send_if_modified(|dra| std::mem::replace(dra, duties.dra) != duties.dra);
        Ok(())
    }

    /// Returns true if this process takes the place of an owner that offers nothing, and sees nothing itself.
    fn is_empty_handed(&self) -> bool {
        self.machine.takes_place() && self.seen.is_none()
    }

    /// Shows the part of the other process: NVML that cannot be initialised must not end a process that may still take
    /// over, or that offers what an owner saw.
    fn show_others(&self) {
        let others = match &self.seen {
            Some((_, away)) if self.machine.takes_place() && !self.machine.stands_by() => {
                Others::HandedOver { away: *away }
            }
            _ if self.machine.may_end() => Others::None,
            _ => Others::MayHandOver,
        };
        self.others.send_if_modified(|before| std::mem::replace(before, others) != others);
    }

    async fn perform(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Ask => {
                self.facts.readiness.takeover_failed(None);
                self.asked = Instant::now();
                let asks = Asks { version: VERSION.to_owned(), pod: self.place.pod.clone(), joins: true };
                let place = self.machine.takes_place();
                self.say(if place { Word::TakePlace(asks) } else { Word::TakeOver(asks) }).await;
            }
            Action::HandOver => {
                let kept = self.records.borrow().clone();
                let record = kept.unwrap_or_else(|| self.facts.snapshot.borrow().record());
                let record = serde_json::to_value(record).unwrap_or_default();
                let observed = self.observed.borrow().clone().filter(|_| self.passes_seen);
                let seen = observed.map(|seen| serde_json::to_value(&*seen).unwrap_or_default()).unwrap_or_default();
                self.say(Word::Record { record, seen, away: self.facts.readiness.is_driver_away() }).await;
            }
            Action::Say(word) => self.say(word).await,
            Action::Adopt => {
                let record = match self.passed.take() {
                    Some(record) => record,
                    None => self.keeper.read().await.map(Box::new),
                };
                let seen = self.seen.as_ref().filter(|_| self.machine.takes_place()).map(|(seen, _)| seen.clone());
                let inherits = seen.is_some();
                self.order(Order::Adopt { record, owner_scan: seen }).await?;
                if inherits {
                    // Claims that wait go on next, and find the GPUs in the snapshot.
                    let sees = self.facts.snapshot.wait_for(|state| !state.topology().gpus().is_empty());
                    let _ = timeout(SAY_TIMEOUT, sees).await;
                }
            }
            Action::Renew => self.order(Order::Renew).await?,
            Action::End(outcome) => {
                self.peer = None;
                self.report(outcome);
            }
        }
        Ok(())
    }

    async fn order(&mut self, order: Order) -> Result<()> {
        self.orders.send(order).await.ok().context("the node takes no orders")
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

    /// Writes this process beside its lock, and becomes reachable for others. The socket of the last owner may still
    /// exist.
    fn listen(&mut self) {
        if let Some(lock) = &mut self.lock {
            self.place.write_owner(lock);
        }
        if self.facts.readiness.sees_nothing() {
            // No plugin will start and end this part.
            self.facts.readiness.remove(&Part::Owner);
        }
        let path = self.place.folder.join(SOCKET);
        let listening = files::remove_for_this_boot(&path).and_then(|_| uds::listen(&path, Callers::default()));
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
        let label = match outcome {
            Outcome::TookOver => {
                tracing::info!(took = ?self.asked.elapsed(), "took over this node from another linkwise");
                "took_over"
            }
            Outcome::Succeeded => {
                tracing::info!("took over this node: the linkwise that served it has ended");
                "succeeded"
            }
            Outcome::Failed => {
                let wait = self.machine.wake().map(|wake| wake.saturating_sub(self.begin.elapsed()));
                let again_in = Duration::from_secs((wait.unwrap_or_default() + Duration::from_millis(500)).as_secs());
                let why = self.failed.take().unwrap_or_else(|| "the other linkwise did not go on".to_owned());
                tracing::warn!(why, ?again_in, "could not take over this node, standing by again");
                let why = format!("could not take over, again in {again_in:?}: {why}");
                self.facts.readiness.takeover_failed(Some(why));
                "failed"
            }
            Outcome::HandedOver => {
                tracing::info!("another linkwise has taken over this node; idling until a signal");
                "handed_over"
            }
            Outcome::WentOn => {
                tracing::warn!("another linkwise could not take over this node, going on");
                "went_on"
            }
        };
        self.metrics.takeovers.get_or_create(&[("outcome", label)]).inc();
    }
}

/// The outcomes of takeovers. docs/metrics.md documents them.
#[derive(Clone, Debug)]
pub struct TakeoverMetrics {
    takeovers: Family<[(&'static str, &'static str); 1], Counter>,
    /// 1 while another linkwise serves this node.
    standing_by: Gauge,
}

impl TakeoverMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Takeovers between two linkwise of this node that this process took part in, by how they went";
        let takeovers: Family<_, Counter> = new(registry, "takeovers", help);
        for outcome in ["took_over", "succeeded", "failed", "handed_over", "went_on"] {
            drop(takeovers.get_or_create(&[("outcome", outcome)]));
        }
        let standing_by = new(registry, "standing_by", "1 while another linkwise serves this node");
        Self { takeovers, standing_by }
    }
}
