//! `linkwise claim`: prints a manifest that asks for GPUs by what belongs together.
//!
//! A claim lists the node's groups of its size as alternatives, the best first, and any GPUs last (not with `--strict`):
//! kube-scheduler takes the first that a node can give, and prefers nodes by it. docs/dra.md shows what comes out.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::Value;

use super::manifest::{List, text};
use super::output::print;
use crate::config::{ClaimArgs, ClaimKind, Near};
use crate::machines;
use crate::publish::dra::{GpuLayout, GroupSizes};
use crate::topology::{MigProfile, NodeTopology};

/// The domain of our attributes.
const OURS: &str = "linkwise.dev";

/// The class of whole GPUs.
const GPUS: &str = "gpu.nvidia.com";

/// The class of GPUs that several claims share.
const SHARED_GPUS: &str = "shared-gpu.linkwise.dev";

/// The attribute for more GPUs than any group has.
const NVLINK_DOMAIN: &str = "nvlinkDomain";

/// What two devices below one PCIe root have in common.
const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";

/// What two devices of one NUMA node have in common, for releases of DRANET and dra-driver-cpu old and new.
const NUMA_NODE: &str = "dra.net/numaNode";

/// The most devices of a claim (`resource.k8s.io/v1`, `AllocationResultsMaxSize`).
const MOST_DEVICES: u8 = 32;

/// What a claim asks for (`DeviceClaim` of `resource.k8s.io/v1`), in the order in which people read it.
#[derive(Clone, Debug, Default, Serialize)]
struct Devices {
    requests: Vec<Request>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    constraints: Vec<Constraint>,
}

#[derive(Clone, Debug, Serialize)]
struct Request {
    name: String,
    #[serde(flatten)]
    devices: Requested,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
enum Requested {
    Exactly(Asked),
    FirstAvailable(Vec<Asked>),
}

/// So many devices of a class.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Asked {
    /// Of an alternative.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    device_class_name: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    selectors: Vec<Selector>,
    allocation_mode: &'static str,
    count: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<Capacity>,
}

/// What is asked of a device that several claims share.
#[derive(Clone, Debug, Serialize)]
struct Capacity {
    requests: BTreeMap<&'static str, String>,
}

#[derive(Clone, Debug, Serialize)]
struct Selector {
    cel: Expression,
}

#[derive(Clone, Debug, Serialize)]
struct Expression {
    expression: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Constraint {
    requests: Vec<String>,
    match_attribute: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Object<S> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata,
    spec: S,
}

#[derive(Debug, Serialize)]
struct Metadata {
    name: String,
}

/// The specification of a claim; a template has it twice.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Spec {
    Devices(Devices),
    Spec(Box<Self>),
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Any {
    Claim(Object<Spec>),
    Pod(Object<PodSpec>),
    Deployment(Object<DeploymentSpec>),
}

#[derive(Debug, Serialize)]
struct DeploymentSpec {
    replicas: u8,
    selector: Selected,
    template: PodTemplate,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Selected {
    match_labels: Labels,
}

#[derive(Debug, Serialize)]
struct PodTemplate {
    metadata: Labelled,
    spec: PodSpec,
}

#[derive(Debug, Serialize)]
struct Labelled {
    labels: Labels,
}

#[derive(Clone, Debug, Serialize)]
struct Labels {
    app: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    restart_policy: Option<&'static str>,
    containers: [Container; 1],
    resource_claims: [PodClaim; 1],
}

#[derive(Debug, Serialize)]
struct Container {
    name: &'static str,
    image: &'static str,
    command: Vec<&'static str>,
    resources: Resources,
}

#[derive(Debug, Serialize)]
struct Resources {
    claims: [ContainerClaim; 1],
}

#[derive(Debug, Serialize)]
struct ContainerClaim {
    name: &'static str,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodClaim {
    name: &'static str,
    resource_claim_template_name: String,
}

/// Prints the manifest.
pub fn claim(args: &ClaimArgs) -> Result<()> {
    let devices = match (&args.mig, args.near) {
        (Some(profile), _) => of_mig(args.gpus, profile),
        (None, Some(near)) => beside(args.gpus, near, &gpu(args))?,
        (None, None) if is_shared(args) => {
            let gpus = Asked { count: args.gpus, ..gpu(args) };
            Devices { requests: vec![request("gpus", gpus)], ..Devices::default() }
        }
        (None, None) => in_groups(args.gpus, &groups(args)?, args.strict),
    };
    let usual = match &args.mig {
        Some(profile) => format!("mig-{}", profile.to_string().replace('.', "").replace('+', "-")),
        None if is_shared(args) => "shared-gpu".to_owned(),
        None if args.gpus == 1 => "gpu".to_owned(),
        None => format!("gpus-{}", args.gpus),
    };
    let name = args.name.clone().unwrap_or(usual);
    let object = |kind: &'static str, spec: Spec| {
        let metadata = Metadata { name: name.clone() };
        Any::Claim(Object { api_version: "resource.k8s.io/v1", kind, metadata, spec })
    };
    let template = |devices| object("ResourceClaimTemplate", Spec::Spec(Box::new(Spec::Devices(devices))));
    let manifest = match args.kind {
        ClaimKind::Claim => text(&object("ResourceClaim", Spec::Devices(devices)), args.format),
        ClaimKind::Template => text(&template(devices), args.format),
        ClaimKind::Pod => text(&List::new(vec![template(devices), pod(&name)]), args.format),
        ClaimKind::Deployment => text(&List::new(vec![template(devices), deployment(&name)]), args.format),
    };
    Ok(print(&manifest?)?)
}

/// The specification of a claim for so many GPUs of any node, as the command prints it by default.
pub fn any_claim(gpus: u8) -> Result<Value, serde_json::Error> {
    serde_json::to_value(Spec::Devices(in_groups(gpus, &any_groups(gpus), false)))
}

/// The attributes by which a claim of this size finds groups, of all that a node may have.
fn any_groups(gpus: u8) -> Vec<String> {
    match GroupSizes::default().holding(usize::from(gpus)) {
        _ if gpus == 1 => Vec::new(),
        Some(size) => size.names().collect(),
        None => vec![NVLINK_DOMAIN.to_owned()],
    }
}

/// The attributes by which a claim of this size finds groups: those of a machine, or all that a node may have.
fn groups(args: &ClaimArgs) -> Result<Vec<String>> {
    let mut groups = any_groups(args.gpus);
    if let Some(node) = args.node.as_ref().filter(|_| args.gpus > 1) {
        let (topology, _) = NodeTopology::assemble(&machines::load(node)?.observed);
        let gpus = (0..topology.gpus().len()).collect();
        let layout = GpuLayout::of(&super::tables(topology), gpus, &GroupSizes::default());
        let is_there = |name: &String| match name.as_str() {
            NVLINK_DOMAIN => !layout.nvlink_domains.is_empty(),
            _ => layout.families.iter().any(|family| family.name == *name),
        };
        groups.retain(is_there);
        ensure!(
            !(args.strict && groups.is_empty()),
            "--strict: {node} has no group of {} GPUs, so such a claim would wait for ever",
            args.gpus
        );
    }
    Ok(groups)
}

/// One request: the groups as alternatives, then any GPUs.
fn in_groups(gpus: u8, groups: &[String], strict: bool) -> Devices {
    if groups.is_empty() {
        return Devices { requests: vec![request("gpus", asked(GPUS, gpus))], ..Devices::default() };
    }
    // Names of alternatives are DNS labels.
    let alternative = |name: &str| Asked { name: Some(name.to_ascii_lowercase()), ..asked(GPUS, gpus) };
    let any = if strict { &[][..] } else { &["any"] };
    let alternatives = groups.iter().map(String::as_str).chain(any.iter().copied()).map(alternative).collect();
    let together = |name: &String| Constraint {
        requests: vec![format!("gpus/{}", name.to_ascii_lowercase())],
        match_attribute: format!("{OURS}/{name}"),
    };
    Devices {
        requests: vec![Request { name: "gpus".to_owned(), devices: Requested::FirstAvailable(alternatives) }],
        constraints: groups.iter().map(together).collect(),
    }
}

/// A GPU with what is near to it, as often as asked.
fn beside(gpus: u8, near: Near, of_gpu: &Asked) -> Result<Devices> {
    const MOST: u8 = MOST_DEVICES / 2;
    let (word, what) = match near {
        Near::Nic => ("nic", "a NIC"),
        Near::Cpu => ("cpus", "CPUs"),
    };
    ensure!(
        gpus <= MOST,
        "--gpus {gpus} with --near: a claim takes {MOST_DEVICES} devices, {MOST} GPUs with {what} each"
    );
    let mut devices = Devices::default();
    for number in 0..gpus {
        let name = |word: &str| if gpus == 1 { word.to_owned() } else { format!("{word}-{number}") };
        let (gpu, other) = (name("gpu"), name(word));
        let (asked_too, attribute) = match near {
            Near::Nic => {
                let rdma = "'rdma' in device.attributes['dra.net'] && device.attributes['dra.net'].rdma";
                (Asked { selectors: selector(rdma), ..asked("dra.net", 1) }, PCIE_ROOT)
            }
            Near::Cpu => (asked("dra.cpu", 1), NUMA_NODE),
        };
        devices.requests.extend([request(&gpu, of_gpu.clone()), request(&other, asked_too)]);
        devices.constraints.push(Constraint { requests: vec![gpu, other], match_attribute: attribute.to_owned() });
    }
    Ok(devices)
}

/// MIG devices of a profile.
fn of_mig(count: u8, profile: &MigProfile) -> Devices {
    // A selector that reads an attribute which a device lacks is an error of the whole pod, on all nodes.
    let expression = format!(
        "'profile' in device.attributes['gpu.nvidia.com'] && \
         device.attributes['gpu.nvidia.com'].profile == '{profile}'"
    );
    let mig = Asked { selectors: selector(&expression), ..asked("mig.nvidia.com", count) };
    Devices { requests: vec![request("mig", mig)], ..Devices::default() }
}

fn asked(device_class_name: &'static str, count: u8) -> Asked {
    Asked { name: None, device_class_name, selectors: Vec::new(), allocation_mode: "ExactCount", count, capacity: None }
}

/// Whether a part of a GPU is asked for.
fn is_shared(args: &ClaimArgs) -> bool {
    args.shares.is_some() || args.memory.is_some()
}

/// A GPU, or a part of one.
fn gpu(args: &ClaimArgs) -> Asked {
    if !is_shared(args) {
        return asked(GPUS, 1);
    }
    let shares = args.shares.map(|shares| ("shares", shares.to_string()));
    let memory = args.memory.clone().map(|memory| ("memory", memory));
    let requests = shares.into_iter().chain(memory).collect();
    Asked { capacity: Some(Capacity { requests }), ..asked(SHARED_GPUS, 1) }
}

fn request(name: &str, asked: Asked) -> Request {
    Request { name: name.to_owned(), devices: Requested::Exactly(asked) }
}

fn selector(expression: &str) -> Vec<Selector> {
    vec![Selector { cel: Expression { expression: expression.to_owned() } }]
}

/// A pod that shows what it got.
fn pod(name: &str) -> Any {
    let spec = pod_spec(name, Some("Never"), vec!["nvidia-smi", "-L"]);
    Any::Pod(Object { api_version: "v1", kind: "Pod", metadata: Metadata { name: name.to_owned() }, spec })
}

/// A deployment of pods that show what they got, and go on.
fn deployment(name: &str) -> Any {
    let labels = Labels { app: name.to_owned() };
    let spec = DeploymentSpec {
        replicas: 1,
        selector: Selected { match_labels: labels.clone() },
        template: PodTemplate {
            metadata: Labelled { labels },
            spec: pod_spec(name, None, vec!["sh", "-c", "nvidia-smi -L && exec sleep infinity"]),
        },
    };
    let metadata = Metadata { name: name.to_owned() };
    Any::Deployment(Object { api_version: "apps/v1", kind: "Deployment", metadata, spec })
}

fn pod_spec(template: &str, restart_policy: Option<&'static str>, command: Vec<&'static str>) -> PodSpec {
    let resources = Resources { claims: [ContainerClaim { name: "gpus" }] };
    let container = Container { name: "main", image: "ubuntu:24.04", command, resources };
    let claims = [PodClaim { name: "gpus", resource_claim_template_name: template.to_owned() }];
    PodSpec { restart_policy, containers: [container], resource_claims: claims }
}
