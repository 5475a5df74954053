//! Resources: MIG devices, slots, names and filters, from what the NVML child sees to what the kubelet gets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

mod agreement;
mod availability;
mod conflicts;
mod doors;
mod hardware;
mod look;
mod mps;
mod node;
mod orphans;
mod plans;
mod shares;

use linkwise_core::state::ResourceName;
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

/// Four A100: whole, seven 1g, a 3g and two halves of a 4g, two 1g (one with media extensions) and a 2g.
pub const MIXED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/four-gpus-mig.yaml");

/// The machine of [`MIXED`].
pub fn mixed() -> NodeObservation {
    machines::load(MIXED).unwrap().observed
}

/// A resource by its name.
pub fn resource(name: &str) -> ResourceName {
    name.parse().unwrap()
}
