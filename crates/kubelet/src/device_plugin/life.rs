//! The device plugin of one resource, as the registration's executor drives it: it finds the kubelet's socket, calls
//! the kubelet and reports events.
//!
//! All its work is done in the task of [`Plugin::run`], which the node owns.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::handshake::{DevicePluginHandshake, Input, Limits, OwnAction, OwnInput};
use super::reporter::Reporter;
use super::session::PluginSession;
use super::{Phase, Settings, Shared, Sources, pod_resources, register};
use crate::registration::{
    self, BindError, BoxedFuture, Executor, Life, Registrant, RegistrationMachine, Watching, random,
};
use linkwise_core::errors::chain;
use linkwise_core::state::ResourceName;
use linkwise_system::or_never;
use linkwise_system::uds::FileId;

/// The time from the end of a session to the cut of its connections. Only a call that `calls` holds needs longer.
/// Kubelets up to 1.36 do not close the connection of a plugin that another one has replaced, and this process may have
/// to serve again soon.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(50);

/// The plugin of one resource.
pub struct Plugin {
    resource: ResourceName,
    settings: Arc<Settings>,
    sources: Sources,
    phase: watch::Sender<Phase>,
}

/// The cause of a plugin that cannot run: the path of the kubelet's socket has no folder.
#[derive(Debug, Error)]
#[error("'{}' is not the path of a kubelet socket", .0.display())]
pub struct NoFolder(PathBuf);

impl Plugin {
    /// A plugin that does nothing until [`Self::run`].
    pub fn new(resource: ResourceName, settings: Arc<Settings>, sources: Sources) -> Self {
        Self { resource, settings, sources, phase: watch::Sender::new(Phase::WaitingForKubelet) }
    }

    /// Follows the phase.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Serves until `shutdown`, of the process or of this resource alone; then removes its socket, ends its streams and
    /// connections and returns.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), NoFolder> {
        let Self { resource, settings, sources, phase } = self;
        let socket = &settings.kubelet_socket;
        let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned);
        let folder = folder.ok_or_else(|| NoFolder(socket.clone()))?;
        let limits = registration::Limits { close: CLOSE_TIMEOUT, longest_pause: settings.longest_pause };
        let Settings { register_timeout: register, stream_timeout: stream, .. } = *settings;
        let handshake = DevicePluginHandshake::new(Limits { register, stream });
        let machine = RegistrationMachine::new(limits, Phase::WaitingForKubelet, handshake, random());
        let (snapshot, renew) = (sources.snapshot.clone(), sources.renew.clone());
        let reporter = Arc::new(Reporter::new(resource.clone(), sources));
        let watching = Watching { folder, poll: settings.poll, inotify: settings.inotify };
        let folder = watching.folder.clone();
        let registrant = DevicePlugin { shared: Shared { resource, settings, snapshot, reporter }, renew, folder };
        Executor::new(registrant, machine, phase, watching).run(&shutdown).await;
        Ok(())
    }
}

/// A running plugin.
struct DevicePlugin {
    shared: Shared,
    renew: watch::Receiver<u64>,
    folder: PathBuf,
}

impl DevicePlugin {
    /// Registers a session's socket by one of its names.
    fn register(&self, session: &PluginSession, name: String) -> BoxedFuture<Input> {
        let Shared { resource, settings, .. } = self.shared.clone();
        let kubelet = Arc::clone(&session.kubelet);
        Box::pin(async move {
            let answer = register::register(&settings.kubelet_socket, &name, &resource, &kubelet).await;
            Input::Registered(answer.map_err(|error| chain(&error)))
        })
    }
}

impl Registrant for DevicePlugin {
    type Handshake = DevicePluginHandshake;
    type Session = PluginSession;

    fn report(&self, event: Life<Phase>) {
        self.shared.reporter.report(&event);
    }

    fn kubelet(&self) -> Result<FileId, String> {
        let socket = &self.shared.settings.kubelet_socket;
        FileId::of_socket(socket).ok_or_else(|| absence(&self.folder, socket))
    }

    fn bind(&self, random: u64) -> BoxedFuture<Result<(bool, PluginSession), BindError>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let mut session = PluginSession::begin(shared, random)?;
            Ok((session.has_predecessor(), session))
        })
    }

    fn perform(&self, action: OwnAction, session: &mut PluginSession) -> Option<BoxedFuture<Input>> {
        let Shared { resource, settings, snapshot, .. } = self.shared.clone();
        Some(match action {
            OwnAction::Register => self.register(session, session.name.clone()),
            OwnAction::Renew => match session.add_alias(&settings, &resource, random()) {
                Ok(name) => self.register(session, name),
                Err(error) => {
                    let why = format!("cannot give our socket a second name: {error}");
                    Box::pin(std::future::ready(Input::Registered(Err(why))))
                }
            },
            OwnAction::Detach => Box::pin(async move {
                let answer = register::detach(&settings, &resource, random()).await;
                Input::Own(OwnInput::Detached(answer.map_err(|error| chain(&error))))
            }),
            OwnAction::Ask => Box::pin(async move {
                let socket = settings.pod_resources_socket.as_deref();
                Input::Own(OwnInput::Listed(pod_resources::listing(socket, &snapshot, &resource).await))
            }),
            OwnAction::ReportDetached(result) => {
                match result {
                    Ok(()) => {
                        tracing::info!(%resource, "serving beside the plugin before us, whose end will change nothing");
                    }
                    Err(error) => {
                        let what = "the end of the plugin before us may cost another registration";
                        tracing::warn!(%resource, error, "{what}");
                    }
                }
                return None;
            }
        })
    }

    async fn next(&mut self) -> OwnInput {
        // An error means that the node is ending.
        or_never(self.renew.changed()).await;
        OwnInput::Renew
    }
}

/// The cause of a missing kubelet.sock.
fn absence(folder: &Path, socket: &Path) -> String {
    if !folder.is_dir() {
        format!("there is no folder {}", folder.display())
    } else if socket.symlink_metadata().is_ok() {
        format!("{} is not a socket", socket.display())
    } else {
        format!("there is no {}", socket.display())
    }
}
