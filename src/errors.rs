//! One way to print an error with its causes.

use std::error::Error;

/// An error and all its causes in one line, as the log and /readyz show it: `cannot write x: permission denied`.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
