//! The five RPCs of one resource.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use futures_util::stream::{self, Stream, StreamExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::narrowing::Narrowing;
use super::{Shared, convert};
use crate::Answer;
use linkwise_core::publish::injection::{ChosenDevice, Granted, Injection, InjectionError};
use linkwise_core::publish::{MpsClient, MpsShm};
use linkwise_core::state::{Device, NodeState};
use linkwise_kubelet_api::v1beta1 as wire;
use linkwise_kubelet_api::v1beta1::device_plugin_server::DevicePlugin;
use linkwise_system::Counted;
use linkwise_system::lock;
use linkwise_system::uds::Peer;

/// The service of one resource for one session with the kubelet.
pub(super) struct Service {
    pub shared: Shared,
    /// The process that listens on kubelet.sock, once known.
    pub kubelet: Arc<OnceLock<Peer>>,
    /// The number of ListAndWatch streams that the kubelet holds.
    pub streams: watch::Sender<usize>,
    /// The devices that the kubelet has shown to be free in this session.
    pub narrowing: Mutex<Narrowing>,
    /// Ends the open streams: tonic's graceful shutdown waits for them.
    pub end: CancellationToken,
}

impl Service {
    fn snapshot(&self) -> Arc<NodeState> {
        Arc::clone(&self.shared.snapshot.borrow())
    }

    /// Returns false if the caller is certainly not the process that listens on kubelet.sock.
    fn may_be_kubelet<T>(&self, request: &Request<T>) -> bool {
        let caller = request.extensions().get::<Peer>();
        caller.zip(self.kubelet.get()).is_none_or(|(caller, kubelet)| caller.may_be(kubelet))
    }

    /// The injection into a container that was granted these devices.
    fn injection(&self, snapshot: &NodeState, devices: &[&Device]) -> Result<Injection, InjectionError> {
        let options = &self.shared.settings.injection;
        let by_mps = snapshot.mps_shares().contains_key(&self.shared.resource);
        let by_mps = by_mps && devices.iter().any(|device| device.slot.is_some());
        let granted = Granted {
            topology: snapshot.topology(),
            devices: devices.iter().map(|device| ChosenDevice::from(*device)).collect(),
            mps: by_mps.then(|| MpsClient::new(&options.mps_root, &self.shared.resource, MpsShm::Common)),
        };
        let host = Arc::clone(&self.shared.settings.host_devices.borrow());
        let mut injection = options.inject(&granted, &host)?;
        if let Some(cdi) = &options.cdi {
            cdi.place(&self.shared.resource, &mut injection);
        }
        Ok(injection)
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(&self, _: Request<wire::Empty>) -> Answer<wire::DevicePluginOptions> {
        Ok(Response::new(convert::options()))
    }

    /// Sends the whole list at once, and again whenever it changes or a device gets a holder that only the kubelet's
    /// checkpoint has: if that pod has ended, the kubelet removes it from the checkpoint with the next list
    /// (`writeCheckpoint` in pkg/kubelet/cm/devicemanager/manager.go).
    async fn list_and_watch(&self, request: Request<wire::Empty>) -> Answer<Self::ListAndWatchStream> {
        let resource = self.shared.resource.clone();
        let open = self.may_be_kubelet(&request).then(|| Counted::new(&self.streams));
        let state = (self.shared.snapshot.clone(), None, open);
        let lists = stream::unfold(state, move |(mut snapshot, mut last, open)| {
            let resource = resource.clone();
            async move {
                loop {
                    let (list, unlisted) = {
                        let state = snapshot.borrow_and_update();
                        let unlisted = state.ledger().holdings().init_containers.iter();
                        let unlisted = unlisted.filter(|(of, _)| *of == resource).cloned();
                        (convert::device_list(&state, &resource), unlisted.collect::<BTreeSet<_>>())
                    };
                    match &mut last {
                        Some((sent, known)) if *sent == list && unlisted.is_subset(known) => *known = unlisted,
                        _ => {
                            last = Some((list.clone(), unlisted));
                            return Some((Ok(list), (snapshot, last, open)));
                        }
                    }
                    snapshot.changed().await.ok()?;
                }
            }
        });
        Ok(Response::new(Box::pin(lists.take_until(self.end.clone().cancelled_owned()))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<wire::PreferredAllocationRequest>,
    ) -> Answer<wire::PreferredAllocationResponse> {
        self.shared.settings.calls.pass().await;
        let snapshot = self.snapshot();
        let containers = request.into_inner().container_requests.into_iter();
        let answers = containers.map(|container| {
            let question = convert::request(container);
            let start = Instant::now();
            let (answer, report) = snapshot.preferred(&self.shared.resource, &question);
            let elapsed = start.elapsed();
            let mut narrowing = lock(&self.narrowing);
            let narrowed = narrowing.requested(&question, |id| snapshot.offers().is_healthy(&self.shared.resource, id));
            narrowing.answered(question.available);
            drop(narrowing);
            self.shared.reporter.chosen(report, elapsed, narrowed);
            convert::preferred(answer)
        });
        Ok(Response::new(wire::PreferredAllocationResponse { container_responses: answers.collect() }))
    }

    async fn allocate(&self, request: Request<wire::AllocateRequest>) -> Answer<wire::AllocateResponse> {
        self.shared.settings.calls.pass().await;
        let snapshot = self.snapshot();
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            let ids = convert::ids(container.devices_ids);
            let offered = lock(&self.narrowing).allocated(&ids);
            let granted = snapshot.allocate(&self.shared.resource, &ids).map_err(|error| convert::refusal(&error));
            let answer = granted.and_then(|devices| {
                let injection = self.injection(&snapshot, &devices);
                injection.map(convert::container).map_err(|error| Status::failed_precondition(error.to_string()))
            });
            self.shared.reporter.allocated(ids, offered, answer.as_ref().err());
            container_responses.push(answer?);
        }
        Ok(Response::new(wire::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<wire::PreStartContainerRequest>,
    ) -> Answer<wire::PreStartContainerResponse> {
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}
