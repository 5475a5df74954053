//! Claims that ask for MPS, and a process of daemons that is a table.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use linkwise_core::claims::{ClaimName, MpsOrder};
use linkwise_core::publish::MpsShm;
use linkwise_core::state::ResourceName;
use linkwise_core::topology::GpuUuid;
use linkwise_kubelet::dra::{MpsLink, MpsOrders, MpsServed};
use tokio::sync::watch;

use super::node::{Answer, LIMIT, Node, claim, configured, end, hardware, refusal, start, start_container};

/// How the process of daemons behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mood {
    Serves,
    /// As one of an older release, with one shared memory for all.
    IsOld,
    /// There is none.
    Away,
    /// Orders cannot be written.
    Unreachable,
}

impl Mood {
    fn shm(&self) -> Option<MpsShm> {
        match self {
            Self::Serves => Some(MpsShm::Own),
            Self::IsOld => Some(MpsShm::Common),
            Self::Away | Self::Unreachable => None,
        }
    }
}

/// What the process of daemons does.
#[derive(Clone)]
struct Daemons {
    orders: watch::Receiver<Option<MpsOrders>>,
    mood: watch::Sender<Mood>,
    /// GPUs that it has exclusive beside those of its daemons.
    left: Arc<Mutex<Vec<GpuUuid>>>,
}

/// A node with a process of daemons, its plugin not started.
fn node() -> (Node, Daemons) {
    let mut node = Node::new();
    let ((orders, ordered), (served, serving)) = (watch::channel(None), watch::channel(None));
    node.settings.mps = Some(MpsLink { orders, served: serving });
    node.settings.mps_timeout = Duration::from_millis(50);
    let daemons = Daemons { orders: ordered.clone(), mood: watch::Sender::new(Mood::Serves), left: Arc::default() };
    let (mut mood, left, mut orders) = (daemons.mood.subscribe(), Arc::clone(&daemons.left), ordered);
    tokio::spawn(async move {
        loop {
            let (wanted, how): (Option<MpsOrders>, Mood) =
                (orders.borrow_and_update().clone(), mood.borrow_and_update().clone());
            if let Some(MpsOrders { revision, daemons, .. }) = wanted {
                let is_exclusive = |order: &&MpsOrder| order.exclusive && how.shm().is_some();
                let gpus = daemons.values().filter(is_exclusive).flat_map(|order| &order.gpus);
                let exclusive = gpus.map(|gpu| gpu.gpu.clone()).chain(left.lock().unwrap().clone()).collect();
                let away = || "the MPS daemon does not serve it".to_owned();
                let states = daemons.into_keys();
                let states = states.map(|name| (name, how.shm().ok_or_else(away))).collect();
                let trouble = (how == Mood::Unreachable).then(|| "cannot write orders".to_owned());
                served.send_replace(Some(MpsServed { revision, trouble, daemons: states, exclusive }));
            }
            let changed = async {
                tokio::select! {
                    changed = orders.changed() => changed.is_ok(),
                    changed = mood.changed() => changed.is_ok(),
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

    async fn wait(&self, wanted: impl Fn(&BTreeMap<ResourceName, MpsOrder>) -> bool) {
        let mut orders = self.orders.clone();
        let holds = orders.wait_for(|orders| orders.as_ref().is_some_and(|orders| wanted(&orders.daemons)));
        drop(tokio::time::timeout(LIMIT, holds).await.expect("it is not ordered").unwrap());
    }
}

const MPS: &str = r#"{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}"#;

/// A claim of the cluster that asks for MPS.
fn by_mps(node: &Node, uid: &str, devices: &[(&str, &str)]) -> ClaimName {
    node.set(uid, Answer::Claim(configured(claim(uid, devices), MPS)))
}

fn uuid(node: &Node, minor: u32) -> GpuUuid {
    node.gpu(minor).split_once('=').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn daemon_is_ordered_with_a_claim_and_withdrawn_with_it() {
    let (mut node, daemons) = node();
    node.start();
    let kubelet = node.kubelet().await;
    daemons.wait(BTreeMap::is_empty).await;
    let asks = by_mps(&node, "a", &[("gpus", "gpu-0"), ("gpus", "gpu-5")]);
    let got = start_container(&kubelet, &asks).await.unwrap();
    assert_eq!(hardware(&got), [node.gpu(0), node.gpu(5)]);
    assert!(got.env.contains_key("CUDA_MPS_PIPE_DIRECTORY"), "{got:?}");
    let wanted = daemons.wanted();
    let [(name, order)] = &wanted.iter().collect::<Vec<_>>()[..] else { panic!("{wanted:?}") };
    assert_eq!(name.as_str(), format!("dra.linkwise.dev/{}", uuid(&node, 0)));
    let gpus: Vec<&GpuUuid> = order.gpus.iter().map(|gpu| &gpu.gpu).collect();
    assert_eq!((gpus, order.exclusive), (vec![&uuid(&node, 0), &uuid(&node, 5)], true));
    // A claim without MPS orders nothing.
    start(&kubelet, &node.claim("b", &[("gpus", "gpu-1")])).await.unwrap();
    assert_eq!(daemons.wanted(), wanted);
    end(&kubelet, &asks).await;
    assert!(daemons.wanted().is_empty());
    assert_eq!(
        (node.checkpoints(), node.claim_specs()),
        (vec!["b.json".to_owned()], vec!["linkwise.dev-claim-b.json".to_owned()])
    );
}

#[tokio::test]
async fn claim_without_a_daemon_is_refused_until_there_is_one() {
    let (mut node, daemons) = node();
    node.start();
    let kubelet = node.kubelet().await;
    let asks = by_mps(&node, "a", &[("gpus", "gpu-0")]);
    for (mood, words) in [
        (Mood::Away, "is not ready: the MPS daemon does not serve it; `linkwise mps-control-daemon` has to run"),
        (
            Mood::Unreachable,
            "does not have for claims: cannot write orders; the overlay dra-mps and the chart's dra.mps",
        ),
    ] {
        daemons.mood.send_replace(mood);
        let why = refusal(&kubelet, &asks).await;
        assert!(why.contains(words), "{why}");
        assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
        assert!(daemons.wanted().is_empty(), "nothing is left of it");
    }
    // Others do not wait for it.
    start(&kubelet, &node.claim("b", &[("gpus", "gpu-1")])).await.unwrap();
    daemons.mood.send_replace(Mood::Serves);
    assert_eq!(start(&kubelet, &asks).await.unwrap(), [node.gpu(0)]);
    // One that was prepared, and whose daemon has died since, is not answered from the checkpoint.
    daemons.mood.send_replace(Mood::Away);
    kubelet.restart().await.unwrap();
    super::node::connected(&kubelet).await;
    let why = refusal(&kubelet, &asks).await;
    assert!(why.contains("is not ready"), "{why}");
    assert_eq!(node.checkpoints(), ["a.json", "b.json"], "its containers may run");
    assert_eq!(daemons.wanted().len(), 1);
}

#[tokio::test]
async fn containers_have_the_shared_memory_of_their_daemon() {
    let (mut node, daemons) = node();
    node.start();
    let kubelet = node.kubelet().await;
    daemons.mood.send_replace(Mood::IsOld);
    let asks = by_mps(&node, "a", &[("gpus", "gpu-0")]);
    let shm = async || start_container(&kubelet, &asks).await.unwrap().mounts["/dev/shm"].clone();
    let own = format!("/dra.linkwise.dev/{}/shm", uuid(&node, 0));
    assert!(!shm().await.ends_with(&own), "the daemon of an older release has that of all");
    let renewed = async |is_own: bool| {
        while shm().await.ends_with(&own) != is_own {
            tokio::task::yield_now().await;
        }
    };
    daemons.mood.send_replace(Mood::Serves);
    tokio::time::timeout(LIMIT, renewed(true)).await.unwrap();
    // A daemon that serves no more had its own.
    daemons.mood.send_replace(Mood::Away);
    daemons.mood.send_replace(Mood::IsOld);
    tokio::time::timeout(LIMIT, renewed(false)).await.unwrap();
}

#[tokio::test]
async fn gpu_that_is_exclusive_for_others_is_not_given_out() {
    let (mut node, daemons) = node();
    node.start();
    let kubelet = node.kubelet().await;
    daemons.left.lock().unwrap().push(uuid(&node, 0));
    // Look again.
    daemons.mood.send_replace(Mood::Serves);
    let plain = node.claim("a", &[("gpus", "gpu-0")]);
    let words = format!("device gpu-0 ({}) is in the compute mode EXCLUSIVE_PROCESS", uuid(&node, 0));
    // The first look may come after the claim.
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
    let why = tokio::time::timeout(LIMIT, refused).await.unwrap();
    assert!(why.contains(&words), "{why}");
    let asks = by_mps(&node, "b", &[("gpus", "gpu-1")]);
    start(&kubelet, &asks).await.unwrap();
    daemons.left.lock().unwrap().clear();
    daemons.mood.send_replace(Mood::Serves);
    let given = async {
        while start(&kubelet, &plain).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, given).await.unwrap();
}

/// What a killed plugin leaves: how far the checkpoint is and of which boot, and whether the claim's spec is there.
const STATES: [(Option<&str>, &str, bool); 6] = [
    (None, "this boot", false),
    (None, "this boot", true),
    (Some("Started"), "this boot", false),
    (Some("Completed"), "this boot", true),
    (Some("Completed"), "another boot", false),
    (Some("Started"), "another boot", true),
];

/// A node whose plugin was killed so. What it had ordered is the last that its neighbour saw.
async fn killed((progress, boot, spec): (Option<&str>, &str, bool)) -> (Node, Daemons) {
    let (mut node, daemons) = node();
    node.start();
    let kubelet = node.kubelet().await;
    start(&kubelet, &by_mps(&node, "a", &[("gpus", "gpu-0")])).await.unwrap();
    kubelet.stop().await;
    node.kill().await;
    let path = node.checkpoint("a");
    match progress {
        None => fs::remove_file(&path).unwrap(),
        Some(progress) => {
            let text = fs::read_to_string(&path).unwrap().replace("\"Completed\"", &format!("{progress:?}"));
            fs::write(&path, text.replace("this boot", boot)).unwrap();
        }
    }
    if !spec {
        fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-a.json")).unwrap();
    }
    (node, daemons)
}

#[tokio::test]
async fn orders_of_a_new_process_follow_its_checkpoints() {
    for left in STATES {
        let (mut node, daemons) = killed(left).await;
        node.start();
        // No container of another boot runs.
        let count = usize::from(left.0.is_some() && left.1 == "this boot");
        daemons.wait(|wanted| wanted.len() == count).await;
        let kubelet = node.kubelet().await;
        assert_eq!(start(&kubelet, &super::node::name("a")).await.unwrap(), [node.gpu(0)], "{left:?}");
        assert_eq!((daemons.wanted().len(), node.claim_specs().len()), (1, 1), "{left:?}");
        end(&kubelet, &super::node::name("a")).await;
        assert_eq!((daemons.wanted().len(), node.claim_specs().len()), (0, 0), "{left:?}");
    }
}

#[tokio::test]
async fn orders_of_an_unreadable_checkpoint_stay() {
    for (from, to, is_seen) in [("\"version\": 1", "\"version\": 7", true), ("\"version\": 1", "", false)] {
        let (mut node, daemons) = killed((Some("Completed"), "this boot", true)).await;
        let text = fs::read_to_string(node.checkpoint("a")).unwrap().replace(from, to);
        fs::write(node.checkpoint("a"), text).unwrap();
        node.settings.listed_within = LIMIT;
        node.start();
        node.log.has(&["checkpoint of a claim unreadable, keeping it"]).await;
        let mut orders = daemons.orders.clone();
        // Where it cannot be seen what it had, all that was ordered before stays.
        let keeps = orders.wait_for(|orders| {
            orders.as_ref().is_some_and(|now| (now.daemons.len(), now.keeps_others) == (usize::from(is_seen), !is_seen))
        });
        drop(tokio::time::timeout(LIMIT, keeps).await.unwrap().unwrap());
        let kubelet = node.kubelet().await;
        if !is_seen {
            // Torn: the kubelet's word is enough.
            assert_eq!(start(&kubelet, &super::node::name("a")).await.unwrap(), [node.gpu(0)]);
            let now = daemons.orders.borrow().clone().unwrap();
            assert_eq!((now.daemons.len(), now.keeps_others), (1, false));
        } else {
            let why = refusal(&kubelet, &super::node::name("a")).await;
            assert!(why.contains("cannot be read, and is kept"), "{why}");
        }
        end(&kubelet, &super::node::name("a")).await;
        assert!(daemons.wanted().is_empty() && node.checkpoints().is_empty());
    }
}

#[tokio::test]
async fn orders_of_a_claim_that_is_gone_are_withdrawn() {
    for left in STATES {
        let (mut node, daemons) = killed(left).await;
        node.delete("a");
        node.settings.sweep = Duration::from_millis(1);
        node.start();
        daemons.wait(BTreeMap::is_empty).await;
        let swept = async {
            while node.checkpoints().len() + node.claim_specs().len() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, swept).await.unwrap_or_else(|_| panic!("{left:?}"));
        assert!(daemons.wanted().is_empty(), "{left:?}");
    }
}

#[tokio::test]
async fn plugin_killed_while_it_waits_keeps_the_order() {
    let (mut node, daemons) = node();
    daemons.mood.send_replace(Mood::Away);
    (node.settings.mps_timeout, node.settings.prepare_timeout) = (LIMIT, LIMIT);
    node.start();
    let kubelet = node.kubelet().await;
    let asks = by_mps(&node, "a", &[("gpus", "gpu-0")]);
    let (started, ()) = tokio::join!(tokio::time::timeout(LIMIT, start(&kubelet, &asks)), async {
        let begun = async {
            while node.checkpoints().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, begun).await.unwrap();
        node.running.as_ref().unwrap().0.abort();
    });
    assert!(started.unwrap().is_err());
    node.kill_and_start().await;
    daemons.wait(|wanted| wanted.len() == 1).await;
    daemons.mood.send_replace(Mood::Serves);
    let again = async {
        // The connection may still be the old one's.
        while start(&kubelet, &asks).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, again).await.unwrap();
    end(&kubelet, &asks).await;
    assert!(daemons.wanted().is_empty() && node.checkpoints().is_empty());
}
