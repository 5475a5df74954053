//! The node's loop: its tasks, its plugins, the first list, and the ledger of claims.

use super::*;
use linkwise_core::claims::{ClaimError, ClaimName, Prepared};
use linkwise_core::state::{ClaimedDevice, DRA_DRIVER, HealthRecord, PreparedClaim};

/// Waits until /readyz gives the wanted answer.
async fn wait_for_readyz(node: &Node, wanted: impl Fn(Result<String, Vec<String>>) -> bool) {
    let ready = node.answers().ready;
    let waits = async {
        while !wanted(ready()) {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), waits).await.unwrap_or_else(|_| panic!("{:?}", ready()));
}

impl Node {
    /// Publishes another state.
    fn show(&mut self, state: NodeState) {
        self.state.current = state;
        self.state.publish();
        self.follow_published();
    }
}

fn observed() -> Event {
    Event::Observed(Box::new(linkwise_host::machines::load("dgx1-v100").unwrap().observed))
}

/// A claim for GPU 0, as the kubelet lists it.
fn claimed() -> ClaimedDevice {
    ClaimedDevice {
        claim: "ml/a".to_owned(),
        driver: DRA_DRIVER.to_owned(),
        pool: "n".to_owned(),
        device: "gpu-0".to_owned(),
        cdi_names: Vec::new(),
    }
}

fn settings(folder: &std::path::Path) -> NodeSettings {
    NodeSettings::new(kubelet::Settings::new(folder.join("kubelet.sock")))
}

/// Waits until a task ends; returns true if it ran the plugin of a withdrawn resource.
async fn await_withdrawal(node: &mut Node) -> bool {
    let ended = timeout(Duration::from_secs(20), node.tasks.join_next()).await.unwrap();
    let (name, result) = ended.unwrap().unwrap();
    result.unwrap();
    node.forget_withdrawn(&name)
}

#[tokio::test]
async fn unexpected_task_end_ends_the_node() {
    let folder = tempfile::tempdir().unwrap();
    type Task = std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>>;
    let tasks: [(Task, &str); 3] = [
        (Box::pin(async { Ok(()) }), "the task 'task' ended"),
        (Box::pin(async { Err(anyhow!("no room")) }), "the task 'task' failed: no room"),
        (Box::pin(async { panic!("at the disco") }), "a task panicked"),
    ];
    for (task, cause) in tasks {
        let mut node = Node::start(settings(folder.path())).await.unwrap();
        let shutdown = node.shutdown();
        node.spawn("task", task);
        let ended = timeout(Duration::from_secs(20), node.serve()).await.unwrap();
        let error = format!("{:#}", ended.unwrap_err());
        assert!(error.starts_with(cause), "{error}");
        assert!(shutdown.is_cancelled(), "the other tasks are asked to end");
    }
    let node = Node::start(settings(folder.path())).await.unwrap();
    node.shutdown().cancel();
    node.serve().await.unwrap();
}

#[tokio::test]
async fn no_plugin_before_kubelet_was_asked_for_holders() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(folder.path());
    settings.kubelet.pod_resources_socket = Some(folder.path().join("pod-resources.sock"));
    settings.health.await_first_poll = true;
    let mut node = Node::start(settings).await.unwrap();
    let observed = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    let first = observed.gpus[0].uuid.clone();
    node.apply(Event::Observed(Box::new(observed)));
    assert!(node.follows_holders, "the kubelet is asked for the holders");
    node.apply(Event::Polled([(first, Default::default())].into()));
    assert!(node.plugins.is_empty());
    node.apply(Event::Holders(None));
    assert_eq!(node.plugins.len(), 1);
}

#[tokio::test]
async fn trouble_of_a_withdrawn_plugin_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Node::start(settings(folder.path())).await.unwrap();
    node.apply(observed());
    wait_for_readyz(&node, |answer| answer.unwrap_err()[0].contains("there is no")).await;
    node.show(NodeState::default());
    assert!(await_withdrawal(&mut node).await && node.readiness.all().is_empty());
}

#[tokio::test]
async fn claims_entered_right_after_adopt_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    // The loop picks one of its channels at random.
    for _ in 0..20 {
        let mut node = Node::start(settings(folder.path())).await.unwrap();
        node.stand_by();
        node.apply(observed());
        let (orders, ledger, snapshot) = (node.order_sender.clone(), node.ledger(), node.snapshot());
        orders.send(Order::Adopt { record: None, owner_scan: None }).await.unwrap();
        let claim = ClaimName { uid: "1".to_owned(), ..ClaimName::default() };
        let prepared = PreparedClaim { claim, ..PreparedClaim::default() };
        let until_both_are_taken = async {
            ledger.change(|_| Event::Prepared(vec![prepared])).await;
            while orders.capacity() < MAX_ORDERS {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            ended = node.serve() => panic!("{ended:?}"),
            () = until_both_are_taken => {}
        }
        assert!(snapshot.borrow().ledger().prepared("1").is_some());
    }
}

#[tokio::test]
async fn kubelet_is_asked_soon_after_claims_change() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Node::start(settings(folder.path())).await.unwrap();
    node.apply(observed());
    node.apply(Event::Holders(Some(Holdings { claims: [claimed()].into(), ..Holdings::default() })));
    assert!(node.state.current.offers().awaits_holders());
    let mut asked = node.asks_often.subscribe();
    node.apply(Event::Prepared(Vec::new()));
    assert!(asked.has_changed().unwrap());
    asked.mark_unchanged();
    node.apply(observed());
    assert!(!asked.has_changed().unwrap());
}

/// The kubelet goes on listing a claim for a while after its Unprepare.
#[tokio::test]
async fn kubelet_is_asked_soon_after_own_claim_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Node::start(settings(folder.path())).await.unwrap();
    let gpu = linkwise_host::machines::load("dgx1-v100").unwrap().observed.gpus[0].uuid.clone();
    let device = serde_json::json!({"request": "gpus", "pool": "n", "device": "gpu-0", "gpu": gpu, "cdi": []});
    let prepared = serde_json::from_value(serde_json::json!({"devices": [device]})).unwrap();
    let claim = ClaimName { namespace: "ml".to_owned(), name: "a".to_owned(), uid: "1".to_owned() };
    // The previous process offered the GPU through DRA.
    let record = HealthRecord { dra: [gpu.clone()].into(), ..node.state.current.record() };
    node.apply(Event::Restored(Box::new(record)));
    node.apply(Event::Prepared(vec![PreparedClaim { claim, prepared, ..PreparedClaim::default() }]));
    node.apply(observed());
    node.apply(Event::Holders(Some(Holdings { claims: [claimed()].into(), ..Holdings::default() })));
    assert!(node.state.current.is_with_dra(&gpu) && node.state.current.offers().awaits_holders());
    let mut asked = node.asks_often.subscribe();
    node.apply(Event::Prepared(Vec::new()));
    assert!(node.state.current.is_with_dra(&gpu) && asked.has_changed().unwrap() && *asked.borrow_and_update());
    node.apply(Event::Holders(Some(Holdings::default())));
    assert!(!node.state.current.is_with_dra(&gpu) && !*asked.borrow_and_update());
}

#[tokio::test]
async fn rebuilt_state_keeps_the_ledgers_claims() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Node::start(settings(folder.path())).await.unwrap();
    node.stand_by();
    node.apply(observed());
    let claim = ClaimName { uid: "1".to_owned(), ..ClaimName::default() };
    node.apply(Event::Prepared(vec![PreparedClaim { claim, ..PreparedClaim::default() }]));
    node.perform(Order::Adopt { record: None, owner_scan: None });
    let ledger = node.state.current.ledger();
    assert!(ledger.prepared("1").is_some() && ledger.has_all_claims());
    // A process that has handed its claims over does not keep them.
    node.apply(Event::ClaimsHandedOver);
    node.perform(Order::Adopt { record: None, owner_scan: None });
    assert!(!node.state.current.ledger().has_all_claims());
}

#[tokio::test]
async fn withdrawn_resource_gets_a_new_plugin_when_back() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = linkwise_kubelet_box::KubeletBox::start(linkwise_kubelet_box::Options::new(folder.path())).unwrap();
    let mut node = Node::start(settings(folder.path())).await.unwrap();
    node.apply(observed());
    let offering = node.state.current.clone();
    let serving = |answer| answer == Ok("ready".to_owned());
    wait_for_readyz(&node, serving).await;
    let connected = |node: &Node| node.metrics.encode().unwrap().contains("linkwise_kubelet_connected{");
    assert!(connected(&node));
    // No device of the resource is left: the session closes and nothing else ends.
    node.show(NodeState::default());
    wait_for_readyz(&node, |answer| answer.unwrap_err()[0].contains("not been discovered")).await;
    // The resource comes back before its plugin has ended: the next plugin waits.
    node.show(offering.clone());
    assert_eq!(node.plugins.len(), 1);
    assert!(await_withdrawal(&mut node).await);
    wait_for_readyz(&node, serving).await;
    kubelet.wait(|state| state.resources["nvidia.com/gpu"].registrations == 2).await.unwrap();
    node.show(NodeState::default());
    assert!(await_withdrawal(&mut node).await && node.plugins.is_empty() && !connected(&node));
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name != "kubelet_internal_checkpoint").collect();
    assert_eq!(left, ["kubelet.sock"]);
    kubelet.wait(|state| state.resources["nvidia.com/gpu"].open_streams == 0).await.unwrap();
    // The end of any other task is unexpected.
    node.tasks.spawn(async { ("task".to_owned(), Ok(())) });
    assert!(!await_withdrawal(&mut node).await);
}

#[tokio::test]
async fn one_of_two_waiting_claims_gets_the_hardware() {
    let folder = tempfile::tempdir().unwrap();
    let health = HealthSettings { await_first_poll: true, ..HealthSettings::default() };
    let mut node = Node::start(NodeSettings { health, ..settings(folder.path()) }).await.unwrap();
    node.apply(observed());
    let gpu = node.state.current.topology().gpus()[0].uuid.clone();
    let (ledger, events) = (node.ledger(), node.events());
    let takes = |uid: &'static str| {
        ledger.give(move |state| match state.ledger().claims().next() {
            Some((holder, _)) => Err(ClaimError::NotAllocated(holder.uid.clone())),
            None => {
                let claim = ClaimName { uid: uid.to_owned(), ..ClaimName::default() };
                let entry = PreparedClaim { claim, ..PreparedClaim::default() };
                Ok((Event::Prepared(state.ledger().claims_with(uid, Some(entry))), Prepared::default()))
            }
        })
    };
    let polls = async {
        let holder = |state: &NodeState| state.ledger().claims().next().map(|(claim, _)| claim.uid.clone());
        let (holder_sender, seen) = tokio::sync::oneshot::channel();
        ledger
            .change(move |state| {
                drop(holder_sender.send(holder(state)));
                Event::Tick
            })
            .await;
        assert_eq!(seen.await, Ok(None), "a claim got hardware before the first list");
        events.send(Event::Polled([(gpu, Default::default())].into())).await.unwrap();
    };
    let answers = tokio::select! {
        ended = node.serve() => panic!("{ended:?}"),
        (first, second, ()) = async { tokio::join!(takes("1"), takes("2"), polls) } => (first, second),
    };
    assert_eq!(answers, (Some(Ok(Prepared::default())), Some(Err(ClaimError::NotAllocated("1".to_owned())))));
}
