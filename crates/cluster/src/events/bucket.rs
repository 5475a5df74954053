//! [`Bucket`]: the limit on the number of events that a node writes. It reads no clock.

use std::time::Duration;

/// The most events in a row: those of all GPUs of a node in pods of two, and some more.
const BURST: u32 = 10;

/// The time for each event beyond these. A thousand nodes whose jobs all end and begin within a minute write 17 events
/// a second together.
const EACH: Duration = Duration::from_secs(60);

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    left: u32,
    /// The time at which the last token was added.
    filled: Duration,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { left: BURST, filled: Duration::ZERO }
    }
}

impl Bucket {
    /// Allows an event at this time, or returns the time to wait as `Err`.
    pub fn look(&mut self, now: Duration) -> Result<(), Duration> {
        while self.left < BURST && now.saturating_sub(self.filled) >= EACH {
            (self.left, self.filled) = (self.left.saturating_add(1), self.filled.saturating_add(EACH));
        }
        if self.left == BURST {
            self.filled = now;
        }
        match self.left {
            0 => Err(self.filled.saturating_add(EACH).saturating_sub(now)),
            _ => Ok(()),
        }
    }

    /// Takes a token for an event that was written.
    pub fn take(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_then_one_a_minute() {
        let (mut bucket, mut now) = (Bucket::default(), Duration::from_secs(5000));
        for _ in 0..BURST {
            assert_eq!(bucket.look(now), Ok(()));
            bucket.take();
        }
        assert_eq!(bucket.look(now), Err(EACH));
        now += EACH / 2;
        assert_eq!(bucket.look(now), Err(EACH / 2));
        now += EACH / 2;
        assert_eq!(bucket.look(now), Ok(()));
        bucket.take();
        assert_eq!(bucket.look(now), Err(EACH));
        // Full again, and no fuller.
        now += EACH * BURST * 3;
        for _ in 0..BURST {
            assert_eq!(bucket.look(now), Ok(()));
            bucket.take();
        }
        assert!(bucket.look(now).is_err());
    }
}
