//! The client of the kubelet's PodResources API: the devices that containers hold, and those that could be allocated.
//!
//! `life` asks whether our devices are on the kubelet's list, and `linkwise wait` reads the stock; the node owns the
//! task that follows the holders. No admission waits for an answer. Without an answer the holders are unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

use super::channel::connect;
use super::checkpoint::{self, ContainerDevices, ContainerId};
use super::handshake::Listing;
use linkwise_core::allocation::DeviceId;
use linkwise_core::backoff::Backoff;
use linkwise_core::state::{
    ClaimedDevice, ContainerHoldings, ContainerName, Health, Holdings, NodeState, ResourceDevice, ResourceName,
};
use linkwise_kubelet_api::podresources as wire;
use linkwise_system::uds::FileId;
use wire::pod_resources_lister_client::PodResourcesListerClient;

/// The longest time that one answer may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The longest answer that is read, in bytes, as much as the kubelet's own clients take.
const MAX_ANSWER: usize = 16 << 20;
/// The least time between two questions for the holders while an answer is awaited: a container whose Allocate was
/// answered before the first of two questions is in the answer to the second (`state::doors`).
const MIN_ASK_INTERVAL: Duration = Duration::from_secs(1);
/// The most time between two questions while an answer is awaited: a GPU that a pod has left is offered some seconds
/// after the pod's end.
const MAX_ASK_INTERVAL: Duration = Duration::from_secs(10);
/// The time between two questions while no answer is awaited.
const IDLE_ASK_INTERVAL: Duration = Duration::from_secs(30);

/// The holders of devices, as the kubelet lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// The holders; `None` without an answer.
    pub held: Option<Holdings>,
    /// The reason why the devices of init containers are missing.
    pub without_init_containers: Option<String>,
}

/// The places where the kubelet lists the holders of devices.
#[derive(Clone, Debug)]
pub struct HolderSources {
    /// The PodResources socket.
    pub socket: PathBuf,
    /// The device-plugins folder, where the kubelet keeps its checkpoint.
    pub folder: PathBuf,
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

/// Connects and calls, within the deadline; `None` without an answer.
async fn call<T>(
    socket: &Path,
    ask: impl AsyncFnOnce(PodResourcesListerClient<Channel>) -> Result<T, Status>,
) -> Option<T> {
    let exchange = async {
        let (channel, _) = connect(socket).await.ok()?;
        ask(PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER)).await.ok()
    };
    tokio::time::timeout(TIMEOUT, exchange).await.ok().flatten()
}

/// The longest name of a pod, in characters; a namespace and a container have shorter ones.
const MAX_NAME: usize = 253;

/// Reads which devices containers and claims hold now. A name that is not valid for a resource is not ours, and is left
/// out.
async fn listed(socket: &Path) -> Option<Holdings> {
    let pods = call(socket, async |mut client| client.list(wire::ListPodResourcesRequest {}).await).await?;
    let mut holdings = Holdings::default();
    for pod in pods.into_inner().pod_resources {
        let namespace = shortened(pod.namespace);
        let name = shortened(pod.name);
        for container in pod.containers {
            let mut held = ContainerHoldings::default();
            held.claims.extend(container.dynamic_resources.into_iter().flat_map(claimed));
            for (resource, id) in devices(container.devices) {
                let Ok(resource) = resource.parse::<ResourceName>() else { continue };
                holdings.containers.insert((resource.clone(), DeviceId::from(id.clone())));
                held.devices.entry(resource).or_default().insert(DeviceId::from(id));
            }
            holdings.claims.extend(held.claims.iter().cloned());
            let container = shortened(container.name);
            holdings.add(ContainerName { namespace: namespace.clone(), pod: name.clone(), container }, held);
        }
    }
    Some(holdings)
}

/// Cuts a name at the length that Kubernetes allows.
fn shortened(mut name: String) -> String {
    if let Some((end, _)) = name.char_indices().nth(MAX_NAME) {
        name.truncate(end);
    }
    name
}

fn claimed(resource: wire::DynamicResource) -> impl Iterator<Item = ClaimedDevice> {
    let claim = format!("{}/{}", resource.claim_namespace, resource.claim_name);
    resource.claim_resources.into_iter().map(move |device| {
        let names = device.cdi_devices.iter().filter_map(|cdi| Some(cdi.name.split_once('=')?.1.to_owned()));
        let cdi_names = names.collect();
        let (driver, pool, device) = (device.driver_name, device.pool_name, device.device_name);
        ClaimedDevice { claim: claim.clone(), driver, pool, device, cdi_names }
    })
}

/// The containers of the kubelet's checkpoint that a list of PodResources has had. They are not init containers: once a
/// list lacks one, its pod has ended, though the file keeps it until the next allocation or device list.
type ListedContainers = BTreeSet<ContainerId>;

/// The devices that init containers may hold: those of containers in the checkpoint that no list has had.
fn of_init_containers(
    known: &mut ListedContainers,
    checkpoint: Vec<ContainerDevices>,
    listed: &BTreeSet<ResourceDevice>,
) -> BTreeSet<ResourceDevice> {
    known.retain(|known| checkpoint.iter().any(|of| of.container == *known));
    let is_listed =
        |of: &&ContainerDevices| !of.devices.is_empty() && of.devices.iter().all(|device| listed.contains(device));
    known.extend(checkpoint.iter().filter(is_listed).map(|of| of.container.clone()));
    let unlisted = checkpoint.into_iter().filter(|of| !known.contains(&of.container));
    unlisted.flat_map(|of| of.devices).filter(|device| !listed.contains(device)).collect()
}

/// Adds the UIDs of pods, which PodResources lacks, from the checkpoint's containers with the same name and devices.
fn name_pods(held: &mut Holdings, checkpoint: &[ContainerDevices]) {
    for (name, holdings) in &mut held.by_container {
        let has = |(resource, id): &ResourceDevice| holdings.devices.get(resource).is_some_and(|ids| ids.contains(id));
        let is_it = |of: &&ContainerDevices| {
            of.container.name == name.container && !of.devices.is_empty() && of.devices.iter().all(has)
        };
        holdings.pod_uid = checkpoint.iter().find(is_it).map(|of| of.container.pod_uid.clone());
    }
}

/// Reads the holders of devices. The checkpoint is read after the list, because the request for the list makes the
/// kubelet drop pods that have ended.
pub async fn holders(sources: &HolderSources) -> Holders {
    holders_after(sources, &mut ListedContainers::default()).await
}

/// As [`holders`], with the containers that earlier lists had.
async fn holders_after(sources: &HolderSources, containers: &mut ListedContainers) -> Holders {
    let Some(mut held) = listed(&sources.socket).await else { return Holders::default() };
    let mut without_init_containers = None;
    match checkpoint::read(&sources.folder).await {
        Ok(checkpoint) => {
            name_pods(&mut held, &checkpoint);
            held.init_containers = of_init_containers(containers, checkpoint, &held.containers);
        }
        Err(error) => without_init_containers = Some(linkwise_core::errors::chain(&error)),
    }
    Holders { held: Some(held), without_init_containers }
}

/// Polls the holders until `shutdown`.
///
/// While `often` is true, because the state waits for an answer, pauses grow from a second as long as the answers are
/// the same; else a pause is 30 s. A change of `often` resets the pauses, and the next question comes at least a
/// second after the last. `new_state` resets the pauses too, and a question follows at once: a state that was just made
/// has seen no answer.
///
/// After a failure the holders are unknown until the next answer. Every answer is published, even one that equals the
/// last, because an orphan leaves the device list when two lists of holders in a row lack it.
pub async fn follow_holders(
    sources: &HolderSources,
    holders_now: watch::Sender<Holders>,
    mut often: watch::Receiver<bool>,
    new_state: Arc<Notify>,
    shutdown: CancellationToken,
) {
    let mut pauses = Backoff::new(MIN_ASK_INTERVAL, MAX_ASK_INTERVAL);
    let (mut containers, mut last_socket) = (ListedContainers::default(), None);
    let follow = async {
        loop {
            let soonest = Instant::now() + MIN_ASK_INTERVAL;
            // A kubelet that starts makes a new socket.
            let id = || FileId::of_socket(&sources.socket.canonicalize().ok()?);
            let socket = id();
            let mut now = holders_after(sources, &mut containers).await;
            if let Some(held) = &mut now.held {
                let is_same = socket.is_some() && socket == id();
                held.is_first = last_socket != socket || !is_same;
                last_socket = socket;
            }
            let (is_known, last) = (now.held.is_some(), holders_now.send_replace(now));
            let is_news = holders_now.borrow().held != last.held;
            let pause = pause(*often.borrow_and_update(), is_known, is_news, &mut pauses);
            let due = async {
                // A channel that is closed means that the node is ending.
                let resets = tokio::time::timeout(pause, often.changed()).await.is_ok();
                tokio::time::sleep_until(soonest).await;
                resets
            };
            let resets = tokio::select! {
                resets = due => resets,
                () = new_state.notified() => true,
            };
            if resets {
                pauses.reset();
            }
        }
    };
    shutdown.run_until_cancelled(follow).await;
}

/// The pause before the next question.
fn pause(is_awaited: bool, is_known: bool, is_news: bool, pauses: &mut Backoff) -> Duration {
    if is_news {
        // A device that this list lacks is free once the next list lacks it too.
        pauses.reset();
    }
    match (is_awaited, is_known) {
        // A pod may hold a device for days, too long to ask every second.
        (true, true) => pauses.failed(),
        // A kubelet that restarts: GPUs are held back until it answers.
        (true, false) => {
            pauses.reset();
            MIN_ASK_INTERVAL
        }
        (false, _) => IDLE_ASK_INTERVAL,
    }
}

/// The devices that the kubelet could give to pods; `None` without an answer.
async fn allocatable(socket: &Path) -> Option<Devices> {
    let request = wire::AllocatableResourcesRequest {};
    let listed = call(socket, async |mut client| client.get_allocatable_resources(request).await).await?;
    Some(devices(listed.into_inner().devices))
}

/// A resource's devices, as the kubelet counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stock {
    /// The healthy devices.
    pub devices: usize,
    /// The healthy devices that containers hold.
    pub held: usize,
}

/// Reads the stock of each resource that has a healthy device; `None` without an answer.
pub async fn stock(socket: &Path) -> Option<BTreeMap<String, Stock>> {
    let (allocatable, held) = (allocatable(socket).await?, listed(socket).await?);
    let held: Devices =
        held.containers.iter().map(|(resource, id)| (resource.as_str().to_owned(), id.as_str().to_owned())).collect();
    let mut stocks = BTreeMap::<String, Stock>::new();
    for device in &allocatable {
        let stock = stocks.entry(device.0.clone()).or_default();
        stock.devices += 1;
        stock.held += usize::from(held.contains(device));
    }
    Some(stocks)
}

/// Asks whether the kubelet would give out every healthy device of a resource. The kubelet lists only healthy devices
/// of registered plugins. Without a healthy device none is missing.
pub(super) async fn listing(
    socket: Option<&Path>,
    snapshot: &watch::Receiver<Arc<NodeState>>,
    resource: &ResourceName,
) -> Listing {
    let Some(socket) = socket else { return Listing::Unknown };
    let Some(listed) = allocatable(socket).await else { return Listing::Unknown };
    let snapshot = Arc::clone(&snapshot.borrow());
    let healthy = snapshot.offers().of(resource).filter(|(_, device)| device.health == Health::Healthy);
    let mut healthy = healthy.map(|(id, _)| (resource.as_str().to_owned(), id.as_str().to_owned()));
    if healthy.all(|device| listed.contains(&device)) { Listing::Listed } else { Listing::Missing }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(ids: &[&str]) -> Vec<ResourceDevice> {
        ids.iter().map(|id| ("nvidia.com/gpu".parse().unwrap(), DeviceId::from((*id).to_owned()))).collect()
    }

    /// A container's devices in the kubelet's checkpoint.
    fn of(pod: &str, container: &str, ids: &[&str]) -> ContainerDevices {
        let container = ContainerId { pod_uid: pod.to_owned(), name: container.to_owned() };
        ContainerDevices { container, devices: devices(ids) }
    }

    #[test]
    fn checkpoint_counts_only_never_listed_containers() {
        // The kubelet writes the file again only with the next allocation or device list.
        let file = [of("a", "main", &["0", "1"]), of("a", "init", &["1", "2"]), of("b", "main", &["3"])];
        let mut containers = ListedContainers::default();
        let mut held = |listed: &[&str]| {
            let listed = devices(listed).into_iter().collect();
            let held = of_init_containers(&mut containers, file.to_vec(), &listed);
            held.into_iter().map(|(_, id)| id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(held(&["0", "1", "3"]), ["2"], "an init container's, until the pod ends");
        assert_eq!(held(&["0", "1"]), ["2"], "pod b has ended");
        // No list has had the init container, so all its devices count.
        assert_eq!(held(&[]), ["1", "2"]);
        let empty = of_init_containers(&mut containers, Vec::new(), &BTreeSet::new());
        assert!(empty.is_empty() && containers.is_empty());
    }

    #[test]
    fn pods_get_their_uids_from_the_checkpoint() {
        let mut held = Holdings::default();
        for (pod, container, ids) in [("a", "main", &["0", "1"][..]), ("b", "main", &["2"]), ("c", "side", &["4"])] {
            let name = ContainerName { pod: pod.to_owned(), container: container.to_owned(), ..Default::default() };
            let mut holdings = ContainerHoldings::default();
            for (resource, id) in devices(ids) {
                holdings.devices.entry(resource).or_default().insert(id);
            }
            held.add(name, holdings);
        }
        // Pod c is too new for the file. The file still has pod d, whose device is c's by now.
        let file = [of("uid-b", "main", &["2"]), of("uid-a", "main", &["0", "1"]), of("uid-d", "main", &["4"])];
        name_pods(&mut held, &file);
        let uids: Vec<Option<&str>> = held.by_container.values().map(|of| of.pod_uid.as_deref()).collect();
        assert_eq!(uids, [Some("uid-a"), Some("uid-b"), None]);
    }

    #[test]
    fn pauses_grow_unless_news_or_kubelet_restarts() {
        let mut pauses = Backoff::new(MIN_ASK_INTERVAL, MAX_ASK_INTERVAL);
        assert_eq!([false; 2].map(|news| pause(true, true, news, &mut pauses).as_secs()), [1, 2]);
        assert_eq!([true, false].map(|news| pause(true, true, news, &mut pauses).as_secs()), [1, 2], "a pod has ended");
        pauses.reset();
        let mut after = |is_awaited, is_known| pause(is_awaited, is_known, false, &mut pauses).as_secs();
        assert_eq!([true; 6].map(|known| after(true, known)), [1, 2, 4, 8, 10, 10]);
        assert_eq!([false; 4].map(|known| after(true, known)), [1; 4]);
        assert_eq!([true; 2].map(|known| after(true, known)), [1, 2], "two lists soon after it is back");
        assert_eq!((after(false, true), after(false, false)), (30, 30));
    }
}
