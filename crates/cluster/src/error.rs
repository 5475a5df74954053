//! [`ApiError`]: the error of a request, as a class that can be counted and a sentence that can be read.

use std::error::Error;
use std::time::Duration;

use http_body_util::LengthLimitError;
use kube::core::Status;
use linkwise_core::quote::{one_line, quoted};
use thiserror::Error;

use crate::access::AccessError;

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
    /// The answer does not follow the API.
    #[error("the API server's answer cannot be read: {0}")]
    Malformed(String),
}

impl ApiError {
    /// The error of a client, and the pause that the server asked for in the answer's header.
    pub(crate) fn of(error: &kube::Error, asked: Option<Duration>) -> Self {
        match error {
            kube::Error::Api(status) => Self::refused(status, asked),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) | kube::Error::LinesCodecMaxLineLengthExceeded => {
                Self::Malformed(sentence(error))
            }
            _ if is_too_long(error) => Self::Malformed("it is too long".to_owned()),
            _ => Self::Unreachable(sentence(error)),
        }
    }

    /// A refusal. A Status without a code is another object that the client took for a Status.
    pub(crate) fn refused(status: &Status, asked: Option<Duration>) -> Self {
        let details = status.details.as_ref().map(|details| details.retry_after_seconds).filter(|after| *after > 0);
        let retry_after = asked.or_else(|| Some(Duration::from_secs(details?.into())));
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
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// The time that the server asks the client to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns true if the client may be at fault: its token, its CA or its connections. A new client reads the files
    /// again.
    pub(crate) fn is_of_the_client(&self) -> bool {
        match self {
            Self::Refused { code, .. } => *code == 401,
            Self::Access(_) | Self::TimedOut(_) | Self::Unreachable(_) | Self::Malformed(_) => true,
        }
    }
}

/// An error and its causes, without text that is repeated.
fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text += &format!(": {next}");
        }
        cause = error.source();
    }
    one_line(&text)
}

fn is_too_long(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// An error of the client, as a sentence.
pub(crate) fn credentials(error: &kube::Error) -> AccessError {
    AccessError::Credentials(sentence(error))
}
