//! The scanned node: NVML's GPUs and the host around them, published together. Pure.
//!
//! Called by `machine`. A scan through NVML waits a while for the scan of the host that belongs to it. Events of
//! unpublished GPUs wait too, since they would be dropped otherwise. A scan with failed calls is repeated, more and
//! more rarely.

use std::time::Duration;

use crate::call::Fault;
use crate::scan::NodeScan;
use linkwise_core::backoff::Backoff;
use linkwise_core::state::Event;
use linkwise_core::topology::{GpuUuid, HostObservation, NodeObservation, ProbeFailure};

/// The most polls from one incomplete scan to the next: about five minutes.
const LONGEST: u32 = 32;

/// The most events that may wait for the scan that names their GPUs.
const MOST_HELD: usize = 1000;

/// The host, and the failures of reading it.
pub(super) type HostScan = (HostObservation, Vec<ProbeFailure>);

/// The scans, and their unpublished part.
#[derive(Debug)]
pub(super) struct Scan {
    /// The latest scan through NVML, completed by those before.
    pub nvml: Option<NodeScan>,
    /// The latest scan of the host; a failed one does not change it.
    host: Option<HostScan>,
    published: Option<NodeObservation>,
    /// Set to publish the next scan even if it equals the last one: another agent may speak to another driver.
    pub force: bool,
    /// The moment until which an unpublished scan waits for the host.
    pending: Option<Duration>,
    /// Set while the host is scanned.
    pub host_runs: bool,
    held: Vec<Event>,
    /// The failures of the last scan, and the moment at which to repeat it.
    failures: Vec<ProbeFailure>,
    backoff: Backoff,
    pub repeat_at: Option<Duration>,
}

impl Scan {
    /// Starts without scans. `poll` is the time from one poll to the next.
    pub fn new(poll: Duration) -> Self {
        Self {
            nvml: None,
            host: None,
            published: None,
            force: false,
            pending: None,
            host_runs: false,
            held: Vec::new(),
            failures: Vec::new(),
            backoff: Backoff::new(poll, poll.saturating_mul(LONGEST)),
            repeat_at: None,
        }
    }

    /// Takes a scan through NVML. It waits for the host until `host_until` at the latest.
    pub fn take(&mut self, scan: NodeScan, host_until: Duration) {
        self.nvml = Some(scan.after(self.nvml.as_ref()));
        self.pending.get_or_insert(host_until);
    }

    /// Takes a scan of the host; `None` if the scan broke off.
    pub fn take_host(&mut self, host: Option<HostScan>, now: Duration) {
        self.host_runs = false;
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
        self.pending.map(|until| if self.host_runs { until } else { Duration::ZERO })
    }

    /// Returns true if a node was ever published.
    pub fn was_published(&self) -> bool {
        self.published.is_some()
    }

    /// Returns true if the readers of the node know the GPU, or if no pending scan could name it.
    pub fn is_published(&self, gpu: &GpuUuid) -> bool {
        let published = self.published.as_ref();
        self.pending.is_none() || published.is_some_and(|node| node.gpus.iter().any(|known| known.uuid == *gpu))
    }

    /// Returns true if a poll of these GPUs has to wait for the pending scan.
    pub fn delays<'a>(&self, mut gpus: impl Iterator<Item = &'a GpuUuid>) -> bool {
        self.pending.is_some() && !gpus.any(|gpu| self.is_published(gpu))
    }

    /// Holds an event back until the pending scan is published. Returns true if the scan has to be published now.
    pub fn hold(&mut self, event: Event) -> bool {
        self.held.push(event);
        self.held.len() >= MOST_HELD
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
        // A process does not get rights while it runs: what they withhold is no reason to repeat the scan.
        let withheld = nvml.failures.iter().all(|failure| failure.error.fault() == Fault::NoPermission);
        let again = !withheld || node.failures.len() > nvml.failures.len();
        self.repeat_at = again.then(|| now + self.backoff.failed());
        self.failures.clone_from(&node.failures);
        if self.host_runs {
            // This call still runs, which is no reason to repeat the scan.
            let (subject, call) = ("hwloc".to_owned(), "hwloc_topology_load".to_owned());
            let error = "it takes too long; the host is as it was seen before, if it was".to_owned();
            node.failures.push(ProbeFailure { subject, call, error });
        }
        let news = std::mem::take(&mut self.force) || self.published.as_ref() != Some(&node);
        (news.then(|| self.published.insert(node).clone()), held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::CallError;
    use crate::scan::CallFailure;

    #[test]
    fn what_rights_withhold_is_not_asked_again() {
        let failure = |code| CallFailure::new("GPU 0", CallError::returned("nvmlDeviceGetGpuInstanceById", code));
        for (codes, host, again) in
            [(&[][..], 0, false), (&[4], 0, false), (&[4, 4], 0, false), (&[4, 999], 0, true), (&[4], 1, true)]
        {
            let mut scan = Scan::new(Duration::from_secs(10));
            let failures = codes.iter().map(|code| failure(*code)).collect();
            let (driver, library, cuda, gpus) = (Ok(None), Ok(None), Ok(None), Vec::new());
            let path = String::new();
            let count = Some(0);
            scan.take(NodeScan { driver, library, path, cuda, count, gpus, failures, mig_orders: 0 }, Duration::ZERO);
            let of_host = || ProbeFailure { subject: "hwloc".into(), call: "f".into(), error: "e".into() };
            let host = (0..host).map(|_| of_host()).collect();
            scan.take_host(Some((HostObservation::default(), host)), Duration::ZERO);
            scan.publish(Duration::ZERO);
            assert_eq!(scan.repeat_at.is_some(), again, "{codes:?}");
        }
    }
}
