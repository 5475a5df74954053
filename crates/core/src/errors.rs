//! Error texts for people: one line with all causes. Other crates log them, or send them in answers.

use crate::prelude::*;
use core::error::Error;

/// An error and its causes, in one line: `cannot open the file: no such file`.
pub fn chain(error: &dyn Error) -> String {
    let causes = core::iter::successors(Some(error), |error| (*error).source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
