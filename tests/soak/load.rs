//! Pods that come and go, whatever happens. Judges each admission with books of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use linkwise_kubelet_box::{AdmissionError, Admitted, KubeletBox, Pod};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::ledger::{Ledger, Outcome};
use crate::node::GPU;
use crate::random::Random;
use crate::world::{Disturbance, World};

/// Pods that come and go at a time.
const WORKERS: u32 = 3;
/// So long after a refused order the kubelet has to know why.
const NEWS: Duration = Duration::from_secs(5);
/// What resources of MIG devices are called.
const MIG: &str = "nvidia.com/mig-";

/// The pods.
pub struct Load {
    workers: JoinSet<()>,
    over: CancellationToken,
}

/// Who has what, by resource and device: kept beside the kubelet's books.
type Held = Arc<Mutex<BTreeMap<(String, String), String>>>;

#[derive(Clone)]
struct Worker {
    kubelet: Arc<KubeletBox>,
    disturbance: Disturbance,
    sharing: Disturbance,
    ledger: Ledger,
    held: Held,
}

impl Load {
    pub fn start(world: &World, seed: u64) -> Self {
        let worker = Worker {
            kubelet: Arc::clone(&world.kubelet),
            disturbance: world.disturbance.clone(),
            sharing: world.sharing.clone(),
            ledger: world.ledger.clone(),
            held: Held::default(),
        };
        let (mut workers, over) = (JoinSet::new(), CancellationToken::new());
        for number in 0..WORKERS {
            let (worker, over) = (worker.clone(), over.clone());
            let random = Random::new(seed ^ (u64::from(number + 1) << 32));
            workers.spawn(async move { worker.work(number, random, &over).await });
        }
        Self { workers, over }
    }

    pub async fn end(mut self) {
        self.over.cancel();
        while let Some(worker) = self.workers.join_next().await {
            worker.unwrap();
        }
    }
}

impl Worker {
    async fn work(&self, number: u32, mut random: Random, over: &CancellationToken) {
        let mut round = 0;
        while !over.is_cancelled() {
            round += 1;
            let name = format!("pod-{number}-{round}");
            let pod = self.pod(&name, &mut random);
            self.admit(&pod).await;
            tokio::time::sleep(random.milliseconds(0..100)).await;
            // First here: the next one who gets a device may be asked for it at once.
            self.held.lock().unwrap().retain(|_, holder| *holder != name);
            self.kubelet.remove_pod(&name);
            tokio::time::sleep(random.milliseconds(1..30)).await;
        }
    }

    /// One container or two, of GPUs, or of MIG devices while there are any.
    fn pod(&self, name: &str, random: &mut Random) -> Pod {
        let state = self.kubelet.state();
        let mig = state.resources.iter().find(|(name, state)| name.starts_with(MIG) && !state.healthy.is_empty());
        match mig {
            Some((resource, _)) if random.one_in(3) => Pod::single(name, resource, 1),
            _ if random.one_in(4) => {
                let pod = Pod::new(name).with_container("first", [(GPU, random.within(1..3))]);
                pod.with_container("second", [(GPU, random.within(1..3))])
            }
            _ => Pod::single(name, GPU, random.within(1..5)),
        }
    }

    async fn admit(&self, pod: &Pod) {
        let (before, sharing) = (self.moment(pod), self.sharing.calm());
        let begin = Instant::now();
        let result = self.kubelet.admit(pod, None).await;
        let took = begin.elapsed();
        let disturbed = before.is_none() || before != self.moment(pod);
        let outcome = match result {
            Ok(admitted) => self.answered(pod, &admitted),
            Err(_) if disturbed => Outcome::Interrupted,
            Err(AdmissionError::NoHealthyDevices { .. }) if sharing.is_none() || sharing != self.sharing.calm() => {
                Outcome::Full
            }
            Err(error) => self.judge(pod, error).await,
        };
        self.ledger.admission(outcome, (!disturbed).then_some(took));
    }

    /// What has to stay as it is for an admission not to be disturbed; `None` where it is disturbed now.
    fn moment(&self, pod: &Pod) -> Option<(u64, Vec<u64>)> {
        let calm = self.disturbance.calm()?;
        let state = self.kubelet.state();
        let names = pod.containers.iter().flat_map(|container| container.requests.keys());
        let registrations = names.map(|name| {
            let resource = &state.resources[name];
            resource.connected.then_some(resource.registrations)
        });
        Some((calm, registrations.collect::<Option<Vec<u64>>>()?))
    }

    fn answered(&self, pod: &Pod, admitted: &Admitted) -> Outcome {
        let mut wrong = Vec::new();
        for container in &pod.containers {
            for (resource, count) in &container.requests {
                let Some(grant) = admitted.grant(&container.name, resource) else {
                    wrong.push(format!("{}: nothing of {resource}", pod.name));
                    continue;
                };
                let allocation = &grant.allocation;
                if u32::try_from(allocation.devices.len()) != Ok(*count) {
                    wrong.push(format!("{}: {count} of {resource} asked for, got {:?}", pod.name, allocation.devices));
                }
                let uuid = |id: &String| id.split("::").next().unwrap_or_default().to_owned();
                let expected: BTreeSet<String> = allocation.devices.iter().map(uuid).collect();
                let visible = allocation.envs.get("NVIDIA_VISIBLE_DEVICES").cloned().unwrap_or_default();
                if visible.split(',').map(str::to_owned).collect::<BTreeSet<_>>() != expected {
                    wrong.push(format!("{}: holds {:?} and sees {visible}", pod.name, allocation.devices));
                }
                for id in &allocation.devices {
                    let key = (resource.clone(), id.clone());
                    if let Some(other) = self.held.lock().unwrap().insert(key, pod.name.clone()) {
                        wrong.push(format!("{id} of {resource} is {other}'s and was handed out to {}", pod.name));
                    }
                }
            }
        }
        let outcome = if wrong.is_empty() { Outcome::Answered } else { Outcome::Failed };
        wrong.into_iter().for_each(|wrong| self.ledger.error(wrong));
        outcome
    }

    /// An admission that failed though nobody disturbed it.
    async fn judge(&self, pod: &Pod, error: AdmissionError) -> Outcome {
        match &error {
            // The kubelet's own books: it asked nobody. That devices do not stay ill is `World::whole`'s to see.
            AdmissionError::Insufficient { .. } => return Outcome::Full,
            AdmissionError::Unregistered(place) | AdmissionError::NoHealthyDevices(place)
                if place.resource.starts_with(MIG) =>
            {
                return Outcome::Full;
            }
            // The device that the refusal names failed after the kubelet's last list: then the next list says so.
            AdmissionError::Allocate { place, devices, .. } => {
                let words = error.status().map(|status| status.message().to_owned()).unwrap_or_default();
                let named: Vec<&String> = devices.iter().filter(|id| words.contains(&format!("'{id}'"))).collect();
                let ill = |id: &String, state: &linkwise_kubelet_box::State| {
                    !state.resources[&place.resource].healthy.contains(id)
                };
                let news = self.kubelet.wait(|state| named.iter().any(|id| ill(id, state)));
                if matches!(timeout(NEWS, news).await, Ok(Ok(_))) {
                    return Outcome::Overtaken;
                }
            }
            _ => {}
        }
        let status = error.status().map(|status| status.to_string()).unwrap_or_default();
        self.ledger.error(format!("{} was not admitted: {error} {status}", pod.name));
        Outcome::Failed
    }
}
