//! The gaps of a resource: from the end of a stream that took its devices to what brought them back.
//!
//! Written by `life` where it changes the books, read through `KubeletBox::gaps`. A pod that is admitted within a gap
//! is rejected.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Gaps by resource.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    open: BTreeMap<String, Instant>,
    over: BTreeMap<String, Vec<Duration>>,
}

impl Gaps {
    /// The devices of the resource became unhealthy because a stream ended at `since`.
    pub(super) fn begin(&mut self, resource: &str, since: Instant) {
        self.open.entry(resource.to_owned()).or_insert(since);
    }

    /// The resource has something to give.
    pub(super) fn end(&mut self, resource: &str, now: Instant) {
        if let Some(since) = self.open.remove(resource) {
            self.over.entry(resource.to_owned()).or_default().push(now.saturating_duration_since(since));
        }
    }

    /// The kubelet ends: no later list belongs to what is open.
    pub(super) fn forget_open(&mut self) {
        self.open.clear();
    }

    /// The gaps of the resource that are over, in order.
    pub(super) fn of(&self, resource: &str) -> Vec<Duration> {
        self.over.get(resource).cloned().unwrap_or_default()
    }
}
