//! The node's page in a real Chromium (`make tools` brings it; without it these tests say that they are skipped).
//!
//! `PAGE_IMAGES=docs/images` has `page_looks_right_at_each_size_and_colour` write the pictures of docs/node-page.md.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test may panic")]
#![allow(clippy::disallowed_methods, reason = "it reads its environment, and looks again and again at another process")]

mod browser;
mod demo;
mod hostile;
mod seen;
