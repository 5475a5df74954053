//! Converts wire types to core types and back.

use tonic::Status;

use linkwise_core::allocation::{AllocationRequest, DeviceId, PreferredAllocation};
use linkwise_core::publish::injection::Injection;
use linkwise_core::state::{AllocateError, Health, NodeState, Resource, ResourceName};
use linkwise_kubelet_api::v1beta1 as wire;

pub(super) fn options() -> wire::DevicePluginOptions {
    wire::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// The whole list of a resource, as ListAndWatch sends it.
pub(super) fn device_list(snapshot: &NodeState, resource: &ResourceName) -> wire::ListAndWatchResponse {
    let device = |id: &DeviceId, health: &str, nodes: Vec<wire::NumaNode>| {
        let topology = (!nodes.is_empty()).then_some(wire::TopologyInfo { nodes });
        wire::Device { id: id.as_str().to_owned(), health: health.to_owned(), topology }
    };
    let devices = snapshot.offers().of(resource).map(|(id, offered)| {
        let health = if offered.health == Health::Healthy { wire::HEALTHY } else { wire::UNHEALTHY };
        device(id, health, offered.numa_nodes.iter().map(|numa| wire::NumaNode { id: i64::from(numa.0) }).collect())
    });
    let without_device = snapshot.offers().resources().get(resource).into_iter().flat_map(Resource::unknown);
    let without_device = without_device.map(|(id, _)| device(id, wire::UNHEALTHY, Vec::new()));
    wire::ListAndWatchResponse { devices: devices.chain(without_device).collect() }
}

/// Converts one container's request. A negative size becomes 0: neither can be met.
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

/// The answer for one container.
pub(super) fn container(injection: Injection) -> wire::ContainerAllocateResponse {
    let mounts = injection.mounts.into_iter().map(|mount| wire::Mount {
        container_path: mount.container,
        host_path: mount.host,
        read_only: false,
    });
    let devices = injection.device_nodes.into_iter().map(|node| wire::DeviceSpec {
        container_path: node.container,
        host_path: node.host,
        permissions: "rw".to_owned(),
    });
    wire::ContainerAllocateResponse {
        envs: injection.env.into_iter().collect(),
        mounts: mounts.collect(),
        devices: devices.collect(),
        annotations: injection.annotations.into_iter().collect(),
        cdi_devices: injection.cdi_devices.into_iter().map(|name| wire::CdiDevice { name }).collect(),
    }
}

/// The longest refusal, in characters. It goes into a header and into the log; what Kubernetes allows as an id (63)
/// and as a resource's name (317) fits.
const MAX_REFUSAL: usize = 512;

/// Converts a refusal: every cause but an unhealthy device is the caller's mistake.
pub(super) fn refusal(error: &AllocateError) -> Status {
    let mut text = error.to_string();
    if let Some((end, _)) = text.char_indices().nth(MAX_REFUSAL) {
        text.truncate(end);
        text.push_str(" ...");
    }
    match error {
        AllocateError::Unknown(..) | AllocateError::Repeated(..) | AllocateError::OneSlot(..) => {
            Status::invalid_argument(text)
        }
        AllocateError::Unhealthy(..) => Status::failed_precondition(text),
    }
}
