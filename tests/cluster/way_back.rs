//! Switches a node from every setting (tests/node_settings) to every other and back, by reinstallation and by surge,
//! with and without pods and claims that outlive the change. Each process gets the folders, variables and token that
//! the chart gives its pod. It becomes ready, serves the free GPUs, gives none twice, and serves all once the last
//! holder has ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::sync::Arc;

use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::Pod;
use linkwise_kubelet_box::dra::ClaimRef;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, LocalSet};

use crate::cluster::support::{until, within};
use crate::dra::cluster::node::Node;
use crate::node_settings::{DRA, PLUGIN, SETTINGS, Setting};
use crate::run::node::{Answer, Process, get, seen};

const GPU: &str = "nvidia.com/gpu";
const GPUS: u32 = 8;
/// The most nodes that are tested at a time.
const MAX_CONCURRENT: usize = 6;

/// The way in which the next pod replaces the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The previous pod ends before the next starts.
    Reinstalled,
    /// The next pod takes over while the previous one runs.
    Surged,
}

/// Waits until the answer of a process's /readyz is accepted; returns its body.
async fn readyz(process: &Process, accepts: impl Fn(&Answer) -> bool) -> String {
    let up = process.logged(|line| line["message"] == "linkwise is up").await;
    let address = up["metrics"].as_str().unwrap().parse().unwrap();
    seen(async || get(address, "/readyz").await, accepts).await.body
}

async fn ready(process: &Process) -> String {
    readyz(process, |answer| answer.status == 200).await
}

/// Waits until /readyz answers 503 with these texts in its body.
async fn wait_unready(process: &Process, parts: &[&str]) {
    readyz(process, |answer| answer.status == 503 && parts.iter().all(|part| answer.body.contains(part))).await;
}

async fn end(mut process: Process) {
    process.signal("TERM");
    let (status, _) = process.ended().await;
    assert!(status.success(), "{status}");
}

/// A node that is switched between settings, with the GPUs and claims of its pods.
struct SwitchedNode {
    node: Node,
    running: Option<Process>,
    setting: Setting,
    starts: u32,
    /// The GPUs of running pods, and the claims of those that have one, by pod.
    gpus_by_pod: BTreeMap<String, BTreeSet<u32>>,
    claims: BTreeMap<String, ClaimRef>,
}

/// The GPU of an id or a name: `GPU-...0003::1`, `gpu-3`.
fn gpu_of(name: &str) -> u32 {
    name.split("::").next().unwrap().rsplit('-').next().unwrap().parse().unwrap()
}

impl SwitchedNode {
    async fn start(setting: Setting) -> Self {
        let mut this = Self::new(setting).await;
        this.running = Some(this.spawn(setting));
        this
    }

    /// A node on which no linkwise runs yet.
    async fn new(setting: Setting) -> Self {
        let node = Node::start().await;
        // A folder below a file can be neither made nor written, not even by root.
        fs::write(node.at("not-mounted"), "").unwrap();
        fs::create_dir(node.at("no-token")).unwrap();
        let (gpus_by_pod, claims) = Default::default();
        Self { node, running: None, setting, starts: 0, gpus_by_pod, claims }
    }

    /// Starts the process of a pod with this setting.
    fn spawn(&mut self, setting: Setting) -> Process {
        self.starts += 1;
        let node = &self.node;
        let mut command = node.program();
        let missing = node.at("not-mounted");
        let place = |given: bool, name: &str| if given { node.at(name) } else { missing.join(name) };
        command.env("LINKWISE_CDI_DIR", place(setting.cdi, "cdi"));
        command.env("LINKWISE_DRA_PLUGINS_DIR", place(setting.sockets, "plugins"));
        command.env("LINKWISE_DRA_REGISTRY_DIR", place(setting.sockets, "reg"));
        command.env_remove("NODE_NAME").env_remove("CONFIG_FILE");
        if setting.node_name {
            command.env("NODE_NAME", "n");
        }
        if !setting.token {
            command.env("LINKWISE_SERVICE_ACCOUNT_DIR", node.at("no-token"));
        }
        if let Some(file) = setting.file {
            let path = node.at(&format!("config-{}.yaml", setting.name));
            fs::write(&path, file).unwrap();
            command.env("CONFIG_FILE", path);
        }
        command.envs(setting.env.iter().copied()).env("LINKWISE_POD_UID", format!("pod-{}", self.starts));
        command.env("LINKWISE_ADMIN_SOCKET", node.at(&format!("admin-{}.sock", self.starts)));
        command.env("LINKWISE_LOG_FORMAT", "json").args(["--claims-listed-ms", "300"]);
        Process::of(command)
    }

    /// Switches the node to a setting.
    async fn switch(&mut self, setting: Setting, change: Change) {
        let before = self.running.take().unwrap();
        let next = match change {
            Change::Reinstalled => {
                end(before).await;
                self.spawn(setting)
            }
            Change::Surged => {
                let next = self.spawn(setting);
                ready(&next).await;
                end(before).await;
                next
            }
        };
        self.running = Some(next);
        self.setting = setting;
        if !setting.sockets || !setting.dra && self.claims.is_empty() {
            // The kubelet deletes a driver's slices 30 s after the driver has gone.
            self.node.cluster.server.wipe_slices("n", None);
        }
    }

    fn running(&self) -> &Process {
        self.running.as_ref().unwrap()
    }

    fn assert_alive(&mut self) {
        let ended = self.running.as_mut().unwrap().child.try_wait().unwrap();
        assert!(ended.is_none(), "linkwise ended: {ended:?}");
    }

    /// The GPUs that the kubelet may give through the device plugin, and those that the scheduler may give through DRA.
    fn offered(&self) -> (BTreeSet<u32>, BTreeSet<u32>) {
        let by_plugin = self.node.healthy(GPU).iter().map(|id| gpu_of(id)).collect();
        (by_plugin, self.node.untainted().iter().map(|name| gpu_of(name)).collect())
    }

    /// Waits until the process is ready and offers the free GPUs through the door of its setting. Asserts meanwhile
    /// that no door offers a GPU that is held through the other.
    async fn wait_serving(&mut self) {
        ready(self.running()).await;
        let held: BTreeSet<u32> = self.gpus_by_pod.values().flatten().copied().collect();
        let claimed: BTreeSet<u32> = self.claims.keys().flat_map(|pod| self.gpus_by_pod[pod].clone()).collect();
        let free = (0..GPUS).filter(|gpu| !held.contains(gpu));
        let (through_dra, through_plugin): (BTreeSet<u32>, BTreeSet<u32>) = free.partition(|_| self.setting.dra);
        let serves = || {
            let (by_plugin, by_dra) = self.offered();
            assert!(by_plugin.is_disjoint(&claimed), "the plugin offers a GPU of a claim: {by_plugin:?}");
            let of_plugin: BTreeSet<u32> = held.difference(&claimed).copied().collect();
            assert!(by_dra.is_disjoint(&of_plugin), "DRA offers a GPU of the plugin's pods: {by_dra:?}");
            // Count all slots, because the previous list may have the same GPUs under other ids.
            let ids = self.node.healthy(GPU).into_iter().filter(|id| through_plugin.contains(&gpu_of(id))).count();
            ids == through_plugin.len() * self.setting.slots && by_dra.is_superset(&through_dra)
        };
        until(serves).await;
        if self.gpus_by_pod.is_empty() {
            until(|| self.offered() == (through_plugin.clone(), through_dra.clone())).await;
        }
        self.assert_alive();
    }

    /// Admits a pod, which gets a free GPU through the door of the setting. `keep` leaves the pod running.
    async fn admit(&mut self, keep: bool) {
        let held: BTreeSet<u32> = self.gpus_by_pod.values().flatten().copied().collect();
        let free: BTreeSet<u32> = (0..GPUS).filter(|gpu| !held.contains(gpu)).collect();
        if !self.setting.dra && !free.is_empty() {
            let pod = format!("plugin-{}", self.starts);
            let admitted = within(self.node.kubelet.admit(&Pod::single(&pod, GPU, 1), None)).await.unwrap();
            let ids = &admitted.grant(admitted.containers.keys().next().unwrap(), GPU).unwrap().allocation.devices;
            let got: BTreeSet<u32> = ids.iter().map(|id| gpu_of(id)).collect();
            // With several slots a GPU is shared: the pod may get a free slot of a held GPU.
            assert!(self.setting.slots > 1 || got.is_subset(&free), "{pod} gets {got:?}, held are {held:?}");
            if keep {
                self.gpus_by_pod.insert(pod, got);
            } else {
                self.node.kubelet.remove_pod(&pod);
            }
        }
        if let Some(gpu) = free.first().filter(|_| self.setting.dra) {
            let pod = format!("claim-{}", self.starts);
            self.node.wait_registered(1).await;
            let claim = self.node.claim(&pod, &[&format!("gpu-{gpu}")]);
            self.node.start_pod(&pod, &claim).await;
            self.claims.insert(pod.clone(), claim);
            self.gpus_by_pod.insert(pod.clone(), [*gpu].into());
            if !keep {
                self.stop_claim(&pod).await;
            }
        }
    }

    /// Ends a pod with a claim. Without a driver the kubelet cannot unprepare the claim, so that the pod stays listed
    /// until an operator deletes it by force.
    async fn stop_claim(&mut self, pod: &str) {
        self.node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), pod));
        if self.setting.sockets {
            within(async {
                while self.node.dra.stop_pod(pod).await.is_err() {
                    self.node.wait_registered(1).await;
                }
            })
            .await;
        } else {
            assert!(self.node.dra.stop_pod(pod).await.is_err(), "{pod}: unprepared without a driver");
            self.node.dra.delete_by_force(pod);
        }
        self.claims.remove(pod);
        self.gpus_by_pod.remove(pod);
    }

    async fn end_holders(&mut self) {
        for pod in self.gpus_by_pod.keys().cloned().collect::<Vec<_>>() {
            if self.claims.contains_key(&pod) {
                self.stop_claim(&pod).await;
            } else {
                assert!(self.node.kubelet.remove_pod(&pod));
                self.gpus_by_pod.remove(&pod);
            }
        }
    }
}

/// Switches a node to another setting under a pod or claim, and back. A reinstalled node goes back without holders.
async fn forth_and_back(from: Setting, to: Setting, change: Change) {
    let mut node = SwitchedNode::start(from).await;
    node.wait_serving().await;
    for (setting, keep) in [(to, true), (from, change == Change::Surged)] {
        node.admit(keep).await;
        node.switch(setting, change).await;
        node.wait_serving().await;
        node.admit(false).await;
        node.end_holders().await;
        node.wait_serving().await;
        until(|| node.node.checkpoints().is_empty()).await;
    }
    node.assert_alive();
    assert_eq!(node.node.kubelet.violations(), []);
}

/// Tests every pair of settings, some nodes at a time.
async fn all_pairs(change: Change) {
    let places = Arc::new(Semaphore::new(MAX_CONCURRENT));
    let (here, mut pairs, mut names) = (LocalSet::new(), JoinSet::new(), HashMap::new());
    for (at, from) in SETTINGS.into_iter().enumerate() {
        for to in SETTINGS.into_iter().skip(at + 1) {
            // The order alternates, so that reinstallations leave each setting both with and without holders.
            let (from, to) = if pairs.len() % 2 == 0 { (from, to) } else { (to, from) };
            let places = Arc::clone(&places);
            let pair = async move {
                let _place = places.acquire_owned().await.unwrap();
                forth_and_back(from, to, change).await;
            };
            let pair = pairs.spawn_local_on(pair, &here).id();
            names.insert(pair, format!("{} to {} and back", from.name, to.name));
        }
    }
    let mut failed = Vec::new();
    while let Some(ended) = here.run_until(pairs.join_next()).await {
        failed.extend(ended.err().map(|error| &names[&error.id()]));
    }
    assert!(failed.is_empty(), "{change:?}: {failed:#?}");
}

#[tokio::test]
async fn every_setting_follows_every_other() {
    all_pairs(Change::Reinstalled).await;
}

#[tokio::test]
async fn settings_take_over_from_each_other_under_pods() {
    all_pairs(Change::Surged).await;
}

/// Readiness and log name the claims for which the new setting waits, until the last holder has ended.
#[tokio::test]
async fn claims_left_by_the_previous_setting_are_named() {
    let mut node = SwitchedNode::start(DRA).await;
    node.wait_serving().await;
    node.admit(true).await;
    node.switch(PLUGIN, Change::Reinstalled).await;
    let names = |body: &str| body.contains("the holders to end; GPUs: 1, held by the claim default/claim-1");
    readyz(node.running(), |answer| answer.status == 200 && names(&answer.body)).await;
    node.running().said("GPUs are held through the other door").await;
    node.running().said("without DRA's folders").await;
    node.end_holders().await;
    node.wait_serving().await;
    readyz(node.running(), |answer| answer.status == 200 && answer.body.trim_end().ends_with("ready")).await;
}

/// The configuration names GPUs for DRA, and the pod lacks what DRA needs.
#[tokio::test]
async fn gpus_stay_with_plugin_if_dra_lacks_requirements() {
    let by_file = |gpus: &str| format!("version: v1\nlinkwise: {{dra: {{gpus: {gpus}}}}}\n");
    let all: &'static str = by_file("all").leak();
    for setting in [
        Setting { name: "by-variable", env: &[("LINKWISE_DRA_GPUS", "all")], ..PLUGIN },
        Setting { name: "by-file", file: Some(all), ..PLUGIN },
    ] {
        let mut node = SwitchedNode::start(setting).await;
        let lacks = ["GPUs stay with the device plugin", "set NODE_NAME", "token", "DRA needs CDI"];
        wait_unready(node.running(), &lacks).await;
        until(|| node.node.healthy(GPU).len() == 8).await;
        node.admit(false).await;
        node.assert_alive();
        if setting.file.is_some() {
            let config = node.node.at("config-by-file.yaml");
            fs::write(&config, by_file("none")).unwrap();
            ready(node.running()).await;
            fs::write(&config, by_file("all")).unwrap();
            wait_unready(node.running(), &lacks).await;
            node.assert_alive();
        }
        // In a pod with all that DRA needs, DRA serves the GPUs.
        node.switch(DRA, Change::Reinstalled).await;
        node.wait_serving().await;
    }
}

/// Each setting serves despite broken files and files of a newer linkwise.
#[tokio::test]
async fn each_setting_serves_despite_broken_files() {
    let newer = r#"{"version": 9, "dra": ["GPU-00000001-0000-4000-8000-000000000003"]}"#;
    // Without a text, a folder takes the file's place.
    let records = [Some(newer), Some("{"), None];
    let checkpoints =
        [("claims/a.json", Some(r#"{"version": 9}"#)), ("claims/b.json", Some("{")), ("claims/c.json", None)];
    for (setting, record) in SETTINGS.into_iter().zip(records.into_iter().cycle()) {
        let mut node = SwitchedNode::new(setting).await;
        let at = |name: &str| node.node.at("k/linkwise").join(name);
        fs::create_dir_all(at("claims")).unwrap();
        for (name, text) in checkpoints.into_iter().chain([("linkwise_health.json", record)]) {
            text.map_or_else(|| fs::create_dir(at(name)), |text| fs::write(at(name), text)).unwrap();
        }
        node.running = Some(node.spawn(setting));
        node.wait_serving().await;
        node.admit(false).await;
    }
}

/// DRA serves only once the file that is in the place of the checkpoints' folder is gone.
#[tokio::test]
async fn file_in_place_of_the_checkpoints_stops_dra_alone() {
    let mut node = SwitchedNode::new(DRA).await;
    let claims = node.node.at("k/linkwise/claims");
    fs::create_dir_all(claims.parent().unwrap()).unwrap();
    fs::write(&claims, "").unwrap();
    node.running = Some(node.spawn(DRA));
    wait_unready(node.running(), &["DRA plugin", "cannot keep checkpoints of claims"]).await;
    node.assert_alive();
    fs::remove_file(&claims).unwrap();
    node.wait_serving().await;
    node.admit(false).await;
}
