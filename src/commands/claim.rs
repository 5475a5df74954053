//! `linkwise claim`: prints a manifest that requests GPUs which belong together.
//!
//! A claim of several whole GPUs lists alternatives, the best first: groups with enough GPUs, and then any GPUs, unless
//! `--strict` is set. The groups are the usual ones, those of one machine, or those of a `fleet`. kube-scheduler takes
//! the first alternative that a node can give, and prefers nodes that can give an earlier one. Claims with `--exact`,
//! `--near` or `--rails` have no alternatives. docs/dra.md shows examples.

mod exact;
mod fleet;
mod kinds;

use std::collections::BTreeSet;

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::config::{ClaimArgs, ClaimKind, FleetArgs, ManifestFormat, Near};
use linkwise_core::publish::dra::exact::{GroupAttribute, NVLINK_DOMAIN};
use linkwise_core::publish::dra::{GpuLayout, GroupSize};
use linkwise_core::topology::{MigProfile, NodeTopology};
use linkwise_host::{machines, yaml};
use linkwise_system::output::print;

pub use kinds::rails_claim;

/// The domain of linkwise's attributes.
const OURS: &str = "linkwise.dev";

/// The annotation by which a template with alternatives names the template of a pod's further claims. The policies of
/// manifests/dra read it.
const FURTHER_CLAIMS: &str = "linkwise.dev/further-claims";

/// The DeviceClass of whole GPUs, which has the driver's name.
const GPUS: &str = "gpu.nvidia.com";

/// The `apiVersion` and `kind` of a claim.
const CLAIM: (&str, &str) = ("resource.k8s.io/v1", "ResourceClaim");
/// The `apiVersion` and `kind` of a claim template.
const TEMPLATE: (&str, &str) = ("resource.k8s.io/v1", "ResourceClaimTemplate");

/// The DeviceClass of GPUs that several claims share.
const SHARED_GPUS: &str = "shared-gpu.linkwise.dev";

/// The attribute that two devices below one PCIe root have in common.
const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";

/// The attribute that a GPU and the CPUs of its NUMA node have in common.
const NUMA_NODE: &str = "dra.net/numaNode";

/// The field of a request's alternatives.
const ALTERNATIVES: &str = "firstAvailable";

/// The most alternatives of a request (`resource.k8s.io/v1`, `FirstAvailableDeviceRequestMaxSize`).
const MAX_ALTERNATIVES: usize = 8;

/// The most devices of a claim (`resource.k8s.io/v1`, `AllocationResultsMaxSize`).
const MAX_DEVICES: u8 = 32;

/// A part of a manifest, with its keys in the order in which people read them.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum Part {
    Text(String),
    Number(u32),
    Request(Request),
    List(Vec<Self>),
    #[serde(serialize_with = "as_map")]
    Map(Vec<(&'static str, Self)>),
}

fn as_map<S: Serializer>(entries: &[(&'static str, Part)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(key, value)| (key, value)))
}

impl<T: Into<String>> From<T> for Part {
    fn from(text: T) -> Self {
        Self::Text(text.into())
    }
}

fn map<const N: usize>(entries: [(&'static str, Part); N]) -> Part {
    Part::Map(entries.into())
}

/// The requests of a claim (`DeviceClaim` of `resource.k8s.io/v1`).
#[derive(Default)]
struct Devices {
    requests: Vec<Part>,
    constraints: Vec<Part>,
}

impl Devices {
    /// The devices of a single request.
    fn one(name: &str, exact: Request) -> Self {
        Self { requests: vec![request(name, exact)], constraints: Vec::new() }
    }

    fn have_alternatives(&self) -> bool {
        let has_list =
            |part: &Part| matches!(part, Part::Map(entries) if entries.iter().any(|(key, _)| *key == ALTERNATIVES));
        self.requests.iter().any(has_list)
    }

    /// The specification of a claim.
    fn spec(&self) -> Part {
        let constraints = Some(&self.constraints).filter(|constraints| !constraints.is_empty());
        let constraints = constraints.map(|constraints| ("constraints", Part::List(constraints.clone())));
        let requests = [("requests", Part::List(self.requests.clone()))];
        map([("devices", Part::Map(requests.into_iter().chain(constraints).collect()))])
    }
}

/// A request for `count` devices of a class (`ExactDeviceRequest` and `DeviceSubRequest` of `resource.k8s.io/v1`).
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    /// The name, if the request is an alternative.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    device_class_name: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    selectors: Vec<Part>,
    allocation_mode: &'static str,
    count: u8,
    /// The requested capacity of a device that several claims share.
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<Box<Part>>,
}

/// One alternative of a claim.
struct Alternative {
    /// A DNS label.
    name: String,
    /// The attribute that the GPUs have in common; `None` for any GPUs.
    attribute: Option<String>,
    /// The GPU models that the alternative is for, with `None` for an unknown one; empty for all models.
    products: BTreeSet<Option<String>>,
}

impl Alternative {
    /// The alternative of a group, on all machines that have it.
    fn group(attribute: &str) -> Self {
        Self { name: attribute.to_ascii_lowercase(), attribute: Some(attribute.to_owned()), products: BTreeSet::new() }
    }

    fn any() -> Self {
        Self { name: "any".to_owned(), attribute: None, products: BTreeSet::new() }
    }
}

pub use exact::exact_claim;
pub use fleet::fleet_claim;

/// Prints the manifest.
pub fn claim(args: &ClaimArgs) -> Result<()> {
    refuse(args)?;
    let group = args.exact.then(|| exact::group(args.gpus, &args.node, &args.fleet)).transpose()?;
    let devices = match (&args.mig, args.near, &args.rails) {
        (Some(profile), ..) => mig_devices(args.gpus, profile),
        (None, Some(near), _) => with_near_devices(args.gpus, near, &gpu(args), group.flatten())?,
        (None, None, Some(rails)) => kinds::requests_of(args, rails)?,
        (None, None, None) if args.exact => exact::devices(args.gpus, group.flatten().as_deref()),
        (None, None, None) if is_shared(args) => Devices::one("gpus", Request { count: args.gpus, ..gpu(args) }),
        (None, None, None) => alternatives(args.gpus, &args.node, &args.fleet, args.strict)?,
    };
    let default_name = match &args.mig {
        Some(profile) => format!("mig-{}", profile.to_string().replace('.', "").replace('+', "-")),
        None if is_shared(args) => "shared-gpu".to_owned(),
        None if args.gpus == 1 => "gpu".to_owned(),
        None => format!("gpus-{}", args.gpus),
    };
    let name = args.name.clone().unwrap_or(default_name);
    let template = object(TEMPLATE, &name, map([("spec", devices.spec())]));
    let objects = match args.kind {
        ClaimKind::Claim => vec![object(CLAIM, &name, devices.spec())],
        ClaimKind::Template if devices.have_alternatives() && !args.strict => with_further(&name, &devices, args.gpus),
        ClaimKind::Template => vec![template],
        ClaimKind::Pod => vec![template, pod(&name)],
        ClaimKind::Deployment => vec![template, deployment(&name)],
    };
    let manifest = match objects.as_slice() {
        [one] => text(one, args.format)?,
        _ => text(&list(objects), args.format)?,
    };
    Ok(print(&manifest)?)
}

/// A template with alternatives, and a template of any GPUs for a pod's further claims. If several claims of a pod had
/// alternatives, the scheduler would try each alternative of one claim with each alternative of the others.
fn with_further(name: &str, devices: &Devices, gpus: u8) -> Vec<Part> {
    let further = format!("{name}-any");
    let annotations = map([(FURTHER_CLAIMS, further.as_str().into())]);
    let metadata = map([("name", name.into()), ("annotations", annotations)]);
    let spec = |devices: &Devices| map([("spec", devices.spec())]);
    let any = in_groups(gpus, &[], false);
    // In this order the further template exists before the annotation names it.
    vec![object(TEMPLATE, &further, spec(&any)), of_metadata(TEMPLATE, metadata, spec(devices))]
}

/// Refuses options that would have no effect, or that exclude each other.
fn refuse(args: &ClaimArgs) -> Result<()> {
    let flags = [(!args.node.is_empty(), "--node"), (args.fleet.cluster.is_some(), "--cluster")];
    if let Some(flag) = flags.into_iter().find_map(|(is_set, flag)| is_set.then_some(flag)) {
        ensure!(args.near.is_none() || args.exact, "{flag} with --near has no effect; add --exact");
        ensure!(args.mig.is_none() && !is_shared(args), "{flag} has no effect: only claims of whole GPUs name groups");
    }
    ensure!(
        args.fleet.cluster.is_none() || !args.node.iter().any(|node| node == "-"),
        "--node - with --cluster: standard input can be read once only; name a file"
    );
    if args.rails.is_some() {
        ensure!(args.fleet.cluster.is_none(), "--cluster with --rails has no effect: the claim names no group");
        ensure!(args.node.len() < 2, "--rails: one --node at most");
    }
    Ok(())
}

/// The specification of a claim for this number of GPUs on any node, as the command prints it by default.
pub fn any_claim(gpus: u8) -> Result<Value, serde_json::Error> {
    let groups: Vec<Alternative> = usual_groups(gpus).iter().map(|name| Alternative::group(name)).collect();
    serde_json::to_value(in_groups(gpus, &groups, false).spec())
}

/// One request with alternatives: the groups of any node, of one machine, or of a fleet.
fn alternatives(gpus: u8, nodes: &[String], fleet: &FleetArgs, strict: bool) -> Result<Devices> {
    if fleet.cluster.is_some() || nodes.len() > 1 {
        return fleet::devices(gpus, nodes, fleet, strict);
    }
    let groups = groups(gpus, nodes.first().map(String::as_str), strict)?;
    Ok(in_groups(gpus, &groups.iter().map(|name| Alternative::group(name)).collect::<Vec<_>>(), strict))
}

/// The attributes that a claim of this size for any machine lists.
fn usual_groups(gpus: u8) -> Vec<String> {
    match GroupSize::holding(usize::from(gpus)) {
        Some(size) if gpus > 1 => size.usual_names().collect(),
        _ => all_groups(gpus),
    }
}

/// The attributes by which a claim of this size finds groups: all that a node may have.
fn all_groups(gpus: u8) -> Vec<String> {
    match GroupSize::holding(usize::from(gpus)) {
        _ if gpus == 1 => Vec::new(),
        Some(size) => size.names().collect(),
        None => vec![NVLINK_DOMAIN.to_owned()],
    }
}

/// The attributes by which a claim of this size finds groups: those of a machine, or the usual ones. Without a machine
/// a strict claim lists all that a node may have.
fn groups(gpus: u8, node: Option<&str>, strict: bool) -> Result<Vec<String>> {
    let mut groups = if node.is_none() && !strict { usual_groups(gpus) } else { all_groups(gpus) };
    if let Some(node) = node {
        let topology = topology(node)?;
        let count = topology.gpus().len();
        ensure!(usize::from(gpus) <= count, kinds::too_few(gpus, count));
        if gpus == 1 {
            return Ok(groups);
        }
        super::note_unknown_nvlinks(node, &topology);
        let existing = GroupAttribute::all_of(&GpuLayout::of(&super::tables(topology), (0..count).collect()));
        groups.retain(|name| existing.iter().any(|attribute| attribute.name == *name));
        ensure!(
            !(strict && groups.is_empty()),
            "--strict: {node} has no group of {gpus} GPUs, so such a claim would wait for ever"
        );
    }
    Ok(groups)
}

/// The topology of a built-in machine or a file.
fn topology(node: &str) -> Result<NodeTopology> {
    Ok(NodeTopology::assemble(&machines::load(node)?.observed).0)
}

/// One request: the groups as alternatives, then any GPUs, unless the claim is strict.
fn in_groups(gpus: u8, groups: &[Alternative], strict: bool) -> Devices {
    if groups.is_empty() {
        return Devices::one("gpus", plain(GPUS, gpus));
    }
    let alternative = |of: &Alternative| {
        let selectors = if of.products.is_empty() { Vec::new() } else { selector(&is_one_of(&of.products)) };
        Part::Request(Request { name: Some(of.name.clone()), selectors, ..plain(GPUS, gpus) })
    };
    let any = (!strict).then(Alternative::any);
    let together = |of: &Alternative| {
        Some(constraint([format!("gpus/{}", of.name)].into(), format!("{OURS}/{}", of.attribute.as_ref()?)))
    };
    let alternatives = groups.iter().chain(&any).map(alternative).collect();
    Devices {
        requests: vec![map([("name", "gpus".into()), (ALTERNATIVES, Part::List(alternatives))])],
        constraints: groups.iter().filter_map(together).collect(),
    }
}

/// The CEL expression for GPUs of these models. It asks first if a device has the attribute, because reading a missing
/// attribute is an error for the whole pod, on all nodes.
fn is_one_of(products: &BTreeSet<Option<String>>) -> String {
    const GPU: &str = "device.attributes['gpu.nvidia.com']";
    // A JSON string is also a CEL string.
    let named: Vec<String> =
        products.iter().flatten().map(|product| Value::from(product.as_str()).to_string()).collect();
    let named = format!("{GPU}.productName in [{}]", named.join(", "));
    match (products.contains(&None), products.len()) {
        (false, _) => format!("'productName' in {GPU} && {named}"),
        (true, 1) => format!("!('productName' in {GPU})"),
        (true, _) => format!("!('productName' in {GPU}) || {named}"),
    }
}

/// Requests for GPUs, each with a device near to it. The GPUs are of one group if `group` names its attribute.
fn with_near_devices(gpus: u8, near: Near, of_gpu: &Request, group: Option<String>) -> Result<Devices> {
    const MAX_GPUS: u8 = MAX_DEVICES / 2;
    let (word, what) = match near {
        Near::Nic => ("nic", "a NIC"),
        Near::Cpu => ("cpus", "CPUs"),
    };
    ensure!(
        gpus <= MAX_GPUS,
        "--gpus {gpus} with --near: a claim has at most {MAX_DEVICES} devices: {MAX_GPUS} GPUs with {what} each"
    );
    let mut devices = Devices::default();
    for number in 0..gpus {
        let (gpu, other) = (numbered("gpu", number, gpus), numbered(word, number, gpus));
        let (near_device, attribute) = match near {
            Near::Nic => (Request { selectors: of_attribute("dra.net", "rdma", ""), ..plain("dra.net", 1) }, PCIE_ROOT),
            Near::Cpu => (plain("dra.cpu", 1), NUMA_NODE),
        };
        devices.requests.extend([request(&gpu, of_gpu.clone()), request(&other, near_device)]);
        devices.constraints.push(constraint(vec![gpu, other], attribute.to_owned()));
    }
    let all = || (0..gpus).map(|number| numbered("gpu", number, gpus)).collect();
    devices.constraints.extend(group.map(|group| constraint(all(), format!("{OURS}/{group}"))));
    Ok(devices)
}

/// The name of a request, with its number if there are several.
fn numbered(word: &str, number: u8, of: u8) -> String {
    if of == 1 { word.to_owned() } else { format!("{word}-{number}") }
}

fn mig_devices(count: u8, profile: &MigProfile) -> Devices {
    let selectors = of_attribute(GPUS, "profile", &format!(" == '{profile}'"));
    Devices::one("mig", Request { selectors, ..plain("mig.nvidia.com", count) })
}

/// The request for `count` devices of a class, without a name, selectors or a capacity.
fn plain(device_class_name: &'static str, count: u8) -> Request {
    let (allocation_mode, selectors) = ("ExactCount", Vec::new());
    Request { name: None, device_class_name, selectors, allocation_mode, count, capacity: None }
}

/// Returns true if a part of a GPU is requested.
fn is_shared(args: &ClaimArgs) -> bool {
    args.shares.is_some() || args.memory.is_some()
}

/// The request for a GPU, or for a part of one.
fn gpu(args: &ClaimArgs) -> Request {
    if !is_shared(args) {
        return plain(GPUS, 1);
    }
    let shares = args.shares.map(|shares| ("shares", shares.to_string()));
    let memory = args.memory.clone().map(|memory| ("memory", memory));
    let amounts = memory.into_iter().chain(shares).map(|(key, amount)| (key, amount.into())).collect();
    Request { capacity: Some(Box::new(map([("requests", Part::Map(amounts))]))), ..plain(SHARED_GPUS, 1) }
}

fn request(name: &str, exact: Request) -> Part {
    map([("name", name.into()), ("exactly", Part::Request(exact))])
}

fn constraint(requests: Vec<String>, attribute: String) -> Part {
    let requests = requests.into_iter().map(Into::into).collect();
    map([("requests", Part::List(requests)), ("matchAttribute", attribute.into())])
}

fn selector(expression: &str) -> Vec<Part> {
    vec![map([("cel", map([("expression", expression.into())]))])]
}

/// The selector of devices whose attribute meets a condition. It asks first if a device has the attribute, as
/// [`is_one_of`] does.
fn of_attribute(driver: &str, name: &str, condition: &str) -> Vec<Part> {
    let attributes = format!("device.attributes['{driver}']");
    selector(&format!("'{name}' in {attributes} && {attributes}.{name}{condition}"))
}

fn object(of: (&'static str, &'static str), name: &str, spec: Part) -> Part {
    of_metadata(of, map([("name", name.into())]), spec)
}

fn of_metadata((version, kind): (&'static str, &'static str), metadata: Part, spec: Part) -> Part {
    map([("apiVersion", version.into()), ("kind", kind.into()), ("metadata", metadata), ("spec", spec)])
}

/// A pod that prints its GPUs.
fn pod(name: &str) -> Part {
    let once = ("restartPolicy", "Never".into());
    object(("v1", "Pod"), name, pod_spec(name, Some(once), &["nvidia-smi", "-L"]))
}

/// A deployment of pods that print their GPUs and keep running.
fn deployment(name: &str) -> Part {
    let labels = || map([("app", name.into())]);
    let pod = pod_spec(name, None, &["sh", "-c", "nvidia-smi -L && exec sleep infinity"]);
    let template = map([("metadata", map([("labels", labels())])), ("spec", pod)]);
    let selector = map([("matchLabels", labels())]);
    let spec = map([("replicas", Part::Number(1)), ("selector", selector), ("template", template)]);
    object(("apps/v1", "Deployment"), name, spec)
}

fn pod_spec(template: &str, policy: Option<(&'static str, Part)>, command: &[&str]) -> Part {
    let claim = || ("name", "gpus".into());
    let container = map([
        ("name", "main".into()),
        ("image", "ubuntu:24.04".into()),
        ("command", Part::List(command.iter().map(|word| (*word).into()).collect())),
        // Kueue assigns a topology only to pods that request CPU or memory.
        ("resources", map([("requests", map([("cpu", "1".into())])), ("claims", Part::List(vec![map([claim()])]))])),
    ]);
    let claims = map([claim(), ("resourceClaimTemplateName", template.into())]);
    let rest = [("containers", Part::List(vec![container])), ("resourceClaims", Part::List(vec![claims]))];
    Part::Map(policy.into_iter().chain(rest).collect())
}

/// A list of objects as one object.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct List<T> {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<T>,
}

pub(super) fn list<T>(items: Vec<T>) -> List<T> {
    List { api_version: "v1", kind: "List", items }
}

/// The text of an object or a list of them.
pub(super) fn text(object: &impl Serialize, format: ManifestFormat) -> Result<String> {
    let text = match format {
        ManifestFormat::Json => serde_json::to_string_pretty(object).context("cannot write JSON")?,
        ManifestFormat::Yaml => yaml::write(object).map_err(|error| anyhow!("cannot write YAML: {error}"))?,
    };
    Ok(format!("{}\n", text.trim_end()))
}
