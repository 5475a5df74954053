//! The gaps of a resource: each lasts from the end of the stream that took its devices until a list brings them back.
//!
//! `life` writes the gaps where it changes the books; `KubeletBox::gaps` reads them. A pod that is admitted within a
//! gap is rejected.

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
    /// Begins a gap: the devices of the resource became unhealthy because a stream ended at `since`.
    pub(super) fn begin(&mut self, resource: &str, since: Instant) {
        self.open.entry(resource.to_owned()).or_insert(since);
    }

    /// Ends the gap: the resource has healthy devices again.
    pub(super) fn end(&mut self, resource: &str, now: Instant) {
        if let Some(since) = self.open.remove(resource) {
            self.over.entry(resource.to_owned()).or_default().push(now.saturating_duration_since(since));
        }
    }

    /// Drops the open gaps: the kubelet ends, so that no later list can end them.
    pub(super) fn forget_open(&mut self) {
        self.open.clear();
    }

    /// The gaps of the resource that have ended, in order.
    pub(super) fn of(&self, resource: &str) -> Vec<Duration> {
        self.over.get(resource).cloned().unwrap_or_default()
    }
}
