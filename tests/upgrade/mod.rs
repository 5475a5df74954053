//! Upgrades under load: real processes take over from each other on one node, as pods of a DaemonSet with a surge do,
//! while the kubelet in the box admits pods. No pod is rejected, no device is lost, and none is given out twice.

mod deaths;
mod driverless;
pub mod fleet;
use crate::run::node;
mod rollout;
