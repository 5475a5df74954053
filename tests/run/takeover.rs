//! Two linkwise on one node: the death of either at each step of a takeover, and a pod that has handed over.

use std::path::PathBuf;

use linkwise_kubelet_box::{Connections, Fault, KubeletBox, Options, Pod};

use super::node::{GPU, LIMIT, Process, Setup, registered, until};

pub(super) fn kubelet(setup: &Setup, connections: Connections) -> KubeletBox {
    let mut options = Options::new(setup.kubelet_socket.parent().unwrap());
    options.dial_retry = std::time::Duration::from_millis(10);
    options.wait_timeout = LIMIT;
    options.pod_resources = Some(setup.pod_resources());
    options.connections = connections;
    KubeletBox::start(options).unwrap()
}

pub(super) fn machine() -> Setup {
    let setup = Setup::on("dgx1-v100").arg("--log=linkwise=debug");
    setup.all_on_bus();
    setup
}

/// A linkwise on this machine whose pod has this UID.
pub(super) fn of_pod(setup: &Setup, pod: &str, more: &[&str]) -> Process {
    let mut command = setup.command();
    command.arg("--pod-uid").arg(pod).args(more);
    Process::of(command)
}

pub async fn stage(process: &Process, stage: &str) {
    process.logged(|line| line["message"] == "takeover" && line["stage"] == stage).await;
}

/// The owner of a fresh node, and its kubelet.
pub(super) async fn owner(setup: &Setup, connections: Connections) -> (Process, KubeletBox) {
    let kubelet = kubelet(setup, connections);
    let owner = of_pod(setup, "first", &[]);
    registered(&kubelet, 1, 8).await;
    owner.logged(|line| line["phase"] == "serving").await;
    (owner, kubelet)
}

/// Waits until the sockets of one process lie beside the kubelet's, and the kubelet has its stream.
async fn only_sockets_of(setup: &Setup, kubelet: &KubeletBox) {
    // One that serves has one name, or two after a takeover.
    until(async || {
        let (sockets, connected) = (setup.sockets(), kubelet.state().resources[GPU].connected);
        if (1..=2).contains(&sockets.len()) && connected { Ok(()) } else { Err((sockets, connected)) }
    })
    .await;
}

pub(super) async fn admits(kubelet: &KubeletBox, pod: &str) {
    kubelet.admit(&Pod::single(pod, GPU, 1), None).await.unwrap();
    kubelet.remove_pod(pod);
}

async fn death_at_any_step(connections: Connections) {
    for (of_owner, step) in [(true, "Yielding"), (true, "Ending"), (false, "Starting"), (false, "Waiting")] {
        for owner_dies in [true, false] {
            let setup = machine();
            let (owner, kubelet) = owner(&setup, connections).await;
            let standby = of_pod(&setup, "second", &[]);
            stage(if of_owner { &owner } else { &standby }, step).await;
            let (victim, left) = if owner_dies { (owner, standby) } else { (standby, owner) };
            victim.signal("KILL");
            // Nothing tells when the kubelet has noticed: it serves for good when pods are admitted by the survivor.
            // The last step takes some milliseconds: under load, the kill may come when the takeover is over.
            let ends = |line: &serde_json::Value| line["stage"] == "Owning" || line["stage"] == "Retired";
            if left.logged(ends).await["stage"] == "Retired" {
                continue;
            }
            let (mut victim, what) = (victim, format!("{connections:?} {step} {owner_dies}"));
            victim.ended().await;
            until(async || {
                let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await;
                kubelet.remove_pod("pod");
                admitted.map(drop).map_err(|error| format!("{what}: {error}"))
            })
            .await;
            only_sockets_of(&setup, &kubelet).await;
            // And the next one takes over from the one that is left.
            let next = of_pod(&setup, "third", &[]);
            next.said("took over this node").await;
            admits(&kubelet, "after").await;
            assert_eq!(kubelet.violations(), [], "{what}");
        }
    }
}

#[tokio::test]
async fn death_at_any_step_leaves_one_that_serves_up_to_1_36() {
    death_at_any_step(Connections::ByResource).await;
}

#[tokio::test]
async fn death_at_any_step_leaves_one_that_serves_from_1_37() {
    death_at_any_step(Connections::BySocket).await;
}

/// The kubelet opens no stream to the new one, which gives up after half a minute.
#[tokio::test]
#[ignore = "half a minute: make test-long"]
async fn update_that_cannot_serve_hands_back() {
    let setup = machine();
    let (owner, kubelet) = owner(&setup, Connections::ByResource).await;
    kubelet.set_fault(Fault::AnswerWithoutDial);
    let standby = of_pod(&setup, "second", &[]);
    let line = standby.said("could not take over this node").await;
    assert!(line["why"].as_str().unwrap().contains("ListAndWatch"), "{line}");
    owner.said("another linkwise could not take over this node").await;
    kubelet.set_fault(Fault::None);
    admits(&kubelet, "pod").await;
    assert!(kubelet.gaps(GPU).is_empty() && kubelet.violations().is_empty(), "{:?}", kubelet.gaps(GPU));
    // It tries again, and can.
    standby.said("took over this node").await;
    admits(&kubelet, "after").await;
}

#[tokio::test]
async fn pod_that_handed_over_never_takes_over_again() {
    let setup = machine();
    let (owner, kubelet) = owner(&setup, Connections::ByResource).await;
    let next = of_pod(&setup, "second", &[]);
    owner.said("another linkwise has taken over this node").await;
    owner.signal("KILL");
    let (_, _) = { owner }.ended().await;
    stage(&next, "Owning").await;
    next.logged(|line| line["phase"] == "serving").await;
    // Its container is started again.
    let record: PathBuf = setup.kubelet_socket.with_file_name("linkwise").join("linkwise_health.json");
    let before = until(async || std::fs::metadata(&record).and_then(|found| found.modified())).await;
    let sockets = setup.sockets();
    let again = of_pod(&setup, "first", &[]);
    let line = again.said("another linkwise serves this node: standing by").await;
    assert_eq!((&line["takes_over"], &line["pod"]), (&false.into(), &"second".into()));
    admits(&kubelet, "pod").await;
    // It is unready, and writes nothing.
    let up = again.logged(|line| line["message"] == "linkwise is up").await;
    let address: std::net::SocketAddr = up["metrics"].as_str().unwrap().parse().unwrap();
    again.logged(|line| line["input"] == "Sees(true)").await;
    let answer = super::node::get(address, "/readyz").await;
    assert!(answer.status == 503 && answer.body.contains("another linkwise serves this node"), "{answer:?}");
    assert_eq!(super::node::get(address, "/livez").await.status, 200);
    assert_eq!(std::fs::metadata(&record).unwrap().modified().unwrap(), before);
    assert_eq!(setup.sockets(), sockets);
    // It serves where nobody else does.
    next.signal("KILL");
    stage(&again, "Owning").await;
    registered(&kubelet, 3, 8).await;
}
