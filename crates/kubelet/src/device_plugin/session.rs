//! One session with the kubelet: our socket, its server, its streams and connections.
//!
//! Made by `life` and driven by the executor of the registration. Ends when it is dropped.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::watch;
use tonic::service::Routes;

use super::handshake::{DevicePluginHandshake, Input, OwnInput};
use super::service::Service;
use super::{Settings, Shared};
use crate::registration::{BindError, Servers, Session, bind, is_number};
use linkwise_core::names::shortened;
use linkwise_core::state::ResourceName;
use linkwise_kubelet_api::v1beta1::device_plugin_server::DevicePluginServer;
use linkwise_system::files;
use linkwise_system::uds::{self, FileId, MAX_SOCKET_PATH, Peer};

/// The length of the rest of a socket's name after the name of its resource: a dash, eight hexadecimal digits, `.sock`.
const REST: usize = 14;
/// The kubelet's own path of the folder, which may be longer than the one in our container.
const KUBELETS_FOLDER: &str = "/var/lib/kubelet/device-plugins";

/// The first part of the names of a resource's sockets, in every version and every start of linkwise.
fn prefix(folder: &Path, resource: &ResourceName) -> String {
    let room = MAX_SOCKET_PATH.saturating_sub(folder.as_os_str().len().max(KUBELETS_FOLDER.len()) + 1 + REST);
    shortened(&format!("linkwise-{}", resource.as_str().replace('/', "_")), room) + "-"
}

/// Returns true if a file name is that of a socket of ours with this prefix. The name of another
/// resource's socket may begin with it too.
fn is_ours(name: &str, prefix: &str) -> bool {
    let rest = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(".sock"));
    rest.is_some_and(is_number)
}

/// Returns true if a file name is that of a socket of ours, for any resource: a resource that is no longer offered has
/// no plugin to remove its sockets.
fn is_any_of_ours(name: &str) -> bool {
    let rest = name.strip_prefix("linkwise-").and_then(|rest| rest.strip_suffix(".sock"));
    rest.and_then(|rest| rest.rsplit_once('-')).is_some_and(|(_, number)| is_number(number))
}

/// Returns true for the socket of the NVIDIA plugin for this resource: `nvidia-gpu.sock` for `nvidia.com/gpu`.
fn is_nvidias(name: &str, resource: &ResourceName) -> bool {
    let (_, last) = resource.as_str().split_once('/').unwrap_or(("", resource.as_str()));
    name.strip_prefix("nvidia-").and_then(|rest| rest.strip_suffix(".sock")) == Some(last)
}

/// The sockets of plugins of this resource on which a process listens: another linkwise, or the NVIDIA plugin. Empty if
/// the folder cannot be read.
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

/// The path and the name of a socket of ours for this resource, with this random number in the name.
pub(super) fn socket_path(settings: &Settings, resource: &ResourceName, random: u64) -> (PathBuf, String) {
    let folder = files::folder(&settings.kubelet_socket);
    // The number is new each time: a kubelet may still hold a connection to an earlier socket.
    let name = format!("{}{:08x}.sock", prefix(folder, resource), random & 0xFFFF_FFFF);
    (folder.join(&name), name)
}

/// A socket of ours that is served.
pub(super) struct PluginSession {
    /// The socket's file name.
    pub name: String,
    /// The process that listens on kubelet.sock, known once we have connected to it.
    pub kubelet: Arc<OnceLock<Peer>>,
    /// The sockets of other plugins of this resource that existed both when ours was bound and at the last check.
    predecessors: Vec<PathBuf>,
    servers: Servers,
    streams: watch::Receiver<usize>,
}

impl PluginSession {
    /// Removes dead sockets of linkwise, binds a socket with this random number in its name and serves it.
    pub fn begin(shared: Shared, random: u64) -> Result<Self, BindError> {
        let Shared { resource, settings, reporter, .. } = shared.clone();
        let folder = files::folder(&settings.kubelet_socket);
        let prefix = prefix(folder, &resource);
        let predecessors = living(folder, &resource, &prefix);
        let (path, name) = socket_path(&settings, &resource, random);
        let bound = bind(&path, &settings.callers, is_any_of_ours)?;

        let mut servers = Servers::new(Arc::new(move |event| reporter.report(&event)));
        let kubelet = Arc::new(OnceLock::new());
        let (open, streams) = watch::channel(0);
        let (narrowing, end) = (Mutex::default(), servers.end_of_streams());
        let service = Service { shared, kubelet: Arc::clone(&kubelet), streams: open, narrowing, end };
        servers.serve(bound, watch::Sender::default(), Routes::new(DevicePluginServer::new(service)));
        Ok(Self { name, kubelet, predecessors, servers, streams })
    }

    /// Removes dead sockets of linkwise, and gives our socket a second name with this random number. Returns the name.
    pub fn add_alias(&mut self, settings: &Settings, resource: &ResourceName, random: u64) -> io::Result<String> {
        let (path, name) = socket_path(settings, resource, random);
        uds::remove_dead(files::folder(&path), is_any_of_ours)?;
        self.servers.add_alias(&path)?;
        Ok(name)
    }

    /// Returns true while a plugin of this resource that is older than our socket still runs.
    pub fn has_predecessor(&mut self) -> bool {
        self.predecessors.retain(|path| is_alive(path));
        !self.predecessors.is_empty()
    }
}

impl Session<DevicePluginHandshake> for PluginSession {
    fn servers(&mut self) -> &mut Servers {
        &mut self.servers
    }

    fn others(session: Option<&mut Self>) -> bool {
        session.is_some_and(Self::has_predecessor)
    }

    async fn next(&mut self) -> Input {
        tokio::select! {
            biased;
            ended = self.servers.next() => ended.map_or(Input::Closed, Input::ServerEnded),
            Ok(()) = self.streams.changed() => Input::Own(OwnInput::Streams(*self.streams.borrow_and_update())),
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
            assert!(kubelets.join(&prefix).as_os_str().len() + REST <= MAX_SOCKET_PATH + 1, "{prefix}");
        }
        assert_eq!(prefix(kubelets, &ResourceName::gpu()), "linkwise-nvidia.com_gpu-");
        // Long names that differ only at their ends have different sockets.
        let prefixes =
            [1, 2].map(|last| prefix(kubelets, &format!("{longest}{last}").replace("bb", "b").parse().unwrap()));
        assert_ne!(prefixes[0], prefixes[1]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("{}01234567.sock", prefix(folder.path(), &longest)));
        assert!(uds::listen(&path, uds::Callers::default()).is_ok());
    }

    #[test]
    fn own_sockets_are_known_by_name() {
        let prefix = prefix(Path::new(KUBELETS_FOLDER), &ResourceName::gpu());
        assert!(is_ours("linkwise-nvidia.com_gpu-0123abcd.sock", &prefix));
        for other in ["linkwise-nvidia.com_gpu-x-0123abcd.sock", "linkwise-nvidia.com_gpu-0123abcd.sock.old"] {
            assert!(!is_ours(other, &prefix), "{other}");
        }
        let any = ["linkwise-nvidia.com_gpu-x-0123abcd.sock", "linkwise-nvidia.com_mig-3g.20gb-0123abcd.sock"];
        assert!(any.into_iter().all(is_any_of_ours));
        let others = ["nvidia-gpu.sock", "linkwise-x.sock", "linkwise-nvidia.com_gpu-0123abcd.sock.old"];
        assert!(!others.into_iter().any(is_any_of_ours));
    }
}
