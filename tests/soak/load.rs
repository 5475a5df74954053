//! The load: pods of the device plugin, and pods with claims of whole GPUs, MIG devices, shares and MPS. The soak's own
//! scheduler allocates devices that the slices offer and no claim has, and now and then any free GPUs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use linkwise_kubelet_box::{AdmissionError, Admitted, Pod};
use serde_json::{Value, json};

use super::ledger::Piece;
use super::random::Random;
use super::world::{Disruptions, GPUS, MIG, SHARED, World, gpu_of};
use crate::dra::cluster::mps;
use crate::dra::cluster::node::DRIVER;
use crate::run::node::GPU;

/// The journal's name for pods of the device plugin.
pub const PODS: &str = "pods of the device plugin";
/// The time within which the kubelet's list shows a refused GPU as unhealthy.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before a failed call is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// The time between two restarts of a container.
const RESTART_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gpus,
    Mig,
    Shares,
    Mps,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Gpus, Self::Mig, Self::Shares, Self::Mps];

    pub fn name(self) -> &'static str {
        match self {
            Self::Gpus => "claims of whole GPUs",
            Self::Mig => "claims of MIG devices",
            Self::Shares => "claims of shares",
            Self::Mps => "claims by MPS",
        }
    }
}

/// The memory slices that a MIG device of GPU 0 takes; `None` for `1g.10gb+me`, which the load does not use.
fn slices(device: &str) -> Option<u8> {
    let mut parts = device.rsplit('-');
    let (start, profile) = (parts.next()?.parse::<u32>().ok()?, parts.next()?);
    let size = match profile {
        "19" => 1,
        "14" | "15" => 2,
        "5" | "9" => 4,
        "0" => 8,
        _ => return None,
    };
    u8::try_from(((1_u32 << size) - 1) << start).ok()
}

/// The pieces that a container has, read from its device nodes.
fn pieces(kind: Kind, hardware: &[String], shares: u32) -> Vec<Piece> {
    let gpus = hardware.iter().filter_map(|node| node.strip_prefix("/dev/nvidia")?.parse::<u32>().ok());
    let caps = hardware.iter().filter_map(|node| node.strip_prefix("/dev/nvidia-caps/nvidia-cap")?.parse().ok());
    match kind {
        Kind::Gpus | Kind::Mps => gpus.map(Piece::Whole).collect(),
        Kind::Shares => gpus.map(|gpu| Piece::Shares(gpu, shares)).collect(),
        // The GPU instance's capability has a lower number than its compute instance's.
        Kind::Mig => gpus.zip(caps.min()).map(|(gpu, cap)| Piece::Instance(gpu, cap)).collect(),
    }
}

/// A claim that the scheduler allocated.
struct Scheduled {
    name: String,
    kind: Kind,
    claim: ClaimRef,
    pieces: Vec<Piece>,
    shares: u32,
    /// Allocated whether or not the slices offer the GPUs, so that the node may refuse the claim for good.
    is_stale: bool,
}

/// Allocates devices to a new claim; `None` if none is free, or the API server is away.
fn schedule(world: &World, kind: Kind, name: String, random: &mut Random) -> Option<Scheduled> {
    let mut scheduled = world.scheduled.lock().unwrap();
    if world.is_server_away() {
        return None;
    }
    let offered = world.node.untainted();
    let is_stale = kind == Kind::Gpus && random.one_in(8);
    let gpus = offered.iter().filter_map(|device| device.strip_prefix("gpu-")?.parse::<u32>().ok());
    let gpus: Vec<u32> = if is_stale { (MIG + 1..GPUS).collect() } else { gpus.collect() };
    let is_free = |gpu: &u32| *gpu != SHARED && scheduled.are_free(&[Piece::Whole(*gpu)]);
    let mut free: Vec<u32> = gpus.into_iter().filter(is_free).collect();
    let mut take = |from: &mut Vec<u32>| {
        let at = random.within(0..u32::try_from(from.len()).ok().filter(|count| *count > 0)?);
        Some(from.swap_remove(usize::try_from(at).unwrap()))
    };
    let (pieces, results, mps, shares) = match kind {
        Kind::Gpus | Kind::Mps => {
            let mut chosen = vec![take(&mut free)?];
            if free.len() > 1 {
                chosen.extend(take(&mut free));
            }
            let results: Vec<Value> = chosen.iter().map(|gpu| mps::whole(&format!("gpu-{gpu}"))).collect();
            let mps = (kind == Kind::Mps).then(|| json!({"defaultActiveThreadPercentage": 50}));
            (chosen.into_iter().map(Piece::Whole).collect(), results, mps, 0)
        }
        Kind::Shares => {
            let device = format!("gpu-{SHARED}");
            let shares = random.within(1..3);
            let pieces = vec![Piece::Shares(SHARED, shares)];
            (offered.contains(&device) && scheduled.are_free(&pieces)).then_some(())?;
            let result = mps::share(&device, &name, &shares.to_string(), "1Gi");
            (pieces, vec![result], random.one_in(2).then(|| json!({})), shares)
        }
        Kind::Mig => {
            let of_gpu = offered.iter().filter(|device| device.starts_with(&format!("gpu-{MIG}-mig-")));
            let fits = |slices: u8| scheduled.are_free(&[Piece::Slices(MIG, slices)]);
            let free: Vec<(&String, u8)> =
                of_gpu.filter_map(|device| Some((device, slices(device).filter(|slices| fits(*slices))?))).collect();
            (!free.is_empty()).then_some(())?;
            let (device, slices) = random.of(&free);
            (vec![Piece::Slices(MIG, slices)], vec![mps::whole(device)], None, 0)
        }
    };
    scheduled.enter(&name, pieces.clone()).unwrap();
    let claim = mps::claim(&world.node, &name, &results, mps);
    Some(Scheduled { name, kind, claim, pieces, shares, is_stale })
}

/// Runs pods with claims one after another until the load is over.
pub async fn run_pods_with_claims(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.journal.over.is_cancelled() {
        made += 1;
        let (name, kind) = (format!("claim-{number}-{made}"), random.of(&Kind::ALL));
        if let Some(scheduled) = schedule(world, kind, name, &mut random) {
            run_pod(world, &scheduled, &mut random).await;
        }
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// A random lifetime for a pod. Some pods still run when the holders are listed after a change of doors.
fn lifetime(random: &mut Random) -> Duration {
    if random.one_in(6) { random.milliseconds(1_000..4_000) } else { random.milliseconds(5..300) }
}

/// Runs a pod with a claim from its start to its end.
async fn run_pod(world: &World, scheduled: &Scheduled, random: &mut Random) {
    let Scheduled { name, kind, .. } = scheduled;
    let (mut disruptions, losses) = (world.subscribe(), world.disruptions().mig_losses);
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
    let Some((mut hardware, mut began)) = start(world, scheduled, true).await else {
        // The user deletes the pod. The kubelet may have no driver to unprepare its claim.
        if world.node.dra.stop_pod(name).await.is_err() {
            world.node.dra.delete_by_force(name);
        }
        world.node.cluster.server.remove(&key);
        world.scheduled.lock().unwrap().leave(name);
        return world.journal.count("claims that the node left unprepared");
    };
    let end = tokio::time::Instant::now() + lifetime(random);
    while !world.has_failed() && tokio::time::Instant::now() < end {
        if tokio::time::timeout(RESTART_INTERVAL, disruptions.changed()).await.is_err() {
            restart(world, scheduled, &hardware, (began, losses));
            continue;
        }
        let now = *disruptions.borrow_and_update();
        if now.mig_losses != losses && *kind == Kind::Mig {
            break;
        }
        // A restarted kubelet prepares every claim again.
        let (previous, reboots) = (hardware, began.reboots);
        let Some(again) = start(world, scheduled, false).await else { return };
        (hardware, began) = again;
        if began.reboots == reboots && hardware != previous && !world.has_failed() {
            world.journal.error(format!("{name} runs with {previous:?} and was given {hardware:?}"));
        }
    }
    world.running.lock().unwrap().leave(name);
    if random.one_in(2) {
        world.node.cluster.server.remove(&key);
    }
    let began = Instant::now();
    while !world.has_failed() {
        let before = world.journal.claims.calm();
        let Err(error) = world.node.dra.stop_pod(name).await else { break };
        world.journal.failed(&world.journal.claims, &format!("the end of {name} ({kind:?})"), began, before, &error);
        tokio::time::sleep(RETRY_DELAY).await;
    }
    world.node.cluster.server.remove(&key);
    world.scheduled.lock().unwrap().leave(name);
    world.journal.count(kind.name());
}

/// Prepares a pod's claim, with retries, and enters the hardware of its container. Returns the hardware and the counts
/// of disruptions before it; `None` if a call fails for a new claim that is stale or whose GPUs left DRA.
async fn start(world: &World, scheduled: &Scheduled, is_new: bool) -> Option<(Vec<String>, Disruptions)> {
    let Scheduled { name, kind, pieces, is_stale, .. } = scheduled;
    let pod = PodClaims::single(name, scheduled.claim.clone(), DRIVER);
    let began = Instant::now();
    while !world.has_failed() {
        let (before, disruptions) = (world.journal.claims.calm(), world.disruptions());
        match world.node.dra.start_pod(&pod).await {
            // The node may have rebooted before the runtime reads the specs.
            Ok(_) if disruptions.reboots != world.disruptions().reboots => continue,
            Ok(containers) => {
                let hardware = world.node.hardware(&containers["main"]);
                if before.zip(world.journal.claims.calm()).is_some() {
                    world.journal.took(kind.name(), began.elapsed());
                }
                enter(world, scheduled, &hardware);
                return Some((hardware, disruptions));
            }
            Err(_) if is_new && (*is_stale || !world.is_dra()) => return None,
            Err(error) => {
                world.journal.failed(&world.journal.claims, &format!("{name} ({pieces:?})"), began, before, &error);
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
    Some((Vec::new(), world.disruptions()))
}

/// Restarts a pod's container as the kubelet does when a container ends, without linkwise. The CDI names that the
/// kubelet keeps must resolve to the same hardware, unless the node rebooted or the MIG device was lost.
fn restart(world: &World, scheduled: &Scheduled, hardware: &[String], (began, losses): (Disruptions, u64)) {
    let Scheduled { name, kind, claim, .. } = scheduled;
    let Ok(names) = world.node.dra.restarted_containers(&PodClaims::single(name, claim.clone(), DRIVER)) else {
        return;
    };
    let resolved = world.node.resolved(&names["main"]);
    let now = world.disruptions();
    if now.reboots == began.reboots && (now.mig_losses == losses || *kind != Kind::Mig) {
        world.journal.count("containers that started again");
        if resolved.as_deref() != Ok(hardware) {
            world.journal.error(format!("{name} had {hardware:?}, and its container starts again with {resolved:?}"));
        }
    }
}

fn enter(world: &World, scheduled: &Scheduled, hardware: &[String]) {
    let Scheduled { name, kind, pieces: allocated, shares, .. } = scheduled;
    let has = pieces(*kind, hardware, *shares);
    let gpus = |pieces: &[Piece]| pieces.iter().map(|piece| piece.gpu()).collect::<BTreeSet<u32>>();
    if gpus(&has) != gpus(allocated) || has.len() != allocated.len() {
        world.journal.error(format!("{name} was allocated {allocated:?} and has {hardware:?}"));
    }
    if let Err(twice) = world.running.lock().unwrap().enter(name, has) {
        world.journal.error(twice);
    }
}

/// Runs pods of the device plugin one after another until the load is over; some have two containers.
pub async fn run_pods_of_the_plugin(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.journal.over.is_cancelled() {
        made += 1;
        let mut pod = Pod::single(format!("pod-{number}-{made}"), GPU, random.within(1..4));
        if random.one_in(4) {
            pod = pod.with_container("second", [(GPU, random.within(1..3))]);
        }
        let mut disruptions = world.subscribe();
        let mut reboots = world.disruptions().reboots;
        if admit(world, &pod, Instant::now(), false).await {
            let end = tokio::time::Instant::now() + lifetime(&mut random);
            while !world.has_failed() && tokio::time::timeout_at(end, disruptions.changed()).await.is_ok() {
                let now = disruptions.borrow_and_update().reboots;
                if std::mem::replace(&mut reboots, now) != now {
                    let began = Instant::now();
                    while !world.has_failed() && !admit(world, &pod, began, true).await {
                        tokio::time::sleep(RETRY_DELAY).await;
                    }
                }
            }
            world.journal.count(PODS);
        }
        world.running.lock().unwrap().leave(&pod.name);
        world.node.kubelet.remove_pod(&pod.name);
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// Admits a pod, and enters its pieces. Returns false if it is refused, or the node reboots.
async fn admit(world: &World, pod: &Pod, began: Instant, again: bool) -> bool {
    let (before, reboots, asked) = (world.journal.pods.calm(), world.disruptions().reboots, Instant::now());
    let may_fail = || world.is_dra() || world.is_sharing_off() || world.journal.pods.calm().is_none();
    let could_fail = may_fail();
    match world.node.kubelet.admit(pod, None).await {
        Ok(_) if reboots != world.disruptions().reboots => false,
        Ok(admitted) => {
            if before.zip(world.journal.pods.calm()).is_some() {
                world.journal.took(PODS, asked.elapsed());
            }
            if let Err(wrong) = granted_pieces(pod, &admitted).and_then(|pieces| {
                let mut running = world.running.lock().unwrap();
                running.enter(&pod.name, pieces)
            }) {
                world.journal.error(wrong);
            }
            true
        }
        // Other pods have the GPUs that it needs.
        Err(AdmissionError::Insufficient { .. }) if !again => false,
        // DRA has all GPUs, the sharing of one is off, or a fault is under way.
        Err(AdmissionError::NoHealthyDevices(_) | AdmissionError::Unregistered(_)) if could_fail || may_fail() => false,
        Err(error) if wait_device_lost(world, &error).await => {
            world.journal.count("pods whose GPU failed during admission");
            false
        }
        Err(error) => {
            let status = error.status().map(ToString::to_string).unwrap_or_default();
            let error = format!("{error} {status}");
            world.journal.failed(&world.journal.pods, &pod.name, began, before, &error);
            world.journal.count("pods that were refused");
            false
        }
    }
}

/// The pieces of a pod's containers. The error names a pod that got another number of devices, or sees other devices.
fn granted_pieces(pod: &Pod, admitted: &Admitted) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    for container in &pod.containers {
        let allocation = &admitted.grant(&container.name, GPU).ok_or("a container has nothing")?.allocation;
        let ids = &allocation.devices;
        let visible = allocation.envs.get("NVIDIA_VISIBLE_DEVICES").map(String::as_str).unwrap_or_default();
        let of_ids = ids.iter().map(|id| id.split("::").next().unwrap_or_default()).collect::<BTreeSet<&str>>();
        if u32::try_from(ids.len()) != Ok(container.requests[GPU])
            || visible.split(',').collect::<BTreeSet<_>>() != of_ids
        {
            return Err(format!("{} asked for {:?}, holds {ids:?} and sees {visible}", pod.name, container.requests));
        }
        let piece =
            |id: &String| if id.contains("::") { Piece::Shares(gpu_of(id), 1) } else { Piece::Whole(gpu_of(id)) };
        pieces.extend(ids.iter().map(piece));
    }
    Ok(pieces)
}

/// Waits until a device that a refusal names is not healthy on the kubelet's list. Returns false if all stay healthy.
async fn wait_device_lost(world: &World, error: &AdmissionError) -> bool {
    let AdmissionError::Allocate { devices, .. } = error else { return false };
    let message = error.status().map(|status| status.message().to_owned()).unwrap_or_default();
    let named: Vec<&String> = devices.iter().filter(|id| message.contains(&format!("'{id}'"))).collect();
    let is_unhealthy =
        |state: &linkwise_kubelet_box::State| named.iter().any(|id| !state.resources[GPU].healthy.contains(*id));
    let listed = tokio::time::timeout(LIST_TIMEOUT, world.node.kubelet.wait(is_unhealthy)).await;
    matches!(listed, Ok(Ok(_)))
}
