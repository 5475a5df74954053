//! [`ApiError`]: the error of a request, as a class that can be counted and a sentence that can be read; [`ApiMetrics`]
//! counts requests by their outcome; [`Attempts`] has the pauses and the log lines of a request that is repeated until
//! it succeeds.

use std::collections::hash_map::RandomState;
use std::error::Error;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::LengthLimitError;
use kube::core::Status;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use thiserror::Error;

use crate::server::{AccessError, Pace};
use linkwise_core::backoff::Backoff;
use linkwise_core::errors::chain;
use linkwise_core::quote::{one_line, quoted};
use linkwise_core::reported::Reported;

/// The reason why a request to the API server failed. The server's text is shortened and put on one line.
#[derive(Debug, Error)]
pub enum ApiError {
    /// No client could be made.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// No answer came in time.
    #[error("no answer from the API server within {0:?}")]
    TimedOut(Duration),
    /// The server is absent, or the connection broke.
    #[error("API server unreachable: {0}")]
    Unreachable(String),
    /// The server refused.
    #[error("the API server answered {code}: {message}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// The server's message.
        message: String,
        /// The time that the server asks the client to wait.
        retry_after: Option<Duration>,
        /// The object that the server says it does not have: its resource and its name. A 404 without one may be about
        /// a path that the server does not know.
        missing: Option<(String, String)>,
    },
    /// The answer or our request does not follow the API.
    #[error("the API server's answer cannot be read: {0}")]
    Malformed(String),
}

impl ApiError {
    /// Converts an error of kube's client. `retry_after` is the pause that the answer's header asks for.
    pub(crate) fn of(error: &kube::Error, retry_after: Option<Duration>) -> Self {
        match error {
            kube::Error::Api(status) => Self::refused(status, retry_after),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) | kube::Error::LinesCodecMaxLineLengthExceeded => {
                Self::Malformed(sentence(error))
            }
            _ if causes(error).any(|cause| cause.is::<LengthLimitError>()) => {
                Self::Malformed("it is too long".to_owned())
            }
            _ => Self::Unreachable(sentence(error)),
        }
    }

    /// Makes a refusal. A Status without a code is another object that the client took for a Status.
    pub(crate) fn refused(status: &Status, retry_after: Option<Duration>) -> Self {
        let details = status.details.as_ref().map(|details| details.retry_after_seconds).filter(|after| *after > 0);
        let retry_after = retry_after.or_else(|| Some(Duration::from_secs(details?.into())));
        let message = if status.message.is_empty() { &status.reason } else { &status.message };
        if status.code == 0 {
            return Self::Malformed(format!("no status, but {}", quoted(message)));
        }
        let about = status.details.as_ref().filter(|_| status.reason == "NotFound");
        let missing = about.map(|details| (details.kind.clone(), details.name.clone()));
        Self::Refused { code: status.code, message: one_line(message), retry_after, missing }
    }

    /// Returns true if the server says that it does not have this object.
    pub(crate) fn is_missing(&self, resource: &str, name: &str) -> bool {
        matches!(self, Self::Refused { missing: Some((of, named)), .. } if of == resource && named == name)
    }

    /// The class, as metrics name it.
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::Access(_) => "no_access",
            Self::TimedOut(_) => "timeout",
            Self::Unreachable(_) => "unreachable",
            Self::Malformed(_) => "malformed",
            Self::Refused { code, .. } => match code {
                401 => "unauthorized",
                403 => "forbidden",
                404 => "not_found",
                409 => "conflict",
                410 => "expired",
                429 => "throttled",
                500.. => "server_error",
                _ => "refused",
            },
        }
    }

    /// The code of a refusal.
    pub fn code(&self) -> Option<u16> {
        if let Self::Refused { code, .. } = self { Some(*code) } else { None }
    }

    /// The time that the server asks the client to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        if let Self::Refused { retry_after, .. } = self { *retry_after } else { None }
    }

    /// Returns true if the client may be at fault: its token, its CA or its connections. A new client reads the token
    /// and the CA again.
    pub(crate) fn is_client_fault(&self) -> bool {
        match self {
            Self::Refused { code, .. } => *code == 401,
            Self::Access(_) | Self::TimedOut(_) | Self::Unreachable(_) | Self::Malformed(_) => true,
        }
    }
}

/// An error and its causes, without text that is repeated.
pub(crate) fn sentence(error: &kube::Error) -> String {
    let mut text = error.to_string();
    for cause in causes(error).skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    one_line(&text)
}

/// An error, and its causes.
fn causes(error: &kube::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |error| (*error).source())
}

/// Counts requests.
#[derive(Clone, Debug, Default)]
pub struct ApiMetrics {
    requests: Family<[(&'static str, &'static str); 3], Counter>,
    registered: Arc<AtomicBool>,
}

impl ApiMetrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        metrics.register_in(registry);
        metrics
    }

    /// Registers the metrics, unless that was done before: several parts of a program may count here.
    pub fn register_in(&self, registry: &mut Registry) {
        let help = "Requests to the API server by kind of object, verb and outcome; a watch counts when it begins, and \
                    once more where it breaks";
        if !self.registered.swap(true, Ordering::Relaxed) {
            registry.register("api_requests", help, self.requests.clone());
        }
    }

    pub(crate) fn count(&self, object: &'static str, verb: &'static str, outcome: &'static str) {
        self.requests.get_or_create(&labels(object, verb, outcome)).inc();
    }

    /// The number of requests with this outcome, for tests.
    pub fn requests(&self, object: &'static str, verb: &'static str, outcome: &'static str) -> u64 {
        self.requests.get_or_create(&labels(object, verb, outcome)).get()
    }
}

fn labels(object: &'static str, verb: &'static str, outcome: &'static str) -> [(&'static str, &'static str); 3] {
    [("object", object), ("verb", verb), ("outcome", outcome)]
}

/// The longest pause that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// The attempts at one request.
pub(crate) struct Attempts {
    /// The request's name in the log.
    request: &'static str,
    backoff: Backoff,
    /// The classes of errors that were logged since the last success.
    logged: Reported<&'static str>,
    failures: u64,
}

impl Attempts {
    /// No attempt was made yet.
    pub fn of(request: &'static str, pace: &Pace) -> Self {
        Self { request, backoff: Backoff::new(pace.first, pace.longest), logged: Reported::new(), failures: 0 }
    }

    /// Records a failure and returns the pause. Logs an error of a class that has not been logged since the last
    /// success.
    pub fn failed(&mut self, error: &ApiError) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let retry_after = error.retry_after().unwrap_or_default().min(MAX_RETRY_AFTER);
        // The nodes of a fleet must not come back in step: our own pause is shortened by up to half, and a pause that
        // the server asked for is lengthened by up to half.
        let lengthened = retry_after.saturating_add(retry_after.saturating_sub(shortened(retry_after)));
        let pause = shortened(self.backoff.failed()).max(lengthened);
        if self.logged.begins(error.outcome()) {
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
        self.logged.clear();
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
    fn pauses_grow_with_jitter_and_start_over_after_success() {
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
    fn pause_of_the_server_is_lengthened_and_bounded() {
        let mut attempts = Attempts::of("x", &PACE);
        let pause = attempts.failed(&refused(429, Some(60)));
        assert!(pause >= Duration::from_secs(60) && pause <= Duration::from_secs(90), "{pause:?}");
        assert!(attempts.failed(&refused(429, Some(u64::MAX))) <= MAX_RETRY_AFTER * 3 / 2);
    }
}
