//! The service Registration: tells the kubelet the plugin's name and services, and hears whether the kubelet registered
//! the plugin. It answers from memory: the kubelet waits for 1 s.

use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use linkwise_core::quote::one_line;
use linkwise_kubelet_api::pluginregistration as wire;
use linkwise_kubelet_api::pluginregistration::registration_server::Registration;
use linkwise_kubelet_api::{dra, dra_health};

/// The services of linkwise. The kubelet calls DRAPlugin and the newest health service that it knows.
const SERVICES: [&str; 3] = [dra::v1::SERVICE, dra_health::v1::SERVICE, dra_health::v1alpha1::SERVICE];

/// The service for one session with the kubelet.
pub(super) struct RegistrationService {
    /// The DRA driver's name.
    pub driver: String,
    /// The path of the socket with our services.
    pub endpoint: String,
    /// The receiver of the kubelet's verdicts.
    pub verdicts: mpsc::Sender<Result<(), String>>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<wire::InfoRequest>) -> Result<Response<wire::PluginInfo>, Status> {
        Ok(Response::new(wire::PluginInfo {
            r#type: wire::DRA_PLUGIN.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<wire::RegistrationStatus>,
    ) -> Result<Response<wire::RegistrationStatusResponse>, Status> {
        let wire::RegistrationStatus { plugin_registered, error } = request.into_inner();
        let verdict = if plugin_registered { Ok(()) } else { Err(one_line(&error)) };
        // Full: the same verdict is waiting already. An error in answer would make the kubelet drop the plugin.
        let _ = self.verdicts.try_send(verdict);
        Ok(Response::new(wire::RegistrationStatusResponse {}))
    }
}
