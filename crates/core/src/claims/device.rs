//! Devices of the pool by name, as NVIDIA's driver names them: `gpu-<minor>`, `gpu-<minor>-mig-<profile>-...`.

use crate::prelude::*;

use crate::publish::injection::ChosenDevice;
use crate::topology::{Gpu, NodeTopology};

/// The hardware behind a name.
pub fn hardware_of<'a>(topology: &'a NodeTopology, name: &str) -> Option<ChosenDevice<'a>> {
    devices(topology).into_iter().find(|(device, _)| device == name).map(|(_, chosen)| chosen)
}

/// All devices by name: GPUs that are not in MIG mode, and MIG devices.
pub fn devices(topology: &NodeTopology) -> Vec<(String, ChosenDevice<'_>)> {
    let minor = |gpu: &Gpu| gpu.minor;
    let whole = topology.gpus().iter().filter(|gpu| !gpu.mig_enabled);
    let whole = whole.filter_map(|gpu| Some((format!("gpu-{}", minor(gpu)?), ChosenDevice { gpu, mig: None })));
    let mig = topology.mig_devices().iter().filter_map(|mig| {
        let gpu = topology.gpus().get(mig.parent)?;
        let profile: String = mig.profile.to_string().to_lowercase().replace('.', "");
        let profile = profile.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "-");
        let name = format!("gpu-{}-mig-{profile}-{}-{}", minor(gpu)?, mig.gpu_instance, mig.compute_instance);
        Some((name, ChosenDevice { gpu, mig: Some(mig) }))
    });
    whole.chain(mig).collect()
}
