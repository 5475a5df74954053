//! The PodResources service, on a socket of its own if [`super::Options::pod_resources`] names one.
//!
//! It starts with the kubelet. Like a kubelet, it answers from the books of device manager and DRA manager: the devices
//! that containers hold, the healthy devices, and the claims of containers. A call of List first takes the devices from
//! pods that have ended, in memory only.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::errors::BoxError;
use super::life::{Core, Life, lock};
use super::pod::{Allocation, Place};
use super::registration::serve_at;
use linkwise_kubelet_api::podresources as wire;
use wire::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

/// The namespace of all pods.
const NAMESPACE: &str = "default";

/// Serves PodResources if the options name a socket for it.
pub(super) fn serve(life: &Arc<Life>) -> Result<(), BoxError> {
    let Some(path) = &life.core.options.pod_resources else { return Ok(()) };
    let service = PodResourcesListerServer::new(Service { core: Arc::clone(&life.core) });
    serve_at(life, path, Routes::new(service))
}

struct Service {
    core: Arc<Core>,
}

fn devices<'a>(resource: &str, ids: impl IntoIterator<Item = &'a String>) -> wire::ContainerDevices {
    wire::ContainerDevices { resource_name: resource.to_owned(), device_ids: ids.into_iter().cloned().collect() }
}

#[tonic::async_trait]
impl PodResourcesLister for Service {
    async fn list(
        &self,
        _: Request<wire::ListPodResourcesRequest>,
    ) -> Result<Response<wire::ListPodResourcesResponse>, Status> {
        self.core.lists.fetch_add(1, Ordering::Relaxed);
        let pod = |(place, held): (&Place, &Allocation)| {
            let devices = vec![devices(&place.resource, &held.devices)];
            let dynamic_resources = Vec::new();
            let container = wire::ContainerResources { name: place.container.clone(), devices, dynamic_resources };
            let namespace = NAMESPACE.to_owned();
            wire::PodResources { name: place.pod.clone(), namespace, containers: vec![container] }
        };
        // A pod may be listed several times, because readers merge its entries.
        let mut pod_resources: Vec<_> = self.core.change(|book| {
            book.update_allocated();
            book.held.iter().map(pod).collect()
        });
        let claims = lock(&self.core.claims).clone();
        pod_resources.extend(claims.into_iter().flat_map(|claims| claims.0()));
        Ok(Response::new(wire::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<wire::AllocatableResourcesRequest>,
    ) -> Result<Response<wire::AllocatableResourcesResponse>, Status> {
        let state = self.core.state.borrow().clone();
        let listed = state.resources.iter().map(|(resource, seen)| devices(resource, &seen.healthy));
        Ok(Response::new(wire::AllocatableResourcesResponse { devices: listed.collect() }))
    }
}
