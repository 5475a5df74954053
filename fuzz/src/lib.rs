//! The checks behind the fuzz targets, which `tests/fuzz_regressions.rs` shares.

#[path = "../../tests/fuzz_checks/mod.rs"]
mod fuzz_checks;

pub use fuzz_checks::{agent_protocol, checkpoint, claim, config, nccl_tests, nccl_xml, node_file, request};
