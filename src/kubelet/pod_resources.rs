//! The client of the kubelet's PodResources API: which containers hold which devices, and which could be allocated.
//!
//! `life` asks whether our devices are on the kubelet's list; the runtime owns the task that follows the holders. Not
//! on the path of an admission. Where the socket is not there, or has no answer, nothing is known, and that is a value.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

use super::channel::{ConnectError, connect};
use super::machine::Listing;
use crate::allocation::DeviceId;
use crate::backoff::Backoff;
use crate::state::{Health, NodeState, ResourceName};
use linkwise_kubelet_api::podresources as wire;
use wire::pod_resources_lister_client::PodResourcesListerClient;

/// How long one answer may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The longest answer that is read, as much as the kubelet's own clients take.
const LONGEST: usize = 16 << 20;
/// How often the holders are asked for while an answer is waited for.
const ASK_OFTEN: Duration = Duration::from_secs(1);
/// How often while no answer is waited for.
const ASK_BETWEEN: Duration = Duration::from_secs(30);

/// Which devices containers held when the kubelet was last asked, as the kubelet names them; `None`: not known.
pub type Holders = Option<BTreeSet<(ResourceName, DeviceId)>>;

/// Why PodResources has no answer.
#[derive(Debug, Error)]
pub enum PodResourcesError {
    /// There is no connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// An error instead of an answer.
    #[error("{path} answered {call} with an error: {} ({})", .status.message(), .status.code())]
    Refused {
        /// The socket.
        path: String,
        /// The call.
        call: &'static str,
        /// What came.
        status: Box<Status>,
    },
    /// No answer in time.
    #[error("{path} did not answer within {after:?}")]
    Late {
        /// The socket.
        path: String,
        /// The deadline.
        after: Duration,
    },
}

/// Pairs of a resource and a device, as the kubelet names them.
type Devices = BTreeSet<(String, String)>;

fn devices(listed: impl IntoIterator<Item = wire::ContainerDevices>) -> Devices {
    let each = |listed: wire::ContainerDevices| {
        let resource = listed.resource_name;
        listed.device_ids.into_iter().map(move |id| (resource.clone(), id))
    };
    listed.into_iter().flat_map(each).collect()
}

/// Connects and calls, within the deadline.
async fn call(
    socket: &Path,
    call: &'static str,
    ask: impl AsyncFnOnce(PodResourcesListerClient<Channel>) -> Result<Devices, Status>,
) -> Result<Devices, PodResourcesError> {
    let path = || socket.display().to_string();
    let exchange = async {
        let (channel, _) = connect(socket).await?;
        let client = PodResourcesListerClient::new(channel).max_decoding_message_size(LONGEST);
        let refused = |status| PodResourcesError::Refused { path: path(), call, status: Box::new(status) };
        ask(client).await.map_err(refused)
    };
    let late = |_| PodResourcesError::Late { path: path(), after: TIMEOUT };
    tokio::time::timeout(TIMEOUT, exchange).await.map_err(late)?
}

/// Which devices containers hold now. A name that is no resource's is not ours and is left out.
pub async fn holders(socket: &Path) -> Result<BTreeSet<(ResourceName, DeviceId)>, PodResourcesError> {
    let held = call(socket, "List", async |mut client| {
        let pods = client.list(wire::ListPodResourcesRequest {}).await?.into_inner().pod_resources;
        Ok(devices(pods.into_iter().flat_map(|pod| pod.containers).flat_map(|container| container.devices)))
    });
    let named = |(resource, id): (String, String)| Some((resource.parse().ok()?, DeviceId::from(id)));
    Ok(held.await?.into_iter().filter_map(named).collect())
}

/// Polls the holders until `shutdown`: every second at first while the state waits for an answer (`often`), then ever
/// more rarely. A failure means "not known" until the next answer. Every answer is published, also one like the last: a
/// GPU that is gone leaves the list by an answer that came after it went.
pub async fn follow_holders(
    socket: &Path,
    holders_now: watch::Sender<Holders>,
    mut often: watch::Receiver<bool>,
    shutdown: CancellationToken,
) {
    let mut pauses = Backoff::new(ASK_OFTEN, ASK_BETWEEN);
    let follow = async {
        loop {
            holders_now.send_replace(holders(socket).await.ok());
            // A pod may hold a device for days: an answer a second would be many.
            let waited_for = *often.borrow_and_update();
            let pause = if waited_for { pauses.failed() } else { ASK_BETWEEN };
            let begins = async {
                // An error means that the node is ending.
                let _ = often.changed().await;
            };
            if tokio::time::timeout(pause, begins).await.is_ok() {
                pauses.reset();
            }
        }
    };
    shutdown.run_until_cancelled(follow).await;
}

/// Whether the kubelet would give out every healthy device of a resource. It lists healthy ones of registered
/// plugins only: where we have none that is healthy, none is missing.
pub(super) async fn listing(
    socket: Option<&Path>,
    snapshot: &watch::Receiver<Arc<NodeState>>,
    resource: &ResourceName,
) -> Listing {
    let Some(socket) = socket else { return Listing::Unknown };
    let listed = call(socket, "GetAllocatableResources", async |mut client| {
        let answer = client.get_allocatable_resources(wire::AllocatableResourcesRequest {}).await?;
        Ok(devices(answer.into_inner().devices))
    });
    let Ok(listed) = listed.await else { return Listing::Unknown };
    let snapshot = Arc::clone(&snapshot.borrow());
    let healthy = snapshot.devices(resource).filter(|(_, device)| device.health == Health::Healthy);
    let mut healthy = healthy.map(|(id, _)| (resource.as_str().to_owned(), id.as_str().to_owned()));
    if healthy.all(|device| listed.contains(&device)) { Listing::Listed } else { Listing::Missing }
}
