//! Tests of the core alone: one binary, with a module for each subject.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_macros,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test may panic, and counts a few GPUs"
)]

mod allocation_beyond;
mod health;
mod health_model;
mod inventory;
mod layers;
mod resource_invariants;

#[path = "../../../../tests/large_node/mod.rs"]
mod large_node;
#[path = "../../../../tests/oracle/mod.rs"]
#[allow(dead_code, reason = "other tests use all of it")]
mod oracle;
#[path = "../../../../tests/random_node/mod.rs"]
#[allow(dead_code, reason = "other tests use all of it")]
mod random_node;
