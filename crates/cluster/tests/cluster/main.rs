//! The programs and writers of `linkwise-cluster` against an API server in a box.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod both_doors_soak;
mod claims;
mod config_manager;
mod counters;
mod demo;
mod doctor;
mod dra_mig;
mod dra_mps;
mod dra_node;
mod dra_soak;
mod events;
mod node;
mod node_feature;
#[path = "../../../../tests/node_settings/mod.rs"]
mod node_settings;
#[allow(dead_code, clippy::indexing_slicing, reason = "other tests judge more by it")]
#[path = "../../../../tests/oracle/mod.rs"]
mod oracle;
mod prometheus;
mod simulate;
mod slices;
mod support;
mod traces;
mod way_back;
mod whole_node;
