//! The agent's polls: cheap calls to each GPU at an interval, and a full scan after each change that a poll shows, each
//! `Observe` of the parent, and each MIG order.
//!
//! It runs on a thread of its own, so that it delays neither the wait for events nor reads of the parent's socket.
//! Called by `agent`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

use super::agent::Parent;
use super::call::CallError;
use super::calls::Calls;
use super::child::AgentCommand;
use super::events::Waiting;
use super::full_scan::{self, Gpu, Listed, REGISTER};
use super::gate::Gate;
use super::mig_order;
use super::poll::{self, Polled, Unoffered};
use super::protocol::{FromAgent, Missing, ToAgent};
use super::scan::{CallFailure, NodeScan};
use linkwise_core::claims::{MigOrder, MigOrderError, MigTask};
use linkwise_core::state::{HealthPoll, Reach};
use linkwise_core::topology::{GpuUuid, MigUuid};

/// The least time from one poll to a poll that an event requests.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the polls.
pub struct Watch {
    pub nvml: &'static Nvml,
    /// The path or the name by which the library was loaded.
    pub library: PathBuf,
    pub parent: Arc<Parent>,
    /// The reporter of calls that are about no GPU.
    pub calls: Calls,
    /// The settings with which the agent was started.
    pub command: AgentCommand,
    /// The GPUs of the latest full scan.
    pub gpus: Arc<Vec<Gpu<'static>>>,
    /// The GPUs that did not report their UUID or PCI address when last asked.
    pub missing: Vec<Missing>,
    /// The GPUs that NVML listed when the agent registered for events.
    pub registered: Vec<GpuUuid>,
    /// The state of the thread that waits for events.
    pub waiting: Arc<Waiting>,
    /// The calls that each GPU does not offer.
    pub unoffered: BTreeMap<GpuUuid, Unoffered>,
    /// The node at the latest poll.
    pub seen: Fingerprint,
}

/// The part of the node that a poll sees, fact by fact. A change of a fact requires a full scan. Failed calls are not
/// in it: a failure is not a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(BTreeMap<Fact, String>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fact {
    Count,
    Uuid(u32),
    Link(GpuUuid, u32),
    Mig(GpuUuid),
}

impl Fingerprint {
    fn add(&mut self, fact: Fact, value: impl Debug) {
        self.0.insert(fact, format!("{value:?}"));
    }

    /// Stores the facts of a poll; returns true if any of them differs from the known one.
    fn update(&mut self, facts: Self) -> bool {
        // This does not stop at the first difference: every fact is stored.
        facts.0.into_iter().fold(false, |changed, (fact, value)| {
            let differs = self.0.get(&fact) != Some(&value);
            self.0.insert(fact, value);
            changed | differs
        })
    }
}

impl Watch {
    /// Makes the first poll and the first full scan; nothing is reported before both are done.
    pub fn begin(&mut self, listed: Listed<'static>) {
        if let Some(count) = listed.count {
            self.seen.add(Fact::Count, count);
        }
        let polls = self.scan(listed);
        self.report(polls);
    }

    /// Polls and serves requests until the parent is gone.
    pub fn run(mut self, requests: &Receiver<ToAgent>) {
        let mut last_poll = Instant::now();
        let mut next_poll = last_poll + self.command.poll;
        loop {
            match requests.recv_timeout(next_poll.saturating_duration_since(Instant::now())) {
                Ok(ToAgent::Observe) => drop(self.observe()),
                Ok(ToAgent::Mig(order)) => {
                    self.parent.send(&FromAgent::MigDone(self.carry_out(&order)));
                    self.observe();
                }
                Ok(ToAgent::Poll) => next_poll = next_poll.min(Instant::now().max(last_poll + MIN_INTERVAL)),
                Err(RecvTimeoutError::Timeout) => {
                    self.waiting.poll_begins(next_poll.elapsed());
                    self.poll_and_report();
                    last_poll = Instant::now();
                    next_poll = last_poll + self.command.poll;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn carry_out(&self, order: &MigOrder) -> Result<Vec<MigUuid>, MigOrderError> {
        let is_lost = |missing: &Missing| matches!(missing.reach, Reach::Lost { .. });
        let hides_gpus = !self.command.skip.is_empty() || !self.missing.iter().all(is_lost);
        // If the parent is killed, this process keeps the turn until its current call has returned.
        let turn = self.command.gate.as_ref().map_or(Ok(None), Gate::mig_turn);
        let may_exist = matches!(order.task, MigTask::Destroy(..));
        let _turn = turn.map_err(|taken| MigOrderError { why: taken.to_string(), may_exist })?;
        mig_order::carry_out(&self.gpus, hides_gpus, order)
    }

    fn poll_and_report(&mut self) {
        let (mut polls, mut facts) = self.poll();
        self.add_listed(&mut facts);
        if self.seen.update(facts) {
            // New GPUs are polled at once; a full scan is rare. A GPU that the scan could not identify is among the
            // missing ones.
            polls = self.observe();
        }
        self.report(polls);
    }

    /// Adds the GPUs' number and UUIDs by index, as a full scan would list them; updates the missing ones.
    fn add_listed(&mut self, facts: &mut Fingerprint) {
        let listed = full_scan::list(self.nvml, &self.calls, &self.command.skip);
        let mut uncounted = listed.failures.into_iter().filter(|_| listed.count.is_none());
        if let Some(failure) = uncounted.find(|failure| failure.error.needs_new_process()) {
            // Only a new process can reach the driver that is loaded now.
            self.parent.leave(failure.error);
        }
        self.missing = listed.missing;
        if let Some(count) = listed.count {
            facts.add(Fact::Count, count);
        }
        for gpu in listed.gpus.iter() {
            facts.add(Fact::Uuid(gpu.index), &gpu.uuid);
        }
    }

    fn poll(&mut self) -> (BTreeMap<GpuUuid, HealthPoll>, Fingerprint) {
        let mut facts = Fingerprint::default();
        let mut polls = BTreeMap::new();
        for gpu in self.gpus.iter() {
            let unoffered = self.unoffered.entry(gpu.uuid.clone()).or_default();
            let Polled { health, links, mig } = poll::poll(gpu, unoffered);
            for (link, up) in links.into_iter().flatten() {
                facts.add(Fact::Link(gpu.uuid.clone(), link), up);
            }
            if let Some(mig) = mig {
                facts.add(Fact::Mig(gpu.uuid.clone()), mig);
            }
            polls.insert(gpu.uuid.clone(), health);
        }
        (polls, facts)
    }

    fn report(&self, gpus: BTreeMap<GpuUuid, HealthPoll>) {
        let waiting_ms = u64::try_from(self.waiting.duration().as_millis()).unwrap_or(u64::MAX);
        let missing = self.missing.clone();
        let subjects: BTreeSet<String> = self.unheard().into_iter().map(|failure| failure.subject).collect();
        // Without an event set, or if every wait fails, no GPU's events arrive.
        let unheard = if subjects.contains("driver") { self.gpus.len() } else { subjects.len() };
        let unheard = u32::try_from(unheard).unwrap_or(u32::MAX);
        self.parent.send(&FromAgent::Polled { gpus, missing, unheard, waiting_ms });
    }

    fn observe(&mut self) -> BTreeMap<GpuUuid, HealthPoll> {
        self.scan(full_scan::list(self.nvml, &self.calls, &self.command.skip))
    }

    /// Makes and reports a full scan of the listed GPUs, which the polls ask from now on. Returns a poll from just
    /// before the scan: the next poll finds each later change, even one that this scan has already.
    fn scan(&mut self, listed: Listed<'static>) -> BTreeMap<GpuUuid, HealthPoll> {
        (self.gpus, self.missing) = (listed.gpus, listed.missing);
        // Only the scanned GPUs have UUIDs here: a GPU that is identified later is a change.
        self.seen.0.retain(|fact, _| !matches!(fact, Fact::Uuid(_)));
        for gpu in self.gpus.iter() {
            self.seen.add(Fact::Uuid(gpu.index), &gpu.uuid);
        }
        let (polls, facts) = self.poll();
        self.seen.update(facts);
        let mut failures = listed.failures;
        failures.extend(self.unheard());
        let (nvml, calls) = (self.nvml, &self.calls);
        let scan = NodeScan {
            driver: calls.ask("nvmlSystemGetDriverVersion", || nvml.sys_driver_version()),
            library: calls.ask("nvmlSystemGetNVMLVersion", || nvml.sys_nvml_version()),
            path: self.library.display().to_string(),
            cuda: full_scan::cuda_version(nvml, calls),
            count: listed.count,
            gpus: full_scan::scan(&self.gpus, &self.command.procfs),
            failures,
            mig_orders: 0,
        };
        self.parent.send(&FromAgent::Ready(Box::new(scan)));
        polls
    }

    /// The failures that keep events away: of the driver, or of single GPUs.
    fn unheard(&self) -> Vec<CallFailure> {
        let late = self.gpus.iter().filter(|gpu| !self.registered.contains(&gpu.uuid)).map(|gpu| {
            let late = "the GPU appeared after the agent's start: its events do not arrive until the next agent starts";
            CallFailure::new(gpu.pci.to_string(), CallError::in_words(REGISTER, late))
        });
        self.waiting.unheard().into_iter().chain(late).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u32) -> GpuUuid {
        format!("GPU-{number}").parse().unwrap()
    }

    fn facts(count: u32, uuids: &[u32], links: &[(u32, u32, bool)]) -> Fingerprint {
        let mut facts = Fingerprint::default();
        facts.add(Fact::Count, count);
        uuids.iter().for_each(|index| facts.add(Fact::Uuid(*index), gpu(*index)));
        links.iter().for_each(|(of, link, up)| facts.add(Fact::Link(gpu(*of), *link), up));
        facts
    }

    #[test]
    fn only_new_values_are_changes() {
        let mut seen = Fingerprint::default();
        assert!(seen.update(facts(2, &[0, 1], &[(0, 3, true)])));
        assert!(!seen.update(facts(2, &[0, 1], &[(0, 3, true)])));
        // One GPU does not answer, nor do the links of the other.
        assert!(!seen.update(facts(2, &[0], &[])));
        assert!(!seen.update(Fingerprint::default()));
        assert!(!seen.update(facts(2, &[0, 1], &[(0, 3, true)])), "the old values are a change");
        assert!(seen.update(facts(2, &[0, 1], &[(0, 3, false)])), "a link down is no change");
        assert!(seen.update(facts(1, &[0], &[])), "a GPU less is no change");
        assert!(seen.update(facts(2, &[0, 1], &[])), "a GPU more is no change");
        for (layout, change) in [(None, "first seen"), (Some(vec![]), "turned on"), (Some(vec!["MIG-1"]), "laid out")] {
            let mig = || {
                let mut facts = facts(2, &[], &[]);
                facts.add(Fact::Mig(gpu(0)), &layout);
                facts
            };
            assert!(seen.update(mig()), "MIG: {change}");
            assert!(!seen.update(mig()), "MIG: {change}");
        }
        let mut other = facts(2, &[], &[]);
        other.add(Fact::Uuid(1), gpu(7));
        assert!(seen.update(other), "another GPU at an index is no change");
    }
}
