//! The time of a scrape with 8 GPUs, without pods and with 64 pods of two slots: over the port, for the text alone, and
//! for the text right after a change.
//!
//! Prints a table and judges nothing; the budget is 2 ms a scrape. Run it with `cargo bench --bench scrape`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints, and ends at its first error")]

use std::hint::black_box;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::{
    ContainerHoldings, ContainerName, Event, Holdings, ResourceName, ResourcePlan, SharedResource, Sharing, SharingKind,
};
use linkwise_host::machines;
use linkwise_kubelet::device_plugin::Settings;
use linkwise_node::node::{Node, NodeSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const REPLICAS: u32 = 16;
/// Scrapes of each kind; after changes a tenth as many.
const ROUNDS: usize = 2_000;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    println!("{:<22}{:<34}{:>8}{:>8}{:>12}{:>12}", "machine", "", "kB", "series", "median", "p99");
    for machine in ["dgx1-v100", "dgx-h100"] {
        for pods in [0, 64] {
            measure(machine, pods).await;
        }
    }
}

async fn measure(machine: &str, pods: usize) {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings::new(folder.path().join("kubelet.sock"));
    let node = Node::start(NodeSettings::new(settings)).await.unwrap();
    let (events, shutdown, metrics) = (node.events(), node.shutdown(), node.metrics().clone());
    let (address, mut snapshot) = (node.metrics_address(), node.snapshot());
    let serving = tokio::spawn(node.serve());
    let observed = machines::load(machine).unwrap().observed;
    let gpus: Vec<String> = observed.gpus.iter().map(|gpu| gpu.uuid.to_string()).collect();
    let shared = vec![SharedResource::new(ResourceName::gpu(), REPLICAS)];
    let sharing = Some(Sharing::new(SharingKind::TimeSlicing, shared));
    let plan = Event::Planned(Box::new(ResourcePlan { sharing, ..ResourcePlan::default() }));
    for event in [plan, Event::Observed(Box::new(observed)), Event::Holders(Some(holdings(&gpus, pods, "a")))] {
        events.send(event).await.unwrap();
    }
    snapshot.wait_for(|state| state.ledger().is_known()).await.unwrap();
    let text = scrape(address).await;
    let series = text.lines().filter(|line| line.starts_with("linkwise_")).count();
    let row = |what: &str, mut times: Vec<Duration>| {
        times.sort_unstable();
        let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
        let (what, size) = (format!("{pods} pods, {what}"), text.len() / 1000);
        println!("{machine:<22}{what:<34}{size:>8}{series:>8}{:>12?}{:>12?}", at(50), at(99));
    };
    let (mut over_port, mut alone, mut changed) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        black_box(scrape(address).await);
        over_port.push(start.elapsed());
        let start = Instant::now();
        black_box(metrics.encode().unwrap());
        alone.push(start.elapsed());
    }
    for round in 0..ROUNDS / 10 {
        let name = if round % 2 == 0 { "b" } else { "a" };
        snapshot.mark_unchanged();
        events.send(Event::Holders(Some(holdings(&gpus, pods, name)))).await.unwrap();
        if pods > 0 {
            snapshot.changed().await.unwrap();
        }
        let start = Instant::now();
        black_box(metrics.encode().unwrap());
        changed.push(start.elapsed());
    }
    row("over the port", over_port);
    row("the text", alone);
    row("the text after a change", changed);
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

/// Pods with slots of two GPUs each.
fn holdings(gpus: &[String], pods: usize, name: &str) -> Holdings {
    let mut holdings = Holdings::default();
    for pod in 0..pods {
        let slot = |at: usize| {
            let mut slots = gpus.iter().flat_map(|gpu| (0..REPLICAS).map(move |slot| format!("{gpu}::{slot}")));
            DeviceId::from(slots.nth(at).unwrap())
        };
        // The two slots of a pod are as many places apart as there are pods, so they are on two GPUs.
        let ids = [slot(pod), slot(pod + pods)];
        holdings.containers.extend(ids.iter().map(|id| (ResourceName::gpu(), id.clone())));
        let devices = [(ResourceName::gpu(), ids.into())].into();
        let pod = format!("{name}-{pod}-{}", "p".repeat(40));
        let name = ContainerName { namespace: "training".into(), pod, container: "main".into() };
        holdings.add(name, ContainerHoldings { devices, ..ContainerHoldings::default() });
    }
    holdings
}

async fn scrape(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}
