//! The programs and writers that need the API server, against an API server in a box.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

mod both_doors_soak;
mod claims;
mod claims_soak;
mod config_manager;
mod counters;
mod doctor;
mod dra_mig;
mod dra_mps;
mod dra_node;
mod dra_soak;
mod events;
mod fleet;
mod gpu_cluster;
mod node;
mod node_feature;
pub mod older;
mod prometheus;
mod slices;
mod support;
mod takeover;
mod way_back;
mod whole_node;
