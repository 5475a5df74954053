//! The service DRAPlugin. An answer has an entry for each claim of the request. An error is in its claim's entry alone,
//! because a gRPC error would fail all claims of the request.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use tonic::{Request, Response};

use super::Shared;
use super::claim_manager::ClaimManager;
use crate::Answer;
use linkwise_core::claims::{ClaimName, PreparedDevice};
use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;

/// The service for one session with the kubelet.
pub(super) struct Service(pub Shared);

impl Service {
    /// Has the manager work on each claim of a request. A claim that is named twice counts once.
    async fn each<T, F: Future<Output = Result<T, String>>>(
        &self,
        claims: Vec<wire::Claim>,
        work: impl Fn(Arc<ClaimManager>, ClaimName) -> F,
    ) -> Vec<(String, Result<T, String>)> {
        let (manager, work) = (&self.0.manager().await, &work);
        let named = claims.into_iter().map(|wire::Claim { namespace, uid, name }| ClaimName { namespace, name, uid });
        let by_uid: BTreeMap<String, ClaimName> = named.map(|claim| (claim.uid.clone(), claim)).collect();
        let each = by_uid.into_iter().map(|(uid, claim)| async move {
            let done = match manager {
                Ok(manager) => work(Arc::clone(manager), claim).await,
                Err(error) => Err(error.clone()),
            };
            (uid, done)
        });
        join_all(each).await
    }
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
    ) -> Answer<wire::NodePrepareResourcesResponse> {
        let prepare = |manager: Arc<ClaimManager>, claim| async move { manager.prepare(claim).await };
        let claims = self.each(request.into_inner().claims, prepare).await.into_iter().map(|(uid, prepared)| {
            let (devices, error) = match prepared {
                Ok(prepared) => (prepared.devices.into_iter().map(device).collect(), String::new()),
                Err(error) => (Vec::new(), error),
            };
            (uid, wire::NodePrepareResourceResponse { devices, error })
        });
        Ok(Response::new(wire::NodePrepareResourcesResponse { claims: claims.collect() }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<wire::NodeUnprepareResourcesRequest>,
    ) -> Answer<wire::NodeUnprepareResourcesResponse> {
        let unprepare = |manager: Arc<ClaimManager>, claim| async move { manager.unprepare(claim).await };
        let claims = self.each(request.into_inner().claims, unprepare).await.into_iter().map(|(uid, unprepared)| {
            let error = unprepared.err().unwrap_or_default();
            (uid, wire::NodeUnprepareResourceResponse { error })
        });
        Ok(Response::new(wire::NodeUnprepareResourcesResponse { claims: claims.collect() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelet_is_told_which_share_a_device_is() {
        let whole = PreparedDevice::whole("gpu-0", "GPU-0".parse().unwrap());
        let prepared = PreparedDevice { share_id: Some("share".to_owned()), ..whole };
        assert_eq!(device(prepared).share_id.as_deref(), Some("share"));
    }
}
