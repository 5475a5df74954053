//! The core with nothing of its neighbours: one binary, a module for each subject.

#![allow(clippy::disallowed_macros, clippy::expect_used, clippy::panic, reason = "a test may panic")]

mod import_circles;
