//! [`Backoff`]: pauses between attempts.
//!
//! Used where something is tried again, such as the NVML agent, quarantined GPUs, registrations with the kubelet and
//! requests to the API server. It reads no clock and does not sleep. Where nodes of a fleet must not act at the same
//! moment, the caller adds jitter.

use core::time::Duration;

/// Pauses that double from the first to the longest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// The last pause; zero before the first failure.
    last: Duration,
}

impl Backoff {
    /// Pauses from `first` to `longest`. If `longest` is shorter than `first`, every pause is `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, last: Duration::ZERO }
    }

    /// Notes a failure. Returns the pause after it: twice the last pause, between `first` and `longest`.
    pub fn failed(&mut self) -> Duration {
        self.last = self.last.saturating_mul(2).max(self.first).min(self.longest);
        self.last
    }

    /// Notes the failure of something that had worked for `lived`, and returns the pause after it. If it had worked at
    /// least as long as the longest pause, the failure counts as a new one and the pauses start again.
    pub fn failed_after(&mut self, lived: Duration) -> Duration {
        if lived >= self.longest {
            self.reset();
        }
        self.failed()
    }

    /// Notes a success: the next pause is the first one again.
    pub fn reset(&mut self) {
        self.last = Duration::ZERO;
    }

    /// Returns true if an attempt has failed since the last success.
    pub fn is_failing(&self) -> bool {
        !self.last.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_longest_then_restart() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(5));
        assert!(!backoff.is_failing());
        assert_eq!([(); 4].map(|()| backoff.failed()), [1, 2, 4, 5].map(seconds));
        assert_eq!(backoff.failed_after(seconds(4)), seconds(5));
        assert_eq!(backoff.failed_after(seconds(5)), seconds(1));
        backoff.reset();
        assert!(!backoff.is_failing());
        assert_eq!(Backoff::new(Duration::MAX, Duration::MAX).failed(), Duration::MAX);
        assert_eq!(Backoff::new(seconds(9), seconds(5)).failed(), seconds(5));
    }
}
