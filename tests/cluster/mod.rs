//! The programs and writers that need the API server, against an API server in a box.

mod claims;
mod config_manager;
mod counters;
mod doctor;
pub mod dra_mig;
pub mod dra_mps;
pub mod dra_node;
mod events;
mod fleet;
mod gpu_cluster;
mod metadata;
mod node;
mod node_condition;
mod node_feature;
pub mod older;
mod prometheus;
mod slices;
pub mod support;
pub mod takeover;
mod way_back;
mod whole_node;
