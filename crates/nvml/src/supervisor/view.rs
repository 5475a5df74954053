//! The node as agents and the host's files show it: scans and polls, published together. Pure.
//!
//! Called by `machine`. A scan through NVML waits a while for the scan of the host that belongs to it, and a poll for
//! the probe of the PCI bus. Events and polls of unpublished GPUs wait too, since they would be dropped otherwise. A
//! scan with failed calls is repeated, more and more rarely.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::host_probe::HostFingerprint;
use crate::HANDLE;
use crate::call::Fault;
use crate::protocol::{Missing, Place};
use crate::scan::NodeScan;
use linkwise_core::backoff::Backoff;
use linkwise_core::state::{Event, HealthPoll, Reach};
use linkwise_core::topology::{GpuUuid, HostObservation, NodeObservation, PciAddress, ProbeFailure};
use linkwise_host::hwloc::BusGpus;

/// The most polls from one incomplete scan to the next: about five minutes.
const MAX_POLLS: u32 = 32;

/// The most events that may wait for the scan that names their GPUs.
const MAX_HELD: usize = 1000;

/// The host, and the failures of reading it.
pub(super) type HostScan = (HostObservation, Vec<ProbeFailure>);

type Polls = BTreeMap<GpuUuid, HealthPoll>;

/// The scans and polls, and their unpublished part.
#[derive(Debug, Default)]
pub(super) struct View {
    /// The latest scan through NVML, completed from the previous ones.
    pub nvml: Option<NodeScan>,
    /// The host as the latest scan without failures saw it, or else the first scan; and the latest scan's failures.
    host: Option<HostScan>,
    /// The node as it was published last.
    pub published: Option<NodeObservation>,
    /// Set to publish the next scan even if it equals the last one: another agent may speak to another driver.
    pub must_publish: bool,
    /// The moment until which an unpublished scan waits for the host.
    pending: Option<Duration>,
    /// Set while the host is scanned.
    is_scanning_host: bool,
    /// The events that wait for the pending scan.
    held: Vec<Event>,
    /// The polls that wait for the probe of the PCI bus, and the latest end of the wait.
    polls: Option<(Polls, Duration)>,
    /// GPUs that NVML has listed since linkwise started.
    once_listed: BTreeSet<PciAddress>,
    /// GPUs that the kernel has listed on the bus since linkwise started.
    once_on_bus: BTreeSet<PciAddress>,
    /// The failures of the scan that was published last.
    failures: Vec<ProbeFailure>,
    backoff: Backoff,
    /// The moment at which to repeat the scan.
    pub repeat_at: Option<Duration>,
}

impl View {
    /// Starts without scans. `poll` is the time from one poll to the next.
    pub fn new(poll: Duration) -> Self {
        Self { backoff: Backoff::new(poll, poll.saturating_mul(MAX_POLLS)), ..Self::default() }
    }

    /// Takes a scan through NVML. It waits for the host until `until` at the latest. Returns true if a scan of the host
    /// is to begin.
    pub fn take(&mut self, scan: NodeScan, now: Duration, until: Duration) -> bool {
        self.once_listed.extend(scan.gpus.iter().map(|gpu| gpu.pci));
        self.nvml = Some(scan.after(self.nvml.as_ref()));
        // A scan of the host that already runs has taken too long, or belongs to the pending scan.
        self.pending.get_or_insert(if self.is_scanning_host { now } else { until });
        !std::mem::replace(&mut self.is_scanning_host, true)
    }

    /// Takes a scan of the host; `None` if the scan broke off.
    pub fn take_host(&mut self, host: Option<HostScan>, now: Duration) {
        self.is_scanning_host = false;
        if let Some((host, failures)) = host {
            let before = self.host.take().filter(|_| !failures.is_empty());
            self.host = Some((before.map_or(host, |(before, _)| before), failures));
        }
        if self.nvml.is_some() {
            self.pending.get_or_insert(now);
        }
    }

    /// The latest moment at which the pending scan is published.
    pub fn due(&self) -> Option<Duration> {
        self.pending.map(|until| if self.is_scanning_host { until } else { Duration::ZERO })
    }

    /// Returns true if the readers of the node know the GPU, or if no pending scan could name it.
    pub fn is_published(&self, gpu: &GpuUuid) -> bool {
        let published = self.published.as_ref();
        self.pending.is_none() || published.is_some_and(|node| node.gpus.iter().any(|known| known.uuid == *gpu))
    }

    /// Takes a poll of the GPUs. It waits for the probe of the bus until `until` at the latest. Returns the
    /// previous poll if that still waits for the bus, and a GPU that only a new process may reach, if there is one.
    /// `skipped` are the GPUs that the agent must not ask.
    pub fn polled(
        &mut self,
        mut polls: Polls,
        missing: &[Missing],
        skipped: &[Place],
        host: Option<&HostFingerprint>,
        until: Duration,
    ) -> (Option<Event>, Option<String>) {
        let unpolled = self.unpolled(&polls, missing, skipped);
        let lost = self.out_of_reach(&polls, &unpolled, host);
        polls.extend(unpolled);
        let before = self.polls.replace((polls, until)).filter(|(before, _)| !self.delays(before));
        (before.map(|(polls, _)| Event::Polled(polls)), lost)
    }

    /// Adds to the waiting poll whether each GPU is on the PCI bus.
    pub fn take_bus(&mut self, bus: Option<&BusGpus>, now: Duration) {
        let Some(bus) = bus else { return };
        self.once_on_bus.extend(bus.keys());
        let Some((polls, until)) = &mut self.polls else { return };
        *until = now;
        for gpu in self.nvml.iter().flat_map(|scan| &scan.gpus) {
            // A GPU that was never on the bus has not fallen off it: under WSL, or with a /sys that is not the host's,
            // the bus shows no GPU although all of them work.
            if let Some(poll) = polls.get_mut(&gpu.uuid).filter(|_| self.once_on_bus.contains(&gpu.pci)) {
                poll.on_bus = Some(bus.contains_key(&gpu.pci));
            }
        }
    }

    /// The latest moment at which the waiting poll is published.
    pub fn polls_due(&self) -> Option<Duration> {
        self.polls.as_ref().filter(|(polls, _)| !self.delays(polls)).map(|(_, until)| *until)
    }

    /// Takes the waiting poll out.
    pub fn take_polls(&mut self) -> Option<Event> {
        self.polls.take().map(|(polls, _)| Event::Polled(polls))
    }

    /// Returns true if a poll of these GPUs has to wait for the pending scan.
    fn delays(&self, polls: &Polls) -> bool {
        self.pending.is_some() && !polls.keys().any(|gpu| self.is_published(gpu))
    }

    /// A GPU that only a new process may reach: it is lost, refuses calls until a reset, or cannot be identified, or it
    /// is on the bus and NVML no longer lists it.
    fn out_of_reach(&self, polled: &Polls, unpolled: &Polls, host: Option<&HostFingerprint>) -> Option<String> {
        let is_lost = |poll: &HealthPoll| matches!(poll.reach, Reach::Lost { .. } | Reach::ResetRequired { .. });
        let lost = polled.iter().find(|(_, poll)| is_lost(poll)).or_else(|| unpolled.iter().next());
        lost.map(|(gpu, _)| gpu.to_string()).or_else(|| {
            let listed = |pci: &PciAddress| self.nvml.iter().flat_map(|scan| &scan.gpus).any(|gpu| gpu.pci == *pci);
            let on_bus = host?.gpus();
            on_bus.into_iter().find(|pci| self.once_listed.contains(pci) && !listed(pci)).map(|pci| pci.to_string())
        })
    }

    /// The polls of the GPUs that the latest scan lists and the agent did not poll, except the skipped ones.
    fn unpolled(&self, polled: &Polls, missing: &[Missing], skipped: &[Place]) -> Polls {
        let Some(scan) = &self.nvml else { return BTreeMap::new() };
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

    /// Holds an event back until the pending scan is published. Returns true if the scan has to be published now.
    pub fn hold(&mut self, event: Event) -> bool {
        self.held.push(event);
        self.held.len() >= MAX_HELD
    }

    /// Publishes the pending scan: the node, if it changed, and the events that waited for it.
    pub fn publish(&mut self, now: Duration) -> (Option<NodeObservation>, Vec<Event>) {
        self.pending = None;
        let held = std::mem::take(&mut self.held);
        let Some(nvml) = &self.nvml else { return (None, held) };
        let (host, host_failures) = self.host.clone().unwrap_or_default();
        let mut node = nvml.node(host, host_failures);
        if node.failures != self.failures || node.failures.is_empty() {
            self.backoff.reset();
        }
        // A process gets no permissions while it runs, so calls that it may not make are no reason to repeat the scan.
        let withheld = nvml.failures.iter().all(|failure| failure.error.fault() == Fault::NoPermission);
        let again = !withheld || node.failures.len() > nvml.failures.len();
        self.repeat_at = again.then(|| now + self.backoff.failed());
        self.failures.clone_from(&node.failures);
        if self.is_scanning_host {
            // A running scan of the host is no reason to repeat the scan through NVML.
            let (subject, call) = ("hwloc".to_owned(), "hwloc_topology_load".to_owned());
            let error = "it has not returned; the previous scan of the host is used, if there is one".to_owned();
            node.failures.push(ProbeFailure { subject, call, error });
        }
        let is_new = std::mem::take(&mut self.must_publish) || self.published.as_ref() != Some(&node);
        (is_new.then(|| self.published.insert(node).clone()), held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::CallError;
    use crate::scan::CallFailure;

    #[test]
    fn call_without_permission_does_not_repeat_scan() {
        let failure = |code| CallFailure::new("GPU 0", CallError::returned("nvmlDeviceGetGpuInstanceById", code));
        for (codes, host, again) in
            [(&[][..], 0, false), (&[4], 0, false), (&[4, 4], 0, false), (&[4, 999], 0, true), (&[4], 1, true)]
        {
            let mut view = View::new(Duration::from_secs(10));
            let failures = codes.iter().map(|code| failure(*code)).collect();
            let of_nvml = NodeScan { failures, ..NodeScan::bare(Vec::new()) };
            view.take(of_nvml, Duration::ZERO, Duration::ZERO);
            let of_host = || ProbeFailure { subject: "hwloc".into(), call: "f".into(), error: "e".into() };
            let host = (0..host).map(|_| of_host()).collect();
            view.take_host(Some((HostObservation::default(), host)), Duration::ZERO);
            view.publish(Duration::ZERO);
            assert_eq!(view.repeat_at.is_some(), again, "{codes:?}");
        }
    }
}
