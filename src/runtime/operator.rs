//! An operator's orders while the node runs: release the driver, resume, clear a GPU. Over the admin socket, and the
//! first two by SIGUSR1 and SIGUSR2.
//!
//! Owns the order and what has become of it. `driver` carries it out; nothing here starts or ends an agent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::watch;
use tokio::time::timeout;

use super::driver::metrics::DriverMetrics;
use super::node::Node;
use super::readiness::{Part, Readiness};
use crate::admin::{GpuState, Order, Orders, Outcome, PartState, ReasonState, ResourceState, State};
use crate::publish::placement::Placements;
use crate::state::{Door, Event, NodeState, Resource};
use crate::topology::GpuUuid;

/// [`Release::patience`].
const LETTING_GO: Duration = Duration::from_secs(10);

/// Whether an operator has released the driver, and whether agents still hold it.
#[derive(Clone, Debug)]
pub(super) struct Release {
    wished: watch::Sender<bool>,
    held: watch::Sender<bool>,
    /// How long an order to release waits for the agents' end before it answers that this is still to come.
    patience: Duration,
    metrics: DriverMetrics,
}

impl Release {
    /// Nothing is ordered.
    pub fn new(metrics: DriverMetrics) -> Self {
        let (wished, held) = (watch::Sender::new(false), watch::Sender::new(false));
        Self { wished, held, patience: LETTING_GO, metrics }
    }

    /// An operator's order: to release the driver, or to resume.
    pub fn wish(&self, release: bool) {
        if self.wished.send_replace(release) != release {
            self.metrics.released.set(release.into());
            let words = if release { "an operator releases the driver" } else { "an operator resumes the driver" };
            tracing::info!("{words}");
        }
    }

    /// Whether the driver is to be released.
    pub fn is_wished(&self) -> bool {
        *self.wished.borrow()
    }

    /// Follows whether the driver is to be released.
    pub fn follow(&self) -> watch::Receiver<bool> {
        self.wished.subscribe()
    }

    /// Whether an agent's process lives. Before a start: set it, then ask [`Self::is_wished`], and start nothing if it
    /// is.
    pub fn set_held(&self, held: bool) {
        self.held.send_if_modified(|was| std::mem::replace(was, held) != held);
    }

    async fn order(&self, release: bool) -> Outcome {
        self.wish(release);
        if !release {
            return Outcome::Done("the driver is taken up again".to_owned());
        }
        if timeout(self.patience, self.held.subscribe().wait_for(|held| !held)).await.is_ok() {
            return Outcome::Done("no process of linkwise holds the driver".to_owned());
        }
        Outcome::NotYet(format!(
            "a process that speaks to NVML has not ended within {:?} (it may hang in the kernel); the order stands",
            self.patience
        ))
    }
}

/// What the admin socket does on this node.
pub(super) fn orders(node: &Node, release: &Release) -> Orders {
    let (snapshot, events) = (node.snapshot(), node.events());
    let (readiness, release) = (node.readiness.clone(), release.clone());
    let (placements, is_released) = (node.metrics().placements().clone(), release.clone());
    Orders {
        state: Arc::new(move || {
            let (snapshot, placements) = placements.named();
            state(&snapshot, &placements, &readiness, is_released.is_wished())
        }),
        carry_out: Arc::new(move |order| {
            let (snapshot, events, release) = (Arc::clone(&snapshot.borrow()), events.clone(), release.clone());
            Box::pin(async move {
                match order {
                    Order::Release => release.order(true).await,
                    Order::Resume => release.order(false).await,
                    Order::Clear(gpu) => clear(&snapshot, &events, gpu),
                }
            })
        }),
    }
}

fn clear(snapshot: &NodeState, events: &mpsc::Sender<Event>, gpu: GpuUuid) -> Outcome {
    if !snapshot.gpus().iter().any(|status| status.gpu.uuid == gpu) {
        return Outcome::Unknown(format!("no GPU {gpu} on this node"));
    }
    match events.try_send(Event::Cleared { gpu: gpu.clone() }) {
        Ok(()) => {
            tracing::warn!(%gpu, "an operator vouches for the GPU");
            Outcome::Done(format!("what was held against {gpu} is forgotten"))
        }
        Err(TrySendError::Full(_)) => Outcome::NotYet("too much happens just now; try again".to_owned()),
        Err(TrySendError::Closed(_)) => Outcome::NotYet("linkwise is ending".to_owned()),
    }
}

/// What `GET /state` answers, and the page shows: of a snapshot and its placements.
pub(super) fn state(
    snapshot: &NodeState,
    placements: &Placements,
    readiness: &Readiness,
    driver_released: bool,
) -> State {
    let gpus: Vec<GpuState> = snapshot
        .gpus()
        .into_iter()
        .map(|status| GpuState {
            uuid: status.gpu.uuid.to_string(),
            index: status.gpu.index,
            pci: status.gpu.pci.to_string(),
            model: status.gpu.model.clone(),
            door: snapshot.door(&status.gpu.uuid).filter(|_| snapshot.has_dra()).map(Door::label),
            healthy: status.is_healthy,
            availability: status.availability,
            reasons: status
                .reasons
                .into_iter()
                .map(|(reason, since)| ReasonState {
                    reason: reason.to_string(),
                    kind: reason.label(),
                    since: since.as_secs(),
                    ends_with: reason.ends_with(),
                })
                .collect(),
        })
        .collect();
    let offered = snapshot.offers().resources();
    let (mut parts, mut resources) = (BTreeMap::new(), BTreeMap::new());
    for (part, state) in readiness.all() {
        if let Part::Plugin(resource) = &part {
            let (healthy, unhealthy) = offered.get(resource).map(Resource::counts).unwrap_or_default();
            let PartState { phase, trouble, .. } = state;
            resources.insert(resource.to_string(), ResourceState { phase, trouble, healthy, unhealthy });
        } else {
            parts.insert(part.to_string(), state);
        }
    }
    let is_known = gpus.is_empty() || snapshot.knows_holders();
    State {
        version: env!("CARGO_PKG_VERSION"),
        driver_released,
        idle: (resources.is_empty() && !snapshot.has_dra()).then(|| readiness.idle().borrow().reason().to_owned()),
        resources,
        parts,
        gpus,
        allocations: is_known.then(|| placements.allocations.iter().map(Into::into).collect()),
        outlook: is_known.then(|| placements.outlook.iter().map(Into::into).collect()),
        warnings: snapshot.hardware().warnings().iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::Phase;
    use crate::runtime::readiness::Idle;
    use crate::runtime::{HealthSettings, NodeSettings};
    use crate::state::{NumaHints, ResourceName, UnhealthyReason};

    fn metrics() -> DriverMetrics {
        DriverMetrics::register(&mut prometheus_client::registry::Registry::default())
    }

    async fn node(folder: &std::path::Path) -> Node {
        Node::start(NodeSettings {
            kubelet: crate::kubelet::Settings::new(folder.join("kubelet.sock")),
            metrics_address: "127.0.0.1:0".parse().unwrap(),
            numa_hints: NumaHints::default(),
            health: HealthSettings::default(),
        })
        .await
        .unwrap()
    }

    /// A dgx1-v100 whose fourth GPU has failed, with an NVLink that only one end knows.
    fn snapshot() -> NodeState {
        let mut seen = crate::machines::load("dgx1-v100").unwrap().observed;
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
        // One that a pod holds and this node does not have is on the list too.
        let held = [(ResourceName::gpu(), crate::allocation::DeviceId::from("GPU-gone".to_owned()))];
        let (snapshot, _) =
            snapshot().apply(Event::Holders(Some(held.into_iter().collect())), Duration::from_secs(1_700_000_000));
        let shown = serde_json::to_value(state(&snapshot, &Placements::of(&snapshot), &readiness, true)).unwrap();
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
                "model": "Tesla V100-SXM2-32GB", "healthy": false, "availability": "unhealthy",
                "reasons": [{"reason": "XID 79", "kind": "xid", "since": 1_700_000_000, "ends_with": way_out}],
            })
        );
    }

    #[tokio::test]
    async fn order_that_cannot_be_queued_is_503() {
        let folder = tempfile::tempdir().unwrap();
        let mut node = node(folder.path()).await;
        let release = Release::new(metrics());
        let seen = crate::machines::load("dgx1-v100").unwrap().observed;
        let gpu = seen.gpus[0].uuid.clone();
        node.apply(Event::Observed(Box::new(seen)));
        let (orders, events) = (orders(&node, &release), node.events());
        assert_eq!(
            (orders.carry_out)(Order::Clear(gpu.clone())).await,
            Outcome::Done(format!("what was held against {gpu} is forgotten"))
        );
        // Nobody takes events here: in the end there is no room for one more.
        while events.try_send(Event::Tick).is_ok() {}
        let later = Outcome::NotYet("too much happens just now; try again".to_owned());
        assert_eq!((orders.carry_out)(Order::Clear(gpu.clone())).await, later);
        drop(node);
        assert_eq!((orders.carry_out)(Order::Clear(gpu)).await, Outcome::NotYet("linkwise is ending".to_owned()));
    }

    #[tokio::test]
    async fn unfinished_release_is_503_and_stands() {
        let release = Release { patience: Duration::from_millis(1), ..Release::new(metrics()) };
        release.set_held(true);
        let answer = timeout(2 * LETTING_GO, release.order(true)).await.unwrap();
        assert!(matches!(&answer, Outcome::NotYet(words) if words.contains("the order stands")), "{answer:?}");
        assert!(release.is_wished());
        release.set_held(false);
        assert_eq!(release.order(true).await, Outcome::Done("no process of linkwise holds the driver".to_owned()));
    }
}
