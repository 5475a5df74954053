//! The devices of the pool by their published names.

use crate::prelude::*;

use crate::publish::injection::ChosenDevice;
use crate::topology::{NodeTopology, device_names};

/// The hardware behind a name.
pub fn hardware_of<'a>(topology: &'a NodeTopology, name: &str) -> Option<ChosenDevice<'a>> {
    devices(topology).into_iter().find(|(device, _)| device == name).map(|(_, chosen)| chosen)
}

/// All devices by name: GPUs that are not in MIG mode, and MIG devices.
pub fn devices(topology: &NodeTopology) -> Vec<(String, ChosenDevice<'_>)> {
    let chosen = |(place, mig): (usize, Option<usize>)| {
        let gpu = topology.gpus().get(place)?;
        match mig {
            Some(mig) => Some(ChosenDevice { gpu, mig: Some(topology.mig_devices().get(mig)?) }),
            None => (!gpu.mig_enabled).then_some(ChosenDevice { gpu, mig: None }),
        }
    };
    let names = device_names(topology).into_iter();
    names.filter_map(|(hardware, name)| Some((name, chosen(hardware)?))).collect()
}
