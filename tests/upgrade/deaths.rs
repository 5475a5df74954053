//! The death of either linkwise at steps of a takeover, a standby that cannot serve, and a pod that has handed over.
//! The model has every step (`crates/node/src/takeover/machine/tests.rs`), these tests the steps that the kubelet sees.

use linkwise_kubelet_box::{Connections, Fault};

use crate::upgrade::fleet::{GPUS, Running, World, wait_stage};
use crate::upgrade::node::{GPU, KUBELETS, get, seen, until, wait_registered};

/// Waits until only one process has sockets beside the kubelet's, and the kubelet has its stream.
async fn wait_sockets_of_one(world: &World) {
    // The socket of a serving process has one name, or two after a takeover.
    let state = async || (world.setup.sockets(), world.kubelet.state().resources[GPU].connected);
    seen(state, |(sockets, connected)| (1..=2).contains(&sockets.len()) && *connected).await;
}

async fn death_in_takeover(connections: Connections) {
    for (of_owner, step) in [(true, "Yielding"), (true, "Ending"), (false, "Starting"), (false, "Waiting")] {
        for owner_dies in [true, false] {
            let world = World::new(connections);
            let owner = world.owner().await.process;
            let standby = world.spawn("second");
            wait_stage(if of_owner { &owner } else { &standby }, step).await;
            let (mut victim, survivor) = if owner_dies { (owner, standby) } else { (standby, owner) };
            victim.signal("KILL");
            // The last step takes some milliseconds: under load, the kill may come when the takeover is over.
            let ends = |line: &serde_json::Value| line["stage"] == "Owning" || line["stage"] == "Retired";
            if survivor.logged(ends).await["stage"] == "Retired" {
                continue;
            }
            victim.ended().await;
            // Nothing shows when the kubelet has noticed the death: pods are tried until one is admitted.
            until(async || world.admit("pod").await).await;
            wait_sockets_of_one(&world).await;
            // The next linkwise takes over from the survivor.
            let next = world.spawn("third");
            next.said("took over this node").await;
            world.admit("after").await.unwrap();
            assert_eq!(world.kubelet.violations(), [], "{connections:?} {step} {owner_dies}");
        }
    }
}

#[tokio::test]
async fn death_in_takeover_leaves_an_owner_up_to_1_36() {
    death_in_takeover(KUBELETS[0]).await;
}

#[tokio::test]
async fn death_in_takeover_leaves_an_owner_from_1_37() {
    death_in_takeover(KUBELETS[1]).await;
}

/// The kubelet opens no stream to the new process, which gives up after half a minute.
#[tokio::test]
#[ignore = "half a minute: make test-long"]
async fn standby_that_cannot_serve_hands_back() {
    let world = World::new(KUBELETS[0]);
    let owner = world.owner().await.process;
    world.kubelet.set_fault(Fault::AnswerWithoutDial);
    let standby = world.spawn("second");
    let line = standby.said("could not take over this node").await;
    assert!(line["why"].as_str().unwrap().contains("ListAndWatch"), "{line}");
    owner.said("another linkwise could not take over this node").await;
    world.kubelet.set_fault(Fault::None);
    world.admit("pod").await.unwrap();
    assert_eq!((world.kubelet.gaps(GPU), world.kubelet.violations()), (vec![], vec![]));
    standby.said("took over this node").await;
    world.admit("after").await.unwrap();
}

#[tokio::test]
async fn pod_that_handed_over_waits_for_the_owners_end() {
    let world = World::new(KUBELETS[0]);
    let mut owner = world.owner().await.process;
    let next = world.spawn("second");
    owner.said("another linkwise has taken over this node").await;
    owner.signal("KILL");
    owner.ended().await;
    wait_stage(&next, "Owning").await;
    next.logged(|line| line["phase"] == "serving").await;
    // The container of the pod that handed over restarts.
    let record = world.setup.kubelet_socket.with_file_name("linkwise").join("linkwise_health.json");
    let before = until(async || std::fs::metadata(&record).and_then(|found| found.modified())).await;
    let sockets = world.setup.sockets();
    let again = world.spawn("first");
    let line = again.said("another linkwise serves this node: standing by").await;
    assert_eq!((&line["takes_over"], &line["pod"]), (&false.into(), &"second".into()));
    world.admit("pod").await.unwrap();
    // The restarted container is unready, and writes nothing.
    let Running { process: again, address } = Running::of(again).await;
    again.logged(|line| line["input"] == "SeesGpus(true)").await;
    let answer = get(address, "/readyz").await;
    assert!(answer.status == 503 && answer.body.contains("another linkwise serves this node"), "{answer:?}");
    assert_eq!(get(address, "/livez").await.status, 200);
    assert_eq!(std::fs::metadata(&record).unwrap().modified().unwrap(), before);
    assert_eq!(world.setup.sockets(), sockets);
    // It serves once no other linkwise does.
    next.signal("KILL");
    wait_stage(&again, "Owning").await;
    wait_registered(&world.kubelet, 3, GPUS.len()).await;
}
