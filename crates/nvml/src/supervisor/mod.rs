//! Carries out the actions of `machine`: starts and ends NVML agents, reads their messages and the host's files, and
//! keeps the time.
//!
//! Called by `src/run` and `src/commands`. Each agent has a task from its start until its process has ended, and each
//! read of the host is a task too; all of them report to one loop.

mod failure;
mod host_probe;
mod machine;
mod metrics;
mod quarantine;
mod release;
mod view;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures_util::future::OptionFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::Instant;

use crate::child::{Agent, AgentCommand, AgentEnded};
use crate::protocol::{Called, FromAgent, Place, ToAgent};
use crate::scan::NodeScan;
use crate::{CallError, Fault};
use failure::{AgentEnd, Reached};
use host_probe::HostProbe;
pub use host_probe::{boot, has_no_gpu, identity};
use linkwise_core::claims::{MigOrder, MigOrderError};
use linkwise_core::state::Event;
use linkwise_core::topology::MigUuid;
use linkwise_host::hwloc;
use linkwise_system::clock::at;
use linkwise_system::lock;
use linkwise_system::metrics::number;
use machine::{Action, AgentId, DriverMachine, Input};
pub use metrics::DriverMetrics;
pub use release::Release;

/// The most inputs in the loop's queue; a task that reports one more waits.
const MAX_INPUTS: usize = 64;

/// The most requests that may wait for an agent; further ones are dropped. An agent that takes no request hangs
/// in a call, and is killed for that.
const MAX_REQUESTS: usize = 64;

/// The most orders about MIG devices that may wait for an agent. The DRA plugin waits for each of them.
pub const MAX_MIG_REQUESTS: usize = 64;

/// The reason why nothing is offered before an agent has seen the GPUs.
pub const NOT_SEEN: &str = "the GPUs have not been discovered yet";

/// The options for the driver; the times are those of `config::NvmlArgs`.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Set if GPUs are unhealthy during an outage of NVML.
    pub unhealthy_when_away: bool,
    /// `--fail-on-init-error`.
    pub fail_on_init_error: Option<bool>,
    /// The first pause before an agent is started again.
    pub pause: Duration,
    /// The time for which NVML may be unavailable before that is an outage.
    pub grace: Duration,
    /// The first pause before a trial of a quarantined GPU, or before a new agent for GPUs out of reach or unheard.
    pub trial: Duration,
    /// The time from one look at the PCI bus to the next on a node without GPUs.
    pub bus_look: Duration,
    /// The time from one poll of an agent to the next.
    pub poll: Duration,
    /// The longest time for one NVML call.
    pub call: Duration,
}

/// The part that the node's other linkwise processes play if this process cannot initialise NVML.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Others {
    /// They do not depend on this process: a failure may end it.
    #[default]
    None,
    /// One of them may hand over the node to this process: no failure ends it.
    MayHandOver,
    /// One of them has handed over the GPUs that it saw. They count as if an agent of this process had seen them.
    HandedOver {
        /// True if NVML had been unavailable to that process for the grace period.
        away: bool,
    },
}

/// The reason why a node offers no GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Idle {
    /// The reason may pass by itself, or an operator has to act: the node is not ready.
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
    /// The number of orders that agents have answered, this one included. An observation may be published after the
    /// answer and still be older than the order: it includes the order if its `NodeObservation::mig_orders` is at least
    /// this number.
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
    /// Orders about MIG devices; `None` if no task gives any.
    pub mig: Option<mpsc::Receiver<MigRequest>>,
    /// The part that the node's other linkwise processes play.
    pub others: watch::Receiver<Others>,
    /// True while NVML has been unavailable for the grace period.
    pub away: watch::Sender<bool>,
}

impl Driver {
    /// Runs for ever; fails if NVML does not start or lists no GPU, and a new container may repair that.
    pub async fn run(self) -> Result<()> {
        let (input_sender, inputs) = mpsc::channel(MAX_INPUTS);
        let probe = HostProbe::new(self.sysfs.clone());
        let executor = Executor {
            machine: DriverMachine::new(self.settings.clone()),
            driver: self,
            begin: Instant::now(),
            agents: BTreeMap::new(),
            tasks: JoinSet::new(),
            probe: Arc::new(Mutex::new(probe)),
            input_sender,
            order: None,
            orders_done: 0,
        };
        executor.run(inputs).await
    }
}

/// The state machine, and the tasks and processes that carry out its actions.
struct Executor {
    driver: Driver,
    machine: DriverMachine,
    begin: Instant,
    /// The agents whose processes have not ended, and the channel of requests to each. Dropping the channel (`None`)
    /// kills the agent.
    agents: BTreeMap<AgentId, Option<mpsc::Sender<ToAgent>>>,
    tasks: JoinSet<()>,
    probe: Arc<Mutex<HostProbe>>,
    input_sender: mpsc::Sender<Input>,
    /// The order about MIG that an agent has, and the channel of its answer. One at a time.
    order: Option<(AgentId, MigAnswer)>,
    /// The number of orders about MIG that agents have answered.
    orders_done: u64,
}

impl Executor {
    async fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> Result<()> {
        self.tasks.spawn(self.driver.release.clone().follow_node());
        let mut released = self.driver.release.follow();
        let (mut mig, mut others) = (self.driver.mig.take(), self.driver.others.clone());
        let (first_others, is_released) = (*others.borrow_and_update(), *released.borrow_and_update());
        let mut next = VecDeque::from([Input::Others(first_others), Input::Released(is_released), Input::Tick]);
        loop {
            // An order waits for the previous order, and for an agent that starts.
            let takes_orders = self.order.is_none() && !self.machine.is_starting();
            let mig = mig.as_mut().filter(|_| takes_orders);
            let input = match next.pop_front() {
                Some(input) => input,
                None => tokio::select! {
                    changed = released.changed() => {
                        changed.context("cannot follow the operator's orders")?;
                        Input::Released(*released.borrow_and_update())
                    }
                    Ok(()) = others.changed() => Input::Others(*others.borrow_and_update()),
                    input = inputs.recv() => input.context("cannot receive the inputs of the NVML driver's loop")?,
                    Some(Some(request)) = OptionFuture::from(mig.map(mpsc::Receiver::recv)) => {
                        self.pass_on(request);
                        continue;
                    }
                    Some(ended) = self.tasks.join_next() => {
                        ended.context("a task of the NVML driver failed")?;
                        continue;
                    }
                    () = at(self.machine.wake().map(|wake| self.begin + wake)) => Input::Tick,
                },
            };
            let Some(input) = self.received(input, &mut next) else { continue };
            for action in self.machine.step(input, self.begin.elapsed()) {
                self.perform(action, &mut next).await?;
            }
            self.driver.release.set_held(!self.agents.is_empty());
            let metrics = &self.driver.metrics;
            metrics.agent_up.set(self.machine.answering().is_some().into());
            metrics.agents_stuck.set(number(self.machine.unended()));
            metrics.nvml_away.set(self.machine.is_outage().into());
            self.driver.away.send_if_modified(|away| std::mem::replace(away, self.machine.is_outage()) != *away);
        }
    }

    /// Handles what an input means for orders and processes; returns the input if the state machine needs it.
    fn received(&mut self, mut input: Input, next: &mut VecDeque<Input>) -> Option<Input> {
        match input {
            Input::Message(id, FromAgent::MigDone(result)) => {
                self.orders_done += 1;
                let number = self.orders_done;
                self.answer(id, result.map(|devices| MigDone { devices, number }));
                return None;
            }
            // An agent does one thing after another, so the scan includes every order that was answered.
            Input::Message(_, FromAgent::Ready(ref mut scan)) => scan.mig_orders = self.orders_done,
            // The agent learned of the release before this process did.
            Input::Ended(_, ref end) if end.reached == Reached::Released && !self.driver.release.is_ordered() => {
                self.driver.release.record(true);
                next.extend([Input::Released(true), input]);
                return None;
            }
            Input::Ended(id, ref end) => {
                self.answer(id, Err(MigOrderError { why: end.why.clone(), may_exist: true }));
            }
            Input::Reaped(id) => drop(self.agents.remove(&id)),
            _ => {}
        }
        Some(input)
    }

    async fn perform(&mut self, action: Action, next: &mut VecDeque<Input>) -> Result<()> {
        match action {
            Action::Start { id, skip, is_trial } => next.extend(self.start(id, skip, is_trial)),
            Action::Rescan(id) => self.request(id, ToAgent::Observe),
            Action::Kill(id) => {
                if let Some(requests) = self.agents.get_mut(&id) {
                    *requests = None;
                }
                // The next agent's scan shows what the order has made or left.
                let why = "the NVML agent was killed before it answered".to_owned();
                self.answer(id, Err(MigOrderError { why, may_exist: true }));
            }
            Action::Probe => {
                let probe = Arc::clone(&self.probe);
                let look = move || lock(&probe).look();
                self.read(look, |host| Input::Probed(host.flatten()));
            }
            Action::ScanHost => {
                let sysfs = self.driver.sysfs.clone();
                self.read(move || hwloc::observe(&sysfs), Input::HostScanned);
            }
            Action::Emit(event) => {
                if let Event::Xid { gpu, code, .. } = &event {
                    self.driver.metrics.xid(gpu, *code);
                }
                self.driver.events.send(event).await.context("cannot send an event to the node's loop")?;
            }
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

    /// Starts an agent; if that fails, returns the inputs for the state machine.
    fn start(&mut self, id: AgentId, skip: Vec<Place>, is_trial: bool) -> Vec<Input> {
        // The driver counts as held before the check, so that a release after the check waits for this agent.
        self.driver.release.set_held(true);
        let not_started = |why| [Input::Ended(id, AgentEnd::not_started(why)), Input::Reaped(id)];
        if self.driver.release.is_ordered() {
            let released = not_started("an operator released the driver".to_owned());
            return [Input::Released(true)].into_iter().chain(released).collect();
        }
        self.driver.metrics.agent_starts.inc();
        let mut command = AgentCommand { skip, ..self.driver.command.clone() };
        if is_trial {
            command.limits.start = command.limits.call;
        }
        match Agent::spawn(&command) {
            Ok(agent) => {
                let (request_sender, requests) = mpsc::channel(MAX_REQUESTS);
                self.agents.insert(id, Some(request_sender));
                self.tasks.spawn(run_agent(id, agent, requests, self.input_sender.clone()));
                Vec::new()
            }
            // The system lacks processes or memory, which passes.
            Err(error) => not_started(format!("{error:#}")).into(),
        }
    }

    fn request(&self, id: AgentId, request: ToAgent) {
        // An agent that has ended takes no request; its end is reported next.
        let _ = self.agents.get(&id).and_then(|requests| requests.as_ref()?.try_send(request).ok());
    }

    /// Passes an order about a MIG device to the agent that answers; without such an agent the order fails at once.
    fn pass_on(&mut self, MigRequest { order, answer }: MigRequest) {
        // An order is not begun if its caller has gone.
        if answer.is_closed() {
            return;
        }
        match self.machine.answering() {
            Some(id) => {
                self.order = Some((id, answer));
                self.request(id, ToAgent::Mig(order));
            }
            None => drop(answer.send(Err(MigOrderError { why: "NVML unavailable".to_owned(), may_exist: false }))),
        }
    }

    /// Answers the order that this agent has, if it has one.
    fn answer(&mut self, id: AgentId, result: Result<MigDone, MigOrderError>) {
        if let Some((_, answer)) = self.order.take_if(|(agent, _)| *agent == id) {
            // The caller may have gone.
            let _ = answer.send(result);
        }
    }

    /// Reads files on a thread of its own: they may hang.
    fn read<T: Send + 'static>(&mut self, work: impl FnOnce() -> T + Send + 'static, input: fn(Option<T>) -> Input) {
        let inputs = self.input_sender.clone();
        self.tasks.spawn(async move {
            let read = spawn_blocking(work).await.ok();
            // The loop ends only with the process.
            let _ = inputs.send(input(read)).await;
        });
    }
}

/// Runs one agent until its process has ended. When the channel of requests closes, the agent is killed.
async fn run_agent(id: AgentId, mut agent: Agent, mut requests: mpsc::Receiver<ToAgent>, inputs: mpsc::Sender<Input>) {
    // Sends fail only if the loop has ended, which ends this task too.
    let mut leaving = None;
    loop {
        tokio::select! {
            message = agent.next() => match message {
                Ok(FromAgent::Leaving(error)) => leaving = Some(error),
                Ok(message) => drop(inputs.send(Input::Message(id, message)).await),
                Err(ended) => {
                    drop(inputs.send(Input::Ended(id, agent_end(&ended, &agent, leaving))).await);
                    break;
                }
            },
            request = requests.recv() => match request {
                // An agent that takes no request has ended; its end is reported next.
                Some(request) => drop(agent.request(request).await),
                None => break,
            },
        }
    }
    agent.kill().await;
    let _ = inputs.send(Input::Reaped(id)).await;
}

/// The end of an agent, for people and for the quarantine. The error with which it left explains more than its exit
/// code. A crash, a hang or a leak is not [`Reached::NoDriver`]: the library is there, so a driver may be there too.
fn agent_end(ended: &AgentEnded, agent: &Agent, leaving: Option<CallError>) -> AgentEnd {
    let (cause, during) = cause(ended, agent.open_call());
    let reached = match leaving.as_ref().map(CallError::fault) {
        Some(Fault::Released) => Reached::Released,
        Some(fault) if fault.is_no_driver() => Reached::NoDriver,
        None if agent.has_initialised() => Reached::Nvml,
        None if matches!(ended, AgentEnded::Memory(..)) => Reached::OverMemory,
        _ => Reached::Failure,
    };
    let why = leaving.map_or_else(|| agent.describe(ended), |error| error.to_string());
    AgentEnd { cause: Some(cause), why, blamed: during.and_then(|called| called.gpu.clone()), reached }
}

/// The cause of an agent's end, as the metric's label value, and the blamed call. `open` is the call that the
/// agent reported last.
fn cause<'a>(ended: &'a AgentEnded, open: Option<&'a Called>) -> (&'static str, Option<&'a Called>) {
    match ended {
        AgentEnded::Hung(called, _) => ("hung", Some(called)),
        AgentEnded::EventWaitHung(_) => ("hung", None),
        AgentEnded::Memory(..) => ("memory", None),
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
            Err(ended) => return Err(failed.map_or_else(|| anyhow!(agent.describe(&ended)), anyhow::Error::from)),
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
        assert_eq!(of(AgentEnded::EventWaitHung(limit)), ("hung", None));
        assert_eq!(of(AgentEnded::Memory(49, 48)), ("memory", None));
        for ended in [AgentEnded::Late(limit), AgentEnded::Stopped(limit), AgentEnded::Silent] {
            assert_eq!(of(ended), ("silent", None));
        }
    }
}
