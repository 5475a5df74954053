//! One session with the kubelet: our socket, its server, the streams and connections that hang on it.
//!
//! Made and driven by `life`, which does with it what the machine says. Everything of it ends when it is dropped: the
//! socket goes, streams end, connections break.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};

use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::callers::Peer;
use super::connection::{Gate, accepted};
use super::layer::Observe;
use super::service::Service;
use super::socket::{OwnSocket, remove_dead};
use super::{Settings, Sources, chain};
use crate::state::ResourceName;
use linkwise_kubelet_api::v1beta1::device_plugin_server::DevicePluginServer;

/// The longest path that a Unix socket can have, in bytes: sun_path of unix(7) less its closing zero.
const LONGEST_PATH: usize = 107;
/// What follows the prefix: eight digits and `.sock`.
const REST: usize = 13;
/// The kubelet's own path of the folder; in our container it may be a shorter one.
const KUBELETS_FOLDER: &str = "/var/lib/kubelet/device-plugins";

/// What the names of a resource's sockets begin with, in any start of ours. A resource with a name too long for a socket's path
/// has a shorter one with a number that is its own.
fn prefix(folder: &Path, resource: &ResourceName) -> String {
    let whole = format!("linkwise-{}-", resource.as_str().replace('/', "_"));
    let room = LONGEST_PATH.saturating_sub(folder.as_os_str().len().max(KUBELETS_FOLDER.len()) + 1 + REST);
    if whole.len() <= room {
        return whole;
    }
    // FNV-1a, 64 bits: the same in every version of linkwise, for what one leaves behind the next one clears away.
    let number = resource
        .as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |number, byte| (number ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let number = format!("-{number:016x}-");
    // A resource's name is ASCII.
    let begin: String = whole.chars().take(room.saturating_sub(number.len())).collect();
    begin + &number
}

/// A future that is polled where it lies.
pub(super) type Held<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Waits for a future that may not be there; then it is no longer there.
pub(super) async fn held<T>(slot: &mut Option<Held<T>>) -> T {
    let Some(future) = slot else { return std::future::pending().await };
    let value = future.await;
    *slot = None;
    value
}

/// Why there is no socket of ours.
#[derive(Debug, Error)]
pub(super) enum BindError {
    #[error("cannot look for old sockets in {folder}")]
    Folder { folder: String, source: io::Error },
    #[error("cannot bind a socket in {folder}")]
    Bind { folder: String, source: io::Error },
}

/// What happened in a session.
pub(super) enum Happened {
    /// The kubelet holds this many ListAndWatch streams.
    Streams(usize),
    /// The server ended, for this reason.
    ServerEnded(String),
    /// The server has ended and the last connection is closed.
    Closed,
}

/// A socket of ours that is served.
pub(super) struct Session {
    /// The socket's file name.
    pub name: String,
    /// Who listens on kubelet.sock, known once we have connected to it.
    pub kubelet: Arc<OnceLock<Peer>>,
    own: Option<OwnSocket>,
    server: Option<Held<Result<(), tonic::transport::Error>>>,
    streams: watch::Receiver<usize>,
    connections: watch::Receiver<usize>,
    end: CancellationToken,
    cut: CancellationToken,
    _guards: [DropGuard; 2],
}

impl Session {
    /// Clears away what dead predecessors left, binds a socket with this random number in its name and serves it.
    pub async fn begin(
        resource: ResourceName,
        settings: Arc<Settings>,
        sources: Sources,
        random: u64,
    ) -> Result<Self, BindError> {
        let folder = settings.kubelet_socket.parent().unwrap_or(Path::new("."));
        let prefix = prefix(folder, &resource);
        let in_folder = |source| BindError::Folder { folder: folder.display().to_string(), source };
        remove_dead(folder, &prefix).await.map_err(in_folder)?;
        // Unique to this start: a kubelet may still hold the connection of an earlier one.
        let name = format!("{prefix}{:08x}.sock", random & 0xFFFF_FFFF);
        let at_path = |source| BindError::Bind { folder: folder.display().to_string(), source };
        let (own, listener) = OwnSocket::bind(folder.join(&name)).map_err(at_path)?;
        let own_uid = Peer::own_uid().map_err(at_path)?;

        let kubelet = Arc::new(OnceLock::new());
        let ((streams_sender, streams), (open, connections)) = (watch::channel(0), watch::channel(0));
        let (end, cut) = (CancellationToken::new(), CancellationToken::new());
        let gate = Gate {
            callers: settings.callers.clone(),
            own_uid,
            open,
            cut: cut.clone(),
            resource: resource.clone(),
            observer: Arc::clone(&sources.observer),
        };
        let observe = Observe { resource: resource.clone(), observer: Arc::clone(&sources.observer) };
        let service = Service {
            resource,
            settings: Arc::clone(&settings),
            sources,
            kubelet: Arc::clone(&kubelet),
            streams: streams_sender,
            offers: Mutex::default(),
            end: end.clone(),
        };
        let server = tonic::transport::Server::builder()
            .layer(observe)
            .add_service(DevicePluginServer::new(service))
            .serve_with_incoming_shutdown(accepted(listener, gate), end.clone().cancelled_owned());
        let guards = [end.clone().drop_guard(), cut.clone().drop_guard()];
        let server: Held<_> = Box::pin(server);
        Ok(Self {
            name,
            kubelet,
            own: Some(own),
            server: Some(server),
            streams,
            connections,
            end,
            cut,
            _guards: guards,
        })
    }

    /// Whether our socket is still the file that was bound.
    pub fn stands(&self) -> bool {
        self.own.as_ref().is_some_and(OwnSocket::stands)
    }

    /// Takes the socket away, ends the streams, accepts nobody any more and asks the connections to close.
    pub fn end(&mut self) {
        self.own = None;
        self.end.cancel();
    }

    /// Breaks the connections that are still open.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// The next thing that happens; may be dropped and asked again. The server works only while this is waited for.
    pub async fn next(&mut self) -> Happened {
        let served = self.server.is_some();
        tokio::select! {
            biased;
            result = held(&mut self.server) => {
                Happened::ServerEnded(result.map_or_else(|error| chain(&error), |()| "without an error".to_owned()))
            }
            // An error is the end of the senders: everything is closed.
            _ = self.connections.wait_for(|open| *open == 0), if !served => Happened::Closed,
            Ok(()) = self.streams.changed() => Happened::Streams(*self.streams.borrow_and_update()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_session_is_closed_when_its_last_connection_is_whatever_the_server_says() {
        let machine = crate::machines::load("dgx1-v100").unwrap();
        let seen = crate::state::Event::Observed(Box::new(machine.observed));
        let (snapshot, _) = crate::state::NodeState::default().apply(seen, std::time::Duration::ZERO);
        let snapshot = watch::Sender::new(Arc::new(snapshot));
        let sources = Sources { snapshot: snapshot.subscribe(), observer: Arc::new(|_, _| {}) };
        let folder = tempfile::tempdir().unwrap();
        let settings = Arc::new(Settings::new(folder.path().join("kubelet.sock")));
        let mut session = Session::begin(ResourceName::gpu(), settings, sources, 7).await.unwrap();
        let open = watch::Sender::new(1);
        let ended: Held<_> = Box::pin(async { Ok(()) });
        (session.connections, session.server) = (open.subscribe(), Some(ended));
        assert!(matches!(session.next().await, Happened::ServerEnded(_)));
        let mut next = Box::pin(session.next());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(next.as_mut().poll(&mut context).is_pending(), "a connection is open");
        open.send_replace(0);
        assert!(matches!(next.await, Happened::Closed));
    }

    #[tokio::test]
    async fn the_longest_name_of_a_resource_has_a_socket_too() {
        let name =
            |domain: usize| format!("{}.example.com/{}", ["a"; 100].concat().get(..domain).unwrap(), "b".repeat(63));
        let longest: ResourceName =
            format!("{}.{}/{}", "a".repeat(63), "a".repeat(63), "b".repeat(63)).parse().unwrap();
        let kubelets = Path::new(KUBELETS_FOLDER);
        for resource in [ResourceName::gpu(), longest.clone(), name(60).parse().unwrap()] {
            let prefix = prefix(kubelets, &resource);
            assert!(kubelets.join(&prefix).as_os_str().len() + REST <= LONGEST_PATH, "{prefix}");
        }
        assert_eq!(prefix(kubelets, &ResourceName::gpu()), "linkwise-nvidia.com_gpu-");
        // Names that differ at their end only have sockets that differ.
        let prefixes =
            [1, 2].map(|last| prefix(kubelets, &format!("{longest}{last}").replace("bb", "b").parse().unwrap()));
        assert_ne!(prefixes[0], prefixes[1]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(format!("{}01234567.sock", prefix(folder.path(), &longest)));
        assert!(OwnSocket::bind(path).is_ok());
    }
}
