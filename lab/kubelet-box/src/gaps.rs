//! The gaps of a resource. A gap lasts from the end of a stream that made its devices unhealthy until pods can get
//! them again. A pod that comes within a gap is rejected.
//!
//! `life` writes the gaps when it changes the books, and `KubeletBox::gaps` reads them.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug, Default)]
pub(super) struct Gaps {
    open: BTreeMap<String, Instant>,
    ended: BTreeMap<String, Vec<Duration>>,
}

impl Gaps {
    /// Begins a gap: the devices of the resource became unhealthy because a stream ended at `since`.
    pub(super) fn begin(&mut self, resource: &str, since: Instant) {
        self.open.entry(resource.to_owned()).or_insert(since);
    }

    /// Ends the gap: the resource has healthy devices again.
    pub(super) fn end(&mut self, resource: &str, now: Instant) {
        if let Some(since) = self.open.remove(resource) {
            self.ended.entry(resource.to_owned()).or_default().push(now.saturating_duration_since(since));
        }
    }

    /// Drops the open gaps, because the kubelet ends and no later list can end them.
    pub(super) fn forget_open(&mut self) {
        self.open.clear();
    }

    /// The gaps of the resource that have ended, in order.
    pub(super) fn of(&self, resource: &str) -> Vec<Duration> {
        self.ended.get(resource).cloned().unwrap_or_default()
    }
}
