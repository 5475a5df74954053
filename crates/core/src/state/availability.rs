//! [`Availability`]: held, free, MIG, unhealthy, cordoned, withheld or unknown, one of them for each GPU. The page, the
//! metrics, the admin socket and `top` read it here, so that their numbers add up to all GPUs.
//!
//! It is computed from the offered devices and from [`Held`], which the state keeps. An event that changes either of
//! them publishes a snapshot.

use alloc::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::device::{Device, Health};
use crate::topology::{GpuUuid, NodeTopology};

/// The GPUs of which a pod or a prepared claim has any part; `None` until the kubelet has listed the holders.
pub(super) type Held = Option<BTreeSet<GpuUuid>>;

/// The use that can be made of a GPU now. A value that this version does not know is read as unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Availability {
    /// A pod or a prepared claim has the GPU, or a slot or MIG device of it. The GPU may be unhealthy.
    Held,
    /// A request can have the whole GPU.
    Free,
    /// No pod holds any part of it, and a request can have MIG devices of it.
    Mig,
    /// No pod holds any part of it, and no request can get a part: the GPU is unhealthy, or its devices are offered
    /// under another name. An unhealthy GPU also has this value until the kubelet has listed the holders.
    Unhealthy,
    /// No pod holds any part of it, and an operator keeps it from new work.
    Cordoned,
    /// No pod is known to hold any part of it, and the configuration has no devices of it that this node could offer.
    Withheld,
    /// The GPU is healthy or only cordoned, and the kubelet has not listed the holders yet.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Availability {
    /// All values, in the order in which they are shown.
    pub const ALL: [Self; 7] =
        [Self::Held, Self::Free, Self::Mig, Self::Unhealthy, Self::Cordoned, Self::Withheld, Self::Unknown];

    /// The availability of a GPU, by its devices.
    pub(super) fn of(gpu: &GpuUuid, devices: &[&Device], topology: &NodeTopology, held: &Held) -> Self {
        let healthy = || devices.iter().filter(|device| device.health == Health::Healthy);
        let whole = healthy().any(|device| device.mig.is_none());
        let part = healthy().any(|device| device.mig.is_some());
        let cordoned = devices.iter().any(|device| device.is_cordoned());
        match held {
            Some(held) if held.contains(gpu) => Self::Held,
            _ if devices.is_empty() => Self::Withheld,
            None if whole || part || cordoned => Self::Unknown,
            // A GPU that is not in the graph has no place in a set of GPUs.
            Some(_) if whole && topology.position(gpu).is_some() => Self::Free,
            Some(_) if part => Self::Mig,
            _ if cordoned => Self::Cordoned,
            _ => Self::Unhealthy,
        }
    }
}
