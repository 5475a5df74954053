//! Claims that come and go on a whole node while linkwise is killed, the kubelet restarts, and the API server goes away,
//! refuses, or loses the slices: no GPU is in two claims, no claim is lost, and no file is left. The books are the test's.
//! SOAK_SEED runs one seed instead of two, SOAK_ROUNDS another number of rounds.

use std::collections::BTreeMap;

use linkwise_api_server_box::{Answer, Fault, ResourceType};
use linkwise_kubelet_box::dra::{ClaimRef, PodClaims};
use tokio::process::Child;

use super::dra_node::{DRIVER, Node};
use crate::cluster::support::{until, within};

use crate::random::Random;

/// GPUs of the machine.
const GPUS: u32 = 8;
/// Seeds, and rounds for each, where the environment says nothing else.
const SEEDS: [u64; 2] = [1, 2];
const ROUNDS: u32 = 100;

/// What was done so often, for the test's last line.
#[derive(Debug, Default)]
struct Done {
    prepared: u32,
    unprepared: u32,
    killed: u32,
    killed_in_prepare: u32,
    given_twice: u32,
    kubelet_restarts: u32,
    outages: u32,
    refusals: u32,
    wiped: u32,
}

/// A claim whose pod runs.
struct Running {
    claim: ClaimRef,
    gpus: Vec<u32>,
    cdi: Vec<String>,
}

struct Soak {
    node: Node,
    process: Child,
    random: Random,
    running: BTreeMap<String, Running>,
    made: u32,
    away: bool,
    done: Done,
}

impl Soak {
    async fn round(&mut self) {
        match self.random.within(0..13) {
            0..5 => self.start_pod().await,
            5..8 => self.stop_pod().await,
            8 => {
                self.process.kill().await.unwrap();
                self.process = self.node.run();
                self.registered().await;
                self.done.killed += 1;
            }
            9 => {
                self.node.dra.restart().await.unwrap();
                self.registered().await;
                // Its start deletes the slices of its node.
                self.node.cluster.server.wipe_slices("n", None);
                self.done.kubelet_restarts += 1;
            }
            10 if self.away => {
                self.node.cluster.server.come_back().await;
                self.away = false;
            }
            10 => {
                self.node.cluster.server.go_away().await;
                (self.away, self.done.outages) = (true, self.done.outages + 1);
            }
            11 => self.start_pod_with_held_gpu().await,
            _ if self.random.one_in(2) => {
                let code = self.random.of(&[409, 429, 500, 503]);
                let answer = || Answer::Refusal(code, "not now", None);
                for (method, path) in [("GET", "resourceclaims"), ("PUT", "resourceslices"), ("POST", "resourceslices")]
                {
                    self.node.cluster.server.fail(Fault::of(method, path, 1, answer()));
                }
                self.done.refusals += 1;
            }
            _ => {
                self.node.cluster.server.wipe_slices("n", None);
                self.done.wiped += 1;
            }
        }
        self.check().await;
    }

    /// A claim gets GPUs that no other has, as the scheduler gives them; its pod starts once the API server answers.
    async fn start_pod(&mut self) {
        let taken: Vec<u32> = self.running.values().flat_map(|it| it.gpus.clone()).collect();
        let mut free: Vec<u32> = (0..GPUS).filter(|gpu| !taken.contains(gpu)).collect();
        let count = self.random.within(1..4).min(u32::try_from(free.len()).unwrap());
        let mut gpus = Vec::new();
        for _ in 0..count {
            gpus.push(free.remove(usize::try_from(self.random.within(0..u32::try_from(free.len()).unwrap())).unwrap()));
        }
        if gpus.is_empty() {
            return;
        }
        self.made += 1;
        let name = format!("claim-{}", self.made);
        let names: Vec<String> = gpus.iter().map(|gpu| format!("gpu-{gpu}")).collect();
        let claim = self.node.claim(&name, &names.iter().map(String::as_str).collect::<Vec<_>>());
        if self.away {
            let refused = self.node.dra.start_pod(&PodClaims::single(&name, claim.clone(), DRIVER)).await;
            assert!(refused.is_err(), "{name} was prepared, and nobody could read it");
            self.node.cluster.server.come_back().await;
            self.away = false;
        }
        let cdi = if self.random.one_in(4) {
            let moment = self.random.milliseconds(0..6);
            let killed = async {
                tokio::time::sleep(moment).await;
                self.process.kill().await.unwrap();
                self.process = self.node.run();
            };
            self.done.killed_in_prepare += 1;
            tokio::join!(self.node.start_pod(&name, &claim), killed).0
        } else {
            self.node.start_pod(&name, &claim).await
        };
        let expected: Vec<String> = gpus.iter().map(|gpu| format!("/dev/nvidia{gpu}")).collect();
        assert_eq!(cdi, expected, "{name}");
        self.running.insert(name, Running { claim, gpus, cdi });
        self.done.prepared += 1;
    }

    /// A claim that was given a GPU of another claim, by a scheduler gone wrong, is refused by itself.
    async fn start_pod_with_held_gpu(&mut self) {
        let Some(gpu) = self.running.values().find_map(|running| running.gpus.last()).copied() else { return };
        let claim = self.node.claim("second", &[&format!("gpu-{gpu}")]);
        let refused = self.node.dra.start_pod(&PodClaims::single("second", claim, DRIVER)).await;
        assert!(refused.is_err(), "gpu-{gpu} is in two claims");
        self.node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), "second"));
        self.node.dra.stop_pod("second").await.unwrap();
        self.done.given_twice += 1;
    }

    /// A pod ends; its claim may be deleted before the plugin is asked.
    async fn stop_pod(&mut self) {
        let names: Vec<String> = self.running.keys().cloned().collect();
        if names.is_empty() {
            return;
        }
        let name = &names[usize::try_from(self.random.within(0..u32::try_from(names.len()).unwrap())).unwrap()];
        self.running.remove(name);
        self.node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), name));
        within(self.node.dra.stop_pod(name)).await.unwrap();
        self.done.unprepared += 1;
    }

    async fn registered(&self) {
        let is = |state: &linkwise_kubelet_box::dra::DraState| {
            state.drivers.get(DRIVER).is_some_and(|driver| driver.connected == 1)
        };
        within(self.node.dra.wait(is)).await.unwrap();
    }

    /// A checkpoint for each claim whose pod runs and no other; each is prepared as it was, without the API server.
    async fn check(&mut self) {
        let mut wanted: Vec<String> =
            self.running.values().map(|running| format!("{}.json", running.claim.uid)).collect();
        wanted.sort();
        assert_eq!(self.node.checkpoints(), wanted);
        self.node.dra.forget_prepared();
        for (pod, running) in &self.running {
            assert_eq!(self.node.start_pod(pod, &running.claim).await, running.cdi, "{pod}: as it was");
        }
        assert!(self.process.try_wait().unwrap().is_none(), "the process has ended");
    }
}

#[tokio::test]
async fn random_failures_of_a_whole_node_lose_no_claim() {
    for seed in number("SOAK_SEED").map_or(SEEDS.to_vec(), |seed| vec![seed]) {
        let node = Node::start().await;
        let process = node.run();
        node.publishes(8).await;
        let (running, done) = (BTreeMap::new(), Done::default());
        let mut soak = Soak { node, process, random: Random::new(seed), running, made: 0, away: false, done };
        soak.registered().await;
        let specs = soak.node.specs();
        for _ in 0..number("SOAK_ROUNDS").unwrap_or(ROUNDS.into()) {
            soak.round().await;
        }
        if soak.away {
            soak.node.cluster.server.come_back().await;
        }
        while !soak.running.is_empty() {
            soak.stop_pod().await;
        }
        // Whatever happened to them: they are there again, and nothing of any claim is left.
        soak.node.publishes(8).await;
        until(|| soak.node.checkpoints().is_empty()).await;
        assert_eq!(soak.node.specs(), specs);
        assert!(soak.process.try_wait().unwrap().is_none());
        let Done {
            prepared,
            unprepared,
            killed,
            killed_in_prepare,
            given_twice,
            kubelet_restarts,
            outages,
            refusals,
            wiped,
        } = soak.done;
        let all =
            [prepared, unprepared, killed, killed_in_prepare, given_twice, kubelet_restarts, outages, refusals, wiped];
        assert!(all.iter().all(|times| *times > 0), "seed {seed}: {:?}", soak.done);
        println!("seed {seed}: {:?}", soak.done);
    }
}

#[allow(clippy::disallowed_methods, reason = "a longer soak is asked for by the environment")]
pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().filter(|text| !text.is_empty()).map(|text| text.parse().unwrap())
}
