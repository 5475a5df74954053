//! One session with the kubelet: our two sockets, their servers and connections.
//!
//! Made and driven by `life`, as the machine decides. All of it ends when it is dropped: the sockets are removed, streams
//! end, connections break.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::OptionFuture;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tower::layer::layer_fn;
use tower::service_fn;

use super::door::Door;
use super::health::HealthService;
use super::machine::Input;
use super::registration::RegistrationService;
use super::service::Service;
use super::{Observer, Occurrence, Settings};
use crate::errors::chain;
use crate::grpc::{Refusal, Report, Rpc, accepted, observed};
use crate::names::shortened;
use crate::state::NodeState;
use crate::uds::{self, LONGEST_PATH, Listener, SocketFile};
use linkwise_kubelet_api::dra::v1::dra_plugin_server::DraPluginServer;
use linkwise_kubelet_api::dra_health::v1::dra_resource_health_server::DraResourceHealthServer as HealthV1;
use linkwise_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1Alpha1;
use linkwise_kubelet_api::pluginregistration::registration_server::RegistrationServer;

/// What the names of our sockets begin with; eight hexadecimal digits follow.
const PREFIX: &str = "linkwise-";
/// How the names of our registration sockets end, after the driver's name.
const REGISTRATION: &str = "-reg.sock";
/// The kubelet's own paths of its folders, which may be longer than those in our container.
const KUBELETS_REGISTRY: &str = "/var/lib/kubelet/plugins_registry";
/// See [`KUBELETS_REGISTRY`].
const KUBELETS_PLUGINS: &str = "/var/lib/kubelet/plugins";
/// Verdicts of the kubelet that may wait.
const VERDICTS: usize = 16;

/// A future on the heap.
pub(super) type Held<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A server until its end.
type Server = Held<Result<(), tonic::transport::Error>>;

/// The file name of a registration socket with this number.
///
/// The kubelet dials it by its bare path, and grpc-go makes the `:authority` of that path, percent-encoded:
/// `%2Fvar%2Flib%2F...`. The crate `http` allows no `%` in a host, and h2 answers with PROTOCOL_ERROR. It allows it in
/// front of an `@`; so the name has one, with a legal host behind it.
fn registration_name(folder: &Path, driver: &str, number: u32) -> String {
    let begin = format!("{PREFIX}{number:08x}@");
    let folder = folder.as_os_str().len().max(KUBELETS_REGISTRY.len());
    let room = LONGEST_PATH.saturating_sub(folder + 1 + begin.len() + REGISTRATION.len());
    format!("{begin}{}{REGISTRATION}", shortened(driver, room))
}

/// The folder of our service sockets: one for each driver, as its name or shortened.
fn service_folder(plugins: &Path, driver: &str) -> PathBuf {
    let folder = plugins.as_os_str().len().max(KUBELETS_PLUGINS.len());
    let room = LONGEST_PATH.saturating_sub(folder + 2 + PREFIX.len() + 8 + ".sock".len());
    plugins.join(shortened(driver, room))
}

/// Whether a file name in the kubelet's registry is that of a DRA driver of linkwise, of whatever start.
pub fn is_registration_socket(name: &str) -> bool {
    is_ours(name, |rest| rest.starts_with('@') && rest.ends_with(REGISTRATION))
}

/// Whether a file name is one of ours, of whatever start: with these characters after the number.
fn is_ours(name: &str, follows: impl Fn(&str) -> bool) -> bool {
    let rest = name.strip_prefix(PREFIX).and_then(|rest| rest.split_at_checked(8));
    rest.is_some_and(|(number, rest)| number.bytes().all(|byte| byte.is_ascii_hexdigit()) && follows(rest))
}

/// Why a session could not begin.
#[derive(Debug, Error)]
pub(super) enum BindError {
    #[error("cannot make the folder {folder}")]
    Make { folder: String, source: io::Error },
    #[error("cannot remove dead sockets from {folder}")]
    Folder { folder: String, source: io::Error },
    #[error("cannot bind a socket in {folder}")]
    Bind { folder: String, source: io::Error },
}

/// Sockets of ours that are served.
pub(super) struct Session {
    registration: Option<SocketFile>,
    services: Option<SocketFile>,
    registrar: Option<Server>,
    server: Option<Server>,
    verdicts: mpsc::Receiver<Result<(), String>>,
    connections: watch::Receiver<usize>,
    end: CancellationToken,
    cut: CancellationToken,
    _guards: [DropGuard; 2],
}

impl Session {
    /// Removes dead predecessors' sockets, binds ours with this random number in their names and serves them.
    pub async fn begin(
        settings: Arc<Settings>,
        door: Arc<Door>,
        snapshot: watch::Receiver<Arc<NodeState>>,
        observer: Observer,
        random: u64,
    ) -> Result<Self, BindError> {
        let number = u32::try_from(random & 0xFFFF_FFFF).unwrap_or_default();
        let folder = service_folder(&settings.plugins, &settings.driver);
        let shown = |folder: &Path| folder.display().to_string();
        fs::create_dir_all(&folder).map_err(|source| BindError::Make { folder: shown(&folder), source })?;
        // Unique to this start: a kubelet that sees a socket come again at a path it knows may miss it.
        let endpoint = folder.join(format!("{PREFIX}{number:08x}.sock"));
        let (services, listener) = bind(&endpoint, &settings, |name| is_ours(name, |rest| rest == ".sock"))?;

        let (end, cut) = (CancellationToken::new(), CancellationToken::new());
        let (open, connections) = watch::channel(0);
        let service = Service(Arc::clone(&door));
        let health = HealthService {
            settings: Arc::clone(&settings),
            door,
            snapshot,
            observer: Arc::clone(&observer),
            streams: watch::Sender::default(),
            end: end.clone(),
        };
        let serving = Serving { observer, end: end.clone(), cut: cut.clone() };
        let routes = Routes::new(DraPluginServer::new(service))
            .add_service(HealthV1::new(health.clone()))
            .add_service(HealthV1Alpha1::new(health));
        let server = serving.server(listener, open, routes);

        // Last: the kubelet asks as soon as it sees this socket.
        let (sender, verdicts) = mpsc::channel(VERDICTS);
        let registrar = RegistrationService {
            driver: settings.driver.clone(),
            endpoint: endpoint.display().to_string(),
            verdicts: sender,
        };
        let path = settings.registry.join(registration_name(&settings.registry, &settings.driver, number));
        let (registration, listener) = bind(&path, &settings, is_registration_socket)?;
        let routes = Routes::new(RegistrationServer::new(registrar));
        let registrar = serving.server(listener, watch::Sender::default(), routes);

        let _guards = [end.clone().drop_guard(), cut.clone().drop_guard()];
        Ok(Self {
            registration: Some(registration),
            services: Some(services),
            registrar: Some(registrar),
            server: Some(server),
            verdicts,
            connections,
            end,
            cut,
            _guards,
        })
    }

    /// Whether our sockets are still the files that were bound.
    pub fn has_sockets(&self) -> bool {
        [&self.registration, &self.services].iter().all(|file| file.as_ref().is_some_and(SocketFile::is_in_place))
    }

    /// Removes the sockets, ends the streams, accepts no more connections and asks the open ones to close.
    pub fn end(&mut self) {
        (self.registration, self.services) = (None, None);
        self.end.cancel();
    }

    /// Breaks the connections that are still open.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// The next thing that happens. Cancel-safe. The servers accept connections only while this is awaited. They end
    /// after their last connection is closed.
    pub async fn next(&mut self) -> Input {
        let ended = |result: Result<(), tonic::transport::Error>| {
            Input::ServerEnded(result.map_or_else(|error| chain(&error), |()| "without an error".to_owned()))
        };
        if self.registrar.is_none() && self.server.is_none() {
            return Input::Closed;
        }
        tokio::select! {
            biased;
            Some(result) = OptionFuture::from(self.registrar.as_mut()) => {
                self.registrar = None;
                ended(result)
            }
            Some(result) = OptionFuture::from(self.server.as_mut()) => {
                self.server = None;
                ended(result)
            }
            Some(verdict) = self.verdicts.recv() => Input::Notified(verdict),
            Ok(()) = self.connections.changed() => Input::Connections(*self.connections.borrow_and_update()),
        }
    }
}

/// Removes dead sockets of ours beside a path and listens there.
fn bind(path: &Path, settings: &Settings, ours: impl Fn(&str) -> bool) -> Result<(SocketFile, Listener), BindError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let shown = || folder.display().to_string();
    uds::remove_dead(folder, ours).map_err(|source| BindError::Folder { folder: shown(), source })?;
    let bound = uds::listen(path, settings.callers.clone());
    bound.map_err(|source| BindError::Bind { folder: shown(), source })
}

/// What both servers share.
struct Serving {
    observer: Observer,
    end: CancellationToken,
    cut: CancellationToken,
}

impl Serving {
    fn server(&self, listener: Listener, open: watch::Sender<usize>, routes: Routes) -> Server {
        let observer = Arc::clone(&self.observer);
        let refused: Report<Refusal> = Arc::new(move |refusal| {
            observer(match refusal {
                Refusal::Caller(peer) => Occurrence::Refused { uid: peer.uid, pid: peer.pid },
                Refusal::NotAccepted(why) => Occurrence::NotAccepted(why),
            });
        });
        let observer = Arc::clone(&self.observer);
        let ended: Report<Rpc> = Arc::new(move |Rpc { method, code, elapsed, parent }| {
            observer(Occurrence::Rpc { method, code, elapsed, parent })
        });
        let layer = layer_fn(move |service: Routes| {
            let ended = Arc::clone(&ended);
            service_fn(move |request| observed(service.clone(), request, Arc::clone(&ended)))
        });
        let connections = accepted(listener, self.cut.clone(), open, refused);
        let server = tonic::transport::Server::builder()
            .layer(layer)
            .add_routes(routes)
            .serve_with_incoming_shutdown(connections, self.end.clone().cancelled_owned());
        Box::pin(server)
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
            assert!(registry.join(&name).as_os_str().len() <= LONGEST_PATH, "{name}");
            let endpoint = service_folder(plugins, &driver).join(format!("{PREFIX}{:08x}.sock", 7));
            assert!(endpoint.as_os_str().len() <= LONGEST_PATH, "{}", endpoint.display());
        }
        assert_eq!(registration_name(registry, "gpu.nvidia.com", 7), "linkwise-00000007@gpu.nvidia.com-reg.sock");
        // Long names that differ at their end only have different sockets.
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
