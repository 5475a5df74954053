//! [`Attempts`]: the pauses and the log lines of one request that is repeated until it succeeds.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

use linkwise_core::backoff::Backoff;
use linkwise_core::errors::chain;
use linkwise_core::once::Once;

use crate::error::ApiError;
use crate::server::Pace;

/// The longest pause that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(600);

/// The attempts at one request.
pub(crate) struct Attempts {
    /// The request's name in the log.
    request: &'static str,
    backoff: Backoff,
    standing: Once<&'static str>,
    failures: u64,
}

impl Attempts {
    /// No attempt was made yet.
    pub fn of(request: &'static str, pace: &Pace) -> Self {
        Self { request, backoff: Backoff::new(pace.first, pace.longest), standing: Once::new(), failures: 0 }
    }

    /// Records a failure and returns the pause. Logs an error of a class that has not been logged since the last
    /// success.
    pub fn failed(&mut self, error: &ApiError) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let asked = error.retry_after().unwrap_or_default().min(LONGEST_ASKED);
        // The nodes of a fleet must not come back in step: up to half of our own pause is left out, and some is added
        // to a pause that the server asked for.
        let pause = shortened(self.backoff.failed()).max(asked.saturating_add(asked.saturating_sub(shortened(asked))));
        if self.standing.is_news(error.outcome()) {
            let (request, error) = (self.request, chain(error));
            tracing::warn!(request, error, again_in = ?pause, "API server request failed, trying again");
        }
        pause
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        if self.failures > 0 {
            tracing::info!(request = self.request, failures = self.failures, "API server answers again");
        }
        self.failures = 0;
        self.standing.clear();
        self.backoff.reset();
    }
}

/// Returns the duration less a random part of at most half of it.
pub(crate) fn shortened(duration: Duration) -> Duration {
    let part = u32::try_from(RandomState::new().build_hasher().finish() % 512).unwrap_or(0);
    duration.saturating_sub((duration / 1024).saturating_mul(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace { first: Duration::from_secs(1), longest: Duration::from_secs(8), ..Pace::DEFAULT };

    fn refused(code: u16, retry_after: Option<u64>) -> ApiError {
        let retry_after = retry_after.map(Duration::from_secs);
        ApiError::Refused { code, message: String::new(), retry_after, missing: None }
    }

    #[test]
    fn pauses_grow_with_jitter_and_begin_anew_after_success() {
        let mut attempts = Attempts::of("x", &PACE);
        for longest in [1, 2, 4, 8, 8] {
            let longest = Duration::from_secs(longest);
            let pause = attempts.failed(&refused(500, None));
            assert!(pause <= longest && pause >= longest / 2, "{pause:?} of {longest:?}");
        }
        attempts.succeeded();
        assert!(attempts.failed(&refused(500, None)) <= Duration::from_secs(1));
    }

    #[test]
    fn servers_pause_is_kept_within_reason() {
        let mut attempts = Attempts::of("x", &PACE);
        let pause = attempts.failed(&refused(429, Some(60)));
        assert!(pause >= Duration::from_secs(60) && pause <= Duration::from_secs(90), "{pause:?}");
        assert!(attempts.failed(&refused(429, Some(u64::MAX))) <= LONGEST_ASKED * 3 / 2);
    }
}
