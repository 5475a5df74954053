//! [`Opening`]: when the kubelet may see the first list.
//!
//! A plugin that starts knows nothing of health and holders. Where polls and PodResources can tell, the first list waits for
//! them, so that no GPU is offered that has failed meanwhile, and no id is missing that a pod holds.

use super::device::Timestamp;

/// How long the first list waits for the first poll and the first list of holders. An agent that has scanned the GPUs polls
/// them at once; one that does not is in trouble, and the kubelet has waited long enough.
const LONGEST: Timestamp = Timestamp::from_secs(20);

/// What the first list waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opening {
    needs_scan: bool,
    needs_poll: bool,
    needs_holders: bool,
    /// When the node was scanned.
    scanned: Option<Timestamp>,
}

impl Opening {
    /// The list waits for the scan and the first poll.
    pub fn await_poll(&mut self) {
        (self.needs_scan, self.needs_poll) = (true, true);
    }

    /// The list waits for the scan and the first list of holders.
    pub fn await_holders(&mut self) {
        (self.needs_scan, self.needs_holders) = (true, true);
    }

    /// Whether the list may be published.
    pub fn is_open(self) -> bool {
        !(self.needs_scan || self.needs_poll || self.needs_holders)
    }

    /// The node was scanned. Where it has no GPU there is nothing to poll and nothing to hold.
    pub fn scanned(&mut self, has_gpus: bool, now: Timestamp) {
        if self.needs_scan {
            self.needs_poll &= has_gpus;
            self.needs_holders &= has_gpus;
            (self.needs_scan, self.scanned) = (false, Some(now));
        }
    }

    /// GPUs were polled. Whether this opened the list. A poll from before the scan does not count.
    pub fn polled(&mut self) -> bool {
        let needs_poll = self.needs_poll && self.needs_scan;
        self.change(Self { needs_poll, ..*self })
    }

    /// The kubelet listed the holders, or cannot be asked. Whether this opened the list.
    pub fn holders_known(&mut self) -> bool {
        self.change(Self { needs_holders: false, ..*self })
    }

    /// Whether the wait has lasted too long, which opens the list. A clock that went back ends the wait, too.
    pub fn tick(&mut self, now: Timestamp) -> bool {
        let over = |since: Timestamp| now < since || now.saturating_sub(since) >= LONGEST;
        self.scanned.is_some_and(over) && self.change(Self::default())
    }

    /// When [`Self::tick`] opens the list.
    pub fn deadline(self) -> Option<Timestamp> {
        self.scanned.filter(|_| !self.is_open()).map(|since| since.saturating_add(LONGEST))
    }

    /// Whether this change opened the list.
    fn change(&mut self, next: Self) -> bool {
        let opened = next.is_open() && !self.is_open();
        *self = next;
        opened
    }
}
