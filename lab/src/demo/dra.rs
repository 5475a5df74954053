//! `linkwise-lab demo --dra`: the demo's node, but its GPUs are offered through DRA.
//!
//! A node of linkwise and the kubelet's DRA manager in a box run in a [`Cluster`] of API server and scheduler. Pods
//! request `nvidia.com/gpu: N`, which the policy of manifests/dra, or without a template for N the scheduler, turns
//! into a claim. Nothing is simulated between the scheduler's allocation and the CDI devices of the container.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::cluster::{Cluster, NODE, Scheduled};
use super::script::{CONTAINER, GPU_XID};
use super::{DemoArgs, Print, manifests, show};
use linkwise::run::simulated::{self, start_with_dra};
use linkwise_cluster::ApiServer;
use linkwise_core::allocation::{
    AllocationPolicy, AllocationRequest, AllocationTables, DeviceId, preferred_allocation,
};
use linkwise_core::state::{DRA_DRIVER, Event, NodeState};
use linkwise_core::topology::{Gpu, NodeTopology};
use linkwise_host::machines::Machine;
use linkwise_host::picture::machine_tree;
use linkwise_kubelet_box::dra::{ClaimRef, DraKubelet, DraOptions, DraState, PodClaims};
use linkwise_kubelet_box::{KubeletBox, Options, runtime};

/// The longest time for any step, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Plays the demo on a machine. `api` is linkwise's client of the cluster's API server. `out` prints.
pub(super) async fn demo_dra(
    args: &DemoArgs,
    machine: Machine,
    cluster: &Cluster,
    api: &ApiServer,
    out: Print<'_>,
) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("linkwise-").tempdir().context("cannot make a temporary folder")?;
    out(&format!("# {}\n", show::cut(&machine_tree(&machine))))?;
    let at = |path: &str| folder.path().join(path);
    let mut options = Options::new(at(simulated::DEVICE_PLUGINS));
    options.pod_resources = Some(at(simulated::POD_RESOURCES));
    let device_manager = KubeletBox::start(options)?;
    let options =
        DraOptions { wipe: Some(cluster.wipe()), wait_timeout: TIMEOUT, ..DraOptions::new(at(simulated::REGISTRY)) };
    let kubelet = DraKubelet::start(options).context("cannot make the folder of registration sockets")?;
    let node = start_with_dra(folder.path(), NODE, args.metrics_address, api).await?;
    let topology = Arc::new(NodeTopology::assemble(&machine.observed).0);
    let script = Script {
        machine: &machine,
        topology: &topology,
        tables: AllocationTables::new(Arc::clone(&topology)),
        kubelet: &kubelet,
        folder: folder.path(),
        cluster,
        events: node.events(),
        snapshot: node.snapshot(),
        print: out,
    };
    let address = node.metrics_address();
    let play = async {
        script.send(Event::Observed(Box::new(machine.observed.clone()))).await?;
        if topology.gpus().is_empty() {
            out("\nThis machine has no GPU: linkwise stays up and publishes nothing.\n")?;
        } else {
            script.play().await?;
            ensure!(count_checkpoints(folder.path())? == 0, "checkpoints of claims are left behind");
        }
        if args.hold { super::hold(address, out).await } else { Ok(()) }
    };
    let result = super::serve_during(node, play).await;
    kubelet.stop().await;
    device_manager.stop().await?;
    result
}

/// The number of checkpoints of claims below the node's folder.
fn count_checkpoints(folder: &Path) -> Result<usize> {
    let claims = folder.join(simulated::STATE).join("claims");
    let files = match std::fs::read_dir(&claims) {
        Ok(files) => files,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", claims.display())),
    };
    Ok(files.flatten().filter(|file| file.path().extension().is_some_and(|end| end == "json")).count())
}

struct Script<'a> {
    machine: &'a Machine,
    topology: &'a NodeTopology,
    /// The tables for the collectives of sets.
    tables: AllocationTables,
    kubelet: &'a DraKubelet,
    folder: &'a Path,
    cluster: &'a Cluster,
    events: mpsc::Sender<Event>,
    snapshot: watch::Receiver<Arc<NodeState>>,
    print: Print<'a>,
}

/// The results of the pods.
#[derive(Default)]
struct Tally {
    running: BTreeMap<String, RunningPod>,
    allocated: usize,
    waiting: usize,
    for_several: usize,
    grouped: usize,
    /// The sum of the collectives, in MB/s, of the sets that claims from templates got.
    with_groups: u64,
    /// The same sum of the sets that these claims would have got without groups.
    without_groups: u64,
}

struct RunningPod {
    claim: ClaimRef,
    devices: Vec<String>,
    cdi_names: Vec<String>,
}

impl Script<'_> {
    /// Runs all steps. Fails if any result is not as expected.
    async fn play(&self) -> Result<()> {
        let gpus = self.topology.gpus().len();
        let part = |parts: usize| (gpus / parts).max(1);
        let mut tally = Tally::default();
        self.wait_for_devices("the devices to be published", |devices| !devices.is_empty()).await?;
        let registered = |state: &DraState| state.drivers.get(DRA_DRIVER).is_some_and(|driver| driver.connected > 0);
        self.kubelet.wait(registered).await.context("waited for the kubelet to register the driver")?;
        let slices = self.cluster.slices();
        self.print_line(&format!(
            "The API server stores {} devices in {}; the kubelet has registered {DRA_DRIVER}.\n",
            devices(&slices).count(),
            if let [_] = slices.as_slice() {
                "a ResourceSlice".to_owned()
            } else {
                format!("{} ResourceSlices", slices.len())
            },
        ))?;

        for manifest in manifests::unchanged_pods()? {
            self.cluster.create(&manifest)?;
        }
        self.print_line(
            "The namespace of the pods has the label linkwise.dev/unchanged-pods=true and the templates of\n\
             manifests/dra: the API server turns nvidia.com/gpu: N of its pods into claims with groups.\n",
        )?;

        self.start("notebook", 1, &mut tally).await?;
        self.start("train-a", part(2), &mut tally).await?;
        self.start("infer-a", part(4), &mut tally).await?;
        self.start("train-b", part(2), &mut tally).await?;
        self.show_holders(&tally)?;

        self.restart(&tally).await?;
        self.leave_and_return(&tally).await?;
        self.fail(&tally).await?;

        for pod in ["train-a", "infer-a", "train-b"] {
            self.end(pod, &mut tally).await?;
        }
        self.start("train-c", part(2), &mut tally).await?;
        self.start("infer-b", part(4), &mut tally).await?;
        self.show_holders(&tally)?;
        for pod in ["notebook", "train-c", "infer-b"] {
            self.end(pod, &mut tally).await?;
        }
        self.finish(&tally)
    }

    /// Starts a pod that names only its limit of GPUs. A pod that waits is a valid result, not a failure.
    async fn start(&self, pod: &str, count: usize, tally: &mut Tally) -> Result<()> {
        let admitted = self.cluster.create(&manifests::pod(pod, CONTAINER, count))?;
        let template = admitted["spec"]["resourceClaims"][0]["resourceClaimTemplateName"].as_str();
        let wants = format!("{pod} wants nvidia.com/gpu: {count}");
        let ungrouped = self.cluster.without_groups(count)?;
        let (reference, spec, allocation) = match self.cluster.schedule(pod)? {
            Scheduled::Allocated { claim, spec, allocation } => (claim, spec, allocation),
            Scheduled::Waits(why) => {
                tally.waiting += 1;
                self.cluster.delete(pod);
                return self.print_line(&format!("✗ {wants}: it waits\n  why: {why}\n"));
            }
        };
        let cdi = self.prepare(pod, &reference).await?;
        let results = allocation["devices"]["results"].as_array().context("the allocation has no results")?;
        let got: Vec<String> = results.iter().map(|result| text(&result["device"]).to_owned()).collect();
        ensure!(got.len() == count, "{pod} got {} devices instead of {count}", got.len());
        for (other, running) in &tally.running {
            ensure!(!got.iter().any(|device| running.devices.contains(device)), "{pod} got a device of {other}");
        }
        let gpus = self.gpus(&got);
        let minors = gpus.iter().filter_map(|(_, gpu)| gpu.facts.minor);
        let nodes: BTreeSet<String> = minors.map(|minor| format!("/dev/nvidia{minor}")).collect();
        let folder = self.folder.join(simulated::CDI);
        let container = runtime::container(&folder, &cdi).map_err(Error::msg)?;
        ensure!(nodes == container.gpus().into_iter().collect(), "{pod} got {got:?}, and its container {container:?}");
        tally.allocated += 1;
        let request = results.first().map(|result| text(&result["request"])).unwrap_or_default();
        let why = self.why(request, &spec, &got, tally);
        let claims = match template {
            Some(template) => format!("a claim from {template}"),
            None => format!("no template for {count}, so its extended resource"),
        };
        let compared = if template.is_some() { self.compare(&got, &ungrouped, tally)? } else { String::new() };
        self.print_line(&format!(
            "● {wants}: {claims}\n  gets {}, {}\n  why: {why}\n{compared}  CDI: {}: {}\n",
            got.join(","),
            show::where_they_are(self.topology, &gpus),
            cdi.first().map_or("none", String::as_str),
            container.gpus().join(" "),
        ))?;
        tally.running.insert(pod.to_owned(), RunningPod { claim: reference, devices: got, cdi_names: cdi });
        Ok(())
    }

    /// Compares the collective of a pod's GPUs with the collective of the GPUs that it would have got without groups.
    fn compare(&self, got: &[String], ungrouped: &[String], tally: &mut Tally) -> Result<String> {
        ensure!(ungrouped.len() == got.len(), "{} GPUs without groups instead of {}", ungrouped.len(), got.len());
        let (with, without) = (self.collective(got)?, self.collective(ungrouped)?);
        tally.with_groups += with;
        tally.without_groups += without;
        Ok(format!("  collective: {with} MB/s; without groups {}: {without} MB/s\n", ungrouped.join(",")))
    }

    /// The ring bandwidth of these GPUs by NCCL's model, in MB/s.
    fn collective(&self, devices: &[String]) -> Result<u64> {
        let available: Vec<DeviceId> = self.gpus(devices).iter().map(|(_, gpu)| DeviceId::from(&gpu.uuid)).collect();
        let request = AllocationRequest { size: available.len(), available, must_include: Vec::new() };
        let (_, report) = preferred_allocation(&self.tables, &request, AllocationPolicy::default());
        report.values.map(|values| values.collective).context("the allocator has no collective of the set")
    }

    /// Describes the alternative of the claim that the scheduler took, and the group of its devices.
    fn why(&self, request: &str, spec: &Value, got: &[String], tally: &mut Tally) -> String {
        if got.len() == 1 {
            return "the first device that is free, in published order".to_owned();
        }
        tally.for_several += 1;
        let Some((_, alternative)) = request.split_once('/') else {
            return "the first devices that are free, in published order".to_owned();
        };
        let constraints = spec["devices"]["constraints"].as_array().map_or(&[][..], Vec::as_slice);
        let taken = (1..).zip(constraints).find(|(_, constraint)| constraint["requests"][0] == request);
        let Some((place, constraint)) = taken else {
            return "no group has so many free: the first devices in published order".to_owned();
        };
        tally.grouped += 1;
        let attribute = text(&constraint["matchAttribute"]);
        let slices = self.cluster.slices();
        let first = got.first().and_then(|name| devices(&slices).find(|device| device["name"] == name.as_str()));
        let group = first.map(|device| text(&device["attributes"][attribute]["string"])).unwrap_or_default();
        format!("alternative {place}, {alternative}: {attribute} is {group} for all of them")
    }

    async fn prepare(&self, pod: &str, claim: &ClaimRef) -> Result<Vec<String>> {
        let pod_claims = PodClaims::single(pod, claim.clone(), DRA_DRIVER);
        let prepared = timeout(TIMEOUT, self.kubelet.start_pod(&pod_claims)).await;
        let mut containers = prepared.with_context(|| format!("{pod}: the claim was not prepared in time"))??;
        containers.remove(CONTAINER).with_context(|| format!("{pod}: the container got no CDI devices"))
    }

    async fn restart(&self, tally: &Tally) -> Result<()> {
        self.print_line("The kubelet restarts: it deletes the ResourceSlices of its node, and pods go on running.")?;
        let before = devices(&self.cluster.slices()).count();
        let known = self.kubelet.state().drivers.get(DRA_DRIVER).map_or(0, |driver| driver.registrations);
        self.kubelet.restart().await.context("the kubelet cannot start again")?;
        let again = |state: &DraState| {
            state.drivers.get(DRA_DRIVER).is_some_and(|driver| driver.registrations > known && driver.connected > 0)
        };
        self.kubelet.wait(again).await.context("waited for the driver to be registered again")?;
        self.wait_for_devices("the devices to be published again", |devices| devices.len() == before).await?;
        for (pod, RunningPod { claim, cdi_names, .. }) in &tally.running {
            let again: BTreeSet<String> = self.prepare(pod, claim).await?.into_iter().collect();
            ensure!(cdi_names.iter().all(|name| again.contains(name)), "{pod} was prepared with other devices");
            ensure!(again.len() <= cdi_names.len(), "{pod} was prepared with more devices");
        }
        self.print_line("  linkwise has written them again; claims are prepared as they were.\n")
    }

    /// Removes a GPU that a claim holds, and adds it again.
    async fn leave_and_return(&self, tally: &Tally) -> Result<()> {
        let device = last_device_of(tally, "notebook").context("notebook holds no GPU")?;
        let (_, gpu) = self.gpus(std::slice::from_ref(&device)).into_iter().next().context("no such GPU")?;
        let mut without = self.machine.observed.clone();
        without.gpus.retain(|seen| seen.uuid != gpu.uuid);
        self.send(Event::Observed(Box::new(without))).await?;
        let tainted = |devices: &[&Value]| taints(devices, &device).is_some_and(|keys| !keys.is_empty());
        let devices = self.wait_for_devices("the missing GPU to be tainted", tainted).await?;
        let keys = taints(&devices.iter().collect::<Vec<_>>(), &device).unwrap_or_default().join(", ");
        self.print_line(&format!(
            "GPU {} ({device}, notebook's) leaves the bus: it stays in the slice, tainted {keys}, \
             because a claim has it.",
            gpu.index
        ))?;
        self.send(Event::Observed(Box::new(self.machine.observed.clone()))).await?;
        let healed = |devices: &[&Value]| taints(devices, &device).is_some_and(|keys| keys.is_empty());
        self.wait_for_devices("the GPU that came back to have no taint", healed).await?;
        self.print_line("  It comes back, and the taint is gone.\n")
    }

    /// Makes a GPU fail for good, so that no new claim gets it.
    async fn fail(&self, tally: &Tally) -> Result<()> {
        let last = || devices(&self.cluster.slices()).next_back().map(|device| text(&device["name"]).to_owned());
        let held = last_device_of(tally, "train-a");
        let which = if held.is_some() { "train-a's" } else { "the last one" };
        let device = held.or_else(last).context("no GPU to fail")?;
        let (_, gpu) = self.gpus(std::slice::from_ref(&device)).into_iter().next().context("no such GPU")?;
        self.send(Event::Xid { gpu: gpu.uuid.clone(), code: GPU_XID, instance: None }).await?;
        let tainted = |devices: &[&Value]| taints(devices, &device).is_some_and(|keys| !keys.is_empty());
        let devices = self.wait_for_devices("the failing GPU to be tainted", tainted).await?;
        let all: Vec<&Value> = devices.iter().collect();
        let is_tainted = |device: &Value| taints(&all, text(&device["name"])).is_some_and(|keys| !keys.is_empty());
        let count = all.iter().filter(|device| is_tainted(device)).count();
        ensure!(count == 1, "XID {GPU_XID} of one GPU tainted {count}");
        self.print_line(&format!(
            "GPU {} ({device}, {which}) reports XID {GPU_XID}: it alone is tainted {}, no new claim gets it.\n",
            gpu.index,
            taints(&all, &device).unwrap_or_default().join(", ")
        ))
    }

    async fn end(&self, pod: &str, tally: &mut Tally) -> Result<()> {
        if tally.running.remove(pod).is_some() {
            let ended = timeout(TIMEOUT, self.kubelet.stop_pod(pod)).await;
            ended.with_context(|| format!("{pod}: the claim was not unprepared in time"))??;
            self.cluster.delete(pod);
            self.print_line(&format!("- {pod} ends, its claim is unprepared and deleted"))?;
        }
        Ok(())
    }

    fn finish(&self, tally: &Tally) -> Result<()> {
        let left = self.kubelet.state().claims;
        ensure!(left.is_empty(), "claims are still prepared: {left:?}");
        ensure!(tally.allocated > 0, "no claim was allocated");
        let Tally { allocated, waiting, for_several, grouped, with_groups, without_groups, .. } = tally;
        let gained = match with_groups {
            0 => String::new(),
            _ => format!(
                "collectives of the claims from templates: {with_groups} MB/s in all; of the first free GPUs: \
                 {without_groups} MB/s;\n"
            ),
        };
        self.print_line(&format!(
            "\nSummary: {allocated} claims allocated, {waiting} waited for want of GPUs;\n\
             {grouped} of {for_several} claims for several GPUs got those of one group;\n\
             {gained}one kubelet restart, one GPU back, one failed; nothing left behind."
        ))
    }

    /// Finds GPUs by the names of their devices. Returns them with their places in the topology.
    fn gpus(&self, names: &[String]) -> Vec<(usize, &Gpu)> {
        let slices = self.cluster.slices();
        let named = devices(&slices).filter(|device| names.iter().any(|name| device["name"] == name.as_str()));
        let uuids: BTreeSet<String> =
            named.map(|device| text(&device["attributes"]["uuid"]["string"]).to_owned()).collect();
        self.topology.gpus().iter().enumerate().filter(|(_, gpu)| uuids.contains(gpu.uuid.as_str())).collect()
    }

    /// Waits until the published devices are as wanted, and returns them.
    async fn wait_for_devices(
        &self,
        what: &str,
        wanted: impl Fn(&[&Value]) -> bool + Send + Sync,
    ) -> Result<Vec<Value>> {
        let are_wanted = |slices: &[Value]| wanted(&devices(slices).collect::<Vec<_>>());
        let waited = timeout(TIMEOUT, self.cluster.wait_for_slices(are_wanted)).await;
        waited.with_context(|| format!("waited for {what}"))?;
        Ok(devices(&self.cluster.slices()).cloned().collect())
    }

    async fn send(&self, event: Event) -> Result<()> {
        self.events.send(event).await.context("the node ended")
    }

    /// Prints each GPU with the pod that holds it.
    fn show_holders(&self, tally: &Tally) -> Result<()> {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let note = |gpu: &Gpu| {
            let has_gpu = |pod: &RunningPod| self.gpus(&pod.devices).iter().any(|(_, own)| own.uuid == gpu.uuid);
            let holder = tally.running.iter().find(|(_, pod)| has_gpu(pod));
            let device = snapshot.offers().through_dra().iter().find(|device| device.gpu.uuid == gpu.uuid);
            show::holder(device.map(|device| &device.health), holder.map(|(pod, _)| pod))
        };
        self.print_line(&show::holders(self.topology, note))
    }

    fn print_line(&self, text: &str) -> Result<()> {
        (self.print)(&format!("{text}\n"))
    }
}

fn last_device_of(tally: &Tally, pod: &str) -> Option<String> {
    tally.running.get(pod)?.devices.last().cloned()
}

/// The devices of slices, in published order.
fn devices(slices: &[Value]) -> impl DoubleEndedIterator<Item = &Value> + Clone {
    slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().map_or(&[][..], Vec::as_slice))
}

/// The taints of a device, as `key=value`, or as `key` if a taint has no value.
fn taints(devices: &[&Value], name: &str) -> Option<Vec<String>> {
    let device = devices.iter().find(|device| device["name"] == name)?;
    let taint = |taint: &Value| match text(&taint["value"]) {
        "" => text(&taint["key"]).to_owned(),
        value => format!("{}={value}", text(&taint["key"])),
    };
    Some(device["taints"].as_array().into_iter().flatten().map(taint).collect())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
