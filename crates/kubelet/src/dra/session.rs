//! One session with the kubelet: our two sockets, their servers and connections.
//!
//! Made by `life` and driven by the executor of the registration. Ends when it is dropped.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tonic::service::Routes;
use tonic::{Request, Response};

use super::Shared;
use super::device_health::HealthService;
use super::handshake::{Connections, DraHandshake, Input};
use super::service::Service;
use crate::Answer;
use crate::registration::{BindError, Servers, Session, bind, is_number};
use linkwise_core::names::shortened;
use linkwise_core::quote::one_line;
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPluginServer;
use linkwise_kubelet_api::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use linkwise_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1Alpha1;
use linkwise_kubelet_api::pluginregistration as wire;
use linkwise_kubelet_api::pluginregistration::registration_server::{Registration, RegistrationServer};
use linkwise_kubelet_api::{dra, dra_health};
use linkwise_system::uds::MAX_SOCKET_PATH;

/// The first part of the names of our sockets; eight hexadecimal digits follow.
const PREFIX: &str = "linkwise-";
/// The end of the names of our registration sockets, after the driver's name.
const REGISTRATION: &str = "-reg.sock";
/// The kubelet's own paths of its folders, which may be longer than those in our container.
const KUBELETS_REGISTRY: &str = "/var/lib/kubelet/plugins_registry";
/// See [`KUBELETS_REGISTRY`].
const KUBELETS_PLUGINS: &str = "/var/lib/kubelet/plugins";
/// The services of linkwise. The kubelet calls DRAPlugin and the newest health service that it knows.
const SERVICES: [&str; 3] = [dra::v1::SERVICE, dra_health::v1::SERVICE, dra_health::v1alpha1::SERVICE];
/// The most verdicts of the kubelet that wait.
const MAX_WAITING_VERDICTS: usize = 16;

/// The file name of a registration socket with this number.
///
/// The kubelet dials it by its bare path, and grpc-go makes the `:authority` of that path, percent-encoded:
/// `%2Fvar%2Flib%2F...`. The crate `http` allows no `%` in a host, and h2 answers with PROTOCOL_ERROR. `http`
/// allows a `%` in front of an `@`, so the name has an `@`, with a legal host behind it.
fn registration_name(folder: &Path, driver: &str, number: u32) -> String {
    let begin = format!("{PREFIX}{number:08x}@");
    let folder = folder.as_os_str().len().max(KUBELETS_REGISTRY.len());
    let room = MAX_SOCKET_PATH.saturating_sub(folder + 1 + begin.len() + REGISTRATION.len());
    format!("{begin}{}{REGISTRATION}", shortened(driver, room))
}

/// The folder of our service sockets. It has the driver's name, shortened if that is too long.
fn service_folder(plugins: &Path, driver: &str) -> PathBuf {
    let folder = plugins.as_os_str().len().max(KUBELETS_PLUGINS.len());
    let room = MAX_SOCKET_PATH.saturating_sub(folder + 2 + PREFIX.len() + 8 + ".sock".len());
    plugins.join(shortened(driver, room))
}

/// Returns true for the file name of a registration socket of linkwise's DRA plugin, with any number.
pub fn is_registration_socket(name: &str) -> bool {
    is_ours(name, |rest| rest.starts_with('@') && rest.ends_with(REGISTRATION))
}

/// Returns true for the file name of a socket of ours, if `follows` holds for the text after its number.
fn is_ours(name: &str, follows: impl Fn(&str) -> bool) -> bool {
    let rest = name.strip_prefix(PREFIX).and_then(|rest| rest.split_at_checked(8));
    rest.is_some_and(|(number, rest)| is_number(number) && follows(rest))
}

/// Our two sockets, which are served.
pub(super) struct PluginSession {
    servers: Servers,
    verdicts: mpsc::Receiver<Result<(), String>>,
    connections: watch::Receiver<usize>,
    /// The registration socket's path, while it is served.
    socket: watch::Sender<Option<PathBuf>>,
}

impl Drop for PluginSession {
    fn drop(&mut self) {
        self.socket.send_replace(None);
    }
}

impl PluginSession {
    /// Removes the dead sockets of earlier sessions, binds ours with this random number in their names and serves them.
    pub fn begin(shared: Shared, random: u64) -> Result<Self, BindError> {
        let Shared { settings, reporter, .. } = shared.clone();
        let number = u32::try_from(random & 0xFFFF_FFFF).unwrap_or_default();
        let folder = service_folder(&settings.plugins, &settings.driver);
        fs::create_dir_all(&folder).map_err(|source| BindError("make the folder", folder.clone(), source))?;
        // Each session has a new number: a kubelet may miss a socket that appears again at a path that it knows.
        let endpoint = folder.join(format!("{PREFIX}{number:08x}.sock"));
        let bound = bind(&endpoint, &settings.callers, |name| is_ours(name, |rest| rest == ".sock"))?;

        let socket = reporter.socket.clone();
        let mut servers = Servers::new(Arc::new(move |event| reporter.report(&event)));
        let health = HealthService { shared: shared.clone(), end: servers.end_of_streams() };
        let routes = Routes::new(DraPluginServer::new(Service(shared)))
            .add_service(HealthV1::new(health.clone()))
            .add_service(HealthV1Alpha1::new(health));
        let (open, connections) = watch::channel(0);
        servers.serve(bound, open, routes);

        // Bound last, because the kubelet calls GetInfo as soon as it sees this socket.
        let (sender, verdicts) = mpsc::channel(MAX_WAITING_VERDICTS);
        let (driver, endpoint) = (settings.driver.clone(), endpoint.display().to_string());
        let registration = RegistrationService { driver, endpoint, verdicts: sender };
        let path = settings.registry.join(registration_name(&settings.registry, &settings.driver, number));
        let bound = bind(&path, &settings.callers, is_registration_socket)?;
        servers.serve(bound, watch::Sender::default(), Routes::new(RegistrationServer::new(registration)));
        socket.send_replace(Some(path));
        Ok(Self { servers, verdicts, connections, socket })
    }
}

impl Session<DraHandshake> for PluginSession {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }

    fn others(_: Option<&mut Self>) {}

    async fn next(&mut self) -> Input {
        tokio::select! {
            biased;
            ended = self.servers.next() => ended.map_or(Input::Closed, Input::ServerEnded),
            Some(verdict) = self.verdicts.recv() => Input::Registered(verdict),
            Ok(()) = self.connections.changed() => {
                Input::Own(Connections(*self.connections.borrow_and_update()))
            }
        }
    }
}

/// The service Registration: gives the kubelet the plugin's name and services, and receives the kubelet's verdict:
/// registered or refused. It answers from memory, because the kubelet waits for 1 s.
struct RegistrationService {
    /// The DRA driver's name.
    driver: String,
    /// The path of the socket with our services.
    endpoint: String,
    /// The channel for the kubelet's verdicts.
    verdicts: mpsc::Sender<Result<(), String>>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<wire::InfoRequest>) -> Answer<wire::PluginInfo> {
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
    ) -> Answer<wire::RegistrationStatusResponse> {
        let wire::RegistrationStatus { plugin_registered, error } = request.into_inner();
        let verdict = if plugin_registered { Ok(()) } else { Err(one_line(&error)) };
        // If the channel is full, this verdict is lost. An error would make the kubelet drop the plugin.
        let _ = self.verdicts.try_send(verdict);
        Ok(Response::new(wire::RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_driver_name_fits_a_socket_path() {
        let (registry, plugins) = (Path::new(KUBELETS_REGISTRY), Path::new(KUBELETS_PLUGINS));
        for driver in ["gpu.nvidia.com".to_owned(), format!("{}.example.com", "x".repeat(51)), "y".repeat(63)] {
            let name = registration_name(registry, &driver, 7);
            assert!(registry.join(&name).as_os_str().len() <= MAX_SOCKET_PATH, "{name}");
            let endpoint = service_folder(plugins, &driver).join(format!("{PREFIX}{:08x}.sock", 7));
            assert!(endpoint.as_os_str().len() <= MAX_SOCKET_PATH, "{}", endpoint.display());
        }
        assert_eq!(registration_name(registry, "gpu.nvidia.com", 7), "linkwise-00000007@gpu.nvidia.com-reg.sock");
        // Long names that differ only at their ends have different sockets.
        let [one, other] = ["1", "2"].map(|last| registration_name(registry, &("x".repeat(62) + last), 7));
        assert_ne!(one, other);
    }

    #[test]
    fn other_plugins_sockets_are_not_ours() {
        assert!(is_registration_socket("linkwise-0123abcd@gpu.nvidia.com-reg.sock"));
        for other in ["gpu.nvidia.com-reg.sock", "linkwise-0123abcx@gpu.nvidia.com-reg.sock", "linkwise-", "linkwise-é"]
        {
            assert!(!is_registration_socket(other), "{other}");
        }
    }
}
