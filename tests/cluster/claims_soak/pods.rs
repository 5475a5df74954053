//! Pods that come and go: of the device plugin, and with claims of whole GPUs, MIG devices, shares and MPS. A scheduler of
//! the soak's own allocates what the slices offer and no other claim has.

use std::collections::BTreeSet;
use std::time::Instant;

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use linkwise_kubelet_box::{AdmissionError, Pod};
use serde_json::{Value, json};

use super::books::Piece;
use super::{GPU, MIG, SHARED, Turns, World, gpu_of};
use crate::cluster::dra_mps;
use crate::cluster::dra_node::DRIVER;
use crate::random::Random;

/// A claim of one kind.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Gpus,
    Mig,
    Shares,
    Mps,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Gpus, Self::Mig, Self::Shares, Self::Mps];

    fn name(self) -> &'static str {
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
    claim: ClaimRef,
    pieces: Vec<Piece>,
    shares: u32,
}

/// Allocates devices to a new claim; `None` where there are none, or nobody can write the claim.
fn schedule(world: &World, kind: Kind, name: &str, random: &mut Random) -> Option<Scheduled> {
    let mut books = world.scheduled.lock().unwrap();
    if world.is_away() {
        return None;
    }
    let offered = world.node.untainted();
    let gpus = offered.iter().filter_map(|device| device.strip_prefix("gpu-")?.parse::<u32>().ok());
    let mut free: Vec<u32> = gpus.filter(|gpu| *gpu != SHARED && books.are_free(&[Piece::Whole(*gpu)])).collect();
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
            let results: Vec<Value> = chosen.iter().map(|gpu| dra_mps::whole(&format!("gpu-{gpu}"))).collect();
            let mps = matches!(kind, Kind::Mps).then(|| json!({"defaultActiveThreadPercentage": 50}));
            (chosen.into_iter().map(Piece::Whole).collect(), results, mps, 0)
        }
        Kind::Shares => {
            let device = format!("gpu-{SHARED}");
            let shares = random.within(1..3);
            let pieces = vec![Piece::Shares(SHARED, shares)];
            (offered.contains(&device) && books.are_free(&pieces)).then_some(())?;
            let result = dra_mps::share(&device, name, &shares.to_string(), "1Gi");
            (pieces, vec![result], random.one_in(2).then(|| json!({})), shares)
        }
        Kind::Mig => {
            let of_gpu = offered.iter().filter(|device| device.starts_with(&format!("gpu-{MIG}-mig-")));
            let fits = |slices: u8| books.are_free(&[Piece::Slices(MIG, slices)]);
            let free: Vec<(&String, u8)> =
                of_gpu.filter_map(|device| Some((device, slices(device).filter(|slices| fits(*slices))?))).collect();
            (!free.is_empty()).then_some(())?;
            let (device, slices) = random.of(&free);
            (vec![Piece::Slices(MIG, slices)], vec![dra_mps::whole(device)], None, 0)
        }
    };
    books.enter(name, pieces.clone()).unwrap();
    let claim = dra_mps::claim(&world.node, name, &results, mps);
    Some(Scheduled { claim, pieces, shares })
}

/// Starts pods one after another until the load is over.
pub async fn with_claims(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.ledger.over.is_cancelled() {
        made += 1;
        let (name, kind) = (format!("claim-{number}-{made}"), random.of(&Kind::ALL));
        if let Some(scheduled) = schedule(world, kind, &name, &mut random) {
            one(world, kind, &name, &scheduled, &mut random).await;
        }
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// A pod with a claim, from its start to its end.
async fn one(world: &World, kind: Kind, name: &str, scheduled: &Scheduled, random: &mut Random) {
    let (mut turns, losses) = (world.turns.subscribe(), world.turns().mig_losses);
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("default"), name);
    let Some((mut hardware, mut began)) = start(world, kind, name, scheduled, true).await else {
        // Its user gives it up. The kubelet may know no driver to unprepare it.
        if world.node.dra.stop_pod(name).await.is_err() {
            world.node.dra.delete_by_force(name);
        }
        world.node.cluster.server.remove(&key);
        world.scheduled.lock().unwrap().leave(name);
        return world.ledger.count("claims that the door left unprepared");
    };
    let end = tokio::time::Instant::now() + random.milliseconds(5..400);
    while !world.has_failed() && tokio::time::timeout_at(end, turns.changed()).await.is_ok() {
        let now = *turns.borrow_and_update();
        if now.mig_losses != losses && matches!(kind, Kind::Mig) {
            break;
        }
        // A kubelet that starts has every claim prepared again.
        let before = (hardware, began);
        let Some(again) = start(world, kind, name, scheduled, false).await else { return };
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
        let before = world.ledger.causes.calm();
        match world.node.dra.stop_pod(name).await {
            Ok(()) => break,
            Err(error) => world.ledger.failed(&format!("the end of {name} ({kind:?})"), began, before, &error),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    world.node.cluster.server.remove(&key);
    world.scheduled.lock().unwrap().leave(name);
    world.ledger.count(kind.name());
}

/// Has a pod's claim prepared, as often as it takes, and enters what its container has. Returns that, and since when;
/// `None` if the claim is new, and is not prepared because the node's door is the device plugin now.
async fn start(
    world: &World,
    kind: Kind,
    name: &str,
    scheduled: &Scheduled,
    is_new: bool,
) -> Option<(Vec<String>, Turns)> {
    let pod = PodClaims::single(name, scheduled.claim.clone(), DRIVER);
    let (began, calm) = (Instant::now(), world.ledger.causes.calm());
    while !world.has_failed() {
        let (before, turns) = (world.ledger.causes.calm(), world.turns());
        match world.node.dra.start_pod(&pod).await {
            // A reboot may have come before the runtime reads the specs.
            Ok(_) if turns.boots != world.turns().boots => continue,
            Ok(containers) => {
                let hardware = world.node.hardware(&containers["main"]);
                world.ledger.took(calm, began.elapsed());
                enter(world, kind, name, scheduled, &hardware);
                return Some((hardware, turns));
            }
            Err(_) if is_new && !world.is_dra() => return None,
            Err(error) => world.ledger.failed(&format!("{name} ({:?})", scheduled.pieces), began, before, &error),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    Some((Vec::new(), world.turns()))
}

fn enter(world: &World, kind: Kind, name: &str, scheduled: &Scheduled, hardware: &[String]) {
    let has = pieces(kind, hardware, scheduled.shares);
    let gpus = |pieces: &[Piece]| pieces.iter().map(|piece| piece.gpu()).collect::<BTreeSet<u32>>();
    if gpus(&has) != gpus(&scheduled.pieces) || has.len() != scheduled.pieces.len() {
        world.ledger.error(format!("{name} was allocated {:?} and has {hardware:?}", scheduled.pieces));
    }
    let mut running = world.running.lock().unwrap();
    running.leave(name);
    if let Err(twice) = running.enter(name, has) {
        world.ledger.error(twice);
    }
}

/// Starts pods of the device plugin one after another until the load is over.
pub async fn of_the_plugin(world: &World, number: u32, mut random: Random) {
    let mut made = 0;
    while !world.ledger.over.is_cancelled() {
        made += 1;
        let pod = Pod::single(format!("pod-{number}-{made}"), GPU, random.within(1..3));
        let (before, mut turns) = (world.ledger.causes.calm(), world.turns.subscribe());
        let mut boots = world.turns().boots;
        if admit(world, &pod, Instant::now(), before, false).await {
            let end = tokio::time::Instant::now() + random.milliseconds(5..400);
            while !world.has_failed() && tokio::time::timeout_at(end, turns.changed()).await.is_ok() {
                let now = turns.borrow_and_update().boots;
                if std::mem::replace(&mut boots, now) != now {
                    let began = Instant::now();
                    while !world.has_failed() && !admit(world, &pod, began, world.ledger.causes.calm(), true).await {
                        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    }
                }
            }
            world.ledger.count("pods of the device plugin");
        }
        world.running.lock().unwrap().leave(&pod.name);
        world.node.kubelet.remove_pod(&pod.name);
        tokio::time::sleep(random.milliseconds(5..40)).await;
    }
}

/// Admits a pod, and enters what it has. False if it is refused.
async fn admit(world: &World, pod: &Pod, began: Instant, before: Option<super::Calm>, again: bool) -> bool {
    let boots = world.turns().boots;
    match world.node.kubelet.admit(pod, None).await {
        Ok(_) if boots != world.turns().boots => false,
        Ok(admitted) => {
            let devices = &admitted.grant("main", GPU).expect("it asked for GPUs").allocation.devices;
            let piece = |id: &_| if gpu_of(id) == SHARED { Piece::Shares(SHARED, 1) } else { Piece::Whole(gpu_of(id)) };
            let pieces = devices.iter().map(|id| piece(id)).collect();
            if let Err(twice) = world.running.lock().unwrap().enter(&pod.name, pieces) {
                world.ledger.error(twice);
            }
            true
        }
        // Other pods have the rest, or DRA has.
        Err(AdmissionError::Insufficient { .. } | AdmissionError::NoHealthyDevices(_)) if !again => {
            world.ledger.count("pods of the device plugin that had to wait");
            false
        }
        Err(error) => {
            world.ledger.failed(&pod.name, began, before, &error);
            world.ledger.count("pods of the device plugin that were refused");
            false
        }
    }
}
