//! The service DRAPlugin. An answer has an entry for each claim of the request. An error is in the entry of its claim
//! alone: a gRPC error would fail all claims of the request.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::join_all;
use tonic::{Request, Response, Status};

use super::claim_manager::ClaimManager;
use crate::claims::{ClaimName, PreparedDevice};
use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPlugin;

/// The service for one session with the kubelet.
pub(super) struct Service(pub Arc<ClaimManager>);

/// The claims of a request; one that is named twice counts once.
fn claims(claims: Vec<wire::Claim>) -> Vec<ClaimName> {
    let named = claims.into_iter().map(|wire::Claim { namespace, uid, name }| ClaimName { namespace, name, uid });
    let by_uid: BTreeMap<String, ClaimName> = named.map(|claim| (claim.uid.clone(), claim)).collect();
    by_uid.into_values().collect()
}

/// The devices of a claim as the kubelet knows them: a set of GPUs is one, with the CDI devices of all its members.
fn devices(prepared: Vec<PreparedDevice>) -> Vec<wire::Device> {
    let mut devices: Vec<wire::Device> = Vec::new();
    for member in prepared {
        let device = wire::Device {
            request_names: vec![member.request],
            pool_name: member.pool,
            device_name: member.device,
            cdi_device_ids: Vec::new(),
            share_id: member.share_id,
        };
        let same = |known: &wire::Device| wire::Device { cdi_device_ids: Vec::new(), ..known.clone() } == device;
        let at = devices.iter().position(same).unwrap_or_else(|| {
            devices.push(device);
            devices.len() - 1
        });
        if let Some(known) = devices.get_mut(at) {
            known.cdi_device_ids.extend(member.cdi);
        }
    }
    devices
}

#[tonic::async_trait]
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<wire::NodePrepareResourcesRequest>,
    ) -> Result<Response<wire::NodePrepareResourcesResponse>, Status> {
        let work = claims(request.into_inner().claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let answer = match self.0.prepare(claim).await {
                Ok(prepared) => {
                    wire::NodePrepareResourceResponse { devices: devices(prepared.devices), error: String::new() }
                }
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
        let work = claims(request.into_inner().claims).into_iter().map(|claim| async move {
            let uid = claim.uid.clone();
            let error = self.0.unprepare(claim).await.err().unwrap_or_default();
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
    fn set_is_one_device_of_the_answer() {
        let member = |request: &str, device: &str, gpu: &str| PreparedDevice {
            request: request.to_owned(),
            pool: "n/gpu".to_owned(),
            device: device.to_owned(),
            share_id: None,
            share: None,
            admin: false,
            gpu: gpu.parse().unwrap(),
            mig: None,
            made: None,
            cdi: vec![format!("k/gpu={gpu}")],
        };
        let prepared = vec![
            member("a", "gpus-2-0-3", "GPU-0"),
            member("a", "gpus-2-0-3", "GPU-3"),
            member("a", "gpu-5", "GPU-5"),
            // An administrator looks at the same set.
            member("b", "gpus-2-0-3", "GPU-0"),
        ];
        let devices: Vec<_> = devices(prepared)
            .into_iter()
            .map(|device| (device.request_names.concat(), device.device_name, device.cdi_device_ids.join(" ")))
            .collect();
        let expected = [
            ("a", "gpus-2-0-3", "k/gpu=GPU-0 k/gpu=GPU-3"),
            ("a", "gpu-5", "k/gpu=GPU-5"),
            ("b", "gpus-2-0-3", "k/gpu=GPU-0"),
        ];
        assert_eq!(devices, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }

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
        assert_eq!(devices(vec![prepared])[0].share_id.as_deref(), Some("share"));
    }
}
