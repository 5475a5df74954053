//! The tests of the program and its neighbours, in one binary because each binary links the whole program.
//!
//! README.md describes most modules. The tests of the image are a target of their own: they need other programs.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure of a helper fails the test"
)]

mod allocation_oracle;
mod architecture;
mod cdi;
mod chart;
mod cli;
mod cluster;
mod commands;
mod commits;
mod dra;
mod examples;
mod fuzz_checks;
mod fuzz_regressions;
mod gpu_kit;
mod kubelet_box;
mod labels;
#[allow(dead_code, reason = "each module needs a part")]
mod large_node;
mod manifests;
mod messages;
mod monitoring;
mod mps;
mod nccl;
mod node_settings;
mod nvml;
#[allow(dead_code, reason = "each module needs a part")]
mod oracle;
mod pictures;
mod placement;
mod rails;
#[allow(dead_code, reason = "each module needs a part")]
mod random_node;
mod raw_dumps;
mod release;
mod resources;
mod run;
mod shared_oracle;
mod sheets;
mod snapshot;
mod soak;
mod topology_golden;
mod topology_machines;
mod topology_rules;
mod unchanged_pods;
mod upgrade;
