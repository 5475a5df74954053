//! The content of a claim's CDI devices, one for each request.
//!
//! The content depends on the claim's hardware and on the node as it is now, never on what the claim's containers got
//! before: a reboot changes minor numbers, a MIG device is made again, the operator changes options.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use super::error::{ClaimError, DeviceRefusal};
use super::plan::PlanInputs;
use crate::publish::injection::{ChosenDevice, Granted, Injection, InjectionOptions};
use crate::publish::{MpsClient, MpsShm};
use crate::state::{ClientLimits, Prepared};

/// The edits of a container that uses one request of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestEdits {
    /// The node's CDI devices whose edits the container gets: those of the request's GPUs and MIG devices, in the order
    /// of the allocation, then those that come with every GPU.
    pub devices: Vec<NodeDevice>,
    /// The other edits: environment, device nodes and mounts.
    pub own: Injection,
}

/// A CDI device of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDevice {
    /// Its full name, `vendor/class=name`.
    pub name: String,
    /// The device nodes, by their paths in a container, that the device's edits must have. Edits without them are
    /// older than the snapshot.
    pub nodes: Vec<String>,
}

/// The content of each request's CDI device, for a claim whose MIG devices are all made.
///
/// # Errors
///
/// The snapshot lacks a device, or containers could not get it.
pub fn containers(prepared: &Prepared, node: PlanInputs<'_>) -> Result<BTreeMap<String, RequestEdits>, ClaimError> {
    let topology = node.state.topology();
    let mut chosen: BTreeMap<&str, Vec<ChosenDevice<'_>>> = BTreeMap::new();
    for device in &prepared.devices {
        let gpu = topology.gpus().iter().find(|gpu| gpu.uuid == device.gpu);
        let mig = device.mig.as_ref().map(|uuid| topology.mig_devices().iter().find(|mig| mig.uuid == *uuid));
        let (Some(gpu), false, false) = (gpu, device.is_unmade(), mig == Some(None)) else {
            return Err(ClaimError::of_device(&device.device, &device.gpu, DeviceRefusal::Vanished));
        };
        chosen.entry(&device.request).or_default().push(ChosenDevice { gpu, mig: mig.flatten() });
    }
    // NVIDIA's runtime has no part in DRA, and the GPUs themselves come with their CDI devices.
    let options = InjectionOptions {
        envvar: false,
        volume_mounts: false,
        device_nodes: false,
        cdi: None,
        ..node.injection.clone()
    };
    let kind = node.injection.cdi.as_ref().map_or("", |cdi| cdi.kind.as_str());
    let mut requests = BTreeMap::new();
    for (request, mut chosen) in chosen {
        chosen.dedup_by_key(|device| device.uuid());
        let mut devices = Vec::new();
        for device in &chosen {
            // By UUID, because an index may belong to another GPU now.
            devices.push(NodeDevice { name: format!("{kind}={}", device.uuid()), nodes: device.nodes()? });
        }
        let common = node.host.cdi_devices.iter().map(|name| NodeDevice { name: name.clone(), nodes: Vec::new() });
        devices.extend(common);
        let limits = prepared.mps.as_ref().and_then(|mps| mps.clients.get(request));
        let daemon = prepared.mps.as_ref().filter(|_| limits.is_some()).and_then(|mps| mps.order.name());
        let mps = daemon.map(|daemon| {
            let shm = if node.common_shm.contains(&daemon) { MpsShm::Common } else { MpsShm::Own };
            MpsClient::new(&options.mps_root, &daemon, shm)
        });
        let mut injection = options.inject(&Granted { topology, devices: chosen, mps }, node.host)?;
        injection.env.extend(limits.copied().into_iter().flat_map(ClientLimits::variables));
        requests.insert(request.to_owned(), RequestEdits { devices, own: injection });
    }
    Ok(requests)
}
