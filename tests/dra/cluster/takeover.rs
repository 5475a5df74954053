//! Takeovers while claims are prepared and unprepared, some with MIG devices that are made for them: the processes act
//! as pods of a DaemonSet with a surge. No call of the kubelet fails, unless a test kills a process.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fake_nvml::Control;
use linkwise_api_server_box::ResourceType;
use linkwise_kubelet_box::Connections;
use linkwise_kubelet_box::dra::PodClaims;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::mig;
use super::node::{DRIVER, Node};
use crate::run::node::{DGX1_V100, KUBELETS, Process, get, put_on_bus, until};
use crate::upgrade::fleet::wait_stage;

/// The takeovers of a usual run, and of the long test.
const FEW: usize = 3;
const MANY: usize = 100;

/// The interval at which the kubelet's DRA manager looks for plugins.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(1);

/// A node on which claims come and go.
pub struct World {
    pub node: Arc<Node>,
    pub command: fn(&Node) -> Command,
    /// Sets of devices. Each claim has one of them.
    pub sets: Vec<Vec<&'static str>>,
    /// True if failed calls are retried, because processes are killed.
    pub is_patient: bool,
    /// The number of claims that came and went.
    pub claims: Arc<AtomicUsize>,
}

/// The number of claims that came and went, and the duration of the longest call.
#[derive(Debug, Default)]
pub struct Tally {
    claims: usize,
    worst: Duration,
}

impl World {
    /// A node whose claims have whole GPUs.
    pub async fn of_gpus(connections: Connections, reconcile: Duration) -> Self {
        let sets = vec![vec!["gpu-4"], vec!["gpu-5", "gpu-6"], vec!["gpu-7"]];
        Self::of(connections, reconcile, Node::program, sets).await
    }

    async fn of(
        connections: Connections,
        reconcile: Duration,
        command: fn(&Node) -> Command,
        sets: Vec<Vec<&'static str>>,
    ) -> Self {
        let node = Node::start_with(|options| options.connections = connections, reconcile).await;
        Self { node: Arc::new(node), command, sets, is_patient: false, claims: Arc::default() }
    }

    /// A node whose claims have a whole GPU, or MIG devices that are made on another.
    pub async fn of_mig(connections: Connections, reconcile: Duration) -> Self {
        let sets = vec![vec!["gpu-1"], vec![mig::DEVICE], vec![mig::OTHER]];
        let world = Self::of(connections, reconcile, mig::program, sets).await;
        mig::prepare(&world.node);
        world
    }

    pub async fn start(&self, uid: &str) -> (Process, SocketAddr) {
        let mut command = (self.command)(&self.node);
        command.env("LINKWISE_POD_UID", uid).env("LINKWISE_LOG", "linkwise=debug").env("LINKWISE_LOG_FORMAT", "json");
        let process = Process::of(command);
        let up = process.logged(|line| line["message"] == "linkwise is up").await;
        let address = up["metrics"].as_str().unwrap().parse().unwrap();
        (process, address)
    }

    /// Starts the first process, and waits until it serves.
    pub async fn first(&self) -> Process {
        let (process, address) = self.start("pod-0").await;
        wait_ready(address).await;
        self.node.wait_registered(1).await;
        process
    }

    /// Waits until further claims have come and gone, on average two of each set.
    pub async fn wait_more_claims(&self, when: &str) {
        let before = self.done();
        until(async || match self.done() {
            claims if claims >= before + 2 * self.sets.len() => Ok(()),
            claims => Err(format!("{when}: {claims} claims, {before} before")),
        })
        .await;
    }

    /// Waits until nothing of a claim is left.
    pub async fn wait_over(&self) {
        let node = &self.node;
        until(async || match (mig::instances(node), node.checkpoints(), node.claim_specs()) {
            (0, checkpoints, specs) if checkpoints.is_empty() && specs.is_empty() => Ok(()),
            left => Err(left),
        })
        .await;
    }

    pub fn done(&self) -> usize {
        self.claims.load(Ordering::Relaxed)
    }

    /// Lets claims of each set of devices come and go until the end.
    pub fn load(&self, end: &CancellationToken) -> JoinSet<Tally> {
        let mut load = JoinSet::new();
        for (place, devices) in self.sets.iter().cloned().enumerate() {
            let (node, end, is_patient) = (Arc::clone(&self.node), end.clone(), self.is_patient);
            let claims = Arc::clone(&self.claims);
            load.spawn(async move {
                let mut tally = Tally::default();
                while !end.is_cancelled() {
                    let pod = format!("pod-{place}-{}", tally.claims);
                    tally.worst = tally.worst.max(one_claim(&node, &pod, &devices, is_patient).await);
                    tally.claims += 1;
                    claims.fetch_add(1, Ordering::Relaxed);
                }
                tally
            });
        }
        load
    }
}

/// Waits until the process that serves probes at this address is ready.
pub async fn wait_ready(address: SocketAddr) {
    until(async || match get(address, "/readyz").await {
        answer if answer.status == 200 => Ok(()),
        answer => Err(answer.body),
    })
    .await;
}

/// Lets a claim come and go with its pod. Returns the longer of the times to prepare and to unprepare it.
async fn one_claim(node: &Node, pod: &str, devices: &[&str], is_patient: bool) -> Duration {
    let claim = node.claim(pod, devices);
    let began = Instant::now();
    let hardware = match is_patient {
        true => node.start_pod(pod, &claim).await,
        false => {
            let started = node.dra.start_pod(&PodClaims::single(pod, claim, DRIVER)).await;
            let containers =
                started.unwrap_or_else(|error| panic!("{pod} ({devices:?}) after {:?}: {error}", began.elapsed()));
            node.hardware(&containers["main"])
        }
    };
    let prepared = began.elapsed();
    let gpus = hardware.iter().filter(|node| !node.contains("caps")).count();
    assert_eq!(gpus, devices.len(), "{pod}: {hardware:?}");
    tokio::time::sleep(Duration::from_millis(10)).await;
    node.cluster.server.remove(&ResourceType::RESOURCE_CLAIMS.key(Some("default"), pod));
    let began = Instant::now();
    loop {
        match node.dra.stop_pod(pod).await {
            Ok(()) => break,
            Err(_) if is_patient => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => panic!("{pod} ({devices:?}) is not unprepared: {error}"),
        }
    }
    prepared.max(began.elapsed())
}

/// Makes takeovers in a row. `left` counts MIG devices that remain at the end.
async fn rollouts(world: World, times: usize, left: fn(&Node) -> usize) {
    let mut running = world.first().await;
    let (end, specs) = (CancellationToken::new(), world.node.specs());
    let mut load = world.load(&end);
    for time in 1..=times {
        let (next, address) = world.start(&format!("pod-{time}")).await;
        tokio::select! {
            () = wait_ready(address) => {}
            Some(ended) = load.join_next() => panic!("takeover {time}: {ended:?}"),
        }
        running.signal("TERM");
        let (status, last) = running.ended().await;
        assert!(status.success(), "takeover {time}: {status}: {last:?}");
        running = next;
        let devices: BTreeSet<&str> = world.sets.iter().flatten().copied().collect();
        let published = world.node.devices();
        assert!(devices.iter().all(|device| published.iter().any(|name| name == device)), "{time}: {published:?}");
    }
    end.cancel();
    let tallies = load.join_all().await;
    assert!(tallies.iter().all(|tally| tally.claims > times), "{tallies:?}");
    assert_eq!((left(&world.node), world.node.checkpoints(), world.node.specs()), (0, vec![], specs));
}

#[tokio::test]
async fn takeovers_under_claims_fail_no_call() {
    for connections in KUBELETS {
        rollouts(World::of_gpus(connections, RECONCILE_INTERVAL).await, FEW, |_| 0).await;
    }
}

#[tokio::test]
async fn takeovers_under_claims_for_mig_leave_no_instance() {
    rollouts(World::of_mig(KUBELETS[0], RECONCILE_INTERVAL).await, FEW, mig::instances).await;
}

/// Linkwise that soon reports NVML as unavailable, on a node whose driver can fail.
fn quick(node: &Node) -> Command {
    let mut command = node.program();
    command.env("FAKE_NVML_CONTROL", node.at("control"));
    command.args(["--nvml-poll-ms=50", "--nvml-pause-ms=10", "--nvml-grace-ms=100"]);
    command
}

/// The new process prepares claims to GPUs that only the old one has seen.
#[tokio::test]
async fn takeover_without_a_driver_fails_no_claim() {
    let world = World { command: quick, ..World::of_gpus(KUBELETS[0], RECONCILE_INTERVAL).await };
    // A process that cannot ask the driver finds the GPUs on the PCI bus.
    DGX1_V100.iter().for_each(|pci| put_on_bus(&world.node.at("sys/bus"), pci));
    let mut old = world.first().await;
    let end = CancellationToken::new();
    let mut load = world.load(&end);
    for order in ["init 9", "fail * nvmlDeviceGetCount_v2 9"] {
        Control::new(world.node.at("control")).send(order).unwrap();
    }
    old.said("NVML unavailable for longer than the grace period").await;
    let (new, address) = world.start("pod-1").await;
    tokio::select! {
        () = wait_ready(address) => {}
        Some(ended) = load.join_next() => panic!("{ended:?}"),
    }
    new.said("took over this node").await;
    old.signal("TERM");
    old.ended().await;
    world.wait_more_claims("after the takeover").await;
    end.cancel();
    load.join_all().await;
    assert_eq!(world.node.checkpoints(), Vec::<String>::new());
}

/// Kills the owner or the standby in each stage of a takeover, on one node. The survivor prepares all claims.
#[tokio::test]
#[ignore = "a quarter of a minute: make test-long"]
async fn kill_in_any_stage_leaves_one_that_prepares_claims() {
    let mut world = World::of_mig(KUBELETS[0], Duration::from_millis(5)).await;
    world.is_patient = true;
    let mut running = world.first().await;
    let (end, specs) = (CancellationToken::new(), world.node.specs());
    let mut load = world.load(&end);
    let of_owner = ["Draining", "Yielding", "Ending"].map(|stage| (true, stage));
    let of_standby = ["Joining", "Receiving", "Starting", "Waiting"].map(|stage| (false, stage));
    let mut late = 0;
    let cases = of_owner.into_iter().chain(of_standby).flat_map(|stage| [(stage, true), (stage, false)]);
    for (number, ((is_owners, stage), owner_dies)) in cases.enumerate() {
        let (standby, _) = world.start(&format!("pod-{}", number + 1)).await;
        wait_stage(if is_owners { &running } else { &standby }, stage).await;
        let (mut victim, survivor) = if owner_dies { (running, standby) } else { (standby, running) };
        victim.signal("KILL");
        victim.ended().await;
        // Under load the kill may come after the takeover.
        let last = survivor.logged(|line| line["stage"] == "Owning" || line["stage"] == "Retired").await;
        if last["stage"] == "Retired" || survivor.lines().iter().any(|line| line.contains("\"Retired\"")) {
            late += 1;
            running = world.start(&format!("pod-{number}-again")).await.0;
        } else {
            running = survivor;
        }
        world.wait_more_claims(stage).await;
        assert!(load.try_join_next().is_none(), "{stage} {owner_dies}");
    }
    assert!(late <= 7, "{late} of 14 kills came too late");
    end.cancel();
    load.join_all().await;
    world.wait_over().await;
    assert_eq!(world.node.specs(), specs);
}

#[tokio::test]
#[ignore = "minutes: make test-long"]
async fn hundred_takeovers_under_claims_fail_no_call() {
    for connections in KUBELETS {
        rollouts(World::of_gpus(connections, RECONCILE_INTERVAL).await, MANY, |_| 0).await;
        rollouts(World::of_mig(connections, RECONCILE_INTERVAL).await, MANY, mig::instances).await;
    }
}
