//! The driver's state machine: decides which NVML agent runs, and turns its messages into actions.
//!
//! Pure: no I/O but log lines, no clock, no task. `mod.rs` is its one caller: it reports inputs and carries out
//! actions. One agent runs at a time. If another one is needed (the driver was replaced, the PCI bus has other GPUs, a
//! GPU is out of reach or its events do not arrive, a quarantined GPU is to be tried), the running one is killed, and
//! the next one starts when the killed process has ended, or after a pause. Meanwhile the node is as last seen; the new
//! agent's first scan and first poll find what has changed. The tests check the invariants with random inputs.

use std::collections::BTreeSet;
use std::time::Duration;

use super::failure::{AgentEnd, NO_GPUS, Outage, Reached, without_nvml};
use super::host_probe::HostFingerprint;
use super::quarantine::{Quarantine, Renewal, Verdict};
use super::view::{HostScan, View};
use super::{Idle, NOT_SEEN, Others, Settings};
use crate::protocol::{FromAgent, Place};
use crate::scan::{CallFailure, NodeScan, known};
use linkwise_core::backoff::Backoff;
use linkwise_core::reported::Reported;
use linkwise_core::state::{Event, MigInstance};
use linkwise_core::topology::{GpuUuid, PciAddress};
use linkwise_core::words::few;

/// An agent starts beside at most this many killed processes that have not ended: more agents do not help a driver in
/// which processes hang.
const MAX_UNENDED: usize = 2;

/// The longest pause before an agent is started again, as a multiple of the first.
const MAX_DELAY: u32 = 60;

/// The longest time that a start and a poll wait for the probe of the host. Later facts are used once they arrive.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// The reason if the driver was released before an agent has seen the GPUs.
const RELEASED: &str = "an operator released the driver before the GPUs were discovered; run `linkwise admin resume`";

/// The number of an agent, in the order of starts.
pub(super) type AgentId = u64;

/// A report of the executor to the state machine.
#[derive(Debug)]
pub(super) enum Input {
    Message(AgentId, FromAgent),
    /// No more messages come from an agent, or none could be started.
    Ended(AgentId, AgentEnd),
    /// An agent's process has ended.
    Reaped(AgentId),
    /// An operator released the driver, or resumed it.
    Released(bool),
    /// The host was probed; `None` if the probe broke off.
    Probed(Option<HostFingerprint>),
    /// The host was scanned; `None` if the scan broke off.
    HostScanned(Option<HostScan>),
    /// The part that other linkwise processes play changed.
    Others(Others),
    /// The time of [`DriverMachine::wake`] has come.
    Tick,
}

/// An order of the state machine to the executor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Start an agent that skips these GPUs. In a trial it may hang at once, so its start has the limit of other calls.
    Start {
        id: AgentId,
        skip: Vec<Place>,
        is_trial: bool,
    },
    /// Ask an agent for a full scan.
    Rescan(AgentId),
    /// Kill an agent, and report when its process has ended.
    Kill(AgentId),
    Probe,
    ScanHost,
    Emit(Event),
    /// Report the reason why no GPU is offered.
    Idle(Idle),
    /// Count an agent's end, by its cause.
    CountEnd(&'static str),
    /// Report the number of GPUs whose events do not arrive.
    Unheard(u32),
    /// Count a failure to receive the driver's events.
    CountFailure,
    /// End the process, with this cause.
    Fail(String),
}

#[derive(Debug)]
enum Stage {
    /// A pause until the next start: after a failure, or because the last agent was killed for the next one.
    Pausing {
        until: Duration,
    },
    /// The host is probed before the start, which comes at `until` at the latest.
    Probing {
        until: Duration,
    },
    Running(RunningAgent),
    /// The host has no GPU for linkwise: the time of the next look at the bus.
    Idle {
        look_at: Duration,
    },
    Failed,
}

impl Default for Stage {
    /// The first agent starts at once.
    fn default() -> Self {
        Self::Pausing { until: Duration::ZERO }
    }
}

#[derive(Debug)]
struct RunningAgent {
    id: AgentId,
    began: Duration,
    skipped: Vec<Place>,
    /// Set once the agent has scanned the GPUs.
    is_ready: bool,
    /// Set once the agent has polled the GPUs.
    has_polled: bool,
}

/// The state of the driver's side of the node.
#[derive(Debug, Default)]
pub(super) struct DriverMachine {
    settings: Settings,
    stage: Stage,
    last_id: AgentId,
    /// The agents whose processes have not ended: a process that hangs in the kernel does not die of SIGKILL.
    processes: BTreeSet<AgentId>,
    /// The moment until which a start waits for the end of these processes.
    awaited_until: Duration,
    is_released: bool,
    others: Others,
    backoff: Backoff,
    /// Set once an agent has initialised NVML: this container can open the driver.
    has_initialised: bool,
    outage: Outage,
    quarantine: Quarantine,
    renewal: Renewal,
    view: View,
    /// The host before the agent's start, or at the latest probe.
    host: Option<HostFingerprint>,
    /// The start of the running probe of the host.
    probe: Option<Duration>,
    /// The moment at which this process ends, and the reason: NVML lists none of the GPUs on the PCI bus.
    lists_none: Option<(Duration, String)>,
    /// Set once an agent of this process or of the previous one has listed GPUs.
    has_listed: bool,
    library: Reported<String>,
    /// The reason why NVML is unavailable, as last logged.
    unavailable: Reported<String>,
    foreign: Reported<(PciAddress, String)>,
    stuck: Reported<()>,
    actions: Vec<Action>,
}

/// The remedy where NVML lists none of the GPUs on the bus.
const NOT_LISTED: &str = ": the driver could not start them, or this container lacks them; look for NVRM in dmesg, \
                          check NVIDIA_VISIBLE_DEVICES and /dev/nvidia*, and recreate the container";

impl DriverMachine {
    pub fn new(settings: Settings) -> Self {
        Self {
            backoff: Backoff::new(settings.pause, settings.pause.saturating_mul(MAX_DELAY)),
            quarantine: Quarantine::new(settings.trial),
            renewal: Renewal::new(settings.trial),
            view: View::new(settings.poll),
            settings,
            ..Self::default()
        }
    }

    /// The agent that answers, if one does.
    pub fn answering(&self) -> Option<AgentId> {
        self.running().filter(|agent| agent.is_ready).map(|agent| agent.id)
    }

    /// Returns true while an agent starts, or is about to start without a pause after a failure.
    pub fn is_starting(&self) -> bool {
        match &self.stage {
            Stage::Pausing { .. } => !self.backoff.is_failing() && !self.is_released,
            Stage::Probing { .. } => true,
            Stage::Running(agent) => !agent.is_ready,
            Stage::Idle { .. } | Stage::Failed => false,
        }
    }

    /// Returns true if NVML has been unavailable for the grace period.
    pub fn is_outage(&self) -> bool {
        matches!(self.outage, Outage::Reported)
    }

    /// The number of processes that are to end and have not ended.
    pub fn unended(&self) -> usize {
        self.processes.len() - usize::from(self.running().is_some_and(|agent| self.processes.contains(&agent.id)))
    }

    /// The moment of the next [`Input::Tick`]; `None`: only another input can change anything.
    pub fn wake(&self) -> Option<Duration> {
        let due = [
            self.stage_due(),
            self.replacement_due().map(|(at, _)| at),
            self.outage.due(),
            self.view.due(),
            self.view.polls_due(),
            self.repeat_due(),
            self.lists_none_due(),
        ];
        due.into_iter().flatten().min()
    }

    /// Takes an input; returns the actions for it, in order.
    pub fn step(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match input {
            Input::Message(id, message) => self.message(id, message, now),
            Input::Ended(id, end) => self.ended(id, end, now),
            Input::Reaped(id) => drop(self.processes.remove(&id)),
            Input::Released(is_released) => self.set_released(is_released, now),
            Input::Probed(host) => self.probed(host, now),
            Input::HostScanned(host) => self.view.take_host(host, now),
            Input::Others(others) => self.take_others(others, now),
            Input::Tick => {}
        }
        self.timers(now);
        std::mem::take(&mut self.actions)
    }

    /// The moment at which this process ends because NVML lists none of the GPUs on the bus. `None` with
    /// --fail-on-init-error=false, once GPUs were listed, if another linkwise may hand over, or without a ready agent.
    fn lists_none_due(&self) -> Option<Duration> {
        let may_end = !self.has_listed
            && self.others == Others::None
            && self.answering().is_some()
            && self.settings.fail_on_init_error != Some(false);
        self.lists_none.as_ref().filter(|_| may_end).map(|(at, _)| *at)
    }

    fn running(&self) -> Option<&RunningAgent> {
        if let Stage::Running(agent) = &self.stage { Some(agent) } else { None }
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn emit(&mut self, event: Event) {
        self.act(Action::Emit(event));
    }

    fn take_others(&mut self, others: Others, now: Duration) {
        self.others = others;
        if let Others::HandedOver { away } = others {
            self.has_listed = true;
            let grace = if away { Duration::ZERO } else { self.settings.grace };
            self.outage.inherit("unavailable since the previous linkwise handed over the node".to_owned(), now + grace);
        }
    }

    fn timers(&mut self, now: Duration) {
        let is_due = |due: Option<Duration>| due.is_some_and(|at| at <= now);
        if self.has_room() {
            self.stuck.clear();
        } else if self.stuck.begins(()) {
            tracing::error!(
                agents = self.unended(),
                "killed NVML agents are stuck in the kernel, none starts until one ends; reboot the node if this lasts"
            );
        }
        if is_due(self.view.due()) {
            self.publish(now);
        }
        if is_due(self.view.polls_due()) {
            self.actions.extend(self.view.take_polls().map(Action::Emit));
        }
        if is_due(self.repeat_due())
            && let Some(id) = self.answering()
        {
            self.view.repeat_at = None;
            self.act(Action::Rescan(id));
        }
        if let Some((_, why)) = self.replacement_due().filter(|(at, _)| *at <= now) {
            tracing::info!(reason = why, "NVML agent replaced");
            self.replace("replaced", why, now);
        }
        if let Some(cause) = self.outage.report(now) {
            let (grace, unhealthy) = (self.settings.grace, self.settings.unhealthy_when_away);
            let devices = if unhealthy { "unhealthy until NVML is back" } else { "offered as last seen" };
            tracing::error!(cause, ?grace, devices, "NVML unavailable for longer than the grace period");
            if unhealthy {
                self.emit(Event::DriverAway(cause));
            }
        }
        // A container gets its libraries and device nodes when it is made: another one may see the GPUs.
        if is_due(self.lists_none_due())
            && let Some((_, why)) = self.lists_none.take()
        {
            self.kill("replaced", now);
            self.stage = Stage::Failed;
            return self.act(Action::Fail(why));
        }
        if is_due(self.stage_due()) {
            match self.stage {
                Stage::Pausing { .. } => {
                    self.host = None;
                    // A probe that hangs is not awaited again.
                    self.stage = Stage::Probing { until: now.max(self.probe.unwrap_or(now) + PROBE_TIMEOUT) };
                    self.probe(now);
                }
                Stage::Probing { .. } => self.start(now),
                Stage::Idle { .. } => self.probe(now),
                Stage::Running(_) | Stage::Failed => {}
            }
        }
    }

    fn has_room(&self) -> bool {
        self.unended() <= MAX_UNENDED
    }

    fn stage_due(&self) -> Option<Duration> {
        match self.stage {
            Stage::Pausing { until } => {
                let until = if self.unended() == 0 { until } else { until.max(self.awaited_until) };
                (!self.is_released && self.has_room()).then_some(until)
            }
            Stage::Probing { until } => Some(until),
            Stage::Idle { look_at } => self.probe.is_none().then_some(look_at),
            Stage::Running(_) | Stage::Failed => None,
        }
    }

    fn repeat_due(&self) -> Option<Duration> {
        self.view.repeat_at.filter(|_| self.answering().is_some())
    }

    /// The moment at which the running agent is to be replaced, and the reason. `None` before its first poll, and
    /// while another process hangs: a GPU may hang the next agent too, and the node would have no agent.
    fn replacement_due(&self) -> Option<(Duration, String)> {
        self.running().filter(|agent| agent.has_polled && self.unended() == 0)?;
        let trial = self.quarantine.next_trial();
        let trial =
            trial.map(|(at, place)| (at, format!("trial of the quarantined GPU {} of {}", place.index, place.of)));
        [trial, self.renewal.next()].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    /// Kills the running agent, and lets the next one start.
    fn replace(&mut self, end: &'static str, why: String, now: Duration) {
        self.kill(end, now);
        self.outage.begin(why, now + self.settings.grace);
        self.start_at_once(now);
    }

    fn kill(&mut self, end: &'static str, now: Duration) {
        let Some(id) = self.running().map(|agent| agent.id) else { return };
        self.act(Action::CountEnd(end));
        self.act(Action::Kill(id));
        self.awaited_until = now + self.settings.pause;
    }

    /// Starts the next agent without a pause: earlier failures no longer count.
    fn start_at_once(&mut self, now: Duration) {
        self.backoff.reset();
        self.stage = Stage::Pausing { until: now };
    }

    fn start(&mut self, now: Duration) {
        let (skipped, trial) = self.quarantine.start(now);
        self.renewal.started(now);
        self.last_id += 1;
        let id = self.last_id;
        self.processes.insert(id);
        self.act(Action::Start { id, skip: skipped.clone(), is_trial: trial.is_some() });
        self.stage = Stage::Running(RunningAgent { id, began: now, skipped, is_ready: false, has_polled: false });
    }

    fn set_released(&mut self, is_released: bool, now: Duration) {
        self.is_released = is_released;
        // A node without a GPU keeps its reason, because it does not wait for the driver.
        if !self.outage.has_worked() && !matches!(self.stage, Stage::Idle { .. } | Stage::Failed) {
            let reason = if is_released { RELEASED } else { NOT_SEEN };
            self.act(Action::Idle(Idle::Waiting(reason.to_owned())));
        }
        match self.stage {
            Stage::Running(_) if is_released => {
                self.replace("released", "an operator released the driver".to_owned(), now)
            }
            Stage::Pausing { .. } | Stage::Probing { .. } if is_released => self.start_at_once(now),
            _ => {}
        }
    }

    fn ended(&mut self, id: AgentId, end: AgentEnd, now: Duration) {
        let Some(agent) = self.running().filter(|agent| agent.id == id) else { return };
        let (began, reached) = (agent.began, if agent.is_ready { Reached::Gpus } else { end.reached });
        self.awaited_until = now + self.settings.pause;
        self.actions.extend(end.cause.map(Action::CountEnd));
        if let Some(gpu) = end.blamed {
            self.quarantine.blame(&gpu, end.why.clone(), now);
        }
        self.agent_failed(began, reached, end.why, now);
    }

    /// Kills the running agent, which is of no use.
    fn kill_useless(&mut self, reached: Reached, cause: &str, now: Duration) {
        let Some(began) = self.running().map(|agent| agent.began) else { return };
        self.kill("replaced", now);
        self.agent_failed(began, reached, cause.to_owned(), now);
    }

    /// Decides what the failure of an agent means for the node, and pauses.
    fn agent_failed(&mut self, began: Duration, reached: Reached, cause: String, now: Duration) {
        let pause = self.backoff.failed_after(now.saturating_sub(began));
        self.has_initialised |= matches!(reached, Reached::Nvml | Reached::Gpus);
        if self.outage.has_worked() {
            self.outage.begin(cause.clone(), now + self.settings.grace);
        } else if self.has_initialised && cause != NO_GPUS {
            // This container can open the driver: the quarantine has to find the GPU behind the failure, and another
            // container would fail in the same way.
            let reason = format!("NVML is initialised, but no agent has seen the GPUs: {cause}");
            self.act(Action::Idle(Idle::Waiting(reason)));
        } else {
            match without_nvml(reached, &cause, self.host.as_ref(), self.settings.fail_on_init_error, self.others) {
                Ok(idle @ Idle::Waiting(_)) => self.act(Action::Idle(idle)),
                Ok(Idle::NoGpu(reason)) => {
                    tracing::info!(reason, "no NVIDIA GPU on this node: idle until one appears");
                    // If the node had GPUs, this observation removes them.
                    self.actions.push(Action::Emit(Event::Observed(Box::default())));
                    self.act(Action::Idle(Idle::NoGpu(reason)));
                    self.stage = Stage::Idle { look_at: now + self.settings.bus_look };
                    return;
                }
                Err(cause) => {
                    self.stage = Stage::Failed;
                    return self.act(Action::Fail(cause));
                }
            }
        }
        // Without a driver, agents fail for ever: there is one line for each cause, and the metric counts the starts.
        if !self.unavailable.replace([cause.clone()]).is_empty() || reached == Reached::Gpus {
            tracing::warn!(cause, again_in = ?pause, "NVML unavailable");
        } else {
            tracing::debug!(cause, again_in = ?pause, "NVML unavailable");
        }
        self.stage = Stage::Pausing { until: now + pause };
    }

    fn probe(&mut self, now: Duration) {
        if self.probe.is_none() {
            self.probe = Some(now);
            self.act(Action::Probe);
        }
    }

    fn probed(&mut self, host: Option<HostFingerprint>, now: Duration) {
        self.probe = None;
        if let Some(host) = &host {
            for (gpu, driver) in self.foreign.replace(host.foreign()) {
                tracing::info!(%gpu, driver, "GPU is bound to another kernel driver and not served");
            }
        }
        match (&self.stage, host) {
            (Stage::Probing { .. }, host) => {
                self.host = host;
                self.start(now);
            }
            (Stage::Idle { .. }, host) => match host.and_then(|host| host.gpus().first().copied()) {
                Some(first) => {
                    tracing::info!(gpu = %first, "NVIDIA GPU appeared on the PCI bus");
                    let reason = format!("GPU {first} appeared on the PCI bus, and has not been scanned yet");
                    self.act(Action::Idle(Idle::Waiting(reason)));
                    self.start_at_once(now);
                }
                None => self.stage = Stage::Idle { look_at: now + self.settings.bus_look },
            },
            (Stage::Running(_), Some(host)) => {
                self.view.take_bus(host.bus.as_ref(), now);
                self.compare(host, now);
            }
            _ => {}
        }
    }

    /// Compares the host with the previous probe, and replaces the running agent if a change requires it.
    fn compare(&mut self, host: HostFingerprint, now: Duration) {
        let Some(before) = self.host.replace(host.clone()) else {
            return self.emit(Event::Identified(host.identity));
        };
        if before.identity.driver != host.identity.driver {
            let name = |host: HostFingerprint| host.identity.driver.unwrap_or_else(|| "none".to_owned());
            let cause = format!("the driver was {}, and is {}", name(before), name(host));
            tracing::warn!(cause, "NVML agent replaced");
            self.replace("replaced", cause, now);
        } else if host.has_other_bus(&before) {
            self.renewal.at_once("the PCI bus has other GPUs than before".to_owned(), now);
        }
    }

    fn message(&mut self, id: AgentId, message: FromAgent, now: Duration) {
        let is_running = self.running().is_some_and(|agent| agent.id == id);
        match message {
            // Events count from any agent: a killed agent may have sent them before its end.
            FromAgent::Xid { gpu, code, gpu_instance, compute_instance } => {
                let instance = gpu_instance.map(|gpu_instance| MigInstance { gpu_instance, compute_instance });
                self.event(&gpu.clone(), Event::Xid { gpu, code, instance }, now);
            }
            FromAgent::DoubleBitEcc { gpu } => self.event(&gpu.clone(), Event::DoubleBitEcc(gpu), now),
            FromAgent::Ready(scan) if is_running => self.scanned(*scan, now),
            FromAgent::Polled { gpus, missing, unheard, .. } if is_running => {
                let Stage::Running(agent) = &mut self.stage else { return };
                agent.has_polled = true;
                // A probe of the bus that hangs is not awaited again.
                let until = self.probe.unwrap_or(now) + PROBE_TIMEOUT;
                let (previous, lost) = self.view.polled(gpus, &missing, &agent.skipped, self.host.as_ref(), until);
                self.act(Action::Unheard(unheard));
                self.actions.extend(previous.map(Action::Emit));
                self.renewal.polled(lost, unheard, now);
                self.probe(now);
            }
            FromAgent::Failed(CallFailure { subject, error, .. }) if is_running => {
                self.act(Action::CountFailure);
                tracing::warn!(subject, call = %error.call, error = error.reason.to_string(), "NVML call failed");
            }
            // The executor handles the reason for leaving and the results of orders.
            _ => {}
        }
    }

    fn event(&mut self, gpu: &GpuUuid, event: Event, now: Duration) {
        if self.view.is_published(gpu) {
            self.emit(event);
        } else if self.view.hold(event) {
            self.publish(now);
        }
    }

    /// Records a scan by the running agent. The first scan makes the agent ready.
    fn scanned(&mut self, scan: NodeScan, now: Duration) {
        let Stage::Running(agent) = &mut self.stage else { return };
        if !agent.is_ready {
            let none_on_bus = self.host.as_ref().is_some_and(|host| host.gpus().is_empty());
            // A Tegra's own GPU counts, but cannot be served.
            let has_none = scan.count == Some(0) || self.host.as_ref().is_some_and(|host| host.is_tegra);
            let is_useless = scan.gpus.is_empty() && has_none && agent.skipped.is_empty() && none_on_bus;
            if is_useless && self.view.published.is_none() {
                // The agent has no GPU to follow, and would poll for ever.
                return self.kill_useless(Reached::NoDriver, NO_GPUS, now);
            }
            let Some(verdict) = self.quarantine.agent_scanned(&agent.skipped, scan.gpus.len(), scan.count) else {
                return self.kill_useless(Reached::Nvml, "agents would have to skip every GPU, so none is blamed", now);
            };
            agent.is_ready = true;
            self.view.must_publish = true;
            let version = |answer| known(answer).map_or("unknown", String::as_str);
            let (driver, nvml) = (version(&scan.driver), version(&scan.library));
            tracing::info!(gpus = scan.gpus.len(), driver, nvml, "NVML available");
            for path in self.library.replace([scan.path.clone()]) {
                tracing::info!(path, "NVML library loaded");
            }
            if self.outage.end() && self.settings.unhealthy_when_away {
                self.emit(Event::DriverBack);
            }
            self.report_verdict(verdict);
        }
        // The identity is unknown if the host was not probed in time; then the next probe has it.
        let identity = self.host.as_ref().map(|host| Event::Identified(host.identity.clone()));
        self.actions.extend(identity.map(Action::Emit));
        self.has_listed |= !scan.gpus.is_empty();
        if scan.gpus.is_empty() {
            let on_bus = self.host.as_ref().map(HostFingerprint::gpus).unwrap_or_default();
            let reason = match scan.count {
                Some(0) if !on_bus.is_empty() => {
                    let why = format!("{NO_GPUS}, but the PCI bus has {}{NOT_LISTED}", few(&on_bus, 4));
                    if !self.has_listed {
                        let grace = self.settings.grace;
                        let limit = if self.settings.fail_on_init_error == Some(true) { Duration::ZERO } else { grace };
                        self.lists_none.get_or_insert((now + limit, why.clone()));
                    }
                    for cause in self.unavailable.replace([why.clone()]) {
                        tracing::warn!(cause, "NVML unavailable");
                    }
                    why
                }
                Some(0) => NO_GPUS.to_owned(),
                Some(count) => format!("NVML counts {count} GPU(s), and none of them can be identified"),
                None => "NVML cannot count the GPUs".to_owned(),
            };
            self.act(Action::Idle(Idle::Waiting(reason)));
        }
        if self.view.take(scan, now, now + self.settings.call / 3) {
            self.act(Action::ScanHost);
        }
    }

    fn publish(&mut self, now: Duration) {
        let (node, events) = self.view.publish(now);
        let node = node.map(|node| Event::Observed(Box::new(node)));
        self.actions.extend(node.into_iter().chain(events).map(Action::Emit));
    }

    /// Reports the newly quarantined GPUs, and those that are quarantined no longer.
    fn report_verdict(&mut self, verdict: Verdict) {
        // A GPU whose UUID is unknown only gets a line in the log.
        let scanned = |place| self.view.nvml.as_ref()?.at(place).map(|gpu| gpu.uuid.clone());
        let name = |place| {
            let uuid = scanned(place).or_else(|| self.quarantine.uuid(place).cloned());
            uuid.map_or_else(String::new, |uuid| uuid.to_string())
        };
        let mut events = Vec::new();
        for (place, why) in verdict.quarantined {
            let (gpu, index, cause) = (name(place), place.index, &why);
            tracing::error!(gpu, index, cause, "GPU quarantined: NVML calls about it hang or crash the agent");
            // The health record may have a GPU that no agent of this process has scanned.
            let gpu = scanned(place).or_else(|| self.quarantine.uuid(place).cloned());
            events.extend(gpu.map(|gpu| Event::Quarantined(gpu, why)));
        }
        for place in verdict.released {
            tracing::warn!(gpu = name(place), index = place.index, "GPU released from quarantine");
            events.extend(scanned(place).map(Event::ReleasedFromQuarantine));
        }
        self.actions.extend(events.into_iter().map(Action::Emit));
    }
}

#[cfg(test)]
mod tests;
