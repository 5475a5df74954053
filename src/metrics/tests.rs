//! The golden test: names, types, help and labels are an interface.

use super::*;
use crate::state::Event;
use crate::topology::{GpuObservation, HostObservation, NodeObservation};

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
    (Metrics::new("1.2.3", snapshot), sender)
}

/// The series of each metric in alphabetical order: the library writes them in a random one.
fn sorted(text: &str) -> String {
    let mut blocks: Vec<Vec<&str>> = Vec::new();
    for line in text.lines() {
        let comment = line.starts_with('#');
        match blocks.last_mut() {
            Some(block) if block.last().is_some_and(|last| last.starts_with('#')) == comment => block.push(line),
            _ => blocks.push(vec![line]),
        }
    }
    for block in blocks.iter_mut().filter(|block| !block.iter().any(|line| line.starts_with('#'))) {
        block.sort_unstable();
    }
    blocks.concat().join("\n")
}

/// Everything once.
fn everything() -> String {
    let (metrics, sender) = metrics();
    let resource = ResourceName::gpu();
    metrics.resource(&resource);
    metrics.registered(&resource, true);
    metrics.connected(&resource, true);
    metrics.allocated(&resource, true);
    metrics.rpc(&resource, "Allocate", "OK", Duration::from_micros(300));
    metrics.rpc(&resource, "ListAndWatch", "CANCELLED", Duration::from_secs(9));
    metrics.rpc(&resource, "Anything", "UNIMPLEMENTED", Duration::from_micros(1));
    let snapshot = sender.borrow().clone();
    let request = crate::allocation::AllocationRequest::default();
    let (_, report) = crate::allocation::preferred_allocation(
        snapshot.tables(),
        &request,
        crate::allocation::AllocationPolicy::BestEffort,
    );
    metrics.chosen(&resource, &report, Duration::from_micros(3), true);
    metrics.xid(&"GPU-b".parse().unwrap(), 79);
    metrics.xid(&"GPU-b".parse().unwrap(), 4_000_000_000);
    metrics.gpu_failed(&"GPU-b".parse().unwrap(), "xid");
    metrics.agent_started();
    metrics.cdi_written(true);
    metrics.cdi_written(false);
    metrics.idle(true);
    metrics.driver_released(true);
    metrics.agent_up(true);
    metrics.agent_ended("crashed");
    metrics.agents_stuck(3);
    metrics.nvml_away(true);
    metrics.unheard_gpus(2);
    metrics.event_failed();
    sorted(&metrics.encode().unwrap())
}

#[test]
fn what_is_written_is_an_interface() {
    insta::assert_snapshot!(everything());
}

#[test]
fn a_gpu_that_is_gone_has_no_series() {
    let (metrics, sender) = metrics();
    assert!(metrics.encode().unwrap().contains("linkwise_gpu_healthy{uuid=\"GPU-a\"} 1"));
    sender.send_replace(Arc::default());
    assert!(!metrics.encode().unwrap().contains("GPU-a"));
}

#[test]
fn numbers_and_names_without_end_share_a_series() {
    let (metrics, _sender) = metrics();
    let (gpu, resource) = ("GPU-b".parse().unwrap(), ResourceName::gpu());
    for number in 0..10_000 {
        metrics.xid(&gpu, number);
        // A caller may hang up before it is told that there is no such method.
        metrics.rpc(&resource, &format!("Method{number}"), "CANCELLED", Duration::ZERO);
    }
    let text = metrics.encode().unwrap();
    let series = |of: &str| text.lines().filter(|line| line.starts_with(of)).collect::<Vec<_>>();
    assert_eq!(series("linkwise_xid_errors_total{").len(), 256);
    assert_eq!(series("linkwise_xid_errors_total{uuid=\"GPU-b\",xid=\"other\"} 9745").len(), 1);
    assert_eq!(series("linkwise_rpcs_total{").len(), 1);
    assert_eq!(series("linkwise_rpc_duration_seconds_count{").len(), 1);
}

#[test]
fn every_metric_is_documented() {
    let documented = include_str!("../../docs/metrics.md");
    let text = everything();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).filter_map(|line| line.split(' ').next());
    let mut seen = 0;
    for name in names {
        assert!(documented.contains(&format!("`{name}")), "docs/metrics.md does not mention {name}");
        seen += 1;
    }
    assert!(seen > 10, "{text}");
}
