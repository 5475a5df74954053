//! The life of one resource's plugin: wait for kubelet.sock → bind → serve → register → see ListAndWatch
//! opened → serving; when anything of it ends, from the top.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use super::layer::Observe;
use super::service::Service;
use super::socket::{Changes, FileId, OwnSocket, identify, remove_dead};
use super::{Occurrence, Phase, Settings, Sources, register};
use crate::inventory::ResourceName;
use crate::proto::v1beta1::device_plugin_server::DevicePluginServer;

/// How long open connections may take to close when a session ends; SIGTERM has to be done within a second.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// A session that lasted this long ended for a new reason: the next attempt comes at once.
const SETTLED: Duration = Duration::from_secs(10);

/// The plugin of one resource.
pub struct Plugin {
    resource: ResourceName,
    settings: Arc<Settings>,
    sources: Sources,
    phase: watch::Sender<Phase>,
}

/// Why a plugin cannot go on.
#[derive(Debug, Error)]
pub enum PluginError {
    /// The kubelet's socket has no folder.
    #[error("'{path}' is no path of a kubelet socket")]
    NoFolder {
        /// The path given.
        path: String,
    },
}

/// Why a session with the kubelet ended; all of them are started again.
#[derive(Debug, Error)]
enum Ended {
    #[error("cannot look for old sockets in {folder}")]
    Folder { folder: String, source: io::Error },
    #[error("cannot bind {path}")]
    Bind { path: String, source: io::Error },
    #[error("the registration failed")]
    Register(#[from] register::RegisterError),
    #[error("the kubelet did not open ListAndWatch within {0:?} of the registration")]
    NoStream(Duration),
    #[error("the kubelet's ListAndWatch stream is gone")]
    StreamGone,
    #[error("kubelet.sock is gone or new: the kubelet restarted")]
    KubeletRestarted,
    #[error("our socket {0} is gone or not ours any more")]
    SocketGone(String),
    #[error("the server ended")]
    Server(#[source] tonic::transport::Error),
    #[error("the server ended without an error")]
    ServerSilent,
}

impl Plugin {
    /// A plugin that does nothing until [`Self::run`].
    pub fn new(resource: ResourceName, settings: Arc<Settings>, sources: Sources) -> Self {
        Self { resource, settings, sources, phase: watch::Sender::new(Phase::WaitingForKubelet) }
    }

    /// Follows the phase.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Lives until `shutdown`; then streams end, the socket goes, and it returns.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), PluginError> {
        let socket = &self.settings.kubelet_socket;
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.ok_or_else(|| PluginError::NoFolder { path: socket.display().to_string() })?;
        let mut attempt = 0;
        loop {
            let Some(mut changes) = shutdown.run_until_cancelled(self.kubelet_socket(folder)).await else { break };
            let begin = tokio::time::Instant::now();
            let kubelet = identify(socket);
            let Err(ended) = self.session(folder, &mut changes, &shutdown).await else { break };
            self.observe(Occurrence::Ended(chain(&ended)));
            attempt = if begin.elapsed() >= SETTLED { 0 } else { attempt + 1 };
            self.enter(Phase::Pausing);
            let pause = tokio::time::sleep(pause(attempt, self.settings.longest_pause));
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = pause => {}
                // A kubelet that is gone leaves its socket behind: the pauses grow while it is away. They are not the
                // new one's.
                () = self.other_kubelet(kubelet, &mut changes) => attempt = 0,
            }
        }
        Ok(())
    }

    /// Waits until the kubelet's socket is another one than `known`.
    async fn other_kubelet(&self, known: Option<FileId>, changes: &mut Changes) {
        while identify(&self.settings.kubelet_socket).is_none_or(|found| Some(found) == known) {
            changes.next().await;
        }
    }

    /// Waits until there is a kubelet's socket; then follows its folder.
    async fn kubelet_socket(&self, folder: &Path) -> Changes {
        let mut changes = Changes::of(folder, self.settings.poll);
        self.enter(Phase::WaitingForKubelet);
        let mut told = None;
        while identify(&self.settings.kubelet_socket).is_none() {
            let why = absence(folder, &self.settings.kubelet_socket);
            if told.as_ref() != Some(&why) {
                self.observe(Occurrence::Waiting(why.clone()));
                told = Some(why);
            }
            changes.next().await;
            if !changes.follows(folder) {
                changes = Changes::of(folder, self.settings.poll);
            }
        }
        changes
    }

    /// One session, from binding our socket to whatever ends it, or to the shutdown. Its socket and its streams
    /// end with it, also when this future is dropped.
    async fn session(&self, folder: &Path, changes: &mut Changes, shutdown: &CancellationToken) -> Result<(), Ended> {
        let kubelet = identify(&self.settings.kubelet_socket).ok_or(Ended::KubeletRestarted)?;
        let prefix = format!("linkwise-{}-", self.resource.as_str().replace('/', "_"));
        let in_folder = |source| Ended::Folder { folder: folder.display().to_string(), source };
        remove_dead(folder, &prefix).await.map_err(in_folder)?;
        // Unique to this start: a kubelet may still hold the connection of an earlier one.
        let name = format!("{prefix}{:08x}.sock", random() & 0xFFFF_FFFF);
        let path: PathBuf = folder.join(&name);
        let at_path = |source| Ended::Bind { path: path.display().to_string(), source };
        let (own, listener) = OwnSocket::bind(path.clone()).map_err(at_path)?;

        let (streams, mut open) = watch::channel(0_usize);
        let end = CancellationToken::new();
        let _end_streams = end.clone().drop_guard();
        let service = Service {
            resource: self.resource.clone(),
            settings: Arc::clone(&self.settings),
            sources: self.sources.clone(),
            streams,
            offers: Mutex::default(),
            end: end.clone(),
        };
        let observe = Observe { resource: self.resource.clone(), observer: Arc::clone(&self.sources.observer) };
        let server = tonic::transport::Server::builder()
            .layer(observe)
            .add_service(DevicePluginServer::new(service))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), end.clone().cancelled_owned());
        let mut server = pin!(server);

        let registered = async {
            self.enter(Phase::Registering);
            let timeout = self.settings.register_timeout;
            let result = register::register(&self.settings.kubelet_socket, &name, &self.resource, timeout).await;
            self.observe(Occurrence::Registered(result.as_ref().copied().map_err(|error| chain(error))));
            result?;
            self.enter(Phase::WaitingForStream);
            let late = self.settings.stream_timeout;
            let opened = tokio::time::timeout(late, open.wait_for(|open| *open > 0)).await;
            // The sender lives in the server, which is polled beside this.
            opened.map_err(|_| Ended::NoStream(late))?.map_err(|_| Ended::StreamGone)?;
            self.enter(Phase::Serving);
            let _ = open.wait_for(|open| *open == 0).await;
            Err(Ended::StreamGone)
        };
        let sockets = async {
            loop {
                if identify(&self.settings.kubelet_socket) != Some(kubelet) {
                    return Err(Ended::KubeletRestarted);
                }
                if !own.stands() {
                    return Err(Ended::SocketGone(path.display().to_string()));
                }
                changes.next().await;
            }
        };
        let ended = tokio::select! {
            // What the files say explains best why a stream went.
            biased;
            () = shutdown.cancelled() => Ok(()),
            ended = sockets => ended,
            served = &mut server => Err(served.map_or_else(Ended::Server, |()| Ended::ServerSilent)),
            ended = registered => ended,
        };
        // Up to 1.36 the kubelet disconnects whichever client is current when an old stream ends: see ours
        // closed before the next registration.
        end.cancel();
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, server).await;
        ended
    }

    fn enter(&self, phase: Phase) {
        if self.phase.send_replace(phase) != phase {
            self.observe(Occurrence::Phase(phase));
        }
    }

    fn observe(&self, occurrence: Occurrence) {
        (self.sources.observer)(&self.resource, occurrence);
    }
}

/// The pause before an attempt: none before the first retry, then doubling up to `longest`, of which a
/// random part up to a half is left out, so that a fleet does not knock in step.
fn pause(attempt: u32, longest: Duration) -> Duration {
    let Some(doublings) = attempt.checked_sub(2) else { return Duration::ZERO };
    let full = (longest / 64).saturating_mul(1 << doublings.min(6)).min(longest);
    let part = u32::try_from(random() % 512).unwrap_or(0);
    full.saturating_sub(full * part / 1024)
}

/// Why there is no kubelet's socket, for people.
fn absence(folder: &Path, socket: &Path) -> String {
    if !folder.is_dir() {
        format!("there is no folder {}", folder.display())
    } else if socket.symlink_metadata().is_ok() {
        format!("{} is not a socket", socket.display())
    } else {
        format!("there is no {}", socket.display())
    }
}

/// A number nobody can guess; the standard library seeds its hashers with one.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// An error with all its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_retry_comes_at_once_and_the_others_double_with_jitter() {
        let longest = Duration::from_secs(16);
        assert_eq!([pause(0, longest), pause(1, longest)], [Duration::ZERO; 2]);
        for (attempt, full) in [(2, 250), (3, 500), (8, 16_000), (9, 16_000), (u32::MAX, 16_000)] {
            let full = Duration::from_millis(full);
            for _ in 0..100 {
                let pause = pause(attempt, longest);
                assert!(pause <= full && pause >= full / 2, "{attempt}: {pause:?}");
            }
        }
    }
}
