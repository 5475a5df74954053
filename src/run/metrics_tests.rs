//! Tests of the modules' metrics: names, types, help and labels are an interface.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::config::valid_metric;
use super::dra::SliceMetrics;
use linkwise_cluster::StoredPool;
use linkwise_core::allocation::DeviceId;
use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::state::{
    ContainerHoldings, ContainerName, Door, Event, Holdings, NodeState, ResourceName, ResourcePlan,
};
use linkwise_core::topology::{GpuObservation, HostObservation, NodeObservation};
use linkwise_host::cdi::CdiMetrics;
use linkwise_host::labels::LabelMetrics;
use linkwise_kubelet::device_plugin::{Life, Phase, PluginMetrics};
use linkwise_kubelet::dra;
use linkwise_node::metrics::Metrics;
use linkwise_node::observe::GpuFailures;
use linkwise_node::readiness::Readiness;
use linkwise_node::takeover::TakeoverMetrics;
use linkwise_node::views::Views;
use linkwise_nvml::supervisor::{DriverMetrics, Idle};
use linkwise_system::grpc::Rpc;

fn node() -> NodeState {
    let gpu: GpuObservation = serde_saphyr::from_str(
        "{index: 0, uuid: GPU-a, pci: '0000:01:00.0', model: \"A \\\"quoted\\\" GPU\", numa: 1}",
    )
    .unwrap();
    let other = GpuObservation { index: 1, uuid: "GPU-b".parse().unwrap(), numa: None, model: None, ..gpu.clone() };
    let observed =
        NodeObservation { gpus: vec![gpu, other], host: HostObservation::default(), ..NodeObservation::default() };
    let (snapshot, _) = NodeState::default().apply(Event::Observed(Box::new(observed)), Duration::ZERO);
    let xid = Event::Xid { gpu: "GPU-b".parse().unwrap(), code: 79, instance: None };
    snapshot.apply(xid, Duration::from_secs(1_700_000_000)).0
}

fn metrics() -> (Metrics, watch::Sender<Arc<NodeState>>) {
    let (sender, snapshot) = watch::channel(Arc::new(node()));
    (Metrics::new("1.2.3", views(snapshot)), sender)
}

fn views(snapshot: watch::Receiver<Arc<NodeState>>) -> Views {
    Views::new(snapshot, Readiness::new(Idle::Waiting(String::new())))
}

/// Sorts metrics and their series, because the library writes the series in random order.
fn sorted(text: &str) -> String {
    let mut blocks: Vec<Vec<&str>> = Vec::new();
    for line in text.lines() {
        match blocks.last_mut() {
            Some(block) if !(line.starts_with("# HELP") || line.starts_with("# EOF")) => block.push(line),
            _ => blocks.push(vec![line]),
        }
    }
    blocks.iter_mut().for_each(|block| block.sort_unstable());
    // "# EOF" comes first.
    blocks.sort_unstable();
    blocks.concat().join("\n")
}

fn rpc(method: &str, code: &'static str, elapsed: Duration) -> Life<Phase> {
    Life::Rpc(Rpc { method: method.to_owned(), code: code.to_owned(), elapsed })
}

/// The text of the metrics of a node without DRA and API server.
fn everything() -> String {
    let (metrics, sender) = metrics();
    let resource = ResourceName::gpu();
    let plugins = metrics.register(PluginMetrics::register);
    plugins.offered(&resource);
    let count = |event| plugins.life(&resource, &event);
    count(Life::Registered(Ok(())));
    count(Life::Phase(Phase::Serving));
    plugins.allocated(&resource, true);
    count(rpc("Allocate", "OK", Duration::from_micros(300)));
    count(rpc("ListAndWatch", "CANCELLED", Duration::from_secs(9)));
    count(rpc("Anything", "UNIMPLEMENTED", Duration::from_micros(1)));
    let snapshot = sender.borrow().clone();
    let request = linkwise_core::allocation::AllocationRequest::default();
    let (_, report) = linkwise_core::allocation::preferred_allocation(
        snapshot.tables(),
        &request,
        linkwise_core::allocation::AllocationPolicy::BestEffort,
    );
    plugins.chosen(&resource, &report, Duration::from_micros(3), true);
    metrics.register(GpuFailures::register).count(&"GPU-b".parse().unwrap(), "xid");
    let labels = metrics.register(LabelMetrics::register);
    labels.made(31, 1);
    labels.written(true);
    let driver = metrics.register(DriverMetrics::register);
    driver.xid(&"GPU-b".parse().unwrap(), 79);
    driver.xid(&"GPU-b".parse().unwrap(), 4_000_000_000);
    driver.idle.set(1);
    driver.released.set(1);
    driver.agent_starts.inc();
    driver.agent_up.set(1);
    driver.agent_ended("crashed");
    driver.agents_stuck.set(3);
    driver.nvml_away.set(1);
    driver.unheard_gpus.set(2);
    driver.event_failures.inc();
    let cdi = metrics.register(CdiMetrics::register);
    cdi.cdi_written(true);
    cdi.cdi_written(false);
    metrics.register(valid_metric);
    drop(metrics.register(TakeoverMetrics::register));
    sorted(&metrics.encode().unwrap())
}

fn everything_of_dra() -> String {
    let (metrics, sender) = metrics();
    let all = ResourcePlan { door: Door::Dra, ..ResourcePlan::default() };
    let events = [Event::Planned(Box::new(all)), Event::Holders(Some(Default::default()))];
    let holders = Event::Holders(Some(Default::default()));
    let state = events.into_iter().chain([holders]).fold(node(), |state, event| state.apply(event, Duration::ZERO).0);
    sender.send_replace(Arc::new(state));
    let slices = metrics.register(SliceMetrics::register);
    let stored = StoredPool { is_current: true, slices: 1, generation: 3, ..StoredPool::default() };
    slices.set(Some(&Pool::new("n", Vec::new())), &stored);
    let plugin = metrics.register(dra::PluginMetrics::register);
    plugin.held(2, 5);
    sorted(&metrics.encode().unwrap())
}

#[test]
fn dra_metrics_text_is_an_interface() {
    let only = |line: &&str| line.contains("linkwise_dra") || line.contains("linkwise_gpu_door");
    insta::assert_snapshot!(everything_of_dra().lines().filter(only).collect::<Vec<_>>().join("\n"));
}

#[test]
fn metrics_text_is_an_interface() {
    insta::assert_snapshot!(everything());
}

/// Two pods on a DGX-1: one has GPU 0 and a GPU of the other package, the other has GPU 1.
fn placed() -> NodeState {
    let seen = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
    let uuid = |at: usize| DeviceId::from(seen.gpus[at].uuid.to_string());
    let gpu = ResourceName::gpu();
    let mut holdings = Holdings::default();
    for (pod, gpus) in [("train\"\n\\", vec![uuid(0), uuid(5)]), ("notebook", vec![uuid(1)])] {
        holdings.containers.extend(gpus.iter().map(|id| (gpu.clone(), id.clone())));
        let held = ContainerHoldings {
            devices: [(gpu.clone(), gpus.into_iter().collect())].into(),
            ..ContainerHoldings::default()
        };
        let name = ContainerName { namespace: "ml".into(), pod: pod.into(), container: "main".into() };
        holdings.add(name, held);
    }
    let events = [Event::Observed(Box::new(seen)), Event::Holders(Some(holdings))];
    events.into_iter().fold(NodeState::default(), |state, event| state.apply(event, Duration::ZERO).0)
}

#[test]
fn placement_metrics_text_is_an_interface() {
    let (metrics, sender) = metrics();
    sender.send_replace(Arc::new(placed()));
    let of = ["allocation_", "best_", "free_", "fragmentation", "gpus"].map(|name| format!("linkwise_{name}"));
    let text = sorted(&metrics.encode().unwrap());
    let only = |line: &&str| of.iter().any(|name| line.contains(name.as_str()));
    insta::assert_snapshot!(text.lines().filter(only).collect::<Vec<_>>().join("\n"));
}

#[test]
fn pods_are_hidden_by_hash_and_on_a_standby() {
    let (_sender, snapshot) = watch::channel(Arc::new(placed()));
    let views = views(snapshot);
    let metrics = Metrics::new("1.2.3", views.clone());
    assert!(metrics.encode().unwrap().contains("pod=\"notebook\""));
    views.hide_pods();
    let text = metrics.encode().unwrap();
    assert!(!text.contains("notebook") && !text.contains("train"), "{text}");
    // The hash is from `printf ml/notebook | sha256sum`.
    assert!(text.contains("namespace=\"ml\",pod=\"pod-99bac2e8ffcd\",container=\"main\""), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("linkwise_allocation_info{")).count(), 3);
    let named = views.for_operator();
    assert!(named.held().iter().any(|held| held.pod == "notebook"), "{named:?}");
    views.stand_by(true);
    let text = metrics.encode().unwrap();
    assert!(!text.contains("linkwise_allocation_info{") && !text.contains("linkwise_gpus_by_availability{"), "{text}");
    assert_eq!(text.matches("linkwise_gpu_healthy{").count(), 8, "{text}");
}

#[test]
fn gone_gpu_has_no_series() {
    let (metrics, sender) = metrics();
    assert!(metrics.encode().unwrap().contains("linkwise_gpu_healthy{uuid=\"GPU-a\"} 1"));
    sender.send_replace(Arc::default());
    assert!(!metrics.encode().unwrap().contains("GPU-a"));
}

#[test]
fn unbounded_labels_share_a_series() {
    let (metrics, _sender) = metrics();
    let (gpu, resource) = ("GPU-b".parse().unwrap(), ResourceName::gpu());
    let (driver, plugins) = (metrics.register(DriverMetrics::register), metrics.register(PluginMetrics::register));
    for number in 0..10_000 {
        driver.xid(&gpu, number);
        // A caller may disconnect before it learns that there is no such method.
        plugins.life(&resource, &rpc(&format!("Method{number}"), "CANCELLED", Duration::ZERO));
    }
    let text = metrics.encode().unwrap();
    let series = |of: &str| text.lines().filter(|line| line.starts_with(of)).collect::<Vec<_>>();
    assert_eq!(series("linkwise_xid_errors_total{").len(), 256);
    assert_eq!(series("linkwise_xid_errors_total{uuid=\"GPU-b\",xid=\"other\"} 9745").len(), 1);
    assert_eq!(series("linkwise_rpcs_total{").len(), 1);
    assert_eq!(series("linkwise_rpc_duration_seconds_count{").len(), 1);
}

#[test]
fn golden_metrics_are_documented() {
    let documented = include_str!("../../docs/metrics.md");
    let text = everything() + "\n" + &everything_of_dra();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).filter_map(|line| line.split(' ').next());
    let mut seen = 0;
    for name in names {
        assert!(documented.contains(&format!("`{name}")), "docs/metrics.md does not mention {name}");
        seen += 1;
    }
    assert!(seen > 10, "{text}");
}
