//! Errors for people: one line with all causes. Used by adapters that log an error or answer with one.

use crate::prelude::*;
use core::error::Error;

/// An error and its causes, in one line: `cannot open the file: no such file`.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
