//! The PodResources service, on a socket of its own where [`super::Options::pod_resources`] names one.
//!
//! Started with each life of the kubelet; answers from what can be seen of the books, as a kubelet answers from its
//! device manager: the devices that containers hold, and those that are healthy. Changes nothing.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::errors::BoxError;
use super::life::{Core, Life};
use super::registration::{bind, incoming};
use crate::proto::podresources as wire;
use wire::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};

/// Serves PodResources in a task of `life`, where it is wanted.
pub(super) fn serve(life: &Arc<Life>) -> Result<(), BoxError> {
    let Some(path) = &life.core.options.pod_resources else { return Ok(()) };
    let listener = bind(path)?;
    let incoming = incoming(life, listener);
    let service = PodResourcesListerServer::new(Service { core: Arc::clone(&life.core) });
    let end = life.end.clone();
    life.spawn(async move {
        let server = tonic::transport::Server::builder();
        let _ = server.serve_with_incoming_shutdown(service, incoming, end.cancelled_owned()).await;
    });
    Ok(())
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
        let state = self.core.state.borrow().clone();
        let mut pods = Vec::new();
        for (resource, seen) in state.resources.iter() {
            for (name, containers) in &seen.allocated {
                let containers = containers.iter().map(|(name, ids)| wire::ContainerResources {
                    name: name.clone(),
                    devices: vec![devices(resource, ids)],
                });
                pods.push(wire::PodResources { name: name.clone(), containers: containers.collect() });
            }
        }
        Ok(Response::new(wire::ListPodResourcesResponse { pod_resources: pods }))
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
