//! [`Opening`]: decides when the kubelet may get the first list.
//!
//! A plugin that starts knows neither health nor holders. The first list waits for polls, PodResources and the
//! checkpoints of claims, where the node has these. The list then offers no GPU that has failed meanwhile or that a
//! claim has, and contains each id that a pod holds.

use super::device::Timestamp;

/// The longest time after the scan that the first list waits. An agent that has scanned the GPUs polls them at once. If
/// it does not, it is in trouble, and the kubelet has waited long enough.
const MAX_WAIT: Timestamp = Timestamp::from_secs(20);

/// The facts that the first list still waits for: each is awaited while its field is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// The scan of the node.
    pub scan: bool,
    /// The first [`Event::Polled`](super::Event::Polled) after the scan.
    pub poll: bool,
    /// The first [`Event::Holders`](super::Event::Holders), even if the kubelet could not be asked. The list then
    /// contains the ids that pods are known to hold.
    pub holders: bool,
    /// The first [`Event::Prepared`](super::Event::Prepared): a claim that the previous process prepared keeps its GPU
    /// from the device plugin.
    pub claims: bool,
    /// The time of the node's scan.
    scanned: Option<Timestamp>,
    /// The waits for a poll, holders and claims that a node without GPUs puts off until it has some.
    without_gpus: Option<[bool; 3]>,
}

impl Opening {
    /// Returns true if the list may be published.
    pub(super) fn is_open(self) -> bool {
        !(self.scan || self.poll || self.holders || self.claims)
    }

    /// Notes a scan of the node. Without GPUs there is nothing to poll and nothing that a pod holds, until some appear.
    pub(super) fn scanned(&mut self, has_gpus: bool, now: Timestamp) {
        if self.scan && !has_gpus {
            self.without_gpus = Some([self.poll, self.holders, self.claims]);
            (self.poll, self.holders, self.claims) = (false, false, false);
        }
        if let Some(waits) = self.without_gpus.take_if(|_| has_gpus) {
            [self.poll, self.holders, self.claims] = waits;
            self.scan = true;
        }
        if self.scan {
            (self.scan, self.scanned) = (false, Some(now));
        }
    }

    /// Notes a poll. Returns true if this opened the list. A poll from before the scan does not count.
    pub(super) fn polled(&mut self) -> bool {
        self.change(Self { poll: self.poll && self.scan, ..*self })
    }

    /// Notes that the kubelet listed the holders, or cannot be asked. Returns true if this opened the list.
    pub(super) fn holders_known(&mut self) -> bool {
        self.change(Self { holders: false, ..*self })
    }

    /// Notes that the prepared claims are known. Returns true if this opened the list.
    pub(super) fn claims_known(&mut self) -> bool {
        self.without_gpus = self.without_gpus.map(|[poll, holders, _]| [poll, holders, false]);
        self.change(Self { claims: false, ..*self })
    }

    /// Opens the list if the wait has lasted too long, and returns true then. A clock that went back ends the wait too.
    pub(super) fn tick(&mut self, now: Timestamp) -> bool {
        let over = |since: Timestamp| now < since || now.saturating_sub(since) >= MAX_WAIT;
        let ended = Self { without_gpus: self.without_gpus, ..Self::default() };
        self.scanned.is_some_and(over) && self.change(ended)
    }

    /// The time at which [`Self::tick`] opens the list.
    pub(super) fn deadline(self) -> Option<Timestamp> {
        self.scanned.filter(|_| !self.is_open()).map(|since| since.saturating_add(MAX_WAIT))
    }

    /// Makes a change. Returns true if it opened the list.
    fn change(&mut self, next: Self) -> bool {
        let opened = next.is_open() && !self.is_open();
        *self = next;
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_before_scan_does_not_open_the_list() {
        let mut opening = Opening { scan: true, poll: true, ..Opening::default() };
        assert!(!opening.polled() && !opening.is_open());
        opening.scanned(true, Timestamp::ZERO);
        assert!(!opening.is_open(), "the poll came before the scan");
        assert_eq!(opening.deadline(), Some(MAX_WAIT));
        assert!(opening.polled() && opening.is_open());
        assert_eq!(opening.deadline(), None);
    }

    #[test]
    fn gpus_that_come_later_are_waited_for() {
        let mut opening = Opening { scan: true, poll: true, holders: true, claims: true, ..Opening::default() };
        opening.scanned(false, Timestamp::ZERO);
        assert!(opening.is_open(), "a node without GPUs");
        opening.claims_known();
        opening.scanned(true, MAX_WAIT);
        assert!(opening.poll && opening.holders && !opening.claims && !opening.is_open());
        opening.scanned(true, MAX_WAIT);
        assert!(opening.holders_known() || opening.polled());
    }

    #[test]
    fn wait_ends_max_wait_after_the_scan() {
        let mut opening = Opening { scan: true, poll: true, holders: true, ..Opening::default() };
        assert!(!opening.tick(MAX_WAIT), "the wait begins with the scan");
        opening.scanned(true, MAX_WAIT);
        (opening.scan, opening.claims) = (true, true);
        assert!(!opening.polled() && !opening.holders_known() && !opening.is_open(), "scan and claims are missing");
        assert!(!opening.tick(MAX_WAIT) && opening.tick(MAX_WAIT * 2) && opening.is_open());
    }
}
