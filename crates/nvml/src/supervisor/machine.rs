//! The driver's state machine: decides which NVML agents run, and turns their messages into actions.
//!
//! Pure: no I/O but log lines, no clock, no task. `mod.rs` is its one caller: it reports inputs and carries out
//! actions. One agent is active at a time. A standby is started beside it if a new agent is needed while the active one
//! still works (a GPU has come, the library file changed, a quarantined GPU is to be tried). The standby takes over
//! once it has scanned the GPUs: so no event falls between the two agents, no event of the new one waits for the end of
//! the old one, and a standby that fails costs nothing. The tests beside this file check the invariants with random
//! sequences of inputs.

mod failure;
mod io;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Idle;
use failure::{NO_GPUS, Reached};

use super::agents::{ActiveAgent, AgentId, Agents, RestartReason, StandbyAgent};
use super::host_probe::HostFingerprint;
use super::lost::LostGpus;
use super::outage::NvmlOutage;
use super::quarantine::{Quarantine, Verdict};
use super::scan::Scan;
use crate::HANDLE;
use crate::protocol::{FromAgent, Missing, Place};
use crate::scan::{CallFailure, NodeScan, known};
use linkwise_core::backoff::Backoff;
use linkwise_core::once::Once;
use linkwise_core::state::{Event, HealthPoll, MigInstance, Reach};
use linkwise_core::topology::{GpuUuid, PciAddress};

pub(super) use io::{Action, Input};
pub use io::{Others, Settings};

/// The longest pause before an agent is started again, as a multiple of the first.
const LONGEST: u32 = 60;

/// The time that a start and a poll wait for short files; facts that come later count later.
const FILES: Duration = Duration::from_millis(500);

/// The reason why nothing is offered before an agent has seen the GPUs.
pub const NOT_SEEN: &str = "the GPUs have not been discovered yet";

/// The reason if the driver was released before an agent has seen them.
const RELEASED: &str = "an operator released the driver before the GPUs were discovered: `linkwise admin resume`";

/// The state while no agent is active.
#[derive(Debug)]
enum Stage {
    /// A pause until the next start.
    Pausing {
        until: Duration,
    },
    /// The host is probed before the start, which comes at `until` at the latest.
    Probing {
        until: Duration,
    },
    Running,
    /// The host has no GPU for linkwise: the time of the next look at the bus.
    Idle {
        look_at: Duration,
    },
    Failed,
}

/// The polls of the GPUs that wait for the probe of the PCI bus and for the scan that names the GPUs.
#[derive(Debug)]
struct PendingPolls {
    polls: BTreeMap<GpuUuid, HealthPoll>,
    until: Duration,
}

/// The state of the driver's side of the node.
#[derive(Debug)]
pub(super) struct DriverMachine {
    settings: Settings,
    stage: Stage,
    agents: Agents,
    released: bool,
    others: Others,
    backoff: Backoff,
    library: Once<String>,
    /// The reason why NVML is unavailable, as last logged.
    unavailable: Once<String>,
    /// Set once an agent has initialised NVML: this container can open the driver.
    initialised: bool,
    outage: NvmlOutage,
    quarantine: Quarantine,
    scan: Scan,
    polls: Option<PendingPolls>,
    lost: LostGpus,
    /// GPUs that NVML has listed since linkwise started.
    once_listed: BTreeSet<PciAddress>,
    /// The begin of the running probe of the host, and whether it began before the active agent.
    probe: Option<(Duration, bool)>,
    /// GPUs that the kernel has listed on the bus since linkwise started.
    once_on_bus: BTreeSet<PciAddress>,
    held_by_others: Once<(PciAddress, String)>,
    stuck: Once<()>,
    actions: Vec<Action>,
}

impl DriverMachine {
    pub fn new(settings: Settings) -> Self {
        let backoff = Backoff::new(settings.pause, settings.pause.saturating_mul(LONGEST));
        Self {
            stage: Stage::Pausing { until: Duration::ZERO },
            agents: Agents::default(),
            released: false,
            others: Others::None,
            backoff,
            library: Once::new(),
            unavailable: Once::new(),
            initialised: false,
            outage: NvmlOutage::new(settings.grace),
            quarantine: Quarantine::new(settings.trial),
            scan: Scan::new(settings.poll),
            polls: None,
            lost: LostGpus::new(settings.trial),
            once_listed: BTreeSet::new(),
            probe: None,
            once_on_bus: BTreeSet::new(),
            held_by_others: Once::new(),
            stuck: Once::new(),
            actions: Vec::new(),
            settings,
        }
    }

    /// Returns true if an agent answers.
    pub fn is_up(&self) -> bool {
        self.answering().is_some()
    }

    /// The agent that answers, which gets the orders.
    pub fn answering(&self) -> Option<AgentId> {
        self.agents.active.as_ref().filter(|active| active.ready).map(|active| active.id)
    }

    /// Returns true if NVML has been unavailable for the grace period.
    pub fn is_outage(&self) -> bool {
        self.outage.is_reported()
    }

    /// The number of killed processes that have not ended.
    pub fn unreaped(&self) -> usize {
        self.agents.unreaped()
    }

    /// The moment of the next [`Input::Tick`]; `None`: only another input can change anything.
    pub fn wake(&self) -> Option<Duration> {
        let due = [
            self.stage_due(),
            self.agents.next_kill().map(|(at, _)| at),
            self.standby_due().map(|(at, _)| at),
            self.outage.due(),
            self.scan.due(),
            self.polls_due(),
            self.repeat_due(),
        ];
        due.into_iter().flatten().min()
    }

    /// Takes an input; returns the actions for it, in order.
    pub fn step(&mut self, input: Input, now: Duration) -> Vec<Action> {
        match input {
            Input::Message(id, message) => self.message(id, message, now),
            Input::Ended(id, end) => self.ended(id, end, now),
            Input::Reaped(id) => self.agents.reaped(id),
            Input::Released(released) => self.release(released, now),
            Input::Probed(host) => self.probed(host, now),
            Input::HostScanned(host) => self.scan.take_host(host, now),
            Input::Others(others) => self.take_others(others, now),
            Input::Tick => {}
        }
        self.timers(now);
        std::mem::take(&mut self.actions)
    }

    fn take_others(&mut self, others: Others, now: Duration) {
        self.others = others;
        if let Others::HandedOver { away } = others {
            let grace = if away { Duration::ZERO } else { self.settings.grace };
            self.outage.inherit("it did for the linkwise before this one".to_owned(), now + grace);
        }
    }

    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn emit(&mut self, event: Event) {
        self.act(Action::Emit(event));
    }

    fn timers(&mut self, now: Duration) {
        let is_due = |due: Option<Duration>| due.is_some_and(|at| at <= now);
        while let Some((_, id)) = self.agents.next_kill().filter(|(at, _)| *at <= now) {
            self.kill(id);
        }
        if !self.agents.is_stuck() {
            self.stuck.clear();
        } else if self.stuck.is_news(()) {
            tracing::error!(
                agents = self.agents.unreaped(),
                "killed NVML agents do not end (stuck in the kernel): none is started before one of them has ended"
            );
        }
        if is_due(self.scan.due()) {
            self.publish(now);
        }
        if is_due(self.polls_due())
            && let Some(PendingPolls { polls, .. }) = self.polls.take()
        {
            self.emit(Event::Polled(polls));
        }
        if is_due(self.repeat_due())
            && let Some(active) = &self.agents.active
        {
            self.scan.repeat_at = None;
            self.actions.push(Action::Rescan(active.id));
        }
        if let Some((_, reason)) = self.standby_due().filter(|(at, _)| *at <= now) {
            self.start_standby(reason, now);
        }
        if let Some(cause) = self.outage.report(now) {
            let (grace, unhealthy) = (self.settings.grace, self.settings.unhealthy_when_away);
            let devices = if unhealthy { "unhealthy until NVML is back" } else { "offered as last seen" };
            tracing::error!(cause, ?grace, devices, "NVML unavailable for longer than the grace period");
            if unhealthy {
                self.emit(Event::DriverAway(cause));
            }
        }
        if is_due(self.stage_due()) {
            match self.stage {
                Stage::Pausing { .. } => {
                    // A probe that hangs is not awaited again.
                    let since = self.probe.map_or(now, |(since, _)| since);
                    self.stage = Stage::Probing { until: now.max(since + FILES) };
                    self.probe(now);
                }
                Stage::Probing { .. } => self.start(None, now),
                Stage::Idle { .. } => self.probe(now),
                Stage::Running | Stage::Failed => {}
            }
        }
    }

    fn stage_due(&self) -> Option<Duration> {
        match self.stage {
            Stage::Pausing { until } => (!self.released && self.agents.has_room()).then_some(until),
            Stage::Probing { until } => Some(until),
            Stage::Idle { look_at } => self.probe.is_none().then_some(look_at),
            Stage::Running | Stage::Failed => None,
        }
    }

    /// The moment at which a standby is to be started, and the reason.
    fn standby_due(&self) -> Option<(Duration, RestartReason)> {
        let active = self.agents.active.as_ref().filter(|active| active.ready)?;
        if self.agents.standby.is_some() || !self.agents.has_room() {
            return None;
        }
        let renewal = active.renewal.as_ref().map(|(at, why)| (*at, RestartReason::Renewal(why.clone())));
        let trial = self.quarantine.next_trial().map(|(at, place)| (at, RestartReason::Trial(place)));
        let lost = self.lost.next().map(|(at, why)| (at, RestartReason::Lost(why.to_owned())));
        [renewal, trial, lost].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    fn polls_due(&self) -> Option<Duration> {
        let pending = self.polls.as_ref()?;
        (!self.scan.delays(pending.polls.keys())).then_some(pending.until)
    }

    fn repeat_due(&self) -> Option<Duration> {
        self.scan.repeat_at.filter(|_| self.is_up())
    }

    fn probe(&mut self, now: Duration) {
        if self.probe.is_none() {
            self.probe = Some((now, false));
            let active = self.agents.active.as_ref().map(|active| active.id);
            self.act(Action::Probe(active));
        }
    }

    fn probed(&mut self, host: Option<HostFingerprint>, now: Duration) {
        let stale = self.probe.take().is_some_and(|(_, stale)| stale);
        if let Some(host) = &host {
            for (gpu, driver) in self.held_by_others.replace(host.foreign()) {
                tracing::info!(%gpu, driver, "GPU is bound to another kernel driver and not served");
            }
        }
        match (&self.stage, host) {
            (Stage::Probing { .. }, host) => self.start(host, now),
            (Stage::Idle { .. }, host) => match host.and_then(|host| host.gpus().first().copied()) {
                Some(first) => {
                    tracing::info!(gpu = %first, "NVIDIA GPU appeared on the PCI bus");
                    let reason = format!("GPU {first} appeared on the PCI bus, and has not been scanned yet");
                    self.act(Action::Idle(Idle::Waiting(reason)));
                    self.restart_at_once(now);
                }
                None => self.stage = Stage::Idle { look_at: now + self.settings.bus_look },
            },
            (Stage::Running, Some(host)) if !stale => {
                self.polled_on_bus(&host, now);
                self.compare(host, now);
            }
            _ => {}
        }
    }

    /// Adds to the waiting polls whether each GPU is on the PCI bus.
    fn polled_on_bus(&mut self, host: &HostFingerprint, now: Duration) {
        let Some(bus) = &host.bus else { return };
        self.once_on_bus.extend(bus.keys());
        let Some(pending) = &mut self.polls else { return };
        pending.until = now;
        for gpu in self.scan.nvml.iter().flat_map(|scan| &scan.gpus) {
            // A GPU that was never on the bus has not fallen off it: under WSL, or with a /sys that is not the host's,
            // the bus shows no GPU although all of them work.
            if let Some(poll) = pending.polls.get_mut(&gpu.uuid).filter(|_| self.once_on_bus.contains(&gpu.pci)) {
                poll.on_bus = Some(bus.contains_key(&gpu.pci));
            }
        }
    }

    /// Compares the host with that of the active agent, and asks for another agent if it requires one.
    fn compare(&mut self, host: HostFingerprint, now: Duration) {
        let Some(active) = &mut self.agents.active else { return };
        let Some(before) = active.host.replace(host.clone()) else {
            return self.emit(Event::Identified(host.identity));
        };
        if before.identity.driver != host.identity.driver {
            let name = |host: HostFingerprint| host.identity.driver.unwrap_or_else(|| "none".to_owned());
            let cause = format!("the driver was {}, and is {}", name(before), name(host));
            self.retire_all("replaced", now);
            tracing::warn!(cause, "NVML agent replaced");
            self.outage.begin(cause, now);
            return self.restart_at_once(now);
        }
        if host.has_other_library(&before) {
            active.renew("the file of NVML's library changed".to_owned(), now);
        }
        if host.has_other_bus(&before) {
            active.renew("the PCI bus has other GPUs than before".to_owned(), now);
        }
    }

    fn start(&mut self, host: Option<HostFingerprint>, now: Duration) {
        // A probe that still runs is older than the agent.
        self.probe = self.probe.map(|(since, _)| (since, true));
        let (id, skipped) = (self.agents.next_id(), self.quarantine.skip(None));
        self.act(Action::Start(id, skipped.clone()));
        self.lost.asked(now);
        self.agents.active = Some(self.active(id, skipped, host, now));
        self.stage = Stage::Running;
    }

    fn active(&self, id: AgentId, skipped: Vec<Place>, host: Option<HostFingerprint>, began: Duration) -> ActiveAgent {
        let backoff = Backoff::new(self.settings.pause, self.settings.pause.saturating_mul(LONGEST));
        let listens_to = BTreeSet::new();
        ActiveAgent { id, began, skipped, ready: false, listens_to, host, renewal: None, backoff }
    }

    fn start_standby(&mut self, reason: RestartReason, now: Duration) {
        let trial = match &reason {
            RestartReason::Trial(place) => Some(*place),
            RestartReason::Renewal(_) | RestartReason::Lost(_) => None,
        };
        tracing::info!(%reason, "standby NVML agent started");
        let (id, skipped) = (self.agents.next_id(), self.quarantine.skip(trial));
        self.act(Action::Start(id, skipped.clone()));
        self.lost.asked(now);
        self.agents.standby = Some(StandbyAgent { id, skipped, reason });
    }

    /// Starts the next agent without a pause, after the last one ended for a new reason.
    fn restart_at_once(&mut self, now: Duration) {
        self.backoff.reset();
        self.stage = Stage::Pausing { until: now };
    }

    fn retire(&mut self, id: AgentId, now: Duration) {
        self.agents.retire(id, now);
        self.act(Action::Dismiss(id));
    }

    /// Asks the active agent and the standby to end.
    fn retire_all(&mut self, cause: &'static str, now: Duration) {
        let active = self.agents.active.take().map(|active| active.id);
        let standby = self.agents.standby.take().map(|standby| standby.id);
        if active.is_some() {
            self.act(Action::CountEnd(cause));
        }
        for id in [active, standby].into_iter().flatten() {
            self.retire(id, now);
        }
    }

    fn kill(&mut self, id: AgentId) {
        self.agents.kill(id);
        self.act(Action::Kill(id));
    }

    fn release(&mut self, released: bool, now: Duration) {
        self.released = released;
        // Without a GPU there is none to wait for.
        if !self.outage.has_worked() && !matches!(self.stage, Stage::Idle { .. } | Stage::Failed) {
            let reason = if released { RELEASED } else { NOT_SEEN };
            self.act(Action::Idle(Idle::Waiting(reason.to_owned())));
        }
        if !released {
            return;
        }
        match self.stage {
            Stage::Running => {
                self.retire_all("released", now);
                self.outage.begin("an operator released the driver".to_owned(), now);
                self.restart_at_once(now);
            }
            Stage::Pausing { .. } | Stage::Probing { .. } => self.restart_at_once(now),
            Stage::Idle { .. } | Stage::Failed => {}
        }
    }

    fn message(&mut self, id: AgentId, message: FromAgent, now: Duration) {
        let is_active = self.agents.active.as_ref().is_some_and(|active| active.id == id);
        match message {
            // These count from any agent: one that was asked to end still reports its last events.
            FromAgent::Xid { gpu, code, gpu_instance, compute_instance } => {
                let instance = gpu_instance.map(|gpu_instance| MigInstance { gpu_instance, compute_instance });
                self.event(&gpu.clone(), Event::Xid { gpu, code, instance }, now);
            }
            FromAgent::DoubleBitEcc { gpu } => self.event(&gpu.clone(), Event::DoubleBitEcc(gpu), now),
            FromAgent::Ready(scan) if is_active => self.scanned(*scan, now),
            FromAgent::Polled { gpus, missing, unheard, .. } if is_active => self.polled(gpus, &missing, unheard, now),
            FromAgent::Failed(CallFailure { subject, error, .. }) if is_active => {
                self.act(Action::CountFailure);
                tracing::warn!(subject, call = %error.call, error = error.reason.to_string(), "NVML call failed");
            }
            FromAgent::Ready(scan) => {
                if let Some(standby) = self.agents.standby.take_if(|standby| standby.id == id) {
                    self.standby_ready(standby, *scan, now);
                }
            }
            // Messages of a standby or a retired agent are ignored; the reason for leaving also comes with the agent's
            // end.
            _ => {}
        }
    }

    fn event(&mut self, gpu: &GpuUuid, event: Event, now: Duration) {
        if self.scan.is_published(gpu) {
            self.emit(event);
        } else if self.scan.hold(event) {
            self.publish(now);
        }
    }

    fn standby_ready(&mut self, standby: StandbyAgent, scan: NodeScan, now: Duration) {
        // A standby that cannot even count the GPUs sees less than the working agent.
        if scan.count.is_none() {
            self.act(Action::CountEnd("replaced"));
            self.retire(standby.id, now);
            self.standby_failed(standby.reason, "it cannot count the GPUs".to_owned(), now);
        } else if let Some(old) = self.agents.active.take() {
            self.agents.active = Some(self.active(standby.id, standby.skipped, old.host, old.began));
            self.act(Action::CountEnd("replaced"));
            self.retire(old.id, now);
            self.scanned(scan, now);
        }
    }

    /// Records a scan by the active agent: the first when it is ready, and one after each change.
    fn scanned(&mut self, scan: NodeScan, now: Duration) {
        let Some(active) = &mut self.agents.active else { return };
        // The identity is unknown if the host was not probed in time; then the next probe has it.
        let identity = active.host.as_ref().map(|host| host.identity.clone());
        let gpus: BTreeSet<GpuUuid> = scan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        if !active.ready {
            let none_on_bus = active.host.as_ref().is_some_and(|host| host.gpus().is_empty());
            // A Tegra's own GPU counts, but cannot be served.
            let has_none = scan.count == Some(0) || active.host.as_ref().is_some_and(|host| host.is_tegra);
            let is_useless = gpus.is_empty() && has_none && active.skipped.is_empty() && none_on_bus;
            if is_useless && !self.scan.was_published() {
                // The agent has no GPU to follow, and would poll for ever.
                return self.useless(Reached::NoDriver, NO_GPUS, now);
            }
            let Some(verdict) = self.quarantine.agent_lives(&active.skipped, gpus.len(), scan.count) else {
                return self.useless(Reached::Nvml, "agents end whichever GPU they skip", now);
            };
            active.ready = true;
            active.listens_to.clone_from(&gpus);
            self.scan.force = true;
            let version = |answer| known(answer).map_or("unknown", String::as_str);
            let (driver, nvml) = (version(&scan.driver), version(&scan.library));
            tracing::info!(gpus = gpus.len(), driver, nvml, "NVML available");
            for path in self.library.replace([scan.path.clone()]) {
                tracing::info!(path, "NVML library loaded");
            }
            if self.outage.end() && self.settings.unhealthy_when_away {
                self.emit(Event::DriverBack);
            }
            self.report(verdict);
        } else if let Some(new) = gpus.difference(&active.listens_to).next() {
            active.renew(format!("GPU {new} appeared, and its events are not heard"), now);
        }
        self.actions.extend(identity.map(|identity| Action::Emit(Event::Identified(identity))));
        if gpus.is_empty() {
            let reason = match scan.count {
                Some(0) => NO_GPUS.to_owned(),
                Some(count) => format!("NVML counts {count} GPU(s), and none of them can be identified"),
                None => "NVML cannot count the GPUs".to_owned(),
            };
            self.act(Action::Idle(Idle::Waiting(reason)));
        }
        // A scan of the host that runs already has taken too long, or belongs to an unpublished scan.
        let host_until = if self.scan.host_runs { now } else { now + self.settings.call / 3 };
        self.once_listed.extend(scan.gpus.iter().map(|gpu| gpu.pci));
        self.scan.take(scan, host_until);
        if !std::mem::replace(&mut self.scan.host_runs, true) {
            self.act(Action::ScanHost);
        }
    }

    fn publish(&mut self, now: Duration) {
        let (node, events) = self.scan.publish(now);
        self.actions.extend(node.map(|node| Action::Publish(Box::new(node))));
        self.actions.extend(events.into_iter().map(Action::Emit));
    }

    /// Reports the newly quarantined GPUs, and those that are quarantined no longer.
    fn report(&mut self, verdict: Verdict) {
        // A GPU that was never scanned was never offered: it only gets a line in the log.
        let scanned = |place| self.scan.nvml.as_ref()?.at(place).map(|gpu| gpu.uuid.clone());
        let name = |place| {
            let uuid = scanned(place).or_else(|| self.quarantine.name(place).cloned());
            uuid.map_or_else(String::new, |uuid| uuid.to_string())
        };
        let mut events = Vec::new();
        for (place, why) in verdict.quarantined {
            let (gpu, index, cause) = (name(place), place.index, &why);
            tracing::error!(gpu, index, cause, "GPU quarantined: it ends the agents that query it");
            events.extend(scanned(place).map(|gpu| Event::Quarantined(gpu, why)));
        }
        for place in verdict.released {
            tracing::warn!(gpu = name(place), index = place.index, "GPU released from quarantine");
            events.extend(scanned(place).map(Event::ReleasedFromQuarantine));
        }
        self.actions.extend(events.into_iter().map(Action::Emit));
    }

    fn polled(&mut self, mut polls: BTreeMap<GpuUuid, HealthPoll>, missing: &[Missing], unheard: u32, now: Duration) {
        self.act(Action::Unheard(unheard));
        let unpolled = self.unpolled(&polls, missing);
        self.lost.polled(self.out_of_reach(&polls, &unpolled), now);
        polls.extend(unpolled);
        if let Some(before) = self.polls.take().filter(|before| !self.scan.delays(before.polls.keys())) {
            self.emit(Event::Polled(before.polls));
        }
        // A probe of the bus that hangs is not awaited again.
        let since = self.probe.map_or(now, |(since, _)| since);
        self.polls = Some(PendingPolls { polls, until: since + FILES });
        self.probe(now);
    }

    /// A GPU that answers no call of this process, with the reason: one that is lost or refused until a reset, one that
    /// cannot be identified, or one on the bus that NVML has listed before and does not list.
    fn out_of_reach(
        &self,
        polled: &BTreeMap<GpuUuid, HealthPoll>,
        unpolled: &BTreeMap<GpuUuid, HealthPoll>,
    ) -> Option<String> {
        let silent = |poll: &HealthPoll| matches!(poll.reach, Reach::Lost { .. } | Reach::ResetRequired { .. });
        let lost = polled.iter().find(|(_, poll)| silent(poll)).or_else(|| unpolled.iter().next());
        let lost = lost.map(|(gpu, _)| gpu.to_string()).or_else(|| {
            let on_bus = self.agents.active.as_ref()?.host.as_ref()?.gpus();
            let listed =
                |pci: &PciAddress| self.scan.nvml.iter().flat_map(|scan| &scan.gpus).any(|gpu| gpu.pci == *pci);
            let unlisted = on_bus.into_iter().find(|pci| self.once_listed.contains(pci) && !listed(pci))?;
            Some(unlisted.to_string())
        })?;
        Some(format!("GPU {lost} is out of reach, and may be back for a new process"))
    }

    /// Polls for the GPUs that NVML counts and that were not asked, except the skipped ones.
    fn unpolled(&self, polled: &BTreeMap<GpuUuid, HealthPoll>, missing: &[Missing]) -> BTreeMap<GpuUuid, HealthPoll> {
        let Some(scan) = &self.scan.nvml else { return BTreeMap::new() };
        let skipped = self.agents.active.as_ref().map_or(&[][..], |active| &active.skipped);
        let unlisted = || Reach::Failed { call: HANDLE.to_owned(), error: "NVML does not list it".to_owned() };
        let unpolled = scan.gpus.iter().filter(|gpu| !polled.contains_key(&gpu.uuid));
        let polls = unpolled.filter_map(|gpu| {
            let place = Place { index: gpu.index, of: scan.count.unwrap_or(0) };
            let of_it = missing.iter().find(|missing| missing.place.is_none_or(|of| of == place));
            let reach = of_it.map_or_else(unlisted, |missing| missing.reach.clone());
            let poll = HealthPoll { reach, ..HealthPoll::default() };
            (!skipped.contains(&place)).then(|| (gpu.uuid.clone(), poll))
        });
        polls.collect()
    }
}

#[cfg(test)]
mod tests;
