//! What happens in the demo: pods of mixed sizes come and go, a GPU fails, the kubelet restarts.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio::sync::{mpsc, watch};

use super::show;
use crate::allocation::AllocationReport;
use crate::commands::print;
use crate::inventory::{Event, Health, Inventory, ResourceName};
use crate::kubelet_box::{AdmissionError, KubeletBox, Pod, ResourceState, Restart};
use crate::topology::{Gpu, NodeTopology};

/// The one container of each pod.
const CONTAINER: &str = "main";
/// An XID of the GPU's own: 79, the GPU has fallen off the bus.
const GPU_XID: u64 = 79;
/// An XID of a program's making: 31, it touched memory that is not its own.
const APPLICATION_XID: u64 = 31;

/// The players.
pub(super) struct Script<'a> {
    pub topology: &'a NodeTopology,
    pub kubelet: &'a KubeletBox,
    pub events: mpsc::Sender<Event>,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub report: watch::Receiver<Option<Arc<AllocationReport>>>,
    pub resource: ResourceName,
}

/// What came of the pods.
#[derive(Default)]
struct Tally {
    admitted: usize,
    rejected: usize,
    exact: usize,
    asked: usize,
}

impl Script<'_> {
    /// Plays it all. Fails when something does that should not.
    pub async fn play(&self) -> Result<()> {
        let gpus = self.topology.gpus().len();
        let part = |of: usize| u32::try_from((gpus / of).max(1)).unwrap_or(u32::MAX);
        let mut tally = Tally::default();
        let healthy = |count: usize| move |state: &ResourceState| state.connected && state.healthy.len() == count;
        let state = self.wait("the plugin to register", healthy(gpus)).await?;
        self.say(&format!("The kubelet knows {} healthy {}.\n", state.healthy.len(), self.resource))?;

        self.admit("notebook", 1, &mut tally).await?;
        self.admit("train-a", part(2), &mut tally).await?;
        self.admit("infer-a", part(4), &mut tally).await?;
        self.admit("train-b", part(2), &mut tally).await?;
        self.show_holders()?;

        self.say("The kubelet restarts; its pods go on running.")?;
        let before = self.state().registrations;
        self.kubelet.restart(Restart::Kubelet).await?;
        let again = move |state: &ResourceState| state.registrations > before && healthy(gpus)(state);
        self.wait("the plugin to register again", again).await?;
        self.kubelet.restart_container("notebook", CONTAINER).await.context("notebook's container did not restart")?;
        self.say("  linkwise has registered again; notebook's container restarts with the GPU it had.\n")?;

        let (failing, place) = self.victim().context("no GPU to fail")?;
        self.xid(failing, APPLICATION_XID).await?;
        self.xid(failing, GPU_XID).await?;
        let uuid = failing.uuid.as_str();
        let failed = |state: &ResourceState| state.unhealthy.contains(uuid);
        let state = self.wait("the failing GPU to be unhealthy", failed).await?;
        ensure!(state.healthy.len() + 1 == gpus, "XID {GPU_XID} of one GPU changed the health of others");
        self.say(&format!(
            "GPU {} ({place}) reports XID {APPLICATION_XID}, an application's fault: it stays healthy.\n\
             GPU {} reports XID {GPU_XID}, its own fault: it alone is unhealthy, {} others go on.\n",
            failing.index,
            failing.index,
            state.healthy.len()
        ))?;

        self.remove("infer-a")?;
        self.admit("infer-b", part(4), &mut tally).await?;
        self.remove("train-a")?;
        self.admit("train-c", part(2), &mut tally).await?;
        self.show_holders()?;
        for pod in ["notebook", "infer-b", "train-c"] {
            self.remove(pod)?;
        }
        self.finish(&tally)
    }

    fn finish(&self, tally: &Tally) -> Result<()> {
        let violations = self.kubelet.violations();
        ensure!(violations.is_empty(), "a kubelet would have been harmed: {violations:?}");
        let held = self.state().in_use();
        ensure!(held.is_empty(), "devices are still held: {held:?}");
        ensure!(tally.admitted > 0, "no pod was admitted");
        let Tally { admitted, rejected, exact, asked } = tally;
        self.say(&format!(
            "\nSummary: {admitted} pods admitted, {rejected} rejected for want of GPUs; {exact} of {asked} choices exact; \
             one kubelet restart,\none failed GPU; nothing left behind."
        ))
    }

    /// A pod comes; too few GPUs is an answer, any other failure is not.
    async fn admit(&self, name: &str, size: u32, tally: &mut Tally) -> Result<()> {
        let pod = Pod::single(name, self.resource.as_str(), size);
        let admitted = match self.kubelet.admit(&pod, None).await {
            Ok(admitted) => admitted,
            Err(error @ (AdmissionError::Insufficient { .. } | AdmissionError::NoHealthyDevices { .. })) => {
                tally.rejected += 1;
                return self.say(&format!("✗ {name} wants {size}: rejected, {error}\n"));
            }
            Err(error) => return Err(error).with_context(|| format!("pod {name} was not admitted")),
        };
        tally.admitted += 1;
        let grant =
            admitted.grant(CONTAINER, self.resource.as_str()).context("the pod was admitted without devices")?;
        let report = grant.asked.as_ref().and_then(|_| self.report.borrow().clone());
        if let (Some(asked), Some(report)) = (&grant.asked, &report) {
            tally.asked += 1;
            tally.exact += usize::from(report.exact);
            let mut preferred = asked.preferred.clone();
            preferred.sort_unstable();
            ensure!(preferred == grant.allocation.devices, "{name} got other GPUs than the preferred ones");
        }
        let gpus: Vec<(usize, &Gpu)> = self
            .topology
            .gpus()
            .iter()
            .enumerate()
            .filter(|(_, gpu)| grant.allocation.devices.iter().any(|id| id == gpu.uuid.as_str()))
            .collect();
        self.say(&show::pod(name, size, self.topology, &gpus, report.as_deref()))
    }

    fn remove(&self, pod: &str) -> Result<()> {
        if self.kubelet.remove_pod(pod) {
            self.say(&format!("- {pod} ends, its GPUs are free again"))?;
        }
        Ok(())
    }

    /// A GPU to fail: a free one where there is one, so that no pod has to be explained away.
    fn victim(&self) -> Option<(&Gpu, &'static str)> {
        let (gpus, free) = (self.topology.gpus(), self.state().free());
        let idle = gpus.iter().rev().find(|gpu| free.contains(gpu.uuid.as_str())).map(|gpu| (gpu, "free"));
        idle.or_else(|| gpus.last().map(|gpu| (gpu, "in use")))
    }

    /// The driver reports an XID; returns when the node has seen it.
    async fn xid(&self, gpu: &Gpu, code: u64) -> Result<()> {
        let event = Event::Xid { gpu: gpu.uuid.clone(), code };
        self.events.send(event).await.context("the node ended")
    }

    fn state(&self) -> ResourceState {
        self.kubelet.state().resources[self.resource.as_str()].clone()
    }

    async fn wait(&self, what: &str, wanted: impl Fn(&ResourceState) -> bool) -> Result<ResourceState> {
        let resource = self.resource.as_str();
        let state = self.kubelet.wait(|state| wanted(&state.resources[resource])).await;
        Ok(state.with_context(|| format!("waited for {what}"))?.resources[resource].clone())
    }

    /// Who holds what.
    fn show_holders(&self) -> Result<()> {
        let inventory = Arc::clone(&self.inventory.borrow());
        let state = self.state();
        let note = |gpu: &Gpu| {
            let holder = state
                .allocated
                .iter()
                .find(|(_, containers)| containers.values().any(|devices| devices.contains(gpu.uuid.as_str())));
            let device = inventory.devices(&self.resource).find(|(_, device)| device.gpu.uuid == gpu.uuid);
            match (device.map(|(_, device)| &device.health), holder) {
                (Some(Health::Unhealthy { reason, .. }), _) => format!("✗ {reason}"),
                (_, Some((pod, _))) => format!("● {pod}"),
                _ => "○ free".to_owned(),
            }
        };
        self.say(&show::holders(self.topology, note))
    }

    fn say(&self, text: &str) -> Result<()> {
        Ok(print(&format!("{text}\n"))?)
    }
}
