//! Errors for people: one line with all causes. Used by adapters that log an error or answer with one.

use crate::prelude::*;
use core::error::Error;

/// An error and its causes, in one line: `cannot open the file: no such file`.
pub fn chain(error: &dyn Error) -> String {
    let causes = core::iter::successors(Some(error), |error| (*error).source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
