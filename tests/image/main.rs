//! Tests of the image as it ships: a root file system with the contents of the Dockerfile's last stage only, run by
//! runc as the rendered chart says, beside the boxes of kubelet and API server.
//!
//! `make test-image` builds the programs and runs these tests; `make test` does not. They need root, and helm,
//! mmdebstrap and runc, which `make tools` installs. A check that needs a right which this machine lacks is skipped by
//! name ([`rights`]).
//!
//! Differences from a node: pods share the host's network; there is no seccomp profile; the root file system is packed
//! by mmdebstrap, while debian:bookworm-slim has the same packages without documentation, manual pages and
//! translations. The tests mount a libnvidia-ml of our own as NVIDIA's container runtime mounts the driver's.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    reason = "an error in a helper fails the test"
)]

mod contents;
mod dockerfile;
#[path = "../chart/helm.rs"]
#[expect(dead_code, reason = "the chart's own tests use the rest")]
mod helm;
mod memory;
mod node;
#[path = "../node_settings/mod.rs"]
mod node_settings;
mod operator;
mod pod;
mod rights;
mod rootfs;
mod runc;
mod serves;
mod ways;
