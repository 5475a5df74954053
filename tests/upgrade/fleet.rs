//! A node under load, and the pods of a DaemonSet on it: a new pod is started beside the old pod, which is ended when
//! the new pod is ready.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use linkwise_kubelet_box::{AdmissionError, Admitted, Connections, KubeletBox, Load, Pod, Tally};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::node::{GPU, Process, Setup, machine, try_get, until, wait_registered};

pub const GPUS: [(&str, &str, &str); 4] = [
    ("GPU-a", "0000:01:00.0", ""),
    ("GPU-b", "0000:41:00.0", ""),
    ("GPU-c", "0000:81:00.0", ""),
    ("GPU-d", "0000:c1:00.0", ""),
];

/// A node with a kubelet.
pub struct World {
    pub setup: Setup,
    pub kubelet: Arc<KubeletBox>,
}

impl World {
    pub fn new(connections: Connections) -> Self {
        Self::of(Setup::with(&machine(&GPUS)), connections)
    }

    pub fn of(setup: Setup, connections: Connections) -> Self {
        let kubelet = Arc::new(setup.kubelet_with(|options| options.connections = connections));
        Self { setup, kubelet }
    }

    /// Starts linkwise as the pod with this UID.
    pub fn spawn(&self, uid: &str) -> Process {
        let mut command = self.setup.command();
        command.env("LINKWISE_POD_UID", uid).env("LINKWISE_LOG", "linkwise=debug");
        Process::of(command)
    }

    /// Starts linkwise as the pod with this UID, and waits until it is up.
    pub async fn start(&self, uid: &str) -> Running {
        Running::of(self.spawn(uid)).await
    }

    /// Starts the node's first pod, and waits until it serves.
    pub async fn owner(&self) -> Running {
        let owner = self.start("first").await;
        wait_registered(&self.kubelet, 1, GPUS.len()).await;
        owner.wait_ready().await;
        owner.wait_settled().await;
        owner
    }

    /// Admits a pod of one GPU, and ends it.
    pub async fn admit(&self, pod: &str) -> Result<(), AdmissionError> {
        let admitted = self.kubelet.admit(&Pod::single(pod, GPU, 1), None).await;
        self.kubelet.remove_pod(pod);
        admitted.map(drop)
    }

    /// Acts as a rollout: starts a new pod, and ends the old one as soon as the new one is ready.
    pub async fn replace(&self, old: Running, uid: &str) -> Running {
        let new = self.start(uid).await;
        new.wait_ready().await;
        old.end().await;
        new
    }

    /// Starts a load: pods of one and two GPUs come and go, `per_second` of them, until it is ended.
    pub fn load(&self, per_second: u32) -> Loading {
        let load = Load {
            resource: GPU.to_owned(),
            per_second: NonZeroU32::new(per_second).unwrap(),
            sizes: 1..=2,
            held: 3,
            seed: 1,
        };
        let (end, kubelet) = (CancellationToken::new(), Arc::clone(&self.kubelet));
        let ended = end.clone();
        let task = tokio::spawn(async move {
            let check = |pod: &Pod, outcome: Result<&Admitted, &AdmissionError>| {
                if let Ok(admitted) = outcome {
                    assert_own_gpus(&kubelet, pod, admitted);
                }
            };
            kubelet.load(&load, ended.cancelled_owned(), check).await
        });
        Loading { end, task }
    }
}

/// Asserts that a container has the GPUs that the kubelet counts as its own, and that no other pod has any of them.
fn assert_own_gpus(kubelet: &KubeletBox, pod: &Pod, admitted: &Admitted) {
    let allocation = &admitted.grant("main", GPU).unwrap().allocation;
    let given: BTreeSet<&str> = allocation.envs["NVIDIA_VISIBLE_DEVICES"].split(',').collect();
    assert_eq!(given, allocation.devices.iter().map(String::as_str).collect());
    for (other, containers) in &kubelet.state().resources[GPU].allocated {
        let theirs = containers.values().flatten();
        assert!(*other == pod.name || theirs.clone().all(|id| !given.contains(id.as_str())), "{given:?}: {other}");
    }
}

/// Waits until a process is or was at a stage of a takeover.
pub async fn wait_stage(process: &Process, stage: &str) {
    process.logged(|line| line["message"] == "takeover" && line["stage"] == stage).await;
}

pub struct Loading {
    end: CancellationToken,
    task: JoinHandle<Tally>,
}

impl Loading {
    pub async fn end(self) -> Tally {
        self.end.cancel();
        self.task.await.unwrap()
    }
}

/// A linkwise that is up.
pub struct Running {
    pub process: Process,
    pub address: SocketAddr,
}

impl Running {
    pub async fn of(process: Process) -> Self {
        let address = process.up().await;
        Self { process, address }
    }

    pub async fn wait_ready(&self) {
        until(async || if self.is_ready().await { Ok(()) } else { Err("it is not ready") }).await;
    }

    /// Returns true if the kubelet's readiness probe would succeed now.
    pub async fn is_ready(&self) -> bool {
        try_get(self.address, "/readyz").await.is_ok_and(|answer| answer.status == 200)
    }

    /// Waits until the kubelet has no other plugin beside this one.
    pub async fn wait_settled(&self) {
        self.process.logged(|line| line["message"] == "kubelet" && line["phase"] == "serving").await;
    }

    pub async fn end(mut self) {
        self.process.end().await;
    }
}
