//! The service DRAResourceHealth, in both versions. It sends the health of all devices in one list, at each change and
//! often enough that the kubelet does not consider it stale. The kubelet shows the health in the status of pods. The
//! scheduler reads taints instead.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::stream::{self, Stream, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::Shared;
use crate::Answer;
use linkwise_core::claims::devices;
use linkwise_core::state::{Door, Health, MigInstance, NodeState, UnhealthyReason};
use linkwise_core::topology::{Gpu, is_set};
use linkwise_kubelet_api::dra_health::v1::dra_resource_health_server::DraResourceHealth as HealthV1;
use linkwise_kubelet_api::dra_health::v1alpha1 as wire;
use linkwise_kubelet_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealth as HealthV1Alpha1;

/// The longest message, in characters: the kubelet cuts longer ones.
const MAX_MESSAGE: usize = 1024;

/// Both versions of the service, for one session with the kubelet.
#[derive(Clone)]
pub(super) struct HealthService {
    pub shared: Shared,
    /// Ends the open streams: tonic's graceful shutdown waits for them.
    pub end: CancellationToken,
}

/// The report of a device: its health, and why.
type Report = (wire::HealthStatus, String);

/// The health, by name, of the devices of each GPU whose door is DRA or that claims still have, and of each device that
/// a claim holds though it is gone. A set of GPUs, which only builds before 0.1.0 published, is left out.
fn health_reports(state: &NodeState) -> BTreeMap<String, Report> {
    let hardware = state.hardware();
    let mut reports = BTreeMap::new();
    let held = state.ledger().claims().flat_map(|(_, prepared)| &prepared.devices);
    for device in held.filter(|device| !is_set(&device.device)) {
        // The report of a device that still exists overwrites this one below.
        let gone = (wire::HealthStatus::Unhealthy, UnhealthyReason::Gone.to_string());
        reports.insert(device.device.clone(), gone);
    }
    let is_dra = |gpu: &Gpu| state.door(&gpu.uuid) == Some(Door::Dra) || state.is_with_dra(&gpu.uuid);
    for (name, device) in devices(state.topology()).into_iter().filter(|(_, device)| is_dra(device.gpu)) {
        let instance = device
            .mig
            .map(|mig| MigInstance { gpu_instance: mig.gpu_instance, compute_instance: Some(mig.compute_instance) });
        let report = match hardware.health(&device.gpu.uuid, instance) {
            None => (wire::HealthStatus::Unknown, String::new()),
            Some(Health::Healthy) => (wire::HealthStatus::Healthy, String::new()),
            // In an outage, a GPU's health is unknown.
            Some(Health::Unhealthy { reason: reason @ UnhealthyReason::DriverAway { .. }, .. }) => {
                (wire::HealthStatus::Unknown, reason.to_string())
            }
            Some(Health::Unhealthy { reason, .. }) => (wire::HealthStatus::Unhealthy, reason.to_string()),
        };
        reports.insert(name, report);
    }
    reports
}

/// The state of one stream.
struct StreamState {
    shared: Shared,
    sent: Option<BTreeMap<String, Report>>,
    /// The time at which the list is sent again even if nothing changed.
    due: Instant,
}

/// The next list of a stream.
type List = Result<wire::NodeWatchResourcesResponse, Status>;

impl StreamState {
    /// The next list. `None`: the node is ending.
    async fn next(mut self) -> Option<(List, Self)> {
        loop {
            let state = self.shared.snapshot.borrow_and_update().clone();
            let reports = health_reports(&state);
            if self.sent.as_ref() != Some(&reports) || Instant::now() >= self.due {
                let list = message(&self.shared.settings.pool, &reports);
                (self.sent, self.due) = (Some(reports), Instant::now() + self.shared.settings.heartbeat);
                return Some((Ok(list), self));
            }
            tokio::select! {
                changed = self.shared.snapshot.changed() => changed.ok()?,
                () = tokio::time::sleep_until(self.due) => {}
            }
        }
    }
}

fn message(pool: &str, reports: &BTreeMap<String, Report>) -> wire::NodeWatchResourcesResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let devices = reports.iter().map(|(name, (health, why))| wire::DeviceHealth {
        device: Some(wire::DeviceIdentifier { pool_name: pool.to_owned(), device_name: name.clone() }),
        health: (*health).into(),
        last_updated_time: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
        // 0 stands for the kubelet's default, which is twice our heartbeat.
        health_check_timeout_seconds: 0,
        message: why.chars().take(MAX_MESSAGE).collect(),
    });
    wire::NodeWatchResourcesResponse { devices: devices.collect() }
}

/// The lists of one stream.
type Lists = Pin<Box<dyn Stream<Item = List> + Send>>;

impl HealthService {
    fn watch(&self) -> Lists {
        let state = StreamState { shared: self.shared.clone(), sent: None, due: Instant::now() };
        self.shared.reporter.metrics.streams.inc();
        let lists = stream::unfold(state, StreamState::next);
        Box::pin(lists.take_until(self.end.clone().cancelled_owned()))
    }
}

#[tonic::async_trait]
impl HealthV1Alpha1 for HealthService {
    type NodeWatchResourcesStream = Lists;

    async fn node_watch_resources(&self, _: Request<wire::NodeWatchResourcesRequest>) -> Answer<Lists> {
        Ok(Response::new(self.watch()))
    }
}

#[tonic::async_trait]
impl HealthV1 for HealthService {
    type NodeWatchResourcesStream = Lists;

    async fn node_watch_resources(&self, _: Request<wire::NodeWatchResourcesRequest>) -> Answer<Lists> {
        Ok(Response::new(self.watch()))
    }
}

impl Drop for StreamState {
    /// Counts the stream as closed, however it ended.
    fn drop(&mut self) {
        self.shared.reporter.metrics.streams.dec();
    }
}
