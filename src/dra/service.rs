//! The service DRAPlugin, in both versions: an entry for each claim of a request, and an error in the entry of that claim
//! alone. A gRPC error would fail all claims of the request.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures_util::future::join_all;
use tonic::{Request, Response, Status};

use super::door::Door;
use crate::claims::{ClaimName, PreparedDevice};
use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPlugin as DraPluginV1;
use linkwise_kubelet_api::dra::v1beta1::dra_plugin_server::DraPlugin as DraPluginV1Beta1;

/// Both versions of the service.
#[derive(Clone)]
pub(super) struct Service(pub Arc<Door>);

impl Service {
    async fn prepare(&self, request: wire::NodePrepareResourcesRequest) -> wire::NodePrepareResourcesResponse {
        let work = claims(request.claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let answer = match self.0.prepare(claim).await {
                Ok(prepared) => wire::NodePrepareResourceResponse {
                    devices: prepared.devices.into_iter().map(device).collect(),
                    error: String::new(),
                },
                Err(error) => wire::NodePrepareResourceResponse { devices: Vec::new(), error },
            };
            (uid, answer)
        });
        let claims: HashMap<_, _> = join_all(work).await.into_iter().collect();
        wire::NodePrepareResourcesResponse { claims }
    }

    async fn unprepare(&self, request: wire::NodeUnprepareResourcesRequest) -> wire::NodeUnprepareResourcesResponse {
        let work = claims(request.claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let error = self.0.unprepare(claim).await.err().unwrap_or_default();
            (uid, wire::NodeUnprepareResourceResponse { error })
        });
        let claims: HashMap<_, _> = join_all(work).await.into_iter().collect();
        wire::NodeUnprepareResourcesResponse { claims }
    }
}

/// The claims of a request; one that is named twice counts once.
fn claims(claims: Vec<wire::Claim>) -> Vec<ClaimName> {
    let named = claims.into_iter().map(|wire::Claim { namespace, uid, name }| ClaimName { namespace, name, uid });
    let by_uid: BTreeMap<String, ClaimName> = named.map(|claim| (claim.uid.clone(), claim)).collect();
    by_uid.into_values().collect()
}

fn device(device: PreparedDevice) -> wire::Device {
    wire::Device {
        request_names: vec![device.request],
        pool_name: device.pool,
        device_name: device.device,
        cdi_device_ids: device.cdi,
        share_id: device.share_id,
    }
}

#[tonic::async_trait]
impl DraPluginV1 for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<wire::NodePrepareResourcesRequest>,
    ) -> Result<Response<wire::NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<wire::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<wire::NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare(request.into_inner()).await))
    }
}

#[tonic::async_trait]
impl DraPluginV1Beta1 for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<wire::NodePrepareResourcesRequest>,
    ) -> Result<Response<wire::NodePrepareResourcesResponse>, Status> {
        DraPluginV1::node_prepare_resources(self, request).await
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<wire::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<wire::NodeUnprepareResourcesResponse>, Status> {
        DraPluginV1::node_unprepare_resources(self, request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelet_is_told_which_share_a_device_is() {
        let prepared = PreparedDevice {
            request: "gpus".to_owned(),
            pool: "node/gpu".to_owned(),
            device: "gpu-0".to_owned(),
            share_id: Some("share".to_owned()),
            share: None,
            admin: false,
            gpu: "GPU-0".parse().unwrap(),
            mig: None,
            made: None,
            cdi: vec!["k/gpu=GPU-0".to_owned()],
        };
        assert_eq!(device(prepared).share_id.as_deref(), Some("share"));
    }
}
