//! What an operator orders while the node runs: let go of the driver, take it up again, vouch for a GPU. Over the admin
//! socket, and the first two by SIGUSR1 and SIGUSR2.
//!
//! Owns the wish and what has become of it. `driver` heeds it; nothing here starts or ends a child.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::node::Node;
use crate::admin::{GpuState, Orders, Outcome, ReasonState, ResourceState, State};
use crate::inventory::{Event, Health, Inventory};
use crate::kubelet::Phase;
use crate::metrics::Metrics;

/// How long an order to let go waits for the child's end before it says that this is still to come.
const LETTING_GO: Duration = Duration::from_secs(10);

/// Whether the driver is to be let go of, and whether a child of ours holds it.
#[derive(Clone, Debug)]
pub(super) struct Release {
    wished: watch::Sender<bool>,
    held: watch::Sender<bool>,
    metrics: Arc<Metrics>,
}

/// A child lives as long as this does.
pub(super) struct Holding(watch::Sender<bool>);

impl Drop for Holding {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

impl Release {
    /// Nobody wishes anything.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { wished: watch::Sender::new(false), held: watch::Sender::new(false), metrics }
    }

    /// An operator's wish.
    pub fn wish(&self, release: bool) {
        if self.wished.send_replace(release) != release {
            self.metrics.driver_released(release);
            let words =
                if release { "an operator asks to let go of the driver" } else { "the driver is taken up again" };
            tracing::info!("{words}");
        }
    }

    /// Whether the driver is to be let go of.
    pub fn is_wished(&self) -> bool {
        *self.wished.borrow()
    }

    /// Waits until the driver is to be let go of.
    pub async fn wished(&self) {
        self.becomes(&self.wished, true).await;
    }

    /// For whom starts children: waits until it may.
    pub async fn over(&self) {
        self.becomes(&self.wished, false).await;
    }

    /// For whom starts children: one begins, and ends with what is given.
    pub fn holding(&self) -> Holding {
        self.held.send_replace(true);
        Holding(self.held.clone())
    }

    async fn becomes(&self, what: &watch::Sender<bool>, wanted: bool) {
        // It cannot fail: the sender is ours.
        let _ = what.subscribe().wait_for(|is| *is == wanted).await;
    }

    async fn order(&self, release: bool) -> Outcome {
        self.wish(release);
        if !release {
            return Outcome::Done("the driver is taken up again".to_owned());
        }
        match timeout(LETTING_GO, self.becomes(&self.held, false)).await {
            Ok(()) => Outcome::Done("no process of linkwise holds the driver".to_owned()),
            Err(_) => Outcome::NotYet(format!(
                "the process that speaks to NVML has not ended within {LETTING_GO:?} (it may hang in the kernel); the order stands"
            )),
        }
    }
}

/// What the admin socket does on this node.
pub(super) fn orders(node: &Node, release: &Release) -> Orders {
    let (inventory, events) = (node.inventory(), node.events());
    let (plugins, idle, let_go) = (node.plugins(), node.idle_reason(), release.clone());
    let state = {
        let inventory = inventory.clone();
        move || {
            let inventory = Arc::clone(&inventory.borrow());
            let plugins = plugins();
            let idle = plugins.is_empty().then(|| idle.borrow().reason().to_owned());
            state(&inventory, plugins, idle, let_go.is_wished())
        }
    };
    let release = release.clone();
    Orders {
        state: Arc::new(state),
        release: Arc::new(move |wish| {
            let release = release.clone();
            Box::pin(async move { release.order(wish).await })
        }),
        clear: Arc::new(move |gpu| {
            let (known, events) = (Arc::clone(&inventory.borrow()), events.clone());
            Box::pin(async move {
                if !known.resources().values().flatten().any(|(_, device)| device.gpu.uuid == gpu) {
                    return Outcome::Unknown(format!("no GPU {gpu} on this node"));
                }
                match events.try_send(Event::Cleared { gpu: gpu.clone() }) {
                    Ok(()) => {
                        tracing::warn!(%gpu, "an operator vouches for the GPU");
                        Outcome::Done(format!("what was held against {gpu} is forgotten"))
                    }
                    Err(mpsc::error::TrySendError::Full(_)) => {
                        Outcome::NotYet("too much happens just now; try again".to_owned())
                    }
                    Err(mpsc::error::TrySendError::Closed(_)) => Outcome::NotYet("linkwise is ending".to_owned()),
                }
            })
        }),
    }
}

fn state(
    inventory: &Inventory,
    plugins: Vec<(String, Phase, Option<String>)>,
    idle: Option<String>,
    driver_released: bool,
) -> State {
    let mut gpus = Vec::new();
    let mut counts = std::collections::BTreeMap::<String, (usize, usize)>::new();
    for (resource, devices) in inventory.resources() {
        let count = counts.entry(resource.to_string()).or_default();
        count.1 += inventory.absent(resource).count();
        for device in devices.values() {
            let healthy = device.health == Health::Healthy;
            *(if healthy { &mut count.0 } else { &mut count.1 }) += 1;
            let standing = inventory.standing(&device.gpu.uuid);
            gpus.push(GpuState {
                uuid: device.gpu.uuid.to_string(),
                index: device.gpu.index,
                pci: device.gpu.pci.to_string(),
                model: device.gpu.model.clone(),
                healthy,
                reasons: standing
                    .map(|(reason, since)| ReasonState {
                        reason: reason.to_string(),
                        kind: reason.label(),
                        since: since.as_secs(),
                        ends_with: reason.ends_with(),
                    })
                    .collect(),
            });
        }
    }
    gpus.sort_by(|a, b| (&a.pci, &a.uuid).cmp(&(&b.pci, &b.uuid)));
    gpus.dedup_by(|a, b| a.uuid == b.uuid);
    let resources = plugins.into_iter().map(|(resource, phase, trouble)| {
        let (healthy, unhealthy) = counts.get(&resource).copied().unwrap_or_default();
        (resource, ResourceState { phase: phase.words(), trouble, healthy, unhealthy })
    });
    State {
        version: env!("CARGO_PKG_VERSION"),
        driver_released,
        idle,
        resources: resources.collect(),
        gpus,
        warnings: inventory.warnings().iter().map(ToString::to_string).collect(),
    }
}
