//! `linkwise gang`: prints a job of several pods, each with a claim for its GPUs, as a scheduler of gangs wants it.
//!
//! Labels of nodes are named, not looked for: linkwise writes `linkwise.dev/nvlink-fabric`, Topograph those of the
//! network. What the cluster needs beside the manifest goes to standard error.

use anyhow::{Result, ensure};

use super::{Devices, GPUS, Part, TEMPLATE, alternatives, asked, beside, exact, map, object, spares};
use crate::commands::manifest::{List, text};
use crate::config::{GangArgs, GangScheduler};
use linkwise_system::output::{complain, print};

/// The level below all others.
const HOST: &str = "kubernetes.io/hostname";

/// The label whose nodes share NVLink over several machines.
const NVLINK: &str = "linkwise.dev/nvlink-fabric";

/// The label of a job's pods, as the Job controller sets it.
const JOB: &str = "batch.kubernetes.io/job-name";

/// The longest name: `-channel` is added to it, and a pod's number.
const LONGEST_NAME: usize = 50;

/// Fields of an object.
type Fields = Vec<(&'static str, Part)>;

/// Prints the objects.
pub fn gang(args: &GangArgs) -> Result<()> {
    ensure!(args.name.len() <= LONGEST_NAME, "--name has more than {LONGEST_NAME} characters");
    let claims = map([("spec", devices(args)?.spec())]);
    let mut objects = vec![object(TEMPLATE, &args.name, claims)];
    let mut needs: Vec<String> = Vec::new();
    if has_channel(args) {
        objects.push(compute_domain(args));
        needs.push("NVIDIA's DRA driver for ComputeDomains, and IMEX on the nodes".to_owned());
    }
    match args.scheduler {
        GangScheduler::Kube => kube(args, &mut objects, &mut needs),
        GangScheduler::Kueue => kueue(args, &mut objects, &mut needs),
        GangScheduler::Kai => kai(args, &mut objects, &mut needs),
        GangScheduler::Volcano => volcano(args, &mut objects, &mut needs),
    }
    complain("linkwise", needs.into_iter().map(|need| format!("needs {need}")));
    Ok(print(&text(&List::new(objects), args.format)?)?)
}

/// The requests of each pod. Kueue and KAI read no alternatives.
fn devices(args: &GangArgs) -> Result<Devices> {
    let is_exact = args.exact || matches!(args.scheduler, GangScheduler::Kueue | GangScheduler::Kai);
    spares(&args.node, &args.fleet, args.gpus > 1 && !is_exact && args.near.is_none())?;
    // A machine that is named without --exact gives a kueue or kai claim its group too.
    let group = || exact::group(args.gpus, &args.node, &args.fleet);
    match args.near {
        Some(near) if args.exact => exact::beside(args.gpus, near, &asked(GPUS, 1), group()?),
        Some(near) => {
            ensure!(args.node.is_empty(), "--node with --near: no group is named, except with --exact");
            ensure!(args.fleet.cluster.is_none(), "--cluster with --near: no group is named, except with --exact");
            beside(args.gpus, near, &asked(GPUS, 1))
        }
        None if is_exact => Ok(exact::devices(args.gpus, group()?.as_deref())),
        None => alternatives(args.gpus, &args.node, &args.fleet, false),
    }
}

fn has_channel(args: &GangArgs) -> bool {
    args.within.as_deref() == Some(NVLINK)
}

/// The template of claims for an IMEX channel, which the ComputeDomain's controller makes.
fn channel(args: &GangArgs) -> String {
    format!("{}-channel", args.name)
}

/// The NVLink domain of the pods. The number of nodes is deprecated, and 0 is its default.
fn compute_domain(args: &GangArgs) -> Part {
    let template = map([("name", channel(args).into())]);
    let spec = map([("numNodes", Part::Number(0)), ("channel", map([("resourceClaimTemplate", template)]))]);
    object(("resource.nvidia.com/v1beta1", "ComputeDomain"), &args.name, spec)
}

/// kube-scheduler's own gangs and topology, KEP-4671 and KEP-5732.
fn kube(args: &GangArgs, objects: &mut Vec<Part>, needs: &mut Vec<String>) {
    let gang = map([("gang", map([("minCount", Part::Number(args.pods))]))]);
    let mut spec: Fields = vec![("schedulingPolicy", gang)];
    let mut gates = "GenericWorkload".to_owned();
    let mut pod: Fields = vec![("schedulingGroup", map([("podGroupName", args.name.as_str().into())]))];
    match &args.within {
        Some(label) if args.prefer => pod.push(("affinity", near_each_other(args, label))),
        Some(label) => {
            let topology = Part::List(vec![map([("key", label.as_str().into())])]);
            spec.push(("schedulingConstraints", map([("topology", topology)])));
            gates += " and TopologyAwareWorkloadScheduling";
        }
        None => {}
    }
    needs.push(format!("Kubernetes 1.37 with scheduling.k8s.io/v1beta1 and the feature gates {gates}"));
    objects.push(object(("scheduling.k8s.io/v1beta1", "PodGroup"), &args.name, Part::Map(spec)));
    objects.push(job(args, Vec::new(), Vec::new(), &Fields::new(), pod));
}

fn near_each_other(args: &GangArgs, label: &str) -> Part {
    let pods = map([("matchLabels", map([(JOB, args.name.as_str().into())]))]);
    let term = map([("labelSelector", pods), ("topologyKey", label.into())]);
    let preferred = Part::List(vec![map([("weight", Part::Number(100)), ("podAffinityTerm", term)])]);
    map([("podAffinity", map([("preferredDuringSchedulingIgnoredDuringExecution", preferred)]))])
}

/// Kueue starts the job when its quota has room for all pods.
fn kueue(args: &GangArgs, objects: &mut Vec<Part>, needs: &mut Vec<String>) {
    let queue = args.queue.as_deref().unwrap_or("gpus");
    needs.push(format!("Kueue 0.18 or newer, and its LocalQueue {queue}"));
    needs.push(format!(
        "quota for {GPUS}: its extendedResourceName (from Kueue 0.19) or a deviceClassMapping in Kueue's configuration"
    ));
    if has_channel(args) {
        needs.push("a deviceClassMapping for compute-domain-default-channel.nvidia.com".to_owned());
    }
    let mut pods: Fields = Vec::new();
    if let Some(label) = &args.within {
        let key = match args.prefer {
            true => "kueue.x-k8s.io/podset-preferred-topology",
            false => "kueue.x-k8s.io/podset-required-topology",
        };
        pods.push(("annotations", map([(key, label.as_str().into())])));
        needs.push(format!("a flavor whose Topology has the level {label}; Kueue counts no GPUs of claims in it"));
    }
    let labels = ("labels", map([("kueue.x-k8s.io/queue-name", queue.into())]));
    objects.push(job(args, vec![labels], vec![("suspend", Part::Flag(true))], &pods, Vec::new()));
}

/// KAI makes a PodGroup of the job, by its annotations.
fn kai(args: &GangArgs, objects: &mut Vec<Part>, needs: &mut Vec<String>) {
    let queue = args.queue.as_deref().unwrap_or("default-queue");
    needs.push(format!(
        "KAI Scheduler with DynamicResourceAllocation on in scheduler and binder, and its queue {queue}"
    ));
    let mut annotations: Fields = vec![("kai.scheduler/batch-min-member", args.pods.to_string().into())];
    if let Some(label) = &args.within {
        let level = |label: &str| map([("nodeLabel", label.into())]);
        let levels = map([("levels", Part::List(vec![level(label), level(HOST)]))]);
        objects.push(object(("kai.scheduler/v1alpha1", "Topology"), &args.name, levels));
        let placement = match args.prefer {
            true => "kai.scheduler/topology-preferred-placement",
            false => "kai.scheduler/topology-required-placement",
        };
        let topology = ("kai.scheduler/topology", args.name.as_str().into());
        annotations.extend([topology, (placement, label.as_str().into())]);
    }
    let pods: Fields = vec![("labels", map([("kai.scheduler/queue", queue.into())]))];
    let pod = vec![("schedulerName", "kai-scheduler".into())];
    objects.push(job(args, vec![("annotations", Part::Map(annotations))], Vec::new(), &pods, pod));
}

/// Volcano's own Job.
fn volcano(args: &GangArgs, objects: &mut Vec<Part>, needs: &mut Vec<String>) {
    let queue = args.queue.as_deref().unwrap_or("default");
    let lists = args.gpus > 1 && !args.exact && args.near.is_none();
    let gates = if lists { " and DRAPrioritizedList" } else { "" };
    needs.push(format!(
        "Volcano with DynamicResourceAllocation{gates} on, predicate.DynamicResourceAllocationEnable, and the queue {queue}"
    ));
    let pods = Part::Number(args.pods);
    let mut spec: Fields =
        vec![("schedulerName", "volcano".into()), ("queue", queue.into()), ("minAvailable", pods.clone())];
    if let Some(label) = &args.within {
        let mode = if args.prefer { "soft" } else { "hard" };
        spec.push(("networkTopology", map([("mode", mode.into()), ("highestTierAllowed", Part::Number(1))])));
        needs.push(format!("the label {label} as the lowest level of networkTopologyTypes above {HOST}"));
    }
    let template = map([("spec", pod_spec(args, Vec::new()))]);
    let task = map([("name", "worker".into()), ("replicas", pods), ("template", template)]);
    spec.push(("tasks", Part::List(vec![task])));
    objects.push(object(("batch.volcano.sh/v1alpha1", "Job"), &args.name, Part::Map(spec)));
}

/// A Job of Kubernetes, with further metadata, fields, metadata of its pods and fields of them.
fn job(args: &GangArgs, metadata: Fields, fields: Fields, pods: &Fields, pod: Fields) -> Part {
    let template = [("spec", pod_spec(args, pod))];
    let of_pods = Some(("metadata", Part::Map(pods.clone()))).filter(|_| !pods.is_empty());
    let template = Part::Map(of_pods.into_iter().chain(template).collect());
    let all = || Part::Number(args.pods);
    let own = [("parallelism", all()), ("completions", all()), ("completionMode", "Indexed".into())];
    let spec = Part::Map(own.into_iter().chain(fields).chain([("template", template)]).collect());
    let metadata = [("name", args.name.as_str().into())].into_iter().chain(metadata).collect();
    map([("apiVersion", "batch/v1".into()), ("kind", "Job".into()), ("metadata", Part::Map(metadata)), ("spec", spec)])
}

fn pod_spec(args: &GangArgs, fields: Fields) -> Part {
    let claims = [("gpus", args.name.clone())].into_iter();
    let claims: Vec<(&str, String)> = claims.chain(has_channel(args).then(|| ("nvlink", channel(args)))).collect();
    let used = claims.iter().map(|(name, _)| map([("name", (*name).into())])).collect();
    let container = map([
        ("name", "worker".into()),
        ("image", args.image.as_str().into()),
        ("command", Part::List(["nvidia-smi", "-L"].map(Part::from).into())),
        ("resources", map([("claims", Part::List(used))])),
    ]);
    let toleration =
        map([("key", "nvidia.com/gpu".into()), ("operator", "Exists".into()), ("effect", "NoSchedule".into())]);
    let templates = claims
        .into_iter()
        .map(|(name, template)| map([("name", name.into()), ("resourceClaimTemplateName", template.into())]));
    let rest = [
        ("restartPolicy", "Never".into()),
        ("tolerations", Part::List(vec![toleration])),
        ("containers", Part::List(vec![container])),
        ("resourceClaims", Part::List(templates.collect())),
    ];
    Part::Map(fields.into_iter().chain(rest).collect())
}
