//! Tests of the programs and writers that need the API server, against its box.

mod config_manager;
mod doctor;
mod events;
mod node;
mod node_condition;
mod node_feature;
pub mod older;
mod prometheus;
pub mod support;
mod way_back;
mod whole_node;
