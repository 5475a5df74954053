//! Claims that ask for MPS. A task of the tests stands for the process that runs the MPS daemons.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_core::claims::{ClaimName, MpsOrder};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_core::topology::GpuUuid;
use linkwise_kubelet::dra::{MpsLink, MpsOrders, MpsServed};
use tokio::sync::watch;

use super::crash::{Left, STATES, WHOLE, leave};
use super::node::{
    Answer, Node, TEST_TIMEOUT, assert_refused, claim, configured, end, hardware, kill_during_start, name, restart,
    start, start_at_last, start_container, until,
};

/// The behaviour of the process that runs the daemons.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Behaviour {
    Serves,
    /// Serves as an older release does, with one shared memory for all daemons.
    IsOld,
    /// Does not run.
    Away,
    /// Cannot be given orders.
    Unreachable,
}

impl Behaviour {
    fn shm(&self) -> Option<MpsShm> {
        match self {
            Self::Serves => Some(MpsShm::Own),
            Self::IsOld => Some(MpsShm::Common),
            Self::Away | Self::Unreachable => None,
        }
    }
}

/// The process that runs the daemons, as the tests control it.
#[derive(Clone)]
struct Daemons {
    orders: watch::Receiver<Option<MpsOrders>>,
    behaviour: watch::Sender<Behaviour>,
    /// GPUs in the compute mode EXCLUSIVE_PROCESS that belong to no daemon of a claim.
    foreign: Arc<Mutex<Vec<GpuUuid>>>,
}

/// A node with a process that runs daemons, before its plugin is started.
fn node() -> (Node, Daemons) {
    let mut node = Node::new();
    let ((orders, ordered), (served, serving)) = (watch::channel(None), watch::channel(None));
    node.settings.mps = Some(MpsLink { orders, served: serving });
    node.settings.mps_timeout = Duration::from_millis(50);
    let daemons =
        Daemons { orders: ordered.clone(), behaviour: watch::Sender::new(Behaviour::Serves), foreign: Arc::default() };
    let (mut behaviour, foreign, mut orders) = (daemons.behaviour.subscribe(), Arc::clone(&daemons.foreign), ordered);
    tokio::spawn(async move {
        loop {
            let ordered: Option<MpsOrders> = orders.borrow_and_update().clone();
            let now: Behaviour = behaviour.borrow_and_update().clone();
            if let Some(MpsOrders { revision, daemons, .. }) = ordered {
                let is_exclusive = |order: &&MpsOrder| order.exclusive && now.shm().is_some();
                let gpus = daemons.values().filter(is_exclusive).flat_map(|order| &order.gpus);
                let exclusive = gpus.map(|gpu| gpu.gpu.clone()).chain(foreign.lock().unwrap().clone()).collect();
                let away = || "the MPS daemon does not serve".to_owned();
                let states = daemons.into_keys();
                let states = states.map(|name| (name, now.shm().ok_or_else(away))).collect();
                let trouble = (now == Behaviour::Unreachable).then(|| "cannot write orders".to_owned());
                served.send_replace(Some(MpsServed { revision, trouble, daemons: states, exclusive }));
            }
            let changed = async {
                tokio::select! {
                    changed = orders.changed() => changed.is_ok(),
                    changed = behaviour.changed() => changed.is_ok(),
                }
            };
            if !changed.await {
                return;
            }
        }
    });
    (node, daemons)
}

impl Daemons {
    fn wanted(&self) -> BTreeMap<ResourceName, MpsOrder> {
        self.orders.borrow().clone().unwrap_or_default().daemons
    }

    async fn wait(&self, condition: impl Fn(&BTreeMap<ResourceName, MpsOrder>) -> bool) {
        let mut orders = self.orders.clone();
        let met = orders.wait_for(|orders| orders.as_ref().is_some_and(|orders| condition(&orders.daemons)));
        drop(tokio::time::timeout(TEST_TIMEOUT, met).await.expect("the orders do not become as expected").unwrap());
    }
}

const MPS: &str = r#"{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}"#;

/// Creates a claim that asks for MPS.
fn mps_claim(node: &Node, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
    node.set_answer(uid, Answer::Claim(configured(claim(uid, devices), MPS)))
}

#[tokio::test]
async fn daemon_order_comes_and_goes_with_its_claim() {
    let (mut node, daemons) = node();
    let kubelet = node.serve().await;
    daemons.wait(BTreeMap::is_empty).await;
    let asks = mps_claim(&node, "a", &[("gpus", "gpu-0"), ("gpus", "gpu-5")]);
    let got = start_container(&kubelet, &asks).await.unwrap();
    assert_eq!(hardware(&got), [node.gpu(0), node.gpu(5)]);
    assert!(got.env.contains_key("CUDA_MPS_PIPE_DIRECTORY"), "{got:?}");
    let wanted = daemons.wanted();
    let [(name, order)] = &wanted.iter().collect::<Vec<_>>()[..] else { panic!("{wanted:?}") };
    assert_eq!(name.as_str(), format!("dra.linkwise.dev/{}", node.uuid(0)));
    let gpus: Vec<&GpuUuid> = order.gpus.iter().map(|gpu| &gpu.gpu).collect();
    assert_eq!((gpus, order.exclusive), (vec![&node.uuid(0), &node.uuid(5)], true));
    node.started_claim(&kubelet, "b", &[("gpus", "gpu-1")]).await;
    assert_eq!(daemons.wanted(), wanted);
    end(&kubelet, &asks).await;
    assert!(daemons.wanted().is_empty());
    assert_eq!(node.checkpoints(), ["b.json"]);
    assert_eq!(node.claim_specs(), ["linkwise.dev-claim-b.json"]);
}

#[tokio::test]
async fn claim_is_refused_until_its_daemon_serves() {
    let (mut node, daemons) = node();
    let kubelet = node.serve().await;
    let asks = mps_claim(&node, "a", &[("gpus", "gpu-0")]);
    for (behaviour, words) in [
        (Behaviour::Away, "is not ready: the MPS daemon does not serve; run `linkwise mps-control-daemon`"),
        (
            Behaviour::Unreachable,
            "does not have for claims: cannot write orders; install the overlay dra-mps, or set the chart's dra.mps",
        ),
    ] {
        daemons.behaviour.send_replace(behaviour);
        assert_refused(&kubelet, &asks, &[words]).await;
        assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
        assert!(daemons.wanted().is_empty(), "an order is left");
    }
    // Claims without MPS do not wait for daemons.
    node.started_claim(&kubelet, "b", &[("gpus", "gpu-1")]).await;
    daemons.behaviour.send_replace(Behaviour::Serves);
    assert_eq!(start(&kubelet, &asks).await.unwrap(), [node.gpu(0)]);
    // A prepared claim whose daemon died since is not answered from its checkpoint.
    daemons.behaviour.send_replace(Behaviour::Away);
    restart(&kubelet).await;
    assert_refused(&kubelet, &asks, &["is not ready"]).await;
    assert_eq!(node.checkpoints(), ["a.json", "b.json"], "the checkpoint of a claim in use is lost");
    assert_eq!(daemons.wanted().len(), 1);
}

#[tokio::test]
async fn containers_have_the_shared_memory_of_their_daemon() {
    let (mut node, daemons) = node();
    let kubelet = node.serve().await;
    daemons.behaviour.send_replace(Behaviour::IsOld);
    let asks = mps_claim(&node, "a", &[("gpus", "gpu-0")]);
    let shm = async || start_container(&kubelet, &asks).await.unwrap().mounts["/dev/shm"].clone();
    let own = format!("/dra.linkwise.dev/{}/shm", node.uuid(0));
    assert!(!shm().await.ends_with(&own), "a daemon of an older release has its own shared memory");
    let renewed = async |is_own: bool| {
        while shm().await.ends_with(&own) != is_own {
            tokio::task::yield_now().await;
        }
    };
    daemons.behaviour.send_replace(Behaviour::Serves);
    tokio::time::timeout(TEST_TIMEOUT, renewed(true)).await.unwrap();
    // The daemon that stops had its own shared memory; the next one is of an older release.
    daemons.behaviour.send_replace(Behaviour::Away);
    daemons.behaviour.send_replace(Behaviour::IsOld);
    tokio::time::timeout(TEST_TIMEOUT, renewed(false)).await.unwrap();
}

#[tokio::test]
async fn gpu_that_is_exclusive_for_others_is_not_given_out() {
    let (mut node, daemons) = node();
    let kubelet = node.serve().await;
    daemons.foreign.lock().unwrap().push(node.uuid(0));
    // The process reports again when its behaviour is set.
    daemons.behaviour.send_replace(Behaviour::Serves);
    let plain = node.claim("a", &[("gpus", "gpu-0")]);
    let words = format!("device gpu-0 ({}) is in the compute mode EXCLUSIVE_PROCESS", node.uuid(0));
    // Before the report comes, the claim is prepared.
    let refused = async {
        loop {
            match start(&kubelet, &plain).await {
                Ok(_) => {
                    end(&kubelet, &plain).await;
                    tokio::task::yield_now().await;
                }
                Err(error) => return error.to_string(),
            }
        }
    };
    let why = tokio::time::timeout(TEST_TIMEOUT, refused).await.unwrap();
    assert!(why.contains(&words), "{why}");
    let asks = mps_claim(&node, "b", &[("gpus", "gpu-1")]);
    start(&kubelet, &asks).await.unwrap();
    daemons.foreign.lock().unwrap().clear();
    daemons.behaviour.send_replace(Behaviour::Serves);
    start_at_last(&kubelet, &plain).await;
}

/// A node whose plugin was killed and left these files. Its last orders stay in force.
async fn killed(left: Left) -> (Node, Daemons) {
    let (mut node, daemons) = node();
    let kubelet = node.serve().await;
    start(&kubelet, &mps_claim(&node, "a", &[("gpus", "gpu-0")])).await.unwrap();
    node.crash(&kubelet).await;
    leave(&node, left);
    (node, daemons)
}

#[tokio::test]
async fn orders_of_a_new_process_follow_its_checkpoints() {
    for left in STATES {
        let (mut node, daemons) = killed(left).await;
        node.start();
        // No container of another boot runs, so a claim of that boot needs no daemon.
        let count = usize::from(left.checkpoint.is_some() && left.boot == "this boot");
        daemons.wait(|wanted| wanted.len() == count).await;
        let kubelet = node.kubelet().await;
        assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)], "{left:?}");
        assert_eq!((daemons.wanted().len(), node.claim_specs().len()), (1, 1), "{left:?}");
        end(&kubelet, &name("a")).await;
        assert_eq!((daemons.wanted().len(), node.claim_specs().len()), (0, 0), "{left:?}");
    }
}

#[tokio::test]
async fn orders_of_an_unreadable_checkpoint_stay() {
    for (from, to, is_known) in [("\"version\": 1", "\"version\": 7", true), ("\"version\": 1", "", false)] {
        let (mut node, daemons) = killed(WHOLE).await;
        node.edit_checkpoint("a", |text| text.replace(from, to));
        node.settings.listed_within = TEST_TIMEOUT;
        node.start();
        node.log.wait(&["checkpoint of a claim unreadable, keeping it"]).await;
        let mut orders = daemons.orders.clone();
        // If the checkpoint does not show the claim's daemon, all orders of the previous process stay.
        let kept = |now: &MpsOrders| (now.daemons.len(), now.keeps_others) == (usize::from(is_known), !is_known);
        let keeps = orders.wait_for(|orders| orders.as_ref().is_some_and(kept));
        drop(tokio::time::timeout(TEST_TIMEOUT, keeps).await.unwrap().unwrap());
        let kubelet = node.kubelet().await;
        if !is_known {
            // A claim whose checkpoint is torn can be prepared again.
            assert_eq!(start(&kubelet, &name("a")).await.unwrap(), [node.gpu(0)]);
            let now = daemons.orders.borrow().clone().unwrap();
            assert_eq!((now.daemons.len(), now.keeps_others), (1, false));
        } else {
            assert_refused(&kubelet, &name("a"), &["cannot read the checkpoint of the claim, keeping it"]).await;
        }
        end(&kubelet, &name("a")).await;
        assert!(daemons.wanted().is_empty() && node.checkpoints().is_empty());
    }
}

#[tokio::test]
async fn orders_of_a_deleted_claim_are_withdrawn() {
    for left in STATES {
        let (mut node, daemons) = killed(left).await;
        node.delete("a");
        node.settings.sweep = Duration::from_millis(1);
        node.start();
        daemons.wait(BTreeMap::is_empty).await;
        until(|| node.file_counts() == (0, 0)).await;
        assert!(daemons.wanted().is_empty(), "{left:?}");
    }
}

#[tokio::test]
async fn order_of_a_plugin_killed_while_waiting_stays() {
    let (mut node, daemons) = node();
    daemons.behaviour.send_replace(Behaviour::Away);
    (node.settings.mps_timeout, node.settings.prepare_timeout) = (TEST_TIMEOUT, TEST_TIMEOUT);
    let kubelet = node.serve().await;
    let asks = mps_claim(&node, "a", &[("gpus", "gpu-0")]);
    kill_during_start(&node, &kubelet, &asks, || !node.checkpoints().is_empty()).await;
    node.kill_and_start().await;
    daemons.wait(|wanted| wanted.len() == 1).await;
    daemons.behaviour.send_replace(Behaviour::Serves);
    start_at_last(&kubelet, &asks).await;
    end(&kubelet, &asks).await;
    assert!(daemons.wanted().is_empty() && node.checkpoints().is_empty());
}
