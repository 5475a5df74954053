//! Pods that come and go: of the device plugin, and with claims of whole GPUs, MIG devices, shares and MPS. A scheduler of
//! the soak's own allocates what the slices offer and no other claim has; now and then what they offered long ago.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use linkwise_kubelet_box::{AdmissionError, Admitted, Pod};
use serde_json::{Value, json};

use super::ledger::Piece;
use super::random::Random;
use super::world::{GPUS, MIG, SHARED, Turns, World, gpu_of};
use crate::dra::cluster::mps;
use crate::dra::cluster::node::DRIVER;
use crate::run::node::GPU;

/// The name of the pods of the device plugin in the ledger.
pub const PODS: &str = "pods of the device plugin";
/// So long after an order that names a GPU was refused, the kubelet knows why.
const NEWS: Duration = Duration::from_secs(5);
/// Before a call that failed is made again.
const AGAIN: Duration = Duration::from_millis(50);
/// Between two starts of a container.
const RESTARTS: Duration = Duration::from_millis(100);

/// A claim of one kind.
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

/// The memory slices that a device of GPU 0 takes, and not that of the one profile of which there is one only.
fn slices(device: &str) -> Option<u8> {
    let mut words = device.rsplit('-');
    let (start, profile) = (words.next()?.parse::<u32>().ok()?, words.next()?);
    let size = match profile {
        "19" => 1,
        "14" | "15" => 2,
        "5" | "9" => 4,
        "0" => 8,
        _ => return None,
    };
    u8::try_from(((1_u32 << size) - 1) << start).ok()
}

/// What a container has, by its device nodes.
fn pieces(kind: Kind, hardware: &[String], shares: u32) -> Vec<Piece> {
    let gpus = hardware.iter().filter_map(|node| node.strip_prefix("/dev/nvidia")?.parse::<u32>().ok());
    let caps = hardware.iter().filter_map(|node| node.strip_prefix("/dev/nvidia-caps/nvidia-cap")?.parse().ok());
    match kind {
        Kind::Gpus | Kind::Mps => gpus.map(Piece::Whole).collect(),
        Kind::Shares => gpus.map(|gpu| Piece::Shares(gpu, shares)).collect(),
        // The capability of the GPU instance comes before that of its compute instance.
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
    /// By slices that may be old: the node may refuse it for good.
    is_stale: bool,
}

/// Allocates devices to a new claim; `None` where there are none, or nobody can write the claim.
fn schedule(world: &World, kind: Kind, name: String, random: &mut Random) -> Option<Scheduled> {
    let mut books = world.scheduled.lock().unwrap();
    if world.is_away() {
        return None;
    }
    let offered = world.node.untainted();
    let is_stale = kind == Kind::Gpus && random.one_in(8);
    let gpus = offered.iter().filter_map(|device| device.strip_prefix("gpu-")?.parse::<u32>().ok());
    let gpus: Vec<u32> = if is_stale { (MIG + 1..GPUS).collect() } else { gpus.collect() };
    let is_free = |gpu: &u32| *gpu != SHARED && books.are_free(&[Piece::Whole(*gpu)]);
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
            (offered.contains(&device) && books.are_free(&pieces)).then_some(())?;
            let result = mps::share(&device, &name, &shares.to_string(), "1Gi");
            (pieces, vec![result], random.one_in(2).then(|| json!({})), shares)
        }
        Kind::Mig => {
            let of_gpu = offered.iter().filter(|device| device.starts_with(&format!("gpu-{MIG}-mig-")));
            let fits = |slices: u8| books.are_free(&[Piece::Slices(MIG, slices)]);
            let free: Vec<(&String, u8)> =
                of_gpu.filter_map(|device| Some((device, slices(device).filter(|slices| fits(*slices))?))).collect();
            (!free.is_empty()).then_some(())?;
            let (device, slices) = random.of(&free);
            (vec![Piece::Slices(MIG, slices)], vec![mps::whole(device)], None, 0)
        }
    };
    books.enter(&name, pieces.clone()).unwrap();
    let claim = mps::claim(&world.node, &name, &results, mps);
    Some(Scheduled { name, kind, claim, pieces, shares, is_stale })
}

/// Starts pods one after another until the load is over.
pub async fn with_claims(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.ledger.over.is_cancelled() {
        made += 1;
        let (name, kind) = (format!("claim-{number}-{made}"), random.of(&Kind::ALL));
        if let Some(scheduled) = schedule(world, kind, name, &mut random) {
            one(world, &scheduled, &mut random).await;
        }
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// How long a pod runs. Some outlast the lists of holders after a change of doors.
fn lasts(random: &mut Random) -> Duration {
    if random.one_in(6) { random.milliseconds(1_000..4_000) } else { random.milliseconds(5..300) }
}

/// A pod with a claim, from its start to its end.
async fn one(world: &World, scheduled: &Scheduled, random: &mut Random) {
    let Scheduled { name, kind, .. } = scheduled;
    let (mut turns, losses) = (world.subscribe(), world.turns().mig_losses);
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
    let Some((mut hardware, mut began)) = start(world, scheduled, true).await else {
        // Its user gives it up. The kubelet may know no driver to unprepare it.
        if world.node.dra.stop_pod(name).await.is_err() {
            world.node.dra.delete_by_force(name);
        }
        world.node.cluster.server.remove(&key);
        world.scheduled.lock().unwrap().leave(name);
        return world.ledger.count("claims that the node left unprepared");
    };
    let end = tokio::time::Instant::now() + lasts(random);
    while !world.has_failed() && tokio::time::Instant::now() < end {
        if tokio::time::timeout(RESTARTS, turns.changed()).await.is_err() {
            restart(world, scheduled, &hardware, (began, losses));
            continue;
        }
        let now = *turns.borrow_and_update();
        if now.mig_losses != losses && *kind == Kind::Mig {
            break;
        }
        // A kubelet that starts has every claim prepared again.
        let before = (hardware, began);
        let Some(again) = start(world, scheduled, false).await else { return };
        (hardware, began) = again;
        if began.boots == before.1.boots && hardware != before.0 && !world.has_failed() {
            world.ledger.error(format!("{name} runs with {:?} and was given {hardware:?}", before.0));
        }
    }
    world.running.lock().unwrap().leave(name);
    if random.one_in(2) {
        world.node.cluster.server.remove(&key);
    }
    let began = Instant::now();
    while !world.has_failed() {
        let before = world.ledger.claims.calm();
        let Err(error) = world.node.dra.stop_pod(name).await else { break };
        world.ledger.failed(&world.ledger.claims, &format!("the end of {name} ({kind:?})"), began, before, &error);
        tokio::time::sleep(AGAIN).await;
    }
    world.node.cluster.server.remove(&key);
    world.scheduled.lock().unwrap().leave(name);
    world.ledger.count(kind.name());
}

/// Has a pod's claim prepared, as often as it takes, and enters what its container has. Returns that, and since when;
/// `None` if the claim is new, and the node refuses it for good.
async fn start(world: &World, scheduled: &Scheduled, is_new: bool) -> Option<(Vec<String>, Turns)> {
    let Scheduled { name, kind, pieces, is_stale, .. } = scheduled;
    let pod = PodClaims::single(name, scheduled.claim.clone(), DRIVER);
    let began = Instant::now();
    while !world.has_failed() {
        let (before, turns) = (world.ledger.claims.calm(), world.turns());
        match world.node.dra.start_pod(&pod).await {
            // A reboot may have come before the runtime reads the specs.
            Ok(_) if turns.boots != world.turns().boots => continue,
            Ok(containers) => {
                let hardware = world.node.hardware(&containers["main"]);
                if before.zip(world.ledger.claims.calm()).is_some() {
                    world.ledger.took(kind.name(), began.elapsed());
                }
                enter(world, scheduled, &hardware);
                return Some((hardware, turns));
            }
            Err(_) if is_new && (*is_stale || !world.is_dra()) => return None,
            Err(error) => {
                world.ledger.failed(&world.ledger.claims, &format!("{name} ({pieces:?})"), began, before, &error);
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
    Some((Vec::new(), world.turns()))
}

/// Starts a pod's container again, as the kubelet does by itself where one ends: the names that it has noted resolve to
/// the same hardware, whatever linkwise does meanwhile. Nothing runs after a reboot, or after the loss of its MIG device.
fn restart(world: &World, scheduled: &Scheduled, hardware: &[String], (began, losses): (Turns, u64)) {
    let Scheduled { name, kind, claim, .. } = scheduled;
    let Ok(names) = world.node.dra.restarted_containers(&PodClaims::single(name, claim.clone(), DRIVER)) else {
        return;
    };
    let resolved = world.node.resolved(&names["main"]);
    let now = world.turns();
    if now.boots == began.boots && (now.mig_losses == losses || *kind != Kind::Mig) {
        world.ledger.count("containers that started again");
        if resolved.as_deref() != Ok(hardware) {
            world.ledger.error(format!("{name} had {hardware:?}, and its container starts again with {resolved:?}"));
        }
    }
}

fn enter(world: &World, scheduled: &Scheduled, hardware: &[String]) {
    let Scheduled { name, kind, pieces: allocated, shares, .. } = scheduled;
    let has = pieces(*kind, hardware, *shares);
    let gpus = |pieces: &[Piece]| pieces.iter().map(|piece| piece.gpu()).collect::<BTreeSet<u32>>();
    if gpus(&has) != gpus(allocated) || has.len() != allocated.len() {
        world.ledger.error(format!("{name} was allocated {allocated:?} and has {hardware:?}"));
    }
    if let Err(twice) = world.running.lock().unwrap().enter(name, has) {
        world.ledger.error(twice);
    }
}

/// Starts pods of the device plugin one after another until the load is over; some have two containers.
pub async fn of_the_plugin(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.ledger.over.is_cancelled() {
        made += 1;
        let mut pod = Pod::single(format!("pod-{number}-{made}"), GPU, random.within(1..4));
        if random.one_in(4) {
            pod = pod.with_container("second", [(GPU, random.within(1..3))]);
        }
        let mut turns = world.subscribe();
        let mut boots = world.turns().boots;
        if admit(world, &pod, Instant::now(), false).await {
            let end = tokio::time::Instant::now() + lasts(&mut random);
            while !world.has_failed() && tokio::time::timeout_at(end, turns.changed()).await.is_ok() {
                let now = turns.borrow_and_update().boots;
                if std::mem::replace(&mut boots, now) != now {
                    let began = Instant::now();
                    while !world.has_failed() && !admit(world, &pod, began, true).await {
                        tokio::time::sleep(AGAIN).await;
                    }
                }
            }
            world.ledger.count(PODS);
        }
        world.running.lock().unwrap().leave(&pod.name);
        world.node.kubelet.remove_pod(&pod.name);
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// Admits a pod, and enters what it has. False if it is refused.
async fn admit(world: &World, pod: &Pod, began: Instant, again: bool) -> bool {
    let (before, boots, asked) = (world.ledger.pods.calm(), world.turns().boots, Instant::now());
    let is_idle = || world.is_dra() || world.is_sharing() || world.ledger.pods.calm().is_none();
    let was_idle = is_idle();
    match world.node.kubelet.admit(pod, None).await {
        Ok(_) if boots != world.turns().boots => false,
        Ok(admitted) => {
            if before.zip(world.ledger.pods.calm()).is_some() {
                world.ledger.took(PODS, asked.elapsed());
            }
            if let Err(wrong) = has_what_it_asked(pod, &admitted).and_then(|pieces| {
                let mut running = world.running.lock().unwrap();
                running.enter(&pod.name, pieces)
            }) {
                world.ledger.error(wrong);
            }
            true
        }
        // Other pods have the rest.
        Err(AdmissionError::Insufficient { .. }) if !again => false,
        // DRA has all.
        Err(AdmissionError::NoHealthyDevices(_) | AdmissionError::Unregistered(_)) if was_idle || is_idle() => false,
        Err(error) if is_overtaken(world, &error).await => {
            world.ledger.count("pods whose GPU failed on its way");
            false
        }
        Err(error) => {
            let status = error.status().map(ToString::to_string).unwrap_or_default();
            let error = format!("{error} {status}");
            world.ledger.failed(&world.ledger.pods, &pod.name, began, before, &error);
            world.ledger.count("pods that were refused");
            false
        }
    }
}

/// The pieces that a pod's containers have; the error says which has another number than it asked for, or sees others.
fn has_what_it_asked(pod: &Pod, admitted: &Admitted) -> Result<Vec<Piece>, String> {
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

/// True if the device that a refusal names failed after the kubelet's last list: then the next list says so.
async fn is_overtaken(world: &World, error: &AdmissionError) -> bool {
    let AdmissionError::Allocate { devices, .. } = error else { return false };
    let words = error.status().map(|status| status.message().to_owned()).unwrap_or_default();
    let named: Vec<&String> = devices.iter().filter(|id| words.contains(&format!("'{id}'"))).collect();
    let is_ill =
        |state: &linkwise_kubelet_box::State| named.iter().any(|id| !state.resources[GPU].healthy.contains(*id));
    let news = tokio::time::timeout(NEWS, world.node.kubelet.wait(is_ill)).await;
    matches!(news, Ok(Ok(_)))
}
