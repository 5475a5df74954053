//! The node's page in a real Chromium, from `make tools` or the PATH. Without one these tests are ignored.
//!
//! If `PAGE_IMAGES` names a folder, `page_looks_right_at_each_size_and_colour` writes pictures there. Three of them are
//! docs/images/node-page*.png.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "the tests read their environment, and poll another process")]

mod browser;
mod demo;
mod hostile;
mod seen;
