//! [`Opening`]: decides when the kubelet may get the first list.
//!
//! A plugin that starts knows neither health nor holders. If polls, PodResources and the checkpoints of claims can tell,
//! the first list waits for them. Then it offers no GPU that has failed meanwhile or that a claim has, and lacks no id
//! that a pod holds.

use super::device::Timestamp;

/// The time that the first list waits for the first poll and the first list of holders. An agent that has scanned the
/// GPUs polls them at once. If it does not, it is in trouble, and the kubelet has waited long enough.
const LONGEST: Timestamp = Timestamp::from_secs(20);

/// The things that the first list waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opening {
    needs_scan: bool,
    needs_poll: bool,
    needs_holders: bool,
    needs_claims: bool,
    /// The time of the node's scan.
    scanned: Option<Timestamp>,
}

impl Opening {
    /// Lets the list wait for the scan and the first poll.
    pub fn await_poll(&mut self) {
        (self.needs_scan, self.needs_poll) = (true, true);
    }

    /// Lets the list wait for no poll.
    pub fn await_no_poll(&mut self) {
        self.needs_poll = false;
    }

    /// Lets the list wait for the scan alone.
    pub fn await_scan_alone(&mut self) {
        (self.needs_poll, self.needs_holders, self.needs_claims) = (false, false, false);
    }

    /// Lets the list wait for the scan and the prepared claims, or for no claims.
    pub fn await_claims(&mut self, awaits: bool) {
        self.needs_scan |= awaits;
        self.needs_claims = awaits;
    }

    /// Lets the list wait for the scan and the first list of holders.
    pub fn await_holders(&mut self) {
        (self.needs_scan, self.needs_holders) = (true, true);
    }

    /// Returns true if the list may be published.
    pub fn is_open(self) -> bool {
        !(self.needs_scan || self.needs_poll || self.needs_holders || self.needs_claims)
    }

    /// Notes a scan of the node. Without GPUs there is nothing to poll and nothing that a pod holds.
    pub fn scanned(&mut self, has_gpus: bool, now: Timestamp) {
        if self.needs_scan {
            self.needs_poll &= has_gpus;
            self.needs_holders &= has_gpus;
            self.needs_claims &= has_gpus;
            (self.needs_scan, self.scanned) = (false, Some(now));
        }
    }

    /// Notes a poll. Returns true if this opened the list. A poll from before the scan does not count.
    pub fn polled(&mut self) -> bool {
        let needs_poll = self.needs_poll && self.needs_scan;
        self.change(Self { needs_poll, ..*self })
    }

    /// Notes that the kubelet listed the holders, or cannot be asked. Returns true if this opened the list.
    pub fn holders_known(&mut self) -> bool {
        self.change(Self { needs_holders: false, ..*self })
    }

    /// Notes that the prepared claims are known. Returns true if this opened the list.
    pub fn claims_known(&mut self) -> bool {
        self.change(Self { needs_claims: false, ..*self })
    }

    /// Opens the list if the wait has lasted too long, and returns true then. A clock that went back ends the wait too.
    pub fn tick(&mut self, now: Timestamp) -> bool {
        let over = |since: Timestamp| now < since || now.saturating_sub(since) >= LONGEST;
        self.scanned.is_some_and(over) && self.change(Self::default())
    }

    /// The time at which [`Self::tick`] opens the list.
    pub fn deadline(self) -> Option<Timestamp> {
        self.scanned.filter(|_| !self.is_open()).map(|since| since.saturating_add(LONGEST))
    }

    /// Returns true if this change opened the list.
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
        let mut opening = Opening::default();
        opening.await_poll();
        assert!(!opening.polled() && !opening.is_open());
        opening.scanned(true, Timestamp::ZERO);
        assert!(!opening.is_open(), "the poll came before the scan");
        assert_eq!(opening.deadline(), Some(LONGEST));
        assert!(opening.polled() && opening.is_open());
        assert_eq!(opening.deadline(), None);
    }

    #[test]
    fn node_without_gpus_opens_with_its_scan() {
        let mut opening = Opening::default();
        opening.await_poll();
        opening.await_holders();
        opening.await_claims(true);
        opening.scanned(false, Timestamp::ZERO);
        assert!(opening.is_open());
    }

    #[test]
    fn wait_for_poll_and_holders_ends_in_time() {
        let mut opening = Opening::default();
        opening.await_poll();
        opening.await_holders();
        assert!(!opening.tick(LONGEST), "the wait begins with the scan");
        opening.scanned(true, LONGEST);
        opening.await_claims(true);
        assert!(!opening.polled() && !opening.holders_known() && !opening.is_open(), "the claims are missing");
        assert!(!opening.tick(LONGEST) && opening.tick(LONGEST * 2) && opening.is_open());
    }
}
