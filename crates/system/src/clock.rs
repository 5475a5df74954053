//! The node's clock: wall time that does not jump.

use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

use linkwise_core::state::Timestamp;

/// The wall time of the start, and the time since then by a monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    started: Instant,
    wall: Duration,
}

impl Clock {
    /// Reads the wall clock, only once. A time before 1970 counts as 1970.
    pub fn start() -> Self {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), wall }
    }

    /// The present time.
    pub fn now(&self) -> Timestamp {
        self.wall.saturating_add(self.started.elapsed())
    }

    /// The `Instant` of a timestamp: the clock's start for an earlier one, now for one beyond `Instant`'s range.
    pub fn instant(&self, timestamp: Timestamp) -> Instant {
        let now = Instant::now();
        self.started.checked_add(timestamp.saturating_sub(self.wall)).unwrap_or(now)
    }
}

/// Waits until an instant; for ever without one.
pub async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wall_clock_jump_moves_no_deadline() {
        // The clock started in 1970: the wall clock has jumped by decades since.
        let started = Instant::now();
        let clock = Clock { started, wall: Duration::from_secs(1_000) };
        let now = clock.now();
        assert!(now >= clock.wall && now <= clock.wall + started.elapsed(), "{now:?}");
        let in_an_hour = clock.wall + Duration::from_secs(3_600);
        assert_eq!(clock.instant(in_an_hour), started + Duration::from_secs(3_600));
    }
}
