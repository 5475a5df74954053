//! [`Availability`]: who can have a GPU now. The page, the metrics, the admin socket and `top` read it here, so that what
//! they call held, free and unhealthy adds up to all GPUs.
//!
//! A function of the offered devices and of [`Held`], which the state keeps: an event that changes either publishes a
//! snapshot.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use super::device::{Device, Health};
use crate::topology::{GpuUuid, NodeTopology};

/// The GPUs of which a pod has anything, through either door; `None` while the kubelet has not said who holds what.
pub(super) type Held = Option<BTreeSet<GpuUuid>>;

/// Who can have a GPU now. Each GPU has one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Availability {
    /// A pod has it, or a slot or MIG device of it, or has just been given that; healthy or not.
    Held,
    /// A request can have it whole.
    Free,
    /// No pod holds any part of it, and a request can have MIG devices of it.
    Mig,
    /// No pod holds any part of it, and no request can get one: it is unhealthy, or offered otherwise. An unhealthy GPU
    /// also has this before the kubelet has said who holds what.
    Unhealthy,
    /// It is healthy, and the kubelet has not said who holds what.
    Unknown,
}

impl Availability {
    /// All, in the order in which they are shown.
    pub const ALL: [Self; 5] = [Self::Held, Self::Free, Self::Mig, Self::Unhealthy, Self::Unknown];

    /// The word for metrics and scripts.
    pub fn label(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Free => "free",
            Self::Mig => "mig",
            Self::Unhealthy => "unhealthy",
            Self::Unknown => "unknown",
        }
    }

    /// That of a GPU, by its devices.
    pub(super) fn of(gpu: &GpuUuid, devices: &[&Device], topology: &NodeTopology, held: &Held) -> Self {
        let healthy = || devices.iter().filter(|device| device.health == Health::Healthy);
        let whole = healthy().any(|device| device.mig.is_none());
        let part = healthy().any(|device| device.mig.is_some());
        match held {
            Some(held) if held.contains(gpu) => Self::Held,
            None if whole || part => Self::Unknown,
            // One that is not in the graph has no place in a set of GPUs.
            Some(_) if whole && topology.position(gpu).is_some() => Self::Free,
            Some(_) if part => Self::Mig,
            _ => Self::Unhealthy,
        }
    }
}

/// The devices by their GPUs, in the order of PCI addresses and UUIDs.
pub(super) fn by_gpu<'a>(devices: impl Iterator<Item = &'a Device>) -> Vec<Vec<&'a Device>> {
    let mut gpus: BTreeMap<_, Vec<&Device>> = BTreeMap::new();
    for device in devices {
        gpus.entry((device.gpu.pci, &device.gpu.uuid)).or_default().push(device);
    }
    gpus.into_values().collect()
}
