//! Upgrades under load: real processes take over from each other on one node, as pods of a DaemonSet with a surge do,
//! while the kubelet in the box admits pods. No pod is rejected, no device is lost, and none is given out twice.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a helper cannot do fails the test"
)]

mod deaths;
mod driverless;
pub mod fleet;
use crate::run::node;
mod others;
use crate::run::predecessor;
mod rollout;
