//! [`Wait`]: the time for which a GPU of DRA that is to change takes no claim, before it changes.
//!
//! A part of [`super::doors`] and [`super::shares`]. kube-scheduler chooses a device from a slice, and writes the
//! allocation later. No claim is on its way any more when no stored slice has offered the GPU for the grace period:
//! every allocation is written by then, or given up.

use super::device::Timestamp;
use super::ledger::Ledger;
use crate::topology::{GpuUuid, NodeTopology};

/// A wait that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    /// The time at which the change began.
    pub since: Timestamp,
    /// The end of the time in which an allocation may be written; `None` while a stored slice may offer the GPU.
    pub until: Option<Timestamp>,
    /// True if no further allocation will be written.
    is_over: bool,
}

impl Wait {
    /// The wait of a GPU now, after that of before.
    pub fn next(
        before: Option<Self>,
        (topology, gpu): (&NodeTopology, &GpuUuid),
        ledger: &Ledger,
        grace: Timestamp,
        now: Timestamp,
    ) -> Self {
        let longest = now.saturating_add(grace);
        // A clock that goes back costs another grace period.
        let since = before.map_or(now, |before| before.since.min(now));
        let until = before.and_then(|before| before.until).map_or(longest, |until| until.min(longest));
        let until = (!ledger.allocations.may_offer(topology, gpu)).then_some(until);
        Self { since, until, is_over: until.is_some_and(|until| now >= until) }
    }

    /// Returns true if no further allocation will be written: what the API server has now is all.
    pub fn is_over(self) -> bool {
        self.is_over
    }

    /// The time at which the wait is over without any other event.
    pub fn deadline(self) -> Option<Timestamp> {
        self.until.filter(|_| !self.is_over)
    }

    /// Returns true if the GPU may change: the wait is over, no claim has the GPU, and none has it allocated.
    pub fn ends(self, (topology, gpu): (&NodeTopology, &GpuUuid), ledger: &Ledger) -> bool {
        self.is_over
            && ledger.is_known()
            && !ledger.has_claim_on(topology, gpu)
            && ledger.allocations.has_no_claim_on(gpu)
    }
}
