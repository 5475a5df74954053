//! [`Repairs`]: paces repairs of slices that another program changed.
//!
//! Two DRA drivers of one name would keep the API server busy: each writes its slices and deletes the other's. A
//! kubelet that starts deletes all slices of its node, and they have to be back soon.

use std::time::Duration;

use linkwise_core::backoff::Backoff;
use tokio::time::Instant;

/// The number of changes by others in a row that are repaired at once; further repairs come more and more slowly.
const PATIENCE: u32 = 3;

/// The time without a repair after which the next one counts as the first. It is longer than any pause between two.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// The changes by others, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Disturbances {
    /// Slices were created or changed.
    pub changes: u64,
    /// Slices were deleted.
    pub deletions: u64,
}

/// Paces repairs.
pub(super) struct Repairs {
    backoff: Backoff,
    /// The disturbances that have been repaired.
    repaired: Disturbances,
    in_a_row: u32,
    last: Option<Instant>,
}

impl Repairs {
    /// No repair was made yet. Pauses double from `first` to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { backoff: Backoff::new(first, longest), repaired: Disturbances::default(), in_a_row: 0, last: None }
    }

    /// Returns the pause before a repair, from the disturbances so far, and true if they have just become too many.
    pub fn pause(&mut self, disturbances: Disturbances, now: Instant) -> (Duration, bool) {
        let before = std::mem::replace(&mut self.repaired, disturbances);
        if disturbances == before || self.last.is_some_and(|last| now.duration_since(last) >= FORGOTTEN) {
            self.in_a_row = 0;
            self.backoff.reset();
        }
        // Only deletions point to the kubelet; another driver writes as well.
        if disturbances.changes == before.changes && self.in_a_row == 0 {
            return (Duration::ZERO, false);
        }
        self.last = Some(now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        match self.in_a_row.checked_sub(PATIENCE) {
            None | Some(0) => (Duration::ZERO, false),
            Some(beyond) => (self.backoff.failed(), beyond == 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: u64) -> Disturbances {
        Disturbances { changes, deletions: 0 }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn repairs_slow_down_while_somebody_else_writes() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(4)), Instant::now());
        let mut pauses = (0..8).map(|changes| repairs.pause(changed(changes), now));
        let (quick, slow): (Vec<_>, Vec<_>) = pauses.by_ref().partition(|(pause, _)| pause.is_zero());
        assert_eq!((quick.len(), quick.iter().any(|(_, is_news)| *is_news)), (4, false));
        assert_eq!(slow, [(1, true), (2, false), (4, false), (4, false)].map(|(s, news)| (seconds(s), news)));
        assert_eq!(repairs.pause(changed(7), now), (Duration::ZERO, false), "a write of our own");
        assert_eq!(repairs.pause(changed(8), now), (Duration::ZERO, false), "the first again");
    }

    #[test]
    fn repairs_are_forgotten_after_a_quiet_time() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(120)), Instant::now());
        for day in 1..9 {
            let now = now + seconds(86_400 * day);
            assert_eq!(repairs.pause(changed(day), now), (Duration::ZERO, false), "{day}");
        }
    }

    #[test]
    fn deletions_continue_a_fight_and_begin_none() {
        let (mut repairs, now) = (Repairs::new(seconds(1), seconds(4)), Instant::now());
        let mut pause = |changes, deletions| repairs.pause(Disturbances { changes, deletions }, now).0;
        for wipe in 1..9 {
            assert_eq!(pause(0, wipe), Duration::ZERO, "{wipe}");
        }
        assert_eq!([9, 10, 11, 12, 13].map(|deletions| pause(1, deletions).as_secs()), [0, 0, 0, 1, 2]);
    }
}
