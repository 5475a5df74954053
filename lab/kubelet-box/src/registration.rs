//! The Registration service on `kubelet.sock`.
//!
//! Started with the box. Registrations that pass its checks go to `life`, which dials. The service writes only the
//! counts of calls in the books. Injected faults but [`Fault::Forget`] act here, before the request is checked.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::Fault;
use super::errors::{BoxError, chain};
use super::life::{Core, Life};
use super::names;
use linkwise_kubelet_api::v1beta1 as wire;
use wire::registration_server::{Registration, RegistrationServer};

/// Binds one of the kubelet's sockets. Makes its folder first, and removes the sockets in the folder.
fn bind(path: &Path) -> Result<UnixListener, BoxError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| BoxError::Io { action, path, source }
    };
    let dir = path.parent().unwrap_or(path);
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir).map_err(failed("create", dir))?;
    remove_sockets(dir).map_err(failed("remove the sockets in", dir))?;
    let listener = UnixListener::bind(path).map_err(failed("bind", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed("protect", path))?;
    Ok(listener)
}

/// Serves registrations on `kubelet.sock`.
pub(super) fn serve(life: &Arc<Life>) -> Result<(), BoxError> {
    let service = RegistrationServer::new(Service { life: Arc::clone(life) });
    serve_at(life, &life.core.options.dir.join(wire::KUBELET_SOCKET), Routes::new(service))
}

/// Serves on a socket until `life` ends, in a task that then waits for the last connection.
pub(super) fn serve_at(life: &Arc<Life>, path: &Path, routes: Routes) -> Result<(), BoxError> {
    let (listener, end) = (bind(path)?, life.end.clone());
    let copy = listener.as_fd().try_clone_to_owned();
    let copy = copy.map_err(|source| BoxError::Io { action: "copy", path: path.to_owned(), source })?;
    let incoming = UnixListenerStream::new(listener);
    life.spawn(async move {
        let server = tonic::transport::Server::builder().add_routes(routes);
        // A failure to accept shows as clients that cannot connect.
        let _ = server.serve_with_incoming_shutdown(incoming, end.cancelled_owned()).await;
        // A child process that has not called exec yet has a copy of the listener, which would still accept
        // connections.
        let _ = rustix::net::shutdown(copy, rustix::net::Shutdown::Both);
    });
    Ok(())
}

/// Removes the sockets in a folder. The kubelet's checkpoint and other files stay.
fn remove_sockets(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let is_socket = fs::metadata(&path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if is_socket {
            match fs::remove_file(&path) {
                // A plugin that ends may have removed its own socket.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

struct Service {
    life: Arc<Life>,
}

#[tonic::async_trait]
impl Registration for Service {
    async fn register(&self, request: Request<wire::RegisterRequest>) -> Result<Response<wire::Empty>, Status> {
        let _unanswered = Unanswered::new(&self.life.core);
        let request = request.into_inner();
        let fault = self.life.core.fault.borrow().clone();
        let outcome = match fault {
            Fault::None | Fault::Forget => self.accept(request).await,
            Fault::Refuse { code, message } => Err(Status::new(code, message)),
            Fault::AnswerWithoutDial => Ok(()),
            Fault::Hang => {
                self.released().await;
                Err(Status::unavailable("the kubelet hung and did not register anything"))
            }
        };
        match outcome {
            Ok(()) => Ok(Response::new(wire::Empty {})),
            Err(status) => {
                self.life.core.change(|book| book.seen.refused += 1);
                Err(status)
            }
        }
    }
}

/// Counts a call until it is answered or its caller has gone away.
struct Unanswered<'a>(&'a Core);

impl<'a> Unanswered<'a> {
    fn new(core: &'a Core) -> Self {
        core.change(|book| book.seen.registering += 1);
        Self(core)
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.change(|book| book.seen.registering -= 1);
    }
}

impl Service {
    /// Completes when the fault is no longer [`Fault::Hang`], or when the kubelet ends.
    async fn released(&self) {
        let mut fault = self.life.core.fault.subscribe();
        tokio::select! {
            () = self.life.end.cancelled() => {}
            _ = fault.wait_for(|fault| !matches!(fault, Fault::Hang)) => {}
        }
    }

    /// Makes the checks of a kubelet, then dials. As in a kubelet, the dial goes on if its caller goes away, because it
    /// runs in a task of its own. Refusals have the code Unknown, as plain errors of Go have.
    async fn accept(&self, request: wire::RegisterRequest) -> Result<(), Status> {
        let wire::RegisterRequest { version, endpoint, resource_name: resource, .. } = request;
        if version != wire::VERSION {
            return Err(Status::unknown(format!("version {version:?} is not supported, {:?} is", wire::VERSION)));
        }
        if !names::is_extended_resource(&resource) {
            return Err(Status::unknown(format!("{resource:?} is not an extended resource name")));
        }
        if !names::is_file_name(&endpoint) {
            return Err(Status::unknown(format!("endpoint {endpoint:?} is not a file name")));
        }
        let life = Arc::clone(&self.life);
        let (answer, answered) = oneshot::channel();
        self.life.spawn(async move {
            tokio::select! {
                biased;
                () = life.end.cancelled() => {}
                outcome = life.connect(&resource, &endpoint) => {
                    // The registration is valid even if its caller has gone away.
                    let _ = answer.send(outcome.map_err(|error| Status::unknown(chain(&error))));
                }
            }
        });
        answered.await.unwrap_or_else(|_| Err(Status::unavailable("the kubelet has stopped")))
    }
}
