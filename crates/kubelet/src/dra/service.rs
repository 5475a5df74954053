//! The service DRAPlugin. An answer has an entry for each claim of the request. An error is in the entry of its claim
//! alone: a gRPC error would fail all claims of the request.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use tonic::{Request, Response, Status};

use super::turn::Claims;
use linkwise_core::claims::{ClaimName, PreparedDevice};
use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;

/// The service for one session with the kubelet.
pub(super) struct Service(pub Claims);

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
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<wire::NodePrepareResourcesRequest>,
    ) -> Result<Response<wire::NodePrepareResourcesResponse>, Status> {
        let manager = &self.0.manager().await;
        let work = claims(request.into_inner().claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let prepared = match manager {
                Ok(manager) => manager.prepare(claim).await,
                Err(error) => Err(error.clone()),
            };
            let answer = match prepared {
                Ok(prepared) => wire::NodePrepareResourceResponse {
                    devices: prepared.devices.into_iter().map(device).collect(),
                    error: String::new(),
                },
                Err(error) => wire::NodePrepareResourceResponse { devices: Vec::new(), error },
            };
            (uid, answer)
        });
        let claims = join_all(work).await.into_iter().collect();
        Ok(Response::new(wire::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<wire::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<wire::NodeUnprepareResourcesResponse>, Status> {
        let manager = &self.0.manager().await;
        let work = claims(request.into_inner().claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let unprepared = match manager {
                Ok(manager) => manager.unprepare(claim).await,
                Err(error) => Err(error.clone()),
            };
            let error = unprepared.err().unwrap_or_default();
            (uid, wire::NodeUnprepareResourceResponse { error })
        });
        let claims = join_all(work).await.into_iter().collect();
        Ok(Response::new(wire::NodeUnprepareResourcesResponse { claims }))
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
