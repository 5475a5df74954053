//! Carries out what `takeover::machine` decides: holds the lock, speaks with the other process, gives the node's tasks
//! their duties and takes them back, and keeps the time.
//!
//! A task of `linkwise run`. It decides only that an owner with a driver keeps its place.

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
use crate::takeover::lock::{Lock, StateFolder};
use crate::takeover::machine::{Action, Duties, Input, Outcome, Stage, TakeoverMachine};
use crate::takeover::wire::{Connection, Message, StandbyInfo};
use crate::takeover::{SOCKET, VERSION};
use linkwise_core::state::HealthRecord;
use linkwise_core::topology::NodeObservation;
use linkwise_nvml::supervisor::Others;
use linkwise_system::clock::at;
use linkwise_system::files;
use linkwise_system::metrics::new;
use linkwise_system::right::Right;
use linkwise_system::uds::{self, Callers, Listener};

/// The time between two attempts of a standby to take the lock or to connect to the owner, and the connect's timeout.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The time between two attempts to take the lock, of an owner without the lock and of a pod that has handed over.
const SLOW_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The most attempts to take the lock when the connection to the owner has ended: a process that ends may free the lock
/// a moment after it closed the connection.
const MAX_LOCK_ATTEMPTS: usize = 50;
/// The longest time until the kubelet notices that the owner's plugins have ended.
const END_DELAY: Duration = Duration::from_millis(50);
/// The longest time for the other process to take a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The position in which this process begins.
pub enum Position {
    /// The only process: it has no folder for a lock.
    Alone,
    /// The owner. It has no lock if the folder cannot be locked, and goes on trying.
    Owner(StateFolder, Option<Lock>),
    /// A standby; true if it can take over. `None` until the disk shows whether there is an owner.
    Standby(StateFolder, Option<bool>),
}

impl Position {
    /// Takes the lock if no other process serves this node. `pod`: the UID of this process's pod.
    pub async fn at(folder: Option<&Path>, pod: &str) -> Self {
        let Some(path) = folder.map(Path::to_owned) else { return Self::Alone };
        let mut folder = StateFolder::new(path, pod);
        match folder.try_take().await {
            Some(Ok(Some(mut lock))) => {
                folder.write_owner(&mut lock);
                Self::Owner(folder, Some(lock))
            }
            Some(Ok(None)) => {
                let can_take_over = folder.can_take_over();
                Self::Standby(folder, Some(can_take_over))
            }
            Some(Err(error)) => {
                let what = "cannot lock the state folder: another linkwise would go unnoticed";
                tracing::info!(folder = %folder.path.display(), %error, "{what}");
                Self::Owner(folder, None)
            }
            None => {
                let what = "the state folder does not answer: another linkwise may serve this node";
                tracing::warn!(folder = %folder.path.display(), "{what}");
                Self::Standby(folder, None)
            }
        }
    }

    /// Starts the task in a node. Returns a token that is cancelled when the process has handed over for good.
    pub fn spawn_in(self, node: &mut Node) -> CancellationToken {
        let handed_over = CancellationToken::new();
        // Registered first, so that the series exist on every node.
        let metrics = node.metrics().register(TakeoverMetrics::register);
        let (folder, lock, can_take_over, machine) = match self {
            Self::Alone => return handed_over,
            Self::Owner(folder, lock) => {
                if lock.is_none() {
                    // An owner without the lock has to stand by if another process gets it.
                    node.log_events();
                }
                (folder, lock, Some(false), TakeoverMachine::owner())
            }
            Self::Standby(folder, can_take_over) => {
                node.stand_by();
                (folder, None, can_take_over, TakeoverMachine::standby(can_take_over == Some(true)))
            }
        };
        let task = Takeover {
            keeper: Keeper::of(Some(folder.path.clone())),
            folder,
            lock,
            can_take_over,
            orders: node.order_sender.clone(),
            dra: node.offers_dra.clone(),
            claims: node.claims.clone(),
            claims_ends: Vec::new(),
            files: node.files.clone(),
            has_plugins: machine.duties().plugins,
            facts: Facts {
                snapshot: node.snapshot(),
                readiness: node.readiness.clone(),
                plugin_status: node.plugin_status.subscribe(),
                calls: node.kubelet.calls.clone(),
            },
            records: node.records.subscribe(),
            observed: node.observed.subscribe(),
            others: node.others.clone(),
            machine,
            metrics,
            begun_at: Instant::now(),
            owner_since: Instant::now(),
            asked_at: Instant::now(),
            failure: None,
            peer: None,
            owner_record: None,
            owner_scan: None,
            passes_scan: false,
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

/// A message of the process at the other end and the lock with it, or the reason why no further message comes.
type Received = io::Result<(Message, Option<OwnedFd>)>;

/// A connection on which no message has led to a takeover yet: waits for its next message.
type Guest = Pin<Box<dyn Future<Output = (Connection, Received)> + Send>>;

/// The state machine, and the objects that its actions and duties change.
struct Takeover {
    folder: StateFolder,
    lock: Option<Lock>,
    /// True if this process can take over from a living owner. `None` until the disk shows whether there is one.
    can_take_over: Option<bool>,
    machine: TakeoverMachine,
    keeper: Keeper,
    orders: mpsc::Sender<Order>,
    dra: watch::Sender<bool>,
    claims: watch::Sender<Option<Right>>,
    /// A token for each right to touch claims that this process took back; cancelled when the right has ended.
    claims_ends: Vec<CancellationToken>,
    files: watch::Sender<Option<Right>>,
    /// True while the node's plugins have to serve.
    has_plugins: bool,
    facts: Facts,
    records: watch::Receiver<Option<HealthRecord>>,
    observed: watch::Receiver<Option<Arc<NodeObservation>>>,
    others: watch::Sender<Others>,
    metrics: TakeoverMetrics,
    /// The moment from which `machine` counts its time.
    begun_at: Instant,
    /// The moment at which this process became the owner.
    owner_since: Instant,
    /// The moment at which this process last asked to take over.
    asked_at: Instant,
    /// The reason why the last takeover failed.
    failure: Option<String>,
    /// The other process in a takeover; for a standby, the owner.
    peer: Option<Connection>,
    /// The record that the owner handed over; `Some(None)` without one that this process can read.
    owner_record: Option<Option<Box<HealthRecord>>>,
    /// The last scan of the owner whose place this process takes, and true if that owner's driver was away.
    owner_scan: Option<(Box<NodeObservation>, bool)>,
    /// True if the standby takes the place of this process, and so gets its last scan.
    passes_scan: bool,
    listener: Option<Listener>,
    guests: FuturesUnordered<Guest>,
    handed_over: CancellationToken,
    shutdown: CancellationToken,
}

impl Takeover {
    async fn run(mut self) -> Result<()> {
        self.metrics.standing_by.set(self.machine.stands_by().into());
        if self.machine.stands_by() {
            self.try_lock_or_connect().await?;
        } else if self.lock.is_some() {
            self.listen();
        }
        loop {
            let stage = self.machine.stage();
            let wake = self.machine.wake().map(|wake| self.begun_at + wake);
            // A standby without a connection must look for the owner, an owner without the lock for another owner.
            let retry = match stage {
                Stage::StandingBy if self.peer.is_none() => {
                    Some(if self.can_take_over == Some(false) { SLOW_RETRY_INTERVAL } else { RETRY_INTERVAL })
                }
                Stage::Owning if self.lock.is_none() => Some(SLOW_RETRY_INTERVAL),
                _ => None,
            };
            let takes_requests = stage == Stage::Owning && self.peer.is_none();
            let is_empty_handed = self.is_empty_handed();
            let condition = self.facts.clone().condition(&self.machine, is_empty_handed, self.claims_ends.clone());
            let (settled, guests) = (self.facts.clone().settled(self.owner_since), &mut self.guests);
            let requests = async {
                settled.await;
                guests.next().await
            };
            let listener = self.listener.as_ref().map(Listener::accept);
            // The timer comes last: messages that have arrived count before deadlines.
            tokio::select! {
                biased;
                Some(received) = OptionFuture::from(self.peer.as_mut().map(Connection::next)) => {
                    self.on_peer_message(received).await?;
                }
                Some((guest, received)) = requests, if takes_requests => self.on_guest_message(guest, received).await?,
                Some(caller) = OptionFuture::from(listener) => match caller {
                    Ok(caller) if caller.is_admitted => self.welcome(Connection::new(caller.stream)),
                    Ok(_) => {}
                    Err(_) => sleep(RETRY_INTERVAL).await,
                },
                input = condition => self.feed(input).await?,
                Some(()) = OptionFuture::from(retry.map(sleep)) => self.try_lock_or_connect().await?,
                () = at(wake) => self.feed(Input::Tick).await?,
            }
        }
    }

    /// Takes the lock if it is free; if not, connects to the owner if this process can take over.
    async fn try_lock_or_connect(&mut self) -> Result<()> {
        let found = self.folder.try_take().await;
        let is_owner = self.machine.stage() == Stage::Owning;
        match found {
            Some(Ok(Some(lock))) if is_owner => {
                tracing::info!("this process has the lock now");
                self.lock = Some(lock);
                self.listen();
                return Ok(());
            }
            Some(Ok(Some(lock))) => {
                self.lock = Some(lock);
                self.can_take_over.get_or_insert(false);
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) if is_owner || self.can_take_over.is_none() => {
                if is_owner {
                    tracing::warn!("another linkwise has the lock");
                }
                let can_take_over = self.folder.can_take_over();
                self.can_take_over = Some(can_take_over);
                self.feed(Input::Held { can_take_over }).await?;
            }
            _ if is_owner => return Ok(()),
            // The disk answers, and the folder cannot be locked, so no owner has the lock.
            Some(Err(error)) if self.can_take_over.is_none() => {
                tracing::info!(%error, "cannot lock the state folder: another linkwise would go unnoticed");
                self.can_take_over = Some(false);
                return self.feed(Input::Free).await;
            }
            Some(Ok(None)) => {}
            Some(Err(error)) => tracing::debug!(%error, "cannot try the lock"),
            None => tracing::debug!("cannot try the lock in time"),
        }
        if self.can_take_over == Some(true)
            && let Ok(Ok((stream, _))) = timeout(RETRY_INTERVAL, uds::connect(&self.folder.path.join(SOCKET))).await
        {
            self.peer = Some(Connection::new(stream));
            self.feed(Input::Connected).await?;
        }
        Ok(())
    }

    fn welcome(&self, mut connection: Connection) {
        self.guests.push(Box::pin(async move {
            let received = connection.next().await;
            (connection, received)
        }));
    }

    async fn on_guest_message(&mut self, connection: Connection, received: Received) -> Result<()> {
        match received {
            Ok((Message::TakePlace(_), _)) if !self.facts.readiness.lacks_driver() => {
                let _ = timeout(SEND_TIMEOUT, connection.send(&Message::KeepPlace, None)).await;
                self.welcome(connection);
            }
            Ok((message @ (Message::TakeOver(_) | Message::TakePlace(_)), _)) => {
                tracing::info!(word = ?message, "another linkwise takes over");
                (self.peer, self.passes_scan) = (Some(connection), matches!(message, Message::TakePlace(_)));
                self.feed(Input::TakeOver).await?;
            }
            Ok(_) => self.welcome(connection),
            Err(_) => {}
        }
        Ok(())
    }

    async fn on_peer_message(&mut self, received: Received) -> Result<()> {
        let input = match received {
            Ok((Message::Agreed, _)) => Input::Agreed,
            Ok((Message::KeepPlace, _)) => {
                tracing::info!("the linkwise that serves this node has the driver, and keeps its place");
                Input::Refused
            }
            Ok((Message::Joined, _)) => Input::TheyJoined,
            Ok((Message::Record { record, seen, away }, Some(lock))) if self.machine.stage() == Stage::Receiving => {
                match serde_json::from_value::<Option<Box<NodeObservation>>>(seen) {
                    Ok(seen) => {
                        self.lock = Some(Lock::passed(lock));
                        self.owner_scan = seen.map(|scan| (scan, away));
                        let record = Some(record).filter(|record| !record.is_null());
                        let parsed = record.map(|record| keeper::parse(record.to_string().as_bytes()));
                        self.owner_record = Some(parsed.and_then(Result::ok).map(Box::new));
                        Input::Record
                    }
                    Err(error) => {
                        self.failure = Some(format!("cannot read the last scan of the previous linkwise: {error}"));
                        Input::Refused
                    }
                }
            }
            Ok((Message::Serving, _)) => Input::TheyServe,
            Ok((Message::Back, _)) => {
                tracing::warn!("the other linkwise takes back this node");
                Input::Refused
            }
            Ok((Message::Ended, _)) => {
                self.send(Message::Done).await;
                self.peer = None;
                Input::Lost
            }
            Ok(_) => return Ok(()),
            Err(error) => {
                tracing::debug!(%error, "the other linkwise is gone");
                self.peer = None;
                // Try the lock before the sockets of our DRA plugin go, because calls may wait there.
                if self.machine.stands_by() && self.try_free_lock().await { Input::Free } else { Input::Lost }
            }
        };
        self.feed(input).await
    }

    async fn try_free_lock(&mut self) -> bool {
        for _ in 0..MAX_LOCK_ATTEMPTS {
            match self.folder.try_take().await {
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
            self.facts.calls.release(END_DELAY);
        }
        let before = self.machine.stage();
        let actions = self.machine.step(input, self.begun_at.elapsed());
        let (stage, duties) = (self.machine.stage(), self.machine.duties());
        if stage != before || matches!(input, Input::SeesGpus(_) | Input::Connected) {
            tracing::debug!(?stage, ?input, "takeover");
        }
        match stage {
            _ if stage == before => {}
            // Stay unready: once the new pod is ready, Kubernetes ends the previous pod, even while it hands over.
            Stage::Starting => self.facts.readiness.add(Part::Predecessor, "ending its plugins"),
            Stage::Waiting => {}
            _ => self.facts.readiness.remove(&Part::Predecessor),
        }
        self.show_others();
        if (before, stage) == (Stage::Starting, Stage::StandingBy) {
            // Read the readiness before the plugins end.
            let unready = self.facts.readiness.summary().err().unwrap_or_default();
            self.failure.get_or_insert_with(|| unready.join("; "));
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
                self.owner_since = Instant::now();
                if self.listener.is_none() && self.lock.is_some() {
                    self.listen();
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes back the duties that this process no longer has, and waits for the writes that have begun. Writes for
    /// claims may take long: while draining, their end is a condition, so that this task receives messages meanwhile.
    async fn withdraw(&mut self, duties: Duties) -> Result<()> {
        if self.has_plugins && !duties.plugins {
            self.has_plugins = false;
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
        let give = |right: &mut Option<Right>| right.is_none() && right.replace(Right::default()).is_none();
        if duties.files {
            self.files.send_if_modified(give);
        }
        if duties.plugins && !self.has_plugins {
            self.has_plugins = true;
            self.order(Order::Plugins(true)).await?;
        }
        if duties.claims {
            self.claims.send_if_modified(give);
        }
        self.dra.send_if_modified(|dra| std::mem::replace(dra, duties.dra) != duties.dra);
        Ok(())
    }

    /// Returns true if this process takes the place of an owner that offers no GPU, and sees none itself.
    fn is_empty_handed(&self) -> bool {
        self.machine.takes_place() && self.owner_scan.is_none()
    }

    /// Shows the supervisor of the agent what the other process means for this one: a process that may still take over,
    /// or that offers the GPUs of an owner's scan, must not end because it cannot initialise NVML.
    fn show_others(&self) {
        let others = match &self.owner_scan {
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
                self.facts.readiness.set_takeover_failure(None);
                self.asked_at = Instant::now();
                let standby = StandbyInfo { version: VERSION.to_owned(), pod: self.folder.pod.clone(), joins: true };
                let takes_place = self.machine.takes_place();
                self.send(if takes_place { Message::TakePlace(standby) } else { Message::TakeOver(standby) }).await;
            }
            Action::HandOver => {
                let kept = self.records.borrow().clone();
                let record = kept.unwrap_or_else(|| self.facts.snapshot.borrow().record());
                let record = serde_json::to_value(record).unwrap_or_default();
                let observed = self.observed.borrow().clone().filter(|_| self.passes_scan);
                let seen = observed.map(|scan| serde_json::to_value(&*scan).unwrap_or_default()).unwrap_or_default();
                self.send(Message::Record { record, seen, away: self.facts.readiness.is_driver_away() }).await;
            }
            Action::Send(message) => self.send(message).await,
            Action::Adopt => {
                let record = match self.owner_record.take() {
                    Some(record) => record,
                    None => self.keeper.read().await.map(Box::new),
                };
                let scan = self.owner_scan.as_ref().filter(|_| self.machine.takes_place());
                let owner_scan = scan.map(|(scan, _)| scan.clone());
                let inherits = owner_scan.is_some();
                self.order(Order::Adopt { record, owner_scan }).await?;
                if inherits {
                    // Waiting calls for claims go on next, and need the GPUs in the snapshot.
                    let has_gpus = self.facts.snapshot.wait_for(|state| !state.topology().gpus().is_empty());
                    let _ = timeout(SEND_TIMEOUT, has_gpus).await;
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

    /// Sends a message to the other process; the lock goes with the record. If that process is gone, the next read or
    /// a deadline shows it.
    async fn send(&mut self, message: Message) {
        let Some(peer) = &self.peer else { return };
        let lock = self.lock.as_ref().filter(|_| matches!(message, Message::Record { .. })).map(Lock::as_fd);
        if !matches!(timeout(SEND_TIMEOUT, peer.send(&message, lock)).await, Ok(Ok(()))) {
            tracing::debug!(word = ?message, "cannot send a message to the other linkwise");
        }
    }

    /// Writes this process into the lock's file, and listens on the takeover socket. The previous owner's socket may
    /// still exist.
    fn listen(&mut self) {
        if let Some(lock) = &mut self.lock {
            self.folder.write_owner(lock);
        }
        if self.facts.readiness.sees_nothing() {
            // No plugin will start and remove this part.
            self.facts.readiness.remove(&Part::Owner);
        }
        let path = self.folder.path.join(SOCKET);
        let listening = files::remove_for_this_boot(&path).and_then(|_| uds::listen(&path, Callers::default()));
        match listening {
            Ok((file, listener)) => {
                // The next owner binds the path while this process may be ending.
                file.leave();
                self.listener = Some(listener);
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot listen for takeovers: upgrades have to wait");
            }
        }
    }

    fn report(&mut self, outcome: Outcome) {
        let label = match outcome {
            Outcome::TookOver => {
                tracing::info!(took = ?self.asked_at.elapsed(), "took over this node from another linkwise");
                "took_over"
            }
            Outcome::Succeeded => {
                tracing::info!("took over this node: the linkwise that served it has ended");
                "succeeded"
            }
            Outcome::Failed => {
                let wait = self.machine.wake().map(|wake| wake.saturating_sub(self.begun_at.elapsed()));
                let again_in = Duration::from_secs((wait.unwrap_or_default() + Duration::from_millis(500)).as_secs());
                let why = self.failure.take().unwrap_or_else(|| "the other linkwise did not continue".to_owned());
                tracing::warn!(why, ?again_in, "could not take over this node, standing by again");
                let why = format!("could not take over, trying again in {again_in:?}: {why}");
                self.facts.readiness.set_takeover_failure(Some(why));
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

/// The metrics of takeovers. docs/metrics.md documents them.
#[derive(Clone, Debug)]
pub struct TakeoverMetrics {
    takeovers: Family<[(&'static str, &'static str); 1], Counter>,
    /// 1 while another linkwise serves this node.
    standing_by: Gauge,
}

impl TakeoverMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Takeovers in which this process took part, by outcome";
        let takeovers: Family<_, Counter> = new(registry, "takeovers", help);
        for outcome in ["took_over", "succeeded", "failed", "handed_over", "went_on"] {
            drop(takeovers.get_or_create(&[("outcome", outcome)]));
        }
        let standing_by = new(registry, "standing_by", "1 while another linkwise serves this node");
        Self { takeovers, standing_by }
    }
}
