//! The image as it ships, in a box: a root file system with what the Dockerfile's last stage has and nothing else, run by
//! runc as the rendered chart says, beside the kubelet and the API server in their boxes.
//!
//! `make test-image` builds the programs and runs this; `make test` does not. It needs root, and what `make tools` brings
//! (helm, mmdebstrap, runc). A right that this machine lacks is named, and what needs it is left out ([`rights`]).
//!
//! What is not as on a node: pods share the host's network; no seccomp profile; the root file system is Debian's, packed by
//! mmdebstrap, and not Docker's debian:bookworm-slim, which has the same packages without documentation, manual pages and
//! translations. In the place of NVIDIA's container runtime the box mounts a libnvidia-ml of our own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    reason = "what a helper cannot do fails the test"
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
