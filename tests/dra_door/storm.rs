//! Claims that come and go while plugin, kubelet and API server fail at random: no GPU is in two claims, none is lost,
//! and nothing is left. The books of the test are its own.

use std::collections::BTreeMap;
use std::fs;

use linkwise_core::claims::ClaimName;
use linkwise_kubelet_box::dra::DraKubelet;

use super::node::{Answer, LIMIT, Node, connected, name, pod, start};

/// Numbers by xorshift (Marsaglia, 2003).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A claim of the cluster, as the test knows it.
struct Known {
    name: ClaimName,
    gpus: Vec<u64>,
    /// Whether its pod runs, and with which CDI devices.
    devices: Option<Vec<String>>,
}

impl Known {
    /// The API server has it.
    fn exists(&self, node: &Node) {
        let devices: Vec<String> = self.gpus.iter().map(|gpu| format!("gpu-{gpu}")).collect();
        let devices: Vec<(&str, &str)> = devices.iter().map(|device| ("gpus", device.as_str())).collect();
        node.claim(&self.name.uid, &devices);
    }
}

struct Storm {
    node: Node,
    kubelet: DraKubelet,
    numbers: Numbers,
    claims: BTreeMap<u64, Known>,
    made: u64,
}

impl Storm {
    async fn step(&mut self) {
        match self.numbers.below(20) {
            0..6 => self.allocate(),
            6..13 => self.start_some().await,
            13..16 => self.end_some().await,
            16 => {
                self.kubelet.stop().await;
                self.node.kill_and_start().await;
                self.kubelet.start_again().unwrap();
                connected(&self.kubelet).await;
            }
            17 => {
                self.kubelet.restart().await.unwrap();
                connected(&self.kubelet).await;
            }
            18 => {
                // The node's memory goes: CDI specs, and the boot id.
                self.kubelet.stop().await;
                self.node.kill().await;
                // A write that was begun by the plugin that was killed may still end; of a process it would not.
                while fs::remove_dir_all(&self.node.settings.cdi_folder).is_err() {
                    tokio::task::yield_now().await;
                }
                fs::create_dir_all(&self.node.settings.cdi_folder).unwrap();
                self.node.settings.boot = Some(format!("boot {}", self.numbers.below(u64::MAX)));
                self.node.start();
                self.kubelet.start_again().unwrap();
                connected(&self.kubelet).await;
                // No container runs; each pod is started again.
                let running: Vec<u64> = self.running().collect();
                for id in running {
                    let known = &self.claims[&id];
                    known.exists(&self.node);
                    let devices = start(&self.kubelet, &known.name).await;
                    assert_eq!(devices.ok(), known.devices, "{}: a reboot takes nothing from it", known.name);
                }
            }
            _ => {
                // A file of a plugin that was killed in its middle.
                fs::write(self.node.settings.checkpoints.join(".linkwise-draft"), "{").unwrap();
            }
        }
        self.check();
    }

    fn running(&self) -> impl Iterator<Item = u64> {
        self.claims.iter().filter(|(_, known)| known.devices.is_some()).map(|(id, _)| *id)
    }

    fn some(&mut self) -> Option<u64> {
        let ids: Vec<u64> = self.claims.keys().copied().collect();
        let count = u64::try_from(ids.len()).unwrap();
        (count > 0).then(|| ids[usize::try_from(self.numbers.below(count)).unwrap()])
    }

    /// A new claim with one to three GPUs. The scheduler errs at times, and allocates one twice.
    fn allocate(&mut self) {
        let mut gpus: Vec<u64> = (0..=self.numbers.below(3)).map(|_| self.numbers.below(8)).collect();
        gpus.sort_unstable();
        gpus.dedup();
        self.made += 1;
        let known = Known { name: name(&format!("c{}", self.made)), gpus, devices: None };
        known.exists(&self.node);
        self.claims.insert(self.made, known);
    }

    async fn start_some(&mut self) {
        let Some(id) = self.some() else { return };
        let fails = self.numbers.below(4) == 0;
        let known = &self.claims[&id];
        let uid = known.name.uid.clone();
        known.exists(&self.node);
        if fails {
            self.node.set(&uid, Answer::Failed);
        }
        let was = known.devices.clone();
        let taken = self.running().filter(|other| *other != id);
        let taken: Vec<u64> = taken.flat_map(|other| self.claims[&other].gpus.clone()).collect();
        let is_taken = known.gpus.iter().any(|gpu| taken.contains(gpu));
        let got = start(&self.kubelet, &known.name).await.map_err(|error| error.to_string());
        // The kubelet has it in its cache now, and unprepares it when its pod ends.
        match (&got, was) {
            (Ok(devices), Some(was)) => assert_eq!(*devices, was, "the same answer each time"),
            (Ok(_), None) => assert!(!fails && !is_taken, "{uid}: {got:?}; taken {taken:?}"),
            (Err(error), Some(_)) => panic!("{uid} was prepared: {error}"),
            (Err(error), None) => assert!(fails || is_taken, "{uid}: {error}"),
        }
        let known = self.claims.get_mut(&id).unwrap();
        known.devices = got.ok();
    }

    /// The pod ends, and its claim is deleted before or after the plugin is asked.
    async fn end_some(&mut self) {
        let Some(id) = self.some() else { return };
        let known = self.claims.remove(&id).unwrap();
        self.node.delete(&known.name.uid);
        self.kubelet.stop_pod(&pod(&known.name).pod).await.unwrap();
    }

    /// A checkpoint and a CDI spec for each pod that runs, and no other.
    fn check(&self) {
        let mut names: Vec<String> = self.running().map(|id| format!("c{id}.json")).collect();
        names.sort();
        assert_eq!(self.node.checkpoints(), names);
        let specs: Vec<String> = names.iter().map(|name| format!("linkwise.dev-claim-{name}")).collect();
        assert_eq!(self.node.claim_specs(), specs);
        let mut devices: Vec<&String> = self.claims.values().flat_map(|known| known.devices.iter().flatten()).collect();
        let all = devices.len();
        devices.sort();
        devices.dedup();
        assert_eq!(devices.len(), all, "a device in two claims");
    }
}

#[tokio::test]
async fn random_failures_lose_no_claim_and_share_no_gpu() {
    for seed in 1..=4 {
        let mut node = Node::new().with_nics();
        node.start();
        let kubelet = node.kubelet().await;
        let numbers = Numbers(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
        let mut storm = Storm { node, kubelet, numbers, claims: BTreeMap::new(), made: 0 };
        let steps = async {
            for _ in 0..150 {
                storm.step().await;
            }
            while !storm.claims.is_empty() {
                storm.end_some().await;
            }
        };
        tokio::time::timeout(LIMIT, steps).await.unwrap_or_else(|_| panic!("seed {seed} hangs"));
        assert_eq!((storm.node.checkpoints(), storm.node.claim_specs()), (vec![], vec![]), "seed {seed}");
    }
}
