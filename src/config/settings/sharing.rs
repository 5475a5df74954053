//! `sharing`: time-slicing and MPS, as the file says it and as it counts.
//!
//! Without `linkwise.naming` what counts is what counts with the NVIDIA plugin: `rename` is the default one or none,
//! and all devices of a resource are shared.

use serde::{Serialize, Serializer};

use super::given::{Given, boolean, resource_name, whole};
use super::row::tell;
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Node, Problem, Value};
use crate::state::{DeviceSelector, ResourceName};

/// The most replicas of one device. 16 GPUs of 64 slots are what the choice is measured with; more of fewer GPUs is as
/// many. The NVIDIA plugin has no bound.
const MOST_REPLICAS: u32 = 1024;

/// The most devices that a count may name; NVML machines end well below.
const MOST_DEVICES: u32 = 1024;

/// How devices are shared. At most one of both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sharing {
    /// By taking turns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<Replicated>,
    /// By CUDA's Multi-Process Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps: Option<Replicated>,
}

/// Resources that are shared in one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Replicated {
    /// Whether a shared resource is called `NAME.shared`; [`ReplicatedResource::rename`] has it worked in.
    pub rename_by_default: bool,
    /// Whether a request for more than one is refused. For MPS unless the file says otherwise.
    pub fail_requests_greater_than_one: bool,
    /// What is shared.
    pub resources: Vec<ReplicatedResource>,
}

/// A resource that is shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReplicatedResource {
    /// The resource without sharing.
    pub name: ResourceName,
    /// What the shared one is called, where not the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rename: Option<ResourceName>,
    /// Which of its devices.
    pub devices: ReplicatedDevices,
    /// Into how many each is divided: 2 to 1024.
    pub replicas: u32,
    /// Where the file says so.
    #[serde(skip)]
    pub line: u64,
}

/// Which devices of a resource are shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicatedDevices {
    /// All.
    All,
    /// So many, whichever.
    Count(u32),
    /// These, each once.
    List(Vec<DeviceSelector>),
}

impl ReplicatedResource {
    /// The name under which it is offered.
    pub fn offered_as(&self) -> &ResourceName {
        self.rename.as_ref().unwrap_or(&self.name)
    }
}

impl Serialize for ReplicatedDevices {
    /// As the file has it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::Count(count) => serializer.serialize_u32(*count),
            Self::List(devices) => serializer.collect_seq(devices.iter().map(ToString::to_string)),
        }
    }
}

/// Which devices: `all`, a count, or a list.
fn devices(given: Given<'_>) -> Result<ReplicatedDevices, Problem> {
    const EXPECTED: &str = "'all', a number of devices, or a list of indices, MIG indices (0:1) or UUIDs";
    let refused = || given.refused(EXPECTED);
    let Given::Node(node) = given else { return Err(refused()) };
    match &node.value {
        Value::Text(text) if text == "all" => Ok(ReplicatedDevices::All),
        Value::Whole(_) => whole(given, 1, MOST_DEVICES).map(ReplicatedDevices::Count),
        Value::List(items) if !items.is_empty() => {
            let device = |item: &Node| match &item.value {
                Value::Whole(number) => u32::try_from(*number).map(DeviceSelector::Index).map_err(|_| ()),
                Value::Text(text) => text.parse().map_err(|_| ()),
                _ => Err(()),
            };
            let read =
                |item| device(item).map_err(|()| Given::Node(item).refused("an index, a MIG index (0:1) or a UUID"));
            items.iter().map(read).collect::<Result<_, _>>().map(ReplicatedDevices::List)
        }
        _ => Err(refused()),
    }
}

/// Reads `sharing`. `naming` says whether names and devices of the operator's own count.
pub fn read(file: &File, naming: bool, findings: &mut Vec<Finding>) -> Setting<Sharing> {
    let mut time_slicing = replicated(file, "sharing.timeSlicing", false, naming, findings);
    let mps = replicated(file, "sharing.mps", true, naming, findings);
    if let (Some(slicing), Some(_)) = (file.at("sharing.timeSlicing"), &mps)
        && time_slicing.take().is_some()
    {
        tell(findings, slicing.line, "sharing.timeSlicing", Problem::BothSharings);
    }
    match file.at("sharing") {
        Some(node) if time_slicing.is_some() || mps.is_some() => {
            Setting { value: Sharing { time_slicing, mps }, origin: Origin::File { line: node.line } }
        }
        _ => Setting { value: Sharing::default(), origin: Origin::Default },
    }
}

/// One kind of sharing. `single` is what failRequestsGreaterThanOne is where the file does not say.
fn replicated(file: &File, path: &str, single: bool, naming: bool, findings: &mut Vec<Finding>) -> Option<Replicated> {
    let node = file.at(path)?;
    let mut flag = |key: &str, default: bool| {
        let Some(node) = node.value.get(key) else { return default };
        boolean(Given::Node(node)).unwrap_or_else(|problem| {
            tell(findings, node.line, format!("{path}.{key}"), problem);
            default
        })
    };
    let rename_by_default = flag("renameByDefault", false);
    let fail_requests_greater_than_one = flag("failRequestsGreaterThanOne", single);
    // A shape that is wrong is told of already.
    let items = match node.value.get("resources").map(|node| &node.value) {
        Some(Value::List(items)) => items.as_slice(),
        _ => &[],
    };
    if items.is_empty() && matches!(node.value, Value::Map(_)) {
        tell(findings, node.line, path, Problem::Missing("resources"));
    }
    let mut resources: Vec<ReplicatedResource> = Vec::new();
    for (number, item) in items.iter().enumerate() {
        let path = format!("{path}.resources[{number}]");
        let Some(resource) = resource(item, &path, rename_by_default, naming, findings) else { continue };
        let same = resources.iter_mut().find(|known| !naming && known.name == resource.name);
        let Some(known) = same else {
            resources.push(resource);
            continue;
        };
        let problem = "its resource is listed before; the larger number of replicas counts, as with the NVIDIA plugin";
        tell(findings, item.line, &path, Problem::NoEffect(problem));
        known.replicas = known.replicas.max(resource.replicas);
    }
    (!resources.is_empty()).then_some(Replicated { rename_by_default, fail_requests_greater_than_one, resources })
}

/// One resource, as it counts.
fn resource(
    node: &Node,
    path: &str,
    rename_by_default: bool,
    naming: bool,
    findings: &mut Vec<Finding>,
) -> Option<ReplicatedResource> {
    let Value::Map(_) = node.value else { return None };
    let found = |key: &str| node.value.get(key);
    let mut told = |node: &Node, key: &str, problem| tell(findings, node.line, format!("{path}.{key}"), problem);
    let mut read_name = |key: &'static str| {
        let node = found(key)?;
        resource_name(Given::Node(node)).map_err(|problem| told(node, key, problem)).ok()
    };
    let (name, rename) = (read_name("name"), read_name("rename"));
    let shared = found("devices").map(|node| (node, devices(Given::Node(node))));
    let shared = match shared {
        None => Some(ReplicatedDevices::All),
        Some((_, Ok(devices))) => Some(devices),
        Some((node, Err(problem))) => {
            told(node, "devices", problem);
            None
        }
    };
    let replicas = found("replicas").and_then(|node| {
        whole(Given::Node(node), 2, MOST_REPLICAS).map_err(|problem| told(node, "replicas", problem)).ok()
    });
    for key in ["name", "replicas"] {
        if found(key).is_none() {
            tell(findings, node.line, path, Problem::Missing(key));
        }
    }
    let (name, shared, replicas) = (name?, shared?, replicas?);
    let by_default = if rename_by_default { format!("{name}.shared").parse::<ResourceName>().ok() } else { None };
    let (rename, devices) = if naming {
        (rename.or(by_default), shared)
    } else {
        if let Some(node) = found("rename")
            && rename != by_default
        {
            tell(findings, node.line, format!("{path}.rename"), Problem::NamingOff);
        }
        if let Some(node) = found("devices")
            && shared != ReplicatedDevices::All
        {
            tell(findings, node.line, format!("{path}.devices"), Problem::NamingOff);
        }
        (by_default, ReplicatedDevices::All)
    };
    Some(ReplicatedResource { name, rename, devices, replicas, line: node.line })
}
