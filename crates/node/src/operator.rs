//! An operator's orders while the node runs: release the driver, resume, clear or cordon a GPU, accept the hardware.
//! They come over the admin socket, and the first two also by SIGUSR1 and SIGUSR2.
//!
//! Owns the orders and their answers. The supervisor of the NVML agents follows [`Release`]; nothing here starts or
//! ends an agent.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::watch;

use super::node::Node;
use crate::admin::{Order, Orders, Outcome};
use crate::readiness::{Part, Readiness};
use linkwise_core::state::{Cordon, Door, Event, NodeState, Shortfall};
use linkwise_core::topology::GpuUuid;
use linkwise_nvml::supervisor::Release;

/// The longest time that an order to release waits until no process holds the driver. The answer names those that do.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// The functions of the admin socket on this node.
pub fn orders(node: &Node, release: &Release) -> Orders {
    let (snapshot, events) = (node.snapshot(), node.events());
    let (views, release, files) = (node.views.clone(), release.clone(), node.files());
    Orders {
        state: Arc::new(move || views.for_operator()),
        carry_out: Arc::new(move |order| {
            let (snapshot, events, release) = (Arc::clone(&snapshot.borrow()), events.clone(), release.clone());
            let is_owner = files.borrow().is_some();
            Box::pin(async move {
                match order {
                    // A standby would lose the order: a takeover makes its state again, from the owner's record.
                    Order::Clear(_) | Order::Cordon(..) | Order::Accept if !is_owner => {
                        Outcome::NotYet("another linkwise serves this node: give it the order".to_owned())
                    }
                    Order::Release => release_or_resume(&release, true, RELEASE_TIMEOUT).await,
                    Order::Resume => release_or_resume(&release, false, RELEASE_TIMEOUT).await,
                    Order::Clear(gpu) => clear(&snapshot, &events, gpu),
                    Order::Cordon(gpu, cordon) => set_cordon(&snapshot, &events, gpu, cordon),
                    Order::Accept => accept(&snapshot, &events),
                }
            })
        }),
    }
}

async fn release_or_resume(release: &Release, is_release: bool, patience: Duration) -> Outcome {
    let failure = release.order(is_release).await.err().map(|error| {
        let verb = if is_release { "releases" } else { "uses" };
        format!("only this process {verb} the driver: cannot pass the order to other processes: {error}")
    });
    let holders = if is_release { release.holders_after(patience).await } else { Vec::new() };
    match failure {
        _ if !holders.is_empty() => Outcome::NotYet(format!(
            "processes still hold the driver after {patience:?}: {}; one may hang in the kernel; the order stands",
            holders.join(", ")
        )),
        Some(failure) => Outcome::NotYet(failure),
        None if is_release => Outcome::Done("no process of linkwise on this node holds the driver".to_owned()),
        None => Outcome::Done("linkwise uses the driver again".to_owned()),
    }
}

/// Follows the driver for ever: shows in /readyz and in the view that it is released, and reports to the takeover that
/// it is away.
pub async fn show_driver(
    mut released: watch::Receiver<bool>,
    mut away: watch::Receiver<bool>,
    readiness: Readiness,
) -> Result<()> {
    loop {
        readiness.set_driver_away(*away.borrow_and_update());
        if *released.borrow_and_update() {
            readiness.note(Part::Driver, "released", "an operator released it; run `linkwise admin resume`".to_owned());
        } else {
            readiness.remove(&Part::Driver);
        }
        tokio::select! {
            changed = released.changed() => changed.context("the operator's orders are gone")?,
            changed = away.changed() => changed.context("the driver's task is gone")?,
        }
    }
}

fn clear(snapshot: &NodeState, events: &mpsc::Sender<Event>, gpu: GpuUuid) -> Outcome {
    send_for_gpu(snapshot, events, &gpu, Event::Cleared(gpu.clone()), || {
        tracing::warn!(%gpu, "an operator declared the GPU healthy");
        format!("the reasons against {gpu} are cleared")
    })
}

fn set_cordon(snapshot: &NodeState, events: &mpsc::Sender<Event>, gpu: GpuUuid, cordon: Option<Cordon>) -> Outcome {
    send_for_gpu(snapshot, events, &gpu, Event::Cordoned(gpu.clone(), cordon.clone()), || {
        let Some(Cordon { by, why, evict }) = cordon else {
            tracing::warn!(%gpu, "an operator uncordoned the GPU");
            return format!("{gpu} may be given to pods again");
        };
        tracing::warn!(%gpu, by, why, evict, "an operator cordoned the GPU");
        let holders = match (evict, snapshot.door(&gpu)) {
            (true, Some(Door::Dra)) => "its taint evicts the pods whose claims have it",
            (true, _) => "pods keep it until they end: only a DRA taint evicts pods",
            (false, _) => "pods keep it until they end",
        };
        format!("{gpu} is given to no new pod; {holders}")
    })
}

/// Accepts the hardware as it is: what the node lacks now is not expected of it any more.
fn accept(snapshot: &NodeState, events: &mpsc::Sender<Event>) -> Outcome {
    let shortfalls: Vec<Shortfall> = snapshot.hardware().shortfalls().cloned().collect();
    if shortfalls.is_empty() {
        return Outcome::Done("this node lacks no hardware".to_owned());
    }
    let accepted = shortfalls.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    send(events, Event::HardwareAccepted(shortfalls), || {
        tracing::warn!(accepted, "an operator accepted the hardware as it is");
        format!("accepted: {accepted}")
    })
}

/// Sends the state an event about a GPU of this node. Answers with `report` if the event is queued.
fn send_for_gpu(
    snapshot: &NodeState,
    events: &mpsc::Sender<Event>,
    gpu: &GpuUuid,
    event: Event,
    report: impl FnOnce() -> String,
) -> Outcome {
    let is_known = || snapshot.gpus().iter().any(|status| status.gpu.uuid == *gpu);
    // A cordon of a GPU that is gone can be ended.
    let ends_cordon = || matches!(event, Event::Cordoned(_, None)) && snapshot.hardware().cordon(gpu).is_some();
    if !is_known() && !ends_cordon() {
        return Outcome::Unknown(format!("no GPU {gpu} on this node"));
    }
    send(events, event, report)
}

/// Sends the state an event. Answers with `report` if the event is queued.
fn send(events: &mpsc::Sender<Event>, event: Event, report: impl FnOnce() -> String) -> Outcome {
    match events.try_send(event) {
        Ok(()) => Outcome::Done(report()),
        Err(TrySendError::Full(_)) => Outcome::NotYet("the queue of events is full; try again".to_owned()),
        Err(TrySendError::Closed(_)) => Outcome::NotYet("linkwise is ending".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::HealthSettings;
    use crate::node::NodeSettings;
    use crate::views::Views;
    use linkwise_core::state::{NumaHints, ResourceName, UnhealthyReason};
    use linkwise_kubelet::device_plugin::Phase;
    use linkwise_nvml::supervisor::{DriverMetrics, Idle};

    fn release() -> Release {
        Release::new(DriverMetrics::register(&mut prometheus_client::registry::Registry::default()), None)
    }

    async fn node(folder: &std::path::Path) -> Node {
        Node::start(NodeSettings {
            kubelet: linkwise_kubelet::device_plugin::Settings::new(folder.join("kubelet.sock")),
            metrics_address: "127.0.0.1:0".parse().unwrap(),
            numa_hints: NumaHints::default(),
            health: HealthSettings::default(),
        })
        .await
        .unwrap()
    }

    /// A dgx1-v100 whose fourth GPU has failed, and whose first reports no NVLink.
    fn snapshot() -> NodeState {
        let mut seen = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
        seen.gpus[0].nvlinks = Some(Vec::new());
        let gpu: GpuUuid = seen.gpus[3].uuid.clone();
        let now = Duration::from_secs(1_700_000_000);
        let (snapshot, _) = NodeState::default().apply(Event::Observed(Box::new(seen)), now);
        snapshot.apply(Event::Xid { gpu, code: 79, instance: None }, now).0
    }

    #[test]
    fn state_has_resources_parts_and_gpus() {
        let gpu = ResourceName::gpu().to_string();
        let (readiness, plugin) = (Readiness::new(Idle::Waiting(String::new())), Part::Plugin(ResourceName::gpu()));
        readiness.add(Part::CdiSync, "up to date");
        readiness.enter(&Part::CdiSync, "up to date", true);
        readiness.add(plugin.clone(), Phase::Pausing.words());
        readiness.trouble(&plugin, "no kubelet".to_owned());
        // A GPU that a pod holds and this node does not have counts as unhealthy.
        let held = [(ResourceName::gpu(), linkwise_core::allocation::DeviceId::from("GPU-gone".to_owned()))];
        let (snapshot, _) =
            snapshot().apply(Event::Holders(Some(held.into_iter().collect())), Duration::from_secs(1_700_000_000));
        let views = Views::new(watch::channel(Arc::new(snapshot)).1, readiness);
        views.follow_release(watch::channel(true).1);
        let shown = serde_json::to_value(views.for_operator()).unwrap();
        let way_out = UnhealthyReason::Xid { code: 79, instance: None }.ends_with();
        assert_eq!(
            shown["resources"],
            serde_json::json!({ gpu: {
                "phase": Phase::Pausing.words(), "trouble": "no kubelet", "healthy": 7, "unhealthy": 2,
            }})
        );
        assert_eq!((&shown["idle"], &shown["driver_released"]), (&serde_json::Value::Null, &true.into()));
        let cdi = serde_json::json!({"CDI sync": {"phase": "up to date", "ready": true, "trouble": null}});
        assert_eq!(shown["parts"], cdi);
        assert!(
            shown["warnings"].as_array().unwrap().iter().any(|text| text.to_string().contains("NVLink")),
            "{shown}"
        );
        let gpus = shown["gpus"].as_array().unwrap();
        let pcis: Vec<&str> = gpus.iter().map(|gpu| gpu["pci"].as_str().unwrap()).collect();
        assert!(pcis.len() == 8 && pcis.is_sorted(), "{pcis:?}");
        assert_eq!(
            gpus[3],
            serde_json::json!({
                "uuid": "GPU-00000001-0000-4000-8000-000000000003", "index": 3, "pci": "0000:0b:00.0",
                "model": "Tesla V100-SXM2-32GB", "numa": 0, "rail": 1, "healthy": false, "availability": "unhealthy",
                "reasons": [{"reason": "XID 79", "kind": "xid", "since": 1_700_000_000, "ends_with": way_out}],
            })
        );
    }

    #[tokio::test]
    async fn order_is_not_done_on_standby_full_queue_and_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut node = node(folder.path()).await;
        let release = release();
        let seen = linkwise_host::machines::load("dgx1-v100").unwrap().observed;
        let gpu = seen.gpus[0].uuid.clone();
        node.apply(Event::Observed(Box::new(seen)));
        let (orders, events) = (orders(&node, &release), node.events());
        assert_eq!(
            (orders.carry_out)(Order::Clear(gpu.clone())).await,
            Outcome::Done(format!("the reasons against {gpu} are cleared"))
        );
        // A standby refuses the order.
        let right = node.files.send_replace(None);
        let elsewhere = Outcome::NotYet("another linkwise serves this node: give it the order".to_owned());
        assert_eq!((orders.carry_out)(Order::Cordon(gpu.clone(), None)).await, elsewhere);
        node.files.send_replace(right);
        // No task takes events here, so the queue fills.
        while events.try_send(Event::Tick).is_ok() {}
        let later = Outcome::NotYet("the queue of events is full; try again".to_owned());
        assert_eq!((orders.carry_out)(Order::Clear(gpu.clone())).await, later);
        drop(node);
        assert_eq!((orders.carry_out)(Order::Clear(gpu)).await, Outcome::NotYet("linkwise is ending".to_owned()));
    }

    #[tokio::test]
    async fn unfinished_release_is_not_done_but_stands() {
        let release = release();
        release.set_held(true);
        let answer = release_or_resume(&release, true, Duration::from_millis(1)).await;
        assert!(matches!(&answer, Outcome::NotYet(words) if words.contains("the order stands")), "{answer:?}");
        assert!(release.is_ordered());
        release.set_held(false);
        assert_eq!(
            release_or_resume(&release, true, RELEASE_TIMEOUT).await,
            Outcome::Done("no process of linkwise on this node holds the driver".to_owned())
        );
    }
}
