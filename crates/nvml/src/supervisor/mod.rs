//! Carries out the actions of `machine`: starts and ends NVML agents, reads their messages and the host's files, and
//! keeps the time.
//!
//! Called by `src/run` and `src/commands`. Each agent has a task from its start until its process has ended, and each read of
//! the host is a task too; all of them report to one loop. Nothing is decided here.

mod agents;
mod host_probe;
mod lost;
mod machine;
mod metrics;
mod outage;
mod quarantine;
mod release;
mod scan;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use futures_util::future::OptionFuture;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::Instant;

use crate::child::{Agent, AgentCommand, AgentEnded};
use crate::protocol::{Called, FromAgent, Place, ToAgent};
use crate::scan::NodeScan;
use crate::{CallError, Fault};
use agents::{AgentEnd, AgentId, OVER_MEMORY};
use host_probe::HostProbe;
pub use host_probe::{has_no_gpu, identity};
use linkwise_core::claims::{MigOrder, MigOrderError};
use linkwise_core::state::Event;
use linkwise_core::topology::MigUuid;
use linkwise_host::hwloc;
use linkwise_system::clock::at;
use machine::{Action, DriverMachine, Input};
pub use machine::{NOT_SEEN, Others, Settings};
pub use metrics::DriverMetrics;
pub use release::Release;

/// The most inputs in the loop's queue; a task that reports one more waits.
const INPUTS: usize = 64;

/// The most orders about MIG devices that may wait for an agent. The DRA plugin waits for each of them.
pub const MIG_REQUESTS: usize = 64;

/// The reason why a node offers no GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Idle {
    /// This may change by itself, or an operator has to act: the node is not ready.
    Waiting(String),
    /// This host has no GPU to serve: no action is needed, and the node counts as ready.
    NoGpu(String),
}

impl Idle {
    /// The reason, for people.
    pub fn reason(&self) -> &str {
        match self {
            Self::Waiting(reason) | Self::NoGpu(reason) => reason,
        }
    }
}

/// An order about MIG devices for a claim, which the agent gives to the driver.
#[derive(Debug)]
pub struct MigRequest {
    /// The order.
    pub order: MigOrder,
    /// The channel of the answer.
    pub answer: MigAnswer,
}

/// The channel of the answer to a [`MigRequest`].
pub type MigAnswer = oneshot::Sender<Result<MigDone, MigOrderError>>;

/// An order about MIG devices that was carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigDone {
    /// The devices that were made or listed.
    pub devices: Vec<MigUuid>,
    /// Its number. An observation may be published after the answer and still be older: one that knows of this order has
    /// as many [`NodeObservation::mig_orders`].
    pub number: u64,
}

/// The driver's side of the node.
pub struct Driver {
    /// The agents' command line.
    pub command: AgentCommand,
    /// The pauses and limits.
    pub settings: Settings,
    /// The host's /sys.
    pub sysfs: PathBuf,
    /// The node's events.
    pub events: mpsc::Sender<Event>,
    /// The metrics of agents and XIDs.
    pub metrics: DriverMetrics,
    /// The reason why no GPU is offered, for /readyz.
    pub idle: watch::Sender<Idle>,
    /// The operator's order to release the driver.
    pub release: Release,
    /// MIG devices to be made and destroyed; `None` if no task orders any.
    pub mig: Option<mpsc::Receiver<MigRequest>>,
    /// The part of other processes of linkwise on the node.
    pub others: watch::Receiver<Others>,
    /// True while NVML has been unavailable for the grace period.
    pub away: watch::Sender<bool>,
}

impl Driver {
    /// Runs for ever; fails if NVML cannot be initialised and only another container can repair that.
    pub async fn run(self) -> Result<()> {
        let (report, inputs) = mpsc::channel(INPUTS);
        let (left, for_next) = mpsc::channel(MIG_REQUESTS);
        let probe = HostProbe::new(self.sysfs.clone(), self.command.library.clone());
        let life = Life {
            machine: DriverMachine::new(self.settings.clone()),
            driver: self,
            begin: Instant::now(),
            agents: BTreeMap::new(),
            tasks: JoinSet::new(),
            probe: Arc::new(Mutex::new(probe)),
            report,
            left,
            mig_turn: Arc::new(Semaphore::new(1)),
            mig_done: Arc::default(),
        };
        life.live(inputs, for_next).await
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    /// The number of full scans to ask for in all.
    scans: u64,
    dismiss: bool,
    kill: bool,
}

struct Handle {
    orders: watch::Sender<Orders>,
    process: Option<u32>,
    mig: mpsc::Sender<MigRequest>,
}

/// The state machine, and the tasks and processes that carry out its actions.
struct Life {
    driver: Driver,
    machine: DriverMachine,
    begin: Instant,
    agents: BTreeMap<AgentId, Handle>,
    tasks: JoinSet<()>,
    probe: Arc<Mutex<HostProbe>>,
    report: mpsc::Sender<Input>,
    /// Orders about MIG that an agent has left to the next one.
    left: mpsc::Sender<MigRequest>,
    /// Held for one order about MIG at a time: the next follows when the agent has answered, or when its process has
    /// ended, so that no call of an ending agent comes after it.
    mig_turn: Arc<Semaphore>,
    /// The number of orders about MIG that agents have answered.
    mig_done: Arc<AtomicU64>,
}

impl Life {
    async fn live(mut self, mut inputs: mpsc::Receiver<Input>, mut for_next: mpsc::Receiver<MigRequest>) -> Result<()> {
        self.tasks.spawn(self.driver.release.clone().follow_node());
        let mut released = self.driver.release.follow();
        let (mut mig, mut others) = (self.driver.mig.take(), self.driver.others.clone());
        let first = [Input::Others(*others.borrow_and_update()), Input::Released(*released.borrow_and_update())];
        let mut next = VecDeque::from(first);
        next.push_back(Input::Tick);
        loop {
            let input = match next.pop_front() {
                Some(input) => input,
                None => tokio::select! {
                    changed = released.changed() => {
                        changed.context("the operator's orders are gone")?;
                        Input::Released(*released.borrow_and_update())
                    }
                    Ok(()) = others.changed() => Input::Others(*others.borrow_and_update()),
                    input = inputs.recv() => input.context("nothing reports to the NVML driver's loop")?,
                    Some(request) = for_next.recv() => {
                        self.pass_on(request);
                        continue;
                    }
                    Some(Some(request)) = OptionFuture::from(mig.as_mut().map(mpsc::Receiver::recv)) => {
                        self.pass_on(request);
                        continue;
                    }
                    Some(ended) = self.tasks.join_next() => {
                        ended.context("a task of the NVML driver broke off")?;
                        continue;
                    }
                    () = at(self.machine.wake().map(|wake| self.begin + wake)) => Input::Tick,
                },
            };
            // An agent found the order first.
            if matches!(&input, Input::Ended(_, end) if end.released) && !self.driver.release.is_wished() {
                self.driver.release.see(true);
                next.extend([Input::Released(true), input]);
                continue;
            }
            if let Input::Reaped(id) = &input {
                self.agents.remove(id);
            }
            for action in self.machine.step(input, self.begin.elapsed()) {
                self.perform(action, &mut next).await?;
            }
            self.driver.release.set_held(!self.agents.is_empty());
            let metrics = &self.driver.metrics;
            metrics.agent_up.set(self.machine.is_up().into());
            metrics.agents_stuck.set(self.machine.unreaped().try_into().unwrap_or(i64::MAX));
            metrics.nvml_away.set(self.machine.is_outage().into());
            self.driver.away.send_if_modified(|away| std::mem::replace(away, self.machine.is_outage()) != *away);
        }
    }

    async fn perform(&mut self, action: Action, next: &mut VecDeque<Input>) -> Result<()> {
        match action {
            Action::Start(id, skip) => next.extend(self.start(id, skip)),
            Action::Rescan(id) => self.order(id, |orders| orders.scans += 1),
            Action::Dismiss(id) => self.order(id, |orders| orders.dismiss = true),
            Action::Kill(id) => self.order(id, |orders| orders.kill = true),
            Action::Probe(agent) => {
                let process = agent.and_then(|agent| self.agents.get(&agent)?.process);
                let probe = Arc::clone(&self.probe);
                let look = move || probe.lock().unwrap_or_else(PoisonError::into_inner).look(process);
                self.read(look, Input::Probed);
            }
            Action::ScanHost => {
                let sysfs = self.driver.sysfs.clone();
                self.read(move || hwloc::observe(&sysfs), Input::HostScanned);
            }
            Action::Publish(node) => self.emit(Event::Observed(node)).await?,
            Action::Emit(event) => self.emit(event).await?,
            Action::Idle(idle) => {
                self.driver.metrics.idle.set(matches!(idle, Idle::NoGpu(_)).into());
                self.driver.idle.send_replace(idle);
            }
            Action::CountEnd(cause) => self.driver.metrics.agent_ended(cause),
            Action::CountFailure => drop(self.driver.metrics.event_failures.inc()),
            Action::Unheard(gpus) => drop(self.driver.metrics.unheard_gpus.set(gpus.into())),
            Action::Fail(cause) => bail!(cause),
        }
        Ok(())
    }

    async fn emit(&self, event: Event) -> Result<()> {
        if let Event::Xid { gpu, code, .. } = &event {
            self.driver.metrics.xid(gpu, *code);
        }
        self.driver.events.send(event).await.context("the node takes no events")
    }

    /// Starts an agent; if that fails, returns the inputs for the state machine.
    fn start(&mut self, id: AgentId, skip: Vec<Place>) -> Vec<Input> {
        // This comes before the check: an order to release that comes later finds the driver held.
        self.driver.release.set_held(true);
        let not_started = |why| Input::Ended(id, AgentEnd::not_started(why));
        if self.driver.release.is_wished() {
            return vec![Input::Released(true), not_started("the driver is released".to_owned())];
        }
        self.driver.metrics.agent_starts.inc();
        match Agent::spawn(&AgentCommand { skip, ..self.driver.command.clone() }) {
            Ok(agent) => {
                let (orders, follow) = watch::channel(Orders::default());
                let (order, requests) = mpsc::channel(MIG_REQUESTS);
                self.agents.insert(id, Handle { orders, process: agent.id(), mig: order });
                let (turn, done) = (Arc::clone(&self.mig_turn), Arc::clone(&self.mig_done));
                let mig = MigOrders { requests, left: self.left.clone(), turn, done };
                self.tasks.spawn(live(id, agent, follow, mig, self.report.clone()));
                Vec::new()
            }
            // The system lacks processes or memory: this will pass.
            Err(error) => vec![not_started(format!("{:#}", anyhow!(error)))],
        }
    }

    fn order(&self, id: AgentId, order: impl FnOnce(&mut Orders)) {
        if let Some(agent) = self.agents.get(&id) {
            agent.orders.send_modify(order);
        }
    }

    /// Passes an order about a MIG device to the agent that answers; without such an agent the order fails at once.
    fn pass_on(&self, request: MigRequest) {
        let (refused, why) = match self.machine.answering().and_then(|id| self.agents.get(&id)) {
            Some(agent) => match agent.mig.try_send(request) {
                Ok(()) => return,
                Err(error) => (error.into_inner(), "the NVML agent is ending, or has too many orders"),
            },
            None => (request, "NVML unavailable"),
        };
        // The caller may have gone.
        let _ = refused.answer.send(Err(MigOrderError { why: why.to_owned(), may_exist: false }));
    }

    /// Reads files on a thread of its own: they may hang.
    fn read<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static, input: fn(Option<T>) -> Input) {
        let report = self.report.clone();
        self.tasks.spawn(async move {
            let read = spawn_blocking(work).await.ok();
            // The loop ends only with the process.
            let _ = report.send(input(read)).await;
        });
    }
}

/// The orders about MIG of one agent.
struct MigOrders {
    requests: mpsc::Receiver<MigRequest>,
    /// Takes those that the agent has not begun.
    left: mpsc::Sender<MigRequest>,
    turn: Arc<Semaphore>,
    done: Arc<AtomicU64>,
}

impl MigOrders {
    /// Leaves the order that waits for its turn, and those behind it, to the next agent.
    async fn leave(&mut self, waiting: Option<MigRequest>) {
        self.requests.close();
        // The receiver ends only with the process.
        if let Some(request) = waiting {
            let _ = self.left.send(request).await;
        }
        while let Some(request) = self.requests.recv().await {
            let _ = self.left.send(request).await;
        }
    }
}

/// Runs one agent, until its process has ended.
async fn live(
    id: AgentId,
    mut agent: Agent,
    mut orders: watch::Receiver<Orders>,
    mut mig: MigOrders,
    report: mpsc::Sender<Input>,
) {
    // Reports fail only if the loop has ended, and this task with it; answers fail only if the caller has gone.
    let (mut wanted, mut done, mut leaving) = (Orders::default(), Orders::default(), None);
    let (mut waiting, mut asked, mut own_turn): (Option<MigRequest>, Option<MigAnswer>, _) = (None, None, None);
    // The orders that were answered when the agent said something last. It does one thing after the other: a scan is
    // younger than the message before it, and may be older than an order that another agent ended meanwhile.
    let mut known = mig.done.load(Ordering::Relaxed);
    loop {
        // An agent that is to end first ends the order about MIG that it has begun: the limit of a call holds for it, and
        // nobody else would know what is there of the device.
        if asked.is_none() {
            if wanted.kill {
                break;
            }
            // An agent that takes no requests has ended, and that is reported next.
            if wanted.dismiss && !done.dismiss {
                mig.leave(waiting.take()).await;
                let _ = agent.dismiss().await;
            } else if wanted.scans > done.scans && !wanted.dismiss {
                let _ = agent.request(ToAgent::Observe).await;
            }
            done = wanted;
        }
        tokio::select! {
            message = agent.next() => match message {
                Ok(FromAgent::Leaving(error)) => leaving = Some(error),
                Ok(FromAgent::MigDone(result)) => {
                    own_turn = None;
                    known = mig.done.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                    let result = result.map(|devices| MigDone { devices, number: known });
                    drop(asked.take().map(|answer| answer.send(result)));
                }
                Ok(FromAgent::Ready(mut scan)) => {
                    scan.mig_orders = std::mem::replace(&mut known, mig.done.load(Ordering::Relaxed));
                    let is_old = scan.mig_orders < known;
                    drop(report.send(Input::Message(id, FromAgent::Ready(scan))).await);
                    if is_old {
                        let _ = agent.request(ToAgent::Observe).await;
                    }
                }
                Ok(message) => {
                    known = mig.done.load(Ordering::Relaxed);
                    drop(report.send(Input::Message(id, message)).await);
                }
                Err(ended) => {
                    let end = agent_end(&ended, &agent, leaving);
                    // The agent may have ended in the middle of the order.
                    let failed = MigOrderError { why: end.why.clone(), may_exist: true };
                    drop(asked.take().map(|answer| answer.send(Err(failed))));
                    drop(report.send(Input::Ended(id, end)).await);
                    break;
                }
            },
            Some(request) = mig.requests.recv(), if waiting.is_none() => waiting = Some(request),
            Ok(permit) = Arc::clone(&mig.turn).acquire_owned(), if waiting.is_some() && own_turn.is_none() => {
                // An order is not begun if its caller has gone.
                if let Some(MigRequest { order, answer }) = waiting.take().filter(|request| !request.answer.is_closed()) {
                    // An agent that takes no requests has ended, and that is reported next.
                    let _ = agent.request(ToAgent::Mig(order)).await;
                    (asked, own_turn) = (Some(answer), Some(permit));
                }
            }
            _ = orders.changed() => wanted = *orders.borrow_and_update(),
        }
    }
    mig.leave(waiting).await;
    agent.gone().await;
    drop(own_turn);
    let _ = report.send(Input::Reaped(id)).await;
}

/// The end of an agent, for people and for the quarantine. The error with which it left explains more than its exit
/// code.
fn agent_end(ended: &AgentEnded, agent: &Agent, leaving: Option<CallError>) -> AgentEnd {
    let (cause, during) = cause(ended, agent.open());
    AgentEnd {
        cause: Some(cause),
        released: leaving.as_ref().is_some_and(|error| error.fault() == Fault::Released),
        initialised: leaving.is_none() && agent.has_initialised(),
        no_driver: leaving.as_ref().is_some_and(|error| error.fault().is_no_driver()),
        why: leaving.map_or_else(|| agent.account(ended), |error| error.to_string()),
        blamed: during.and_then(|called| called.gpu.clone()),
        reaped: agent.id().is_none(),
    }
}

/// The cause of an agent's end, as the metric's label value, and the blamed call. `open` is the last call that it
/// reported.
fn cause<'a>(ended: &'a AgentEnded, open: Option<&'a Called>) -> (&'static str, Option<&'a Called>) {
    match ended {
        AgentEnded::Hung(called, _) => ("hung", Some(called)),
        AgentEnded::Deaf(_) => ("hung", None),
        AgentEnded::Memory(..) => (OVER_MEMORY, None),
        ended if ended.is_crash() => ("crashed", open),
        AgentEnded::Late(_) | AgentEnded::Stopped(_) | AgentEnded::Silent => ("silent", None),
        AgentEnded::Exited(_) | AgentEnded::Protocol(_) | AgentEnded::Io(_) => ("exited", None),
    }
}

/// Makes one full scan of the GPUs through an agent that then ends.
pub async fn scan(command: &AgentCommand) -> Result<NodeScan> {
    let mut agent = Agent::spawn(command)?;
    let mut failed = None;
    loop {
        match agent.next().await {
            Ok(FromAgent::Ready(scan)) => {
                agent.end().await;
                return Ok(scan.after(None));
            }
            Ok(FromAgent::Leaving(error)) => failed = Some(error),
            Ok(_) => {}
            Err(ended) => return Err(failed.map_or_else(|| anyhow!(agent.account(&ended)), anyhow::Error::from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    #[test]
    fn only_hangs_and_crashes_are_blamed_on_a_call() {
        let open = Called { call: "nvmlDeviceGetName".to_owned(), gpu: None };
        let of = |ended: AgentEnded| {
            let (cause, during) = cause(&ended, Some(&open));
            (cause, during.map(|called| called.call.clone()))
        };
        let exited = |wait_status| of(AgentEnded::Exited(std::process::ExitStatus::from_raw(wait_status)));
        // These are SIGABRT, SIGSEGV, SIGBUS; then signals that others send, and exit codes (wait(2)).
        for signal in [6, 11, 7] {
            assert_eq!(exited(signal), ("crashed", Some("nvmlDeviceGetName".to_owned())), "signal {signal}");
        }
        for outside in [1, 2, 9, 15, 0, 1 << 8] {
            assert_eq!(exited(outside), ("exited", None), "{outside}");
        }
        let (limit, called) = (Duration::ZERO, Called { call: "nvmlInit_v2".to_owned(), gpu: None });
        assert_eq!(of(AgentEnded::Hung(called, limit)), ("hung", Some("nvmlInit_v2".to_owned())));
        assert_eq!(of(AgentEnded::Deaf(limit)), ("hung", None));
        assert_eq!(of(AgentEnded::Memory(49, 48)), ("memory", None));
        for ended in [AgentEnded::Late(limit), AgentEnded::Stopped(limit), AgentEnded::Silent] {
            assert_eq!(of(ended), ("silent", None));
        }
    }
}
