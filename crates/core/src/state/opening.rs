//! [`Opening`]: when the kubelet may see the first list.
//!
//! A plugin that starts knows nothing of health and holders. Where polls and PodResources can tell, the first list waits for
//! them, so that no GPU is offered that has failed meanwhile, and no id is missing that a pod holds.

use super::device::Timestamp;

/// How long the first list waits for the first poll and the first list of holders. An agent that has scanned the GPUs polls
/// them at once; one that does not is in trouble, and the kubelet has waited long enough.
const LONGEST: Timestamp = Timestamp::from_secs(20);

/// Whether the list may be published, and what it waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Opening {
    phase: Phase,
    needs_poll: bool,
    needs_holders: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// The node has not been scanned.
    BeforeScan,
    /// It has; a poll or the holders are missing.
    Waiting { since: Timestamp },
}

impl Opening {
    /// The list waits for the scan and the first poll.
    pub fn await_poll(&mut self) {
        (self.phase, self.needs_poll) = (Phase::BeforeScan, true);
    }

    /// The list waits for the scan and the first list of holders.
    pub fn await_holders(&mut self) {
        (self.phase, self.needs_holders) = (Phase::BeforeScan, true);
    }

    /// Whether the list may be published.
    pub fn is_open(self) -> bool {
        self.phase == Phase::Open
    }

    /// The node was scanned. Where it has no GPU there is nothing to poll and nothing to hold.
    pub fn scanned(&mut self, has_gpus: bool, now: Timestamp) {
        if self.phase == Phase::BeforeScan {
            self.phase = Phase::Waiting { since: now };
            self.needs_poll &= has_gpus;
            self.needs_holders &= has_gpus;
            self.open_if_complete();
        }
    }

    /// GPUs were polled. Whether this opened the list.
    pub fn polled(&mut self) -> bool {
        if matches!(self.phase, Phase::Waiting { .. }) {
            self.needs_poll = false;
        }
        self.open_if_complete()
    }

    /// The kubelet said who holds what, or that it cannot. Whether this opened the list.
    pub fn holders_known(&mut self) -> bool {
        self.needs_holders = false;
        self.open_if_complete()
    }

    /// Whether the wait has lasted too long, which opens the list. A clock that went back ends the wait, too.
    pub fn tick(&mut self, now: Timestamp) -> bool {
        let Phase::Waiting { since } = self.phase else { return false };
        let expired = now < since || now.saturating_sub(since) >= LONGEST;
        if expired {
            self.phase = Phase::Open;
        }
        expired
    }

    /// When [`Self::tick`] opens the list.
    pub fn deadline(self) -> Option<Timestamp> {
        match self.phase {
            Phase::Waiting { since } => Some(since.saturating_add(LONGEST)),
            Phase::Open | Phase::BeforeScan => None,
        }
    }

    fn open_if_complete(&mut self) -> bool {
        let complete = matches!(self.phase, Phase::Waiting { .. }) && !self.needs_poll && !self.needs_holders;
        if complete {
            self.phase = Phase::Open;
        }
        complete
    }
}
