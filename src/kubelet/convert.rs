//! Wire types to core types and back. prost types go no further than this.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tonic::Status;

use crate::allocation::{AllocationRequest, DeviceId, PreferredAllocation};
use crate::inventory::{AllocateError, Device, Health, Inventory, ResourceName};
use crate::proto::v1beta1 as wire;

/// The variable by which NVIDIA's container runtime knows which GPUs to hand in.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

pub(super) fn options() -> wire::DevicePluginOptions {
    wire::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// The whole list of a resource, as ListAndWatch sends it.
pub(super) fn device_list(inventory: &Inventory, resource: &ResourceName) -> wire::ListAndWatchResponse {
    let devices = inventory.devices(resource).map(|(id, device)| {
        let nodes: Vec<_> = device.numa_nodes.iter().map(|numa| wire::NumaNode { id: i64::from(numa.0) }).collect();
        let health = if device.health == Health::Healthy { wire::HEALTHY } else { wire::UNHEALTHY };
        wire::Device {
            id: id.as_str().to_owned(),
            health: health.to_owned(),
            topology: (!nodes.is_empty()).then_some(wire::TopologyInfo { nodes }),
        }
    });
    wire::ListAndWatchResponse { devices: devices.collect() }
}

/// One container's question. A negative size is a size that cannot be met, like 0.
pub(super) fn request(container: wire::ContainerPreferredAllocationRequest) -> AllocationRequest {
    AllocationRequest {
        available: ids(container.available_device_i_ds),
        must_include: ids(container.must_include_device_i_ds),
        size: usize::try_from(container.allocation_size).unwrap_or(0),
    }
}

pub(super) fn preferred(answer: PreferredAllocation) -> wire::ContainerPreferredAllocationResponse {
    let device_i_ds = answer.devices.iter().map(|id| id.as_str().to_owned()).collect();
    wire::ContainerPreferredAllocationResponse { device_i_ds }
}

pub(super) fn ids(ids: Vec<String>) -> Vec<DeviceId> {
    ids.into_iter().map(DeviceId::from).collect()
}

/// What one container gets: its GPUs and MIG devices by UUID, and where asked for the device nodes. Two slots of one GPU
/// are one GPU.
///
/// `control` are the nodes every container with a GPU needs. A GPU or MIG device of which a minor number is unknown has
/// no node to name, and the order is refused: a container without its GPU is worse than none.
pub(super) fn container(
    devices: &[&Device],
    control: Option<&[PathBuf]>,
) -> Result<wire::ContainerAllocateResponse, Status> {
    let mut devices = devices.to_vec();
    // The slots of one device lie beside each other.
    devices.dedup_by_key(|device| device.uuid());
    let uuids: Vec<&str> = devices.iter().map(|device| device.uuid()).collect();
    let envs = HashMap::from([(VISIBLE_DEVICES.to_owned(), uuids.join(","))]);
    let mut nodes = Vec::new();
    if let Some(control) = control {
        for device in devices {
            for node in device.device_nodes().ok_or_else(|| {
                let uuid = device.uuid();
                Status::failed_precondition(format!("the minor number of {uuid} is unknown: no device node to pass"))
            })? {
                let node = device_node(Path::new(&node));
                if !nodes.contains(&node) {
                    nodes.push(node);
                }
            }
        }
        nodes.extend(control.iter().map(|path| device_node(path)));
    }
    Ok(wire::ContainerAllocateResponse { envs, devices: nodes, ..Default::default() })
}

fn device_node(path: &Path) -> wire::DeviceSpec {
    let path = path.display().to_string();
    wire::DeviceSpec { container_path: path.clone(), host_path: path, permissions: "rw".to_owned() }
}

/// The longest refusal, in characters. It goes into a header and into the log; what Kubernetes allows as an id (63)
/// and as a resource's name (317) fits.
const LONGEST_REFUSAL: usize = 512;

/// A refused order: an unknown or repeated id is the caller's mistake, an unhealthy device is not.
pub(super) fn refusal(error: &AllocateError) -> Status {
    let mut words = error.to_string();
    if let Some((end, _)) = words.char_indices().nth(LONGEST_REFUSAL) {
        words.truncate(end);
        words.push_str(" ...");
    }
    match error {
        AllocateError::Unknown { .. } | AllocateError::Repeated { .. } | AllocateError::OneSlot { .. } => {
            Status::invalid_argument(words)
        }
        AllocateError::Unhealthy { .. } => Status::failed_precondition(words),
    }
}
