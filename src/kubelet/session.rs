//! One session with the kubelet: our socket, its server, its streams and connections.
//!
//! Made and driven by `life`, as the machine decides. All of it ends when it is dropped: the socket is removed, streams
//! end, connections break.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};

use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tower::layer::layer_fn;
use tower::service_fn;

use super::machine::Input;
use super::service::Service;
use super::{Occurrence, Report, Settings};
use crate::errors::chain;
use crate::grpc::{Refusal, Rpc, accepted, observed};
use crate::names::shortened;
use crate::state::{NodeState, ResourceName};
use crate::uds::{self, FileId, LONGEST_PATH, Listener, Peer, SocketFile};
use linkwise_kubelet_api::v1beta1::device_plugin_server::DevicePluginServer;

/// What follows the name of a resource in its sockets' names: a dash, eight hexadecimal digits, `.sock`.
const REST: usize = 14;
/// The kubelet's own path of the folder, which may be longer than the one in our container.
const KUBELETS_FOLDER: &str = "/var/lib/kubelet/device-plugins";

/// What the names of a resource's sockets begin with, in every version and every start of linkwise.
fn prefix(folder: &Path, resource: &ResourceName) -> String {
    let room = LONGEST_PATH.saturating_sub(folder.as_os_str().len().max(KUBELETS_FOLDER.len()) + 1 + REST);
    shortened(&format!("linkwise-{}", resource.as_str().replace('/', "_")), room) + "-"
}

/// The file name of a socket of a resource with this random number in it.
fn socket_name(folder: &Path, resource: &ResourceName, random: u64) -> String {
    format!("{}{:08x}.sock", prefix(folder, resource), random & 0xFFFF_FFFF)
}

/// Whether a file name is one of those of a resource with this prefix. That of another resource may begin with it too.
fn is_ours(name: &str, prefix: &str) -> bool {
    let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(".sock"));
    rest.is_some_and(|number| number.len() == 8 && number.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Whether a file name is the socket of the NVIDIA plugin for this resource: `nvidia-gpu.sock` for `nvidia.com/gpu`.
fn is_nvidias(name: &str, resource: &ResourceName) -> bool {
    let (_, last) = resource.as_str().split_once('/').unwrap_or(("", resource.as_str()));
    name.strip_prefix("nvidia-").and_then(|rest| rest.strip_suffix(".sock")) == Some(last)
}

/// The sockets of plugins of this resource on which a process listens: another linkwise, or the NVIDIA plugin. Where
/// the folder cannot be read, none is known.
fn living(folder: &Path, resource: &ResourceName, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| is_ours(name, prefix) || is_nvidias(name, resource))
    });
    named.map(|entry| entry.path()).filter(|path| is_alive(path)).collect()
}

fn is_alive(path: &Path) -> bool {
    FileId::of_socket(path).is_some() && !uds::is_dead(path)
}

/// Binds a socket of ours for this resource, with this random number in its name.
pub(super) fn bind(
    settings: &Settings,
    resource: &ResourceName,
    random: u64,
) -> Result<(SocketFile, Listener, String), BindError> {
    let folder = settings.kubelet_socket.parent().unwrap_or(Path::new("."));
    // Unique to this start: a kubelet may still hold the connection of an earlier one.
    let name = socket_name(folder, resource, random);
    let at_path = |source| BindError::Bind { folder: folder.display().to_string(), source };
    let (own, listener) = uds::listen(&folder.join(&name), settings.callers.clone()).map_err(at_path)?;
    Ok((own, listener, name))
}

/// A future on the heap.
pub(super) type Held<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Why a session could not begin.
#[derive(Debug, Error)]
pub(super) enum BindError {
    #[error("cannot remove dead sockets from {folder}")]
    Folder { folder: String, source: io::Error },
    #[error("cannot bind a socket in {folder}")]
    Bind { folder: String, source: io::Error },
}

/// A socket of ours that is served.
pub(super) struct Session {
    /// The socket's file name.
    pub name: String,
    /// The process that listens on kubelet.sock, known once we have connected to it.
    pub kubelet: Arc<OnceLock<Peer>>,
    /// The sockets of other plugins of this resource that were there when ours was bound, and still were when last asked.
    predecessors: Vec<PathBuf>,
    own: Option<SocketFile>,
    /// Another name of the same socket.
    alias: Option<SocketFile>,
    server: Option<Held<Result<(), tonic::transport::Error>>>,
    streams: watch::Receiver<usize>,
    end: CancellationToken,
    cut: CancellationToken,
    _guards: [DropGuard; 2],
}

impl Session {
    /// Removes dead predecessors' sockets, binds a socket with this random number in its name and serves it.
    pub async fn begin(
        resource: ResourceName,
        settings: Arc<Settings>,
        snapshot: watch::Receiver<Arc<NodeState>>,
        report: Report,
        random: u64,
    ) -> Result<Self, BindError> {
        let folder = settings.kubelet_socket.parent().unwrap_or(Path::new("."));
        let prefix = prefix(folder, &resource);
        let in_folder = |source| BindError::Folder { folder: folder.display().to_string(), source };
        uds::remove_dead(folder, |name| is_ours(name, &prefix)).map_err(in_folder)?;
        let predecessors = living(folder, &resource, &prefix);
        let (own, listener, name) = bind(&settings, &resource, random)?;

        let kubelet = Arc::new(OnceLock::new());
        let (streams_sender, streams) = watch::channel(0);
        let (end, cut) = (CancellationToken::new(), CancellationToken::new());
        let service = Service {
            resource,
            settings: Arc::clone(&settings),
            snapshot,
            report: Arc::clone(&report),
            kubelet: Arc::clone(&kubelet),
            streams: streams_sender,
            narrowing: Mutex::default(),
            end: end.clone(),
        };
        let refused = Arc::clone(&report);
        let refused = move |refusal| {
            refused(match refusal {
                Refusal::Caller(peer) => Occurrence::Refused { uid: peer.uid, pid: peer.pid },
                Refusal::NotAccepted(why) => Occurrence::NotAccepted(why),
            });
        };
        let connections = accepted(listener, cut.clone(), watch::Sender::default(), Arc::new(refused));
        let ended = move |Rpc { method, code, elapsed }| report(Occurrence::Rpc { method, code, elapsed });
        let ended: crate::grpc::Report<Rpc> = Arc::new(ended);
        let layer = layer_fn(move |service: Routes| {
            let ended = Arc::clone(&ended);
            service_fn(move |request| observed(service.clone(), request, Arc::clone(&ended)))
        });
        let server = tonic::transport::Server::builder()
            .layer(layer)
            .add_service(DevicePluginServer::new(service))
            .serve_with_incoming_shutdown(connections, end.clone().cancelled_owned());
        let _guards = [end.clone().drop_guard(), cut.clone().drop_guard()];
        let server: Held<_> = Box::pin(server);
        Ok(Self {
            name,
            kubelet,
            predecessors,
            own: Some(own),
            alias: None,
            server: Some(server),
            streams,
            end,
            cut,
            _guards,
        })
    }

    /// Gives our socket another name, with this random number in it, beside the one that it has; returns it. Removes the
    /// sockets of plugins that have ended.
    pub fn rename(&mut self, settings: &Settings, resource: &ResourceName, random: u64) -> io::Result<String> {
        let folder = settings.kubelet_socket.parent().unwrap_or(Path::new("."));
        let (name, prefix) = (socket_name(folder, resource, random), prefix(folder, resource));
        uds::remove_dead(folder, |name| is_ours(name, &prefix))?;
        let own = self.own.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.alias = Some(own.alias(&folder.join(&name))?);
        Ok(name)
    }

    /// Whether a plugin of this resource that was there when our socket was bound is still there.
    pub fn has_predecessor(&mut self) -> bool {
        self.predecessors.retain(|path| is_alive(path));
        !self.predecessors.is_empty()
    }

    /// Whether our socket is still the file that was bound.
    pub fn has_socket(&self) -> bool {
        self.own.as_ref().is_some_and(SocketFile::is_in_place)
    }

    /// Removes the socket, ends the streams, accepts no more connections and asks the open ones to close.
    pub fn end(&mut self) {
        (self.own, self.alias) = (None, None);
        self.end.cancel();
    }

    /// Breaks the connections that are still open.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// The next thing that happens. Cancel-safe. The server accepts connections only while this is awaited. It ends
    /// after the last connection is closed.
    pub async fn next(&mut self) -> Input {
        let Some(server) = &mut self.server else { return Input::Closed };
        tokio::select! {
            biased;
            result = server => {
                self.server = None;
                Input::ServerEnded(result.map_or_else(|error| chain(&error), |()| "without an error".to_owned()))
            }
            Ok(()) = self.streams.changed() => Input::Streams(*self.streams.borrow_and_update()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn longest_resource_name_fits_a_socket_path() {
        let name =
            |domain: usize| format!("{}.example.com/{}", ["a"; 100].concat().get(..domain).unwrap(), "b".repeat(63));
        let longest: ResourceName =
            format!("{}.{}/{}", "a".repeat(63), "a".repeat(63), "b".repeat(63)).parse().unwrap();
        let kubelets = Path::new(KUBELETS_FOLDER);
        for resource in [ResourceName::gpu(), longest.clone(), name(60).parse().unwrap()] {
            let prefix = prefix(kubelets, &resource);
            assert!(kubelets.join(&prefix).as_os_str().len() + REST <= LONGEST_PATH + 1, "{prefix}");
        }
        assert_eq!(prefix(kubelets, &ResourceName::gpu()), "linkwise-nvidia.com_gpu-");
        // Long names that differ at their end only have different sockets.
        let prefixes =
            [1, 2].map(|last| prefix(kubelets, &format!("{longest}{last}").replace("bb", "b").parse().unwrap()));
        assert_ne!(prefixes[0], prefixes[1]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("{}01234567.sock", prefix(folder.path(), &longest)));
        assert!(uds::listen(&path, uds::Callers::default()).is_ok());
    }

    #[test]
    fn another_resources_sockets_are_not_ours() {
        let prefix = prefix(Path::new(KUBELETS_FOLDER), &ResourceName::gpu());
        assert!(is_ours("linkwise-nvidia.com_gpu-0123abcd.sock", &prefix));
        for other in ["linkwise-nvidia.com_gpu-x-0123abcd.sock", "linkwise-nvidia.com_gpu-0123abcd.sock.old"] {
            assert!(!is_ours(other, &prefix), "{other}");
        }
    }
}
