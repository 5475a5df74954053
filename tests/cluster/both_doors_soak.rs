//! A whole node that changes its door: pods of the device plugin and pods with claims come and go while the configuration
//! changes the door, linkwise is killed, also in the middle of that and of a Prepare, the kubelet restarts,
//! and the API server goes away. No GPU is with two pods, none is lost, and no file is left. The books are the test's.
//! SOAK_SEED runs one seed instead of two, SOAK_ROUNDS another number of rounds.

use std::collections::{BTreeMap, BTreeSet};

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use linkwise_kubelet_box::{Pod, Restart};
use tokio::process::{Child, Command};

use super::dra_node::{DRIVER, Node};
use super::dra_soak::number;
use crate::cluster::support::{until, within};
use crate::random::Random;

const GPU: &str = "nvidia.com/gpu";
const GPUS: u32 = 8;
const SEEDS: [u64; 2] = [1, 2];
const ROUNDS: u32 = 60;

/// What was done so often, for the test's last line.
#[derive(Debug, Default)]
struct Done {
    plugin_pods: u32,
    plugin_refusals: u32,
    claim_pods: u32,
    claim_refusals: u32,
    moves: u32,
    killed: u32,
    killed_in_move: u32,
    killed_in_prepare: u32,
    kubelet_restarts: u32,
    outages: u32,
}

struct Soak {
    node: Node,
    process: Child,
    random: Random,
    /// The GPUs of each pod that runs.
    books: BTreeMap<String, BTreeSet<u32>>,
    /// The claims of those that have one, and of those that could not be prepared.
    claims: BTreeMap<String, ClaimRef>,
    made: u32,
    is_dra: bool,
    away: bool,
    done: Done,
}

/// The GPU of a name that ends with its number: an id of the device plugin, a device node.
fn gpu_of(name: &str) -> u32 {
    name.trim_start_matches("/dev/nvidia").rsplit('-').next().unwrap().parse().unwrap()
}

fn command(node: &Node) -> Command {
    let mut command = node.program();
    command.args(["--claims-listed-ms", "300"]);
    command
}

impl Soak {
    async fn start(seed: u64) -> Self {
        let node = Node::start().await;
        let process = command(&node).spawn().unwrap();
        let soak = Self {
            node,
            process,
            random: Random::new(seed),
            books: BTreeMap::new(),
            claims: BTreeMap::new(),
            made: 0,
            is_dra: true,
            away: false,
            done: Done::default(),
        };
        soak.node.publishes(8).await;
        soak.is_registered().await;
        soak
    }

    async fn round(&mut self) {
        match self.random.within(0..18) {
            0..4 => self.start_plugin_pod().await,
            4..8 => self.start_claim_pod().await,
            8..11 => self.stop_pod().await,
            11..14 => {
                self.change_door();
                if self.random.one_in(2) {
                    tokio::time::sleep(self.random.milliseconds(0..1500)).await;
                    self.kill().await;
                    self.done.killed_in_move += 1;
                }
            }
            14 => self.settle().await,
            15 => {
                self.kill().await;
                self.done.killed += 1;
            }
            16 => {
                self.node.kubelet.restart(Restart::Kubelet).await.unwrap();
                self.node.dra.restart().await.unwrap();
                self.node.cluster.server.wipe_slices("n", None);
                self.done.kubelet_restarts += 1;
            }
            _ if self.away => self.come_back().await,
            _ => {
                self.node.cluster.server.go_away().await;
                (self.away, self.done.outages) = (true, self.done.outages + 1);
            }
        }
        assert!(self.process.try_wait().unwrap().is_none(), "the process has ended");
    }

    /// GPUs go through the other door, from now on.
    fn change_door(&mut self) {
        self.is_dra = !self.is_dra;
        self.node.configure(if self.is_dra { "all" } else { "none" });
        self.done.moves += 1;
    }

    /// Returns true if the kubelet finds the DRA plugin: with the device plugin's door, only while claims are left.
    fn has_dra_plugin(&self) -> bool {
        self.is_dra || !self.node.checkpoints().is_empty()
    }

    async fn kill(&mut self) {
        self.process.kill().await.unwrap();
        self.process = command(&self.node).spawn().unwrap();
    }

    async fn come_back(&mut self) {
        self.node.cluster.server.come_back().await;
        self.away = false;
    }

    async fn is_registered(&self) {
        let is = |state: &linkwise_kubelet_box::dra::DraState| {
            state.drivers.get(DRIVER).is_some_and(|driver| driver.connected == 1)
        };
        within(self.node.dra.wait(is)).await.unwrap();
    }

    /// A pod has these GPUs from now on, and no other pod has one of them.
    fn enter(&mut self, pod: &str, gpus: BTreeSet<u32>) {
        for (other, held) in &self.books {
            assert!(held.is_disjoint(&gpus), "{pod} gets {gpus:?}, {other} has {held:?}");
        }
        self.books.insert(pod.to_owned(), gpus);
    }

    fn next(&mut self, kind: &str) -> String {
        self.made += 1;
        format!("{kind}-{}", self.made)
    }

    /// The kubelet admits a pod with what it believes to be free, or refuses it.
    async fn start_plugin_pod(&mut self) {
        let (pod, count) = (self.next("plugin"), self.random.within(1..3));
        match within(self.node.kubelet.admit(&Pod::single(&pod, GPU, count), None)).await {
            Ok(admitted) => {
                let ids = &admitted.grant(admitted.containers.keys().next().unwrap(), GPU).unwrap().allocation.devices;
                self.enter(&pod, ids.iter().map(|id| gpu_of(id)).collect());
                self.done.plugin_pods += 1;
            }
            Err(_) => {
                self.node.kubelet.remove_pod(&pod);
                self.done.plugin_refusals += 1;
            }
        }
    }

    /// The scheduler gives a claim one or two GPUs of the slices as they are, in one of four cases any GPU: it read them
    /// some moments ago. The pod starts, or its claim is refused and it is deleted.
    async fn start_claim_pod(&mut self) {
        if !self.has_dra_plugin() {
            return;
        }
        let taken: BTreeSet<u32> =
            self.claims.keys().filter_map(|pod| self.books.get(pod)).flatten().copied().collect();
        let listed: Vec<u32> = if self.random.one_in(4) {
            (0..GPUS).collect()
        } else {
            self.node.untainted().iter().map(|device| gpu_of(device)).collect()
        };
        let mut free: Vec<u32> = listed.into_iter().filter(|gpu| !taken.contains(gpu)).collect();
        let mut gpus = BTreeSet::new();
        for _ in 0..self.random.within(1..3).min(u32::try_from(free.len()).unwrap()) {
            let at = self.random.within(0..u32::try_from(free.len()).unwrap());
            gpus.insert(free.swap_remove(usize::try_from(at).unwrap()));
        }
        if gpus.is_empty() {
            return;
        }
        let pod = self.next("claim");
        let devices: Vec<String> = gpus.iter().map(|gpu| format!("gpu-{gpu}")).collect();
        let claim = self.node.claim(&pod, &devices.iter().map(String::as_str).collect::<Vec<_>>());
        self.claims.insert(pod.clone(), claim.clone());
        let asked = PodClaims::single(&pod, claim, DRIVER);
        let mut started = if self.random.one_in(4) {
            let moment = self.random.milliseconds(0..6);
            self.done.killed_in_prepare += 1;
            let killed = async {
                tokio::time::sleep(moment).await;
                self.process.kill().await.unwrap();
                self.process = command(&self.node).spawn().unwrap();
            };
            tokio::join!(self.node.dra.start_pod(&asked), killed).0
        } else {
            self.node.dra.start_pod(&asked).await
        };
        if started.is_err() && !self.away {
            // The kubelet tries again.
            self.is_registered().await;
            started = self.node.dra.start_pod(&asked).await;
        }
        match started {
            Ok(containers) => {
                let got: BTreeSet<u32> =
                    self.node.hardware(&containers["main"]).iter().map(|node| gpu_of(node)).collect();
                assert_eq!(got, gpus, "{pod}");
                self.enter(&pod, got);
                self.done.claim_pods += 1;
            }
            Err(_) => {
                self.done.claim_refusals += 1;
                self.stop(&pod).await;
            }
        }
    }

    async fn stop_pod(&mut self) {
        let pods: Vec<String> = self.books.keys().cloned().collect();
        if !pods.is_empty() {
            let at = self.random.within(0..u32::try_from(pods.len()).unwrap());
            self.stop(&pods[usize::try_from(at).unwrap()]).await;
        }
    }

    /// A pod ends; the kubelet unprepares its claim as soon as the driver is there.
    async fn stop(&mut self, pod: &str) {
        self.books.remove(pod);
        if self.claims.remove(pod).is_none() {
            assert!(self.node.kubelet.remove_pod(pod));
            return;
        }
        self.node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), pod));
        within(async {
            while self.node.dra.stop_pod(pod).await.is_err() {
                self.is_registered().await;
            }
        })
        .await;
    }

    /// Waits until each GPU that no pod has is offered through the door that the configuration names, and no other is.
    async fn settle(&mut self) {
        if self.away {
            self.come_back().await;
        }
        if !self.has_dra_plugin() {
            // As the kubelet does 30 s after a driver has gone.
            self.node.cluster.server.wipe_slices("n", None);
        }
        let held: BTreeSet<u32> = self.books.values().flatten().copied().collect();
        let by_dra: BTreeSet<u32> = self
            .books
            .iter()
            .filter(|(pod, _)| self.claims.contains_key(*pod))
            .flat_map(|(_, gpus)| gpus.clone())
            .collect();
        until(|| {
            let published: BTreeSet<u32> = self.node.untainted().iter().map(|device| gpu_of(device)).collect();
            let healthy: BTreeSet<u32> = self.node.healthy(GPU).iter().map(|id| gpu_of(id)).collect();
            let are_free = |gpus: &BTreeSet<u32>| gpus.difference(&held).copied().collect::<BTreeSet<u32>>();
            let wanted = |is_dra: bool| (0..GPUS).filter(|_| self.is_dra == is_dra).collect::<BTreeSet<u32>>();
            // A GPU that a claim has stays in the slices until it ends.
            are_free(&published) == are_free(&wanted(true))
                && are_free(&healthy) == are_free(&wanted(false))
                && published.is_disjoint(&healthy)
                && by_dra.is_disjoint(&healthy)
        })
        .await;
    }
}

#[tokio::test]
async fn no_gpu_is_twice_or_lost_with_both_doors_open() {
    for seed in number("SOAK_SEED").map_or(SEEDS.to_vec(), |seed| vec![seed]) {
        let mut soak = Soak::start(seed).await;
        let specs = soak.node.specs();
        for _ in 0..number("SOAK_ROUNDS").unwrap_or(ROUNDS.into()) {
            soak.round().await;
        }
        while !soak.books.is_empty() {
            soak.stop_pod().await;
        }
        soak.settle().await;
        until(|| soak.node.checkpoints().is_empty()).await;
        assert_eq!(soak.node.specs(), specs);
        assert_eq!(soak.node.kubelet.violations(), []);
        assert!(soak.process.try_wait().unwrap().is_none());
        println!("seed {seed}: {:?}", soak.done);
    }
}
