//! `sharing`: time-slicing and MPS, in the file's form and in the effective form.
//!
//! Without `linkwise.naming` the effect is the NVIDIA plugin's: a shared resource has its own name or the default one
//! with `.shared`, and all devices of it are shared.

use super::given::{Given, boolean, resource_name, whole};
use super::selection::{Fields, Item, NAMING_OFF, mappings, values};
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Node, Value};
use linkwise_core::state::{DeviceSelector, ResourceName, SharedDevices, SharedResource, Sharing, SharingKind};

/// The most replicas of one device: the choice was measured with as many slots. The NVIDIA plugin has no limit.
const MOST_REPLICAS: u32 = 1024;

/// The largest count of devices that a file may ask for; no node has as many.
const MOST_DEVICES: u32 = 1024;

/// The key of a kind of sharing, below `sharing`.
pub fn key(kind: SharingKind) -> &'static str {
    match kind {
        SharingKind::TimeSlicing => "timeSlicing",
        SharingKind::Mps => "mps",
    }
}

/// Reads `sharing`. `naming` is `linkwise.naming`. The items are those of [`Sharing::resources`], with their places.
pub fn read(
    file: &File,
    naming: bool,
    findings: &mut Vec<Finding>,
) -> (Setting<Option<Sharing>>, Vec<Item<SharedResource>>) {
    let slicing = one_kind(file, SharingKind::TimeSlicing, naming, findings);
    let mps = one_kind(file, SharingKind::Mps, naming, findings);
    if let (Some(_), Some(_), Some(node)) = (&slicing, &mps, file.at("sharing.timeSlicing")) {
        let problem = "time-slicing and MPS exclude each other: sharing.timeSlicing is ignored, as the NVIDIA plugin \
                       ignores it";
        findings.push(Finding::warning(node.line, "sharing.timeSlicing", problem));
    }
    match (mps.or(slicing), file.at("sharing")) {
        (Some((sharing, items)), Some(node)) => {
            (Setting { value: Some(sharing), origin: Origin::File(node.line) }, items)
        }
        _ => (Setting::default(), Vec::new()),
    }
}

fn one_kind(
    file: &File,
    kind: SharingKind,
    naming: bool,
    findings: &mut Vec<Finding>,
) -> Option<(Sharing, Vec<Item<SharedResource>>)> {
    let path = &format!("sharing.{}", key(kind));
    let node = file.at(path)?;
    let mut sharing = Sharing::new(kind, Vec::new());
    let mut fields = Fields { node, path, findings };
    if let Some(Some(value)) = fields.optional("renameByDefault", boolean) {
        sharing.rename_by_default = value;
    }
    if let Some(Some(value)) = fields.optional("failRequestsGreaterThanOne", boolean) {
        sharing.fail_requests_greater_than_one = value;
    }
    let list = node.value.get("resources");
    let empty = list.is_none_or(|list| matches!(&list.value, Value::List(items) if items.is_empty()));
    if empty && matches!(node.value, Value::Map(_)) {
        findings.push(Finding::error(node.line, path, "'resources' is missing"));
    }
    let mut resources: Vec<Item<SharedResource>> = Vec::new();
    for item in mappings(list, &format!("{path}.resources")) {
        let Some(value) = resource(&item, sharing.rename_by_default, naming, findings) else { continue };
        if let Some(earlier) = resources.iter_mut().find(|earlier| !naming && earlier.value.name == value.name) {
            let problem =
                "its resource is listed before; the larger number of replicas counts, as with the NVIDIA plugin";
            findings.push(Finding::note(item.line, item.key, problem));
            earlier.value.replicas = earlier.value.replicas.max(value.replicas);
        } else {
            resources.push(Item { value, line: item.line, key: item.key });
        }
    }
    sharing.resources = values(&resources);
    (!resources.is_empty()).then_some((sharing, resources))
}

/// One resource in its effective form, in which `rename` may be the default name.
fn resource(
    item: &Item<&Node>,
    rename_by_default: bool,
    naming: bool,
    findings: &mut Vec<Finding>,
) -> Option<SharedResource> {
    let mut fields = Fields { node: item.value, path: &item.key, findings };
    let name = fields.required("name", resource_name);
    let rename = fields.optional("rename", resource_name);
    let devices = fields.optional("devices", devices);
    let replicas = fields.required("replicas", |given| whole(given, 2, MOST_REPLICAS));
    let (name, mut rename, mut devices) = (name?, rename?, devices?.unwrap_or_default());
    let by_default = match rename_by_default.then(|| format!("{name}.shared").parse::<ResourceName>()) {
        Some(Err(error)) if rename.is_none() || !naming => {
            findings.push(item.error("name", format!("with renameByDefault, {error}")));
            None
        }
        by_default => by_default.and_then(Result::ok),
    };
    if naming {
        rename = rename.or(by_default);
    } else {
        let renamed = rename.is_some() && rename != by_default;
        for (key, ignored) in [("rename", renamed), ("devices", devices != SharedDevices::All)] {
            if let (true, Some(node)) = (ignored, item.value.value.get(key)) {
                findings.push(Finding::note(node.line, format!("{}.{key}", item.key), NAMING_OFF));
            }
        }
        (rename, devices) = (by_default, SharedDevices::All);
    }
    Some(SharedResource { name, rename, devices, replicas: replicas? })
}

/// The shared devices: `all`, a count, or a list.
fn devices(given: Given<'_>) -> Result<SharedDevices, String> {
    const EXPECTED: &str = "'all', a number of devices, or a list of indices, MIG indices (0:1) or UUIDs";
    let device = |item: &Node| {
        let device = match &item.value {
            Value::Whole(number) => u32::try_from(*number).ok().map(DeviceSelector::Index),
            Value::Text(text) => text.parse().ok(),
            _ => None,
        };
        device.ok_or_else(|| Given::Node(item).refused("an index, a MIG index (0:1) or a UUID"))
    };
    let Given::Node(node) = given else { return Err(given.refused(EXPECTED)) };
    match &node.value {
        Value::Text(text) if text == "all" => Ok(SharedDevices::All),
        Value::Whole(_) => whole(given, 1, MOST_DEVICES).map(SharedDevices::Count),
        Value::List(items) if !items.is_empty() => {
            items.iter().map(device).collect::<Result<_, _>>().map(SharedDevices::List)
        }
        _ => Err(given.refused(EXPECTED)),
    }
}
