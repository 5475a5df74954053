//! The plugin is killed between each two steps of its work; the next one finishes or undoes it.
//!
//! The steps of Prepare: the claim is read; checkpoint Started, if it asks for MIG devices or MPS; the claim's CDI spec;
//! checkpoint Completed; the answer. Of Unprepare: the spec goes; the checkpoint goes.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use linkwise_core::state::{ClaimedDevice, Event, Holdings, NodeState};

use super::node::{Answer, DRIVER, LIMIT, Node, connected, end, refusal, start};

/// What a killed plugin leaves of the claim `a`.
#[derive(Clone, Copy, Debug)]
struct Left {
    checkpoint: Option<&'static str>,
    boot: &'static str,
    spec: bool,
}

/// After each step, and in another boot.
const STATES: [Left; 8] = [
    Left { checkpoint: None, boot: "", spec: false },
    Left { checkpoint: None, boot: "", spec: true },
    Left { checkpoint: Some("Started"), boot: "this boot", spec: false },
    Left { checkpoint: Some("Started"), boot: "this boot", spec: true },
    Left { checkpoint: Some("Completed"), boot: "this boot", spec: true },
    Left { checkpoint: Some("Completed"), boot: "this boot", spec: false },
    Left { checkpoint: Some("Completed"), boot: "another boot", spec: false },
    Left { checkpoint: Some("Started"), boot: "another boot", spec: true },
];

/// A node whose plugin was killed so, and what the claim's container gets.
async fn killed(left: Left) -> (Node, Vec<String>) {
    let mut node = Node::new().with_nics();
    node.start();
    let kubelet = node.kubelet().await;
    let claim = node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-5")]);
    let devices = start(&kubelet, &claim).await.unwrap();
    kubelet.stop().await;
    node.kill().await;
    let path = node.checkpoint("a");
    let text = fs::read_to_string(&path).unwrap();
    match left.checkpoint {
        None => fs::remove_file(path).unwrap(),
        Some(progress) => {
            let text = text.replace("\"Completed\"", &format!("{progress:?}"));
            fs::write(path, text.replace("this boot", left.boot)).unwrap();
        }
    }
    if !left.spec {
        fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-a.json")).unwrap();
    }
    (node, devices)
}

#[tokio::test]
async fn killed_prepare_is_finished_by_the_next() {
    for left in STATES {
        let (mut node, devices) = killed(left).await;
        node.start();
        let kubelet = node.kubelet().await;
        let claim = super::node::name("a");
        assert_eq!(start(&kubelet, &claim).await.unwrap(), devices, "{left:?}");
        assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (1, 1), "{left:?}");
        let text = fs::read_to_string(node.checkpoint("a")).unwrap();
        assert!(text.contains("\"Completed\"") && text.contains("\"this boot\""), "{left:?}: {text}");
        end(&kubelet, &claim).await;
        assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (0, 0), "{left:?}");
    }
}

#[tokio::test]
async fn killed_prepare_is_undone_by_unprepare() {
    for left in STATES {
        let (mut node, _) = killed(left).await;
        // The API server is away, and not needed.
        node.set("a", Answer::Failed);
        node.start();
        let kubelet = node.kubelet().await;
        let claim = super::node::name("a");
        // The kubelet's cache has the claim, whatever came of its Prepare.
        let _ = start(&kubelet, &claim).await;
        end(&kubelet, &claim).await;
        assert_eq!((node.checkpoints().len(), node.claim_specs().len()), (0, 0), "{left:?}");
        // The GPUs are free.
        let other = node.claim("b", &[("gpus", "gpu-5")]);
        start(&kubelet, &other).await.unwrap();
    }
}

#[tokio::test]
async fn killed_prepare_of_a_claim_that_is_gone_is_swept() {
    for left in STATES {
        let (mut node, _) = killed(left).await;
        node.delete("a");
        node.settings.sweep = Duration::from_millis(1);
        node.start();
        let swept = async {
            while node.checkpoints().len() + node.claim_specs().len() > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, swept).await.unwrap_or_else(|_| panic!("{left:?}"));
    }
}

#[tokio::test]
async fn claim_that_exists_survives_the_sweep() {
    let (mut node, devices) = killed(STATES[5]).await;
    node.settings.sweep = Duration::from_millis(1);
    node.set("a", Answer::Failed);
    node.start();
    // The first sweep restores its spec; an API server that fails is no reason to forget a claim.
    let swept = async {
        while node.reads("a") < 4 || node.claim_specs().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, swept).await.unwrap();
    let kubelet = node.kubelet().await;
    assert_eq!(start(&kubelet, &super::node::name("a")).await.unwrap(), devices);
}

/// The kubelet cannot be asked who holds what, or lists nobody.
fn tell_holders(node: &Node, holdings: Option<Holdings>) {
    let state = NodeState::clone(&node.state.borrow());
    node.state.send_replace(Arc::new(state.apply(Event::Holders(holdings), Duration::from_secs(1)).0));
}

#[tokio::test]
async fn claim_that_is_gone_stays_while_holders_are_unknown() {
    let mut node = Node::new().with_nics();
    node.start();
    let kubelet = node.kubelet().await;
    for (uid, gpu) in [("a", "gpu-0"), ("b", "gpu-1")] {
        start(&kubelet, &node.claim(uid, &[("gpus", gpu)])).await.unwrap();
    }
    kubelet.stop().await;
    node.stop().await;
    tell_holders(&node, None);
    node.delete("a");
    fs::remove_file(node.settings.cdi_folder.join("linkwise.dev-claim-b.json")).unwrap();
    node.start();
    let until = async |files: &dyn Fn() -> bool| {
        let reached = async {
            while !files() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LIMIT, reached).await.unwrap();
    };
    // The sweep restores the spec of `b` after it looked at `a`.
    until(&|| node.claim_specs().len() == 2).await;
    assert_eq!(node.checkpoints(), ["a.json", "b.json"]);
    // The next sweep comes with the list, long before its time.
    tell_holders(&node, Some(Holdings::default()));
    until(&|| node.checkpoints() == ["b.json"]).await;
}

#[tokio::test]
async fn list_of_before_a_claim_takes_no_gpu_from_it() {
    let mut node = Node::new();
    node.settings.listed_within = LIMIT;
    node.start();
    let kubelet = node.kubelet().await;
    let (first, second) = (node.claim("a", &[("gpus", "gpu-0")]), node.claim("b", &[("gpus", "gpu-0")]));
    start(&kubelet, &first).await.unwrap();
    // Deleted by force: its pod still runs, and the kubelet was asked before that pod started.
    node.delete("a");
    assert!(refusal(&kubelet, &second).await.contains("is prepared for the claim ml/claim-a"));
    assert_eq!(node.checkpoints(), ["a.json"]);
}

#[tokio::test]
async fn first_list_of_a_new_kubelet_takes_no_gpu_from_a_claim() {
    let node = Node::running();
    let kubelet = node.kubelet().await;
    let (first, second) = (node.claim("a", &[("gpus", "gpu-0")]), node.claim("b", &[("gpus", "gpu-0")]));
    start(&kubelet, &first).await.unwrap();
    node.delete("a");
    let held = ClaimedDevice {
        claim: first.to_string(),
        driver: super::node::DRIVER.to_owned(),
        pool: super::node::POOL.to_owned(),
        device: "gpu-0".to_owned(),
        cdi_names: Vec::new(),
    };
    tell_holders(&node, Some(Holdings { claims: [held].into(), ..Holdings::default() }));
    for _ in 0..2 {
        assert!(refusal(&kubelet, &second).await.contains("is prepared for the claim ml/claim-a"));
        tell_holders(&node, Some(Holdings::default()));
    }
    assert_eq!(start(&kubelet, &second).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn prepare_undoes_no_claim_while_holders_are_unknown() {
    let mut node = Node::new();
    node.settings.boot = None;
    node.start();
    let kubelet = node.kubelet().await;
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    start(&kubelet, &claim).await.unwrap();
    node.delete("a");
    kubelet.restart().await.unwrap();
    connected(&kubelet).await;
    for (holdings, left) in [(None, ["a.json"].as_slice()), (Some(Holdings::default()), &[])] {
        tell_holders(&node, holdings);
        assert!(refusal(&kubelet, &claim).await.contains("there is no such claim"));
        assert_eq!(node.checkpoints(), left);
    }
}

#[tokio::test]
async fn claims_of_another_boot_exchange_their_gpus() {
    let mut node = Node::running();
    let kubelet = node.kubelet().await;
    let claims = [("a", "gpu-0"), ("b", "gpu-1")].map(|(uid, gpu)| node.claim(uid, &[("gpus", gpu)]));
    for claim in &claims {
        start(&kubelet, claim).await.unwrap();
    }
    kubelet.stop().await;
    node.stop().await;
    // The minor numbers moved: in the last boot each had the other's GPU.
    let texts = claims.clone().map(|claim| fs::read_to_string(node.checkpoint(&claim.uid)).unwrap());
    let uuid = |minor| node.gpu(minor).split_once('=').unwrap().1.to_owned();
    for (claim, text, [from, to]) in
        [(&claims[0], &texts[0], [uuid(0), uuid(1)]), (&claims[1], &texts[1], [uuid(1), uuid(0)])]
    {
        fs::write(node.checkpoint(&claim.uid), text.replace(&from, &to)).unwrap();
    }
    node.settings.boot = Some("the next boot".to_owned());
    node.start();
    kubelet.start_again().unwrap();
    connected(&kubelet).await;
    for (claim, minor) in claims.iter().zip(0..) {
        assert_eq!(start(&kubelet, claim).await.unwrap(), [node.gpu(minor)]);
    }
}

#[tokio::test]
async fn plugin_killed_while_the_claim_is_read_leaves_nothing() {
    let mut node = Node::new();
    node.settings.claim_timeout = LIMIT;
    node.start();
    let kubelet = node.kubelet().await;
    let claim = node.set("a", Answer::Silent);
    let asked = async {
        while node.reads("a") == 0 {
            tokio::task::yield_now().await;
        }
    };
    let (started, ()) = tokio::join!(tokio::time::timeout(LIMIT, start(&kubelet, &claim)), async {
        tokio::time::timeout(LIMIT, asked).await.unwrap();
        node.running.as_ref().unwrap().0.abort();
    });
    assert!(started.unwrap().is_err());
    assert_eq!(node.checkpoints(), [""; 0]);
    node.claim("a", &[("gpus", "gpu-0")]);
    node.kill_and_start().await;
    connected(&kubelet).await;
    let again = async {
        // The connection may still be the old one's.
        loop {
            if let Ok(devices) = start(&kubelet, &claim).await {
                return devices;
            }
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(tokio::time::timeout(LIMIT, again).await.unwrap(), [node.gpu(0)]);
}

#[tokio::test]
async fn plugin_killed_before_its_last_step_leaves_nothing() {
    let mut node = Node::new();
    (node.settings.specs_timeout, node.settings.prepare_timeout) = (LIMIT, LIMIT);
    node.start();
    let kubelet = node.kubelet().await;
    node.scan_nothing();
    let claim = node.claim("a", &[("gpus", "gpu-0")]);
    let (started, ()) = tokio::join!(tokio::time::timeout(LIMIT, start(&kubelet, &claim)), async {
        node.holds(1).await;
        node.running.as_ref().unwrap().0.abort();
    });
    assert!(started.unwrap().is_err());
    node.kill_and_start().await;
    node.scan();
    // The kubelet was told nothing: its GPU is free.
    assert_eq!((node.checkpoints(), node.claim_specs()), (vec![], vec![]));
    let other = node.claim("b", &[("gpus", "gpu-0")]);
    let again = async {
        while start(&kubelet, &other).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, again).await.unwrap();
    assert!(refusal(&kubelet, &claim).await.contains("is prepared for the claim ml/claim-b"));
}

/// Checkpoints of when sets of GPUs were devices name the set for each of its GPUs.
#[tokio::test]
async fn checkpoint_of_a_set_holds_its_gpus() {
    for progress in ["Started", "Completed"] {
        let mut node = Node::running();
        let kubelet = node.kubelet().await;
        let claim = node.claim("a", &[("gpus", "gpu-0"), ("gpus", "gpu-3")]);
        let devices = start(&kubelet, &claim).await.unwrap();
        kubelet.stop().await;
        node.kill().await;
        let text = fs::read_to_string(node.checkpoint("a")).unwrap().replace("Completed", progress);
        let text = text.replace("\"gpu-0\"", "\"gpus-2-0-3\"").replace("\"gpu-3\"", "\"gpus-2-0-3\"");
        assert_eq!(text.matches("gpus-2-0-3").count(), 2, "{text}");
        fs::write(node.checkpoint("a"), text).unwrap();
        node.claim("a", &[("gpus", "gpus-2-0-3")]);
        node.start();
        let kubelet = node.kubelet().await;
        let other = node.claim("b", &[("gpus", "gpu-3")]);
        if progress == "Completed" {
            assert_eq!(start(&kubelet, &claim).await.unwrap(), devices);
            // Neither sick nor gone: a set has no health of its own.
            kubelet.wait(|state| state.drivers[DRIVER].health.len() == 8).await.unwrap();
        } else {
            let why = refusal(&kubelet, &claim).await;
            assert!(why.contains("there is no device 'gpus-2-0-3' on this node; there are gpu-0, gpu-1"), "{why}");
        }
        let why = refusal(&kubelet, &other).await;
        assert!(why.contains("is prepared for the claim ml/claim-a"), "{progress}: {why}");
        end(&kubelet, &claim).await;
        assert_eq!(node.checkpoints(), [""; 0], "{progress}");
        start(&kubelet, &other).await.unwrap();
    }
}
