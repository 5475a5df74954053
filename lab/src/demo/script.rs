//! The events of the demo: pods of mixed sizes start and end, the kubelet restarts, a GPU leaves and comes back,
//! a GPU fails and is cleared after a reset.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio::sync::{mpsc, watch};

use super::{Print, show};
use linkwise_core::allocation::AllocationReport;
use linkwise_core::state::{Event, NodeState, ResourceName};
use linkwise_core::topology::{Gpu, NodeTopology};
use linkwise_host::machines::Machine;
use linkwise_kubelet_box::{AdmissionError, KubeletBox, Pod, ResourceState, Restart};

/// The resource that the pods request.
const RESOURCE: &str = "nvidia.com/gpu";
/// The name of each pod's only container.
pub(super) const CONTAINER: &str = "main";
/// An XID that is a fault of the GPU: 79, the GPU has fallen off the bus.
pub(super) const GPU_XID: u64 = 79;
/// An XID that is a fault of a program: 31, the program accessed memory that is not its own.
const APPLICATION_XID: u64 = 31;

/// The parts of the demo, which its steps act on.
pub(super) struct Script<'a> {
    pub machine: &'a Machine,
    pub topology: &'a NodeTopology,
    pub kubelet: &'a KubeletBox,
    pub events: mpsc::Sender<Event>,
    pub snapshot: watch::Receiver<Arc<NodeState>>,
    pub report: watch::Receiver<Option<Arc<AllocationReport>>>,
    /// Set if each step waits for Enter.
    pub steps: bool,
    pub print: Print<'a>,
}

/// The results of the pods.
#[derive(Default)]
struct Tally {
    admitted: usize,
    rejected: usize,
    misaligned: usize,
    exact: usize,
    asked: usize,
}

impl Script<'_> {
    /// Runs all steps. Fails if any result is not as expected.
    pub async fn play(&self) -> Result<()> {
        let gpus = self.topology.gpus().len();
        let part = |parts: usize| u32::try_from((gpus / parts).max(1)).unwrap_or(u32::MAX);
        let mut tally = Tally::default();
        let state = self.wait("the plugin to register", healthy(gpus)).await?;
        self.print_line(&format!("The kubelet knows {} healthy {}.\n", state.healthy.len(), RESOURCE))?;

        self.admit("notebook", 1, &mut tally).await?;
        self.admit("train-a", part(2), &mut tally).await?;
        self.admit("infer-a", part(4), &mut tally).await?;
        self.admit("train-b", part(2), &mut tally).await?;
        self.show_holders()?;

        self.step().await?;
        self.restart().await?;
        self.step().await?;
        self.leave_and_return().await?;
        self.step().await?;
        let failed = self.fail().await?;

        self.step().await?;
        for pod in ["train-a", "infer-a", "train-b"] {
            self.remove(pod)?;
        }
        self.admit("train-c", part(2), &mut tally).await?;
        self.admit("infer-b", part(4), &mut tally).await?;
        self.show_holders()?;
        self.step().await?;
        for pod in ["notebook", "train-c", "infer-b"] {
            self.remove(pod)?;
        }
        self.step().await?;
        self.put_back(failed).await?;
        self.step().await?;
        self.finish(&tally)
    }

    /// Waits for Enter or the end of the input, if the script runs step by step.
    async fn step(&self) -> Result<()> {
        if self.steps {
            self.print_line("[press Enter]")?;
            let enter = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
            enter.await.context("cannot wait for Enter")?.context("cannot read standard input")?;
        }
        Ok(())
    }

    async fn restart(&self) -> Result<()> {
        self.print_line("The kubelet restarts; its pods go on running.")?;
        let (before, gpus) = (self.state().registrations, self.topology.gpus().len());
        self.kubelet.restart(Restart::Kubelet).await?;
        let again = move |state: &ResourceState| state.registrations > before && healthy(gpus)(state);
        self.wait("the plugin to register again", again).await?;
        self.kubelet.restart_container("notebook", CONTAINER).context("notebook's container did not restart")?;
        self.print_line("  linkwise has registered again; notebook's container restarts with the GPU it had.\n")
    }

    /// Removes a GPU that a pod holds, and adds it again. A kubelet could crash if the held id vanished from the list.
    async fn leave_and_return(&self) -> Result<()> {
        let gpu = self.held_by("notebook").context("notebook holds no GPU")?;
        let uuid = gpu.uuid.as_str();
        let mut without = self.machine.observed.clone();
        without.gpus.retain(|seen| seen.uuid != gpu.uuid);
        self.send(Event::Observed(Box::new(without))).await?;
        self.wait("the missing GPU to be unhealthy", |state| state.unhealthy.contains(uuid)).await?;
        self.print_line(&format!(
            "GPU {} (notebook's) leaves the bus: it stays on the list, unhealthy, because a pod holds it.",
            gpu.index
        ))?;
        self.step().await?;
        self.send(Event::Observed(Box::new(self.machine.observed.clone()))).await?;
        self.wait("the GPU that came back to be healthy", healthy(self.topology.gpus().len())).await?;
        self.print_line("  It comes back and is healthy again.\n")
    }

    /// Makes a GPU fail, after an application's fault on it that changes nothing. Returns the failed GPU.
    async fn fail(&self) -> Result<&Gpu> {
        let gpus = self.topology.gpus();
        let held = self.held_by("train-a");
        let (gpu, which) = match held {
            Some(gpu) => (gpu, "train-a's"),
            None => (gpus.last().context("no GPU to fail")?, "the last one"),
        };
        for code in [APPLICATION_XID, GPU_XID] {
            self.send(Event::Xid { gpu: gpu.uuid.clone(), code, instance: None }).await?;
        }
        let uuid = gpu.uuid.as_str();
        let state = self.wait("the failing GPU to be unhealthy", |state| state.unhealthy.contains(uuid)).await?;
        ensure!(state.healthy.len() + 1 == gpus.len(), "XID {GPU_XID} of one GPU changed the health of others");
        self.print_line(&format!(
            "GPU {} ({which}) reports XID {APPLICATION_XID}, an application's fault: it stays healthy.\n\
             GPU {} reports XID {GPU_XID}, its own fault: it alone is unhealthy, {} others go on.\n",
            gpu.index,
            gpu.index,
            state.healthy.len()
        ))?;
        Ok(gpu)
    }

    /// Clears the failed GPU, as an operator does after a reset.
    async fn put_back(&self, gpu: &Gpu) -> Result<()> {
        self.send(Event::Cleared(gpu.uuid.clone())).await?;
        self.wait("the GPU that was put back to be healthy", healthy(self.topology.gpus().len())).await?;
        self.print_line(&format!(
            "\nGPU {} was reset, and linkwise admin clear puts it back: it is healthy.",
            gpu.index
        ))
    }

    fn finish(&self, tally: &Tally) -> Result<()> {
        let violations = self.kubelet.violations();
        ensure!(violations.is_empty(), "a kubelet would have been harmed: {violations:?}");
        let held = self.state().in_use();
        ensure!(held.is_empty(), "devices are still held: {held:?}");
        ensure!(tally.admitted > 0, "no pod was admitted");
        let Tally { admitted, rejected, misaligned, exact, asked } = tally;
        let misaligned = match misaligned {
            0 => String::new(),
            count => format!(", {count} refused by the Topology Manager"),
        };
        self.print_line(&format!(
            "\nSummary: {admitted} pods admitted, {rejected} rejected for want of GPUs{misaligned};\n\
             {exact} of {asked} choices exact; one kubelet restart, one GPU back, one put back; nothing left behind."
        ))
    }

    /// Admits a pod. A rejection for want of GPUs, at all or on the right NUMA nodes, is a valid result. Any other
    /// failure is not.
    async fn admit(&self, name: &str, size: u32, tally: &mut Tally) -> Result<()> {
        self.step().await?;
        let pod = Pod::single(name, RESOURCE, size);
        let admitted = match self.kubelet.admit(&pod, None).await {
            Ok(admitted) => admitted,
            Err(AdmissionError::TopologyAffinity(refusal)) => {
                tally.misaligned += 1;
                let free = self.state().free().len();
                let why = refusal.why();
                return self.print_line(&format!(
                    "✗ {name} wants {size}, {free} are free: TopologyAffinityError\n  why: {why}\n"
                ));
            }
            Err(error @ (AdmissionError::Insufficient { .. } | AdmissionError::NoHealthyDevices { .. })) => {
                tally.rejected += 1;
                return self.print_line(&format!("✗ {name} wants {size}: rejected, {error}\n"));
            }
            Err(error) => return Err(error).with_context(|| format!("pod {name} was not admitted")),
        };
        tally.admitted += 1;
        let grant = admitted.grant(CONTAINER, RESOURCE).context("the pod was admitted without devices")?;
        let report = grant.asked.as_ref().and_then(|_| self.report.borrow().clone());
        if let (Some(asked), Some(report)) = (&grant.asked, &report) {
            tally.asked += 1;
            tally.exact += usize::from(report.exact);
            let mut preferred = asked.preferred.clone();
            preferred.sort_unstable();
            ensure!(preferred == grant.allocation.devices, "{name} got other GPUs than the preferred ones");
        }
        let is_granted = |gpu: &Gpu| grant.allocation.devices.iter().any(|id| id == gpu.uuid.as_str());
        let gpus = self.topology.gpus().iter().enumerate().filter(|(_, gpu)| is_granted(gpu));
        let gpus: Vec<(usize, &Gpu)> = gpus.collect();
        let hint = admitted.containers.get(CONTAINER).and_then(|container| container.hint.as_ref());
        let offered = grant.asked.as_ref().map(|asked| (asked.available.len(), asked.must_include.len()));
        let manager = hint.map(|hint| show::hint(hint, offered));
        self.print_line(&show::pod(name, size, self.topology, &gpus, (manager, report.as_deref())))
    }

    fn remove(&self, pod: &str) -> Result<()> {
        if self.kubelet.remove_pod(pod) {
            self.print_line(&format!("- {pod} ends, its GPUs are free again"))?;
        }
        Ok(())
    }

    /// The last of the GPUs that a pod holds.
    fn held_by(&self, pod: &str) -> Option<&Gpu> {
        let state = self.state();
        let devices = state.allocated.get(pod)?.get(CONTAINER)?;
        self.topology.gpus().iter().rev().find(|gpu| devices.contains(gpu.uuid.as_str()))
    }

    async fn send(&self, event: Event) -> Result<()> {
        self.events.send(event).await.context("the node ended")
    }

    fn state(&self) -> ResourceState {
        self.kubelet.state().resources[RESOURCE].clone()
    }

    async fn wait(&self, what: &str, wanted: impl Fn(&ResourceState) -> bool) -> Result<ResourceState> {
        let state = self.kubelet.wait(|state| wanted(&state.resources[RESOURCE])).await;
        Ok(state.with_context(|| format!("waited for {what}"))?.resources[RESOURCE].clone())
    }

    /// Prints each GPU with the pod that holds it.
    fn show_holders(&self) -> Result<()> {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let state = self.state();
        let note = |gpu: &Gpu| {
            let uuid = gpu.uuid.as_str();
            let holder = state.allocated.iter().find(|(_, held)| held.values().flatten().any(|id| id == uuid));
            let device = snapshot.offers().of(&ResourceName::gpu()).find(|(_, device)| device.gpu.uuid == gpu.uuid);
            show::holder(device.map(|(_, device)| &device.health), holder.map(|(pod, _)| pod))
        };
        self.print_line(&show::holders(self.topology, note))
    }

    fn print_line(&self, text: &str) -> Result<()> {
        (self.print)(&format!("{text}\n"))
    }
}

/// A check that the resource is connected and has this number of healthy devices.
fn healthy(count: usize) -> impl Fn(&ResourceState) -> bool {
    move |state| state.connected && state.healthy.len() == count
}
