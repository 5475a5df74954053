//! The CDI specs of claims: a file for each claim, with a device for each of its requests.
//!
//! Called by `claim_manager`. A device has everything that a container of its request gets: the edits of its GPUs and of
//! all that comes with them, copied from the node's CDI devices, and the claim's own. So a name means this claim's part
//! of the node for as long as the claim lives, whatever the GPUs are called meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::api::CdiDevices;
use super::checkpoint::is_uid;
use linkwise_core::claims::{CLAIM_KIND, Edits, NodeDevice, RequestEdits, claim_device};
use linkwise_core::publish::injection::{DeviceNode, Mount};
use linkwise_system::files;

/// The mode of a spec, which every user may read: runtimes run as other users.
const MODE: u32 = 0o644;

/// Makes the text of a claim's spec, or returns the names of the devices that the node does not have, or not yet with
/// the nodes that they have by the snapshot.
pub(super) fn text(
    uid: &str,
    requests: &BTreeMap<String, RequestEdits>,
    node: &CdiDevices,
) -> Result<String, Vec<String>> {
    let (mut devices, mut missing) = (Vec::new(), Vec::new());
    for (request, RequestEdits { devices: of_request, own }) in requests {
        let mut edits = Map::new();
        for device in of_request {
            match node.devices.get(&device.name).filter(|known| has_nodes(known, device)) {
                Some(known) => append(&mut edits, known),
                None => missing.push(device.name.clone()),
            }
        }
        append(&mut edits, &own_edits(own));
        let name = claim_device(uid, request);
        let name = name.split_once('=').map_or("", |(_, name)| name);
        devices.push(json!({ "name": name, "containerEdits": edits }));
    }
    if !missing.is_empty() {
        return Err(missing);
    }
    let devices = Value::Array(devices);
    let common = if node.common.is_empty() { String::new() } else { format!(",\"containerEdits\":{}", node.common) };
    // The version with names that begin with a digit, and `hostPath` of device nodes.
    Ok(format!("{{\"cdiVersion\":\"0.5.0\",\"kind\":\"{CLAIM_KIND}\",\"devices\":{devices}{common}}}\n"))
}

/// Returns true if the edits have all device nodes that the device has by the snapshot.
fn has_nodes(edits: &Map<String, Value>, device: &NodeDevice) -> bool {
    let nodes = || edits.get("deviceNodes").and_then(Value::as_array).into_iter().flatten();
    device.nodes.iter().all(|path| nodes().any(|node| node["path"] == path.as_str()))
}

/// Adds edits to edits. MIG devices of one GPU share its node.
fn append(edits: &mut Map<String, Value>, more: &Map<String, Value>) {
    for (key, values) in more {
        let Value::Array(all) = edits.entry(key.clone()).or_insert_with(|| Value::Array(Vec::new())) else { continue };
        for value in values.as_array().into_iter().flatten() {
            if !all.contains(value) {
                all.push(value.clone());
            }
        }
    }
}

fn own_edits(edits: &Edits) -> Map<String, Value> {
    let env = edits.env.iter().map(|(name, value)| Value::String(format!("{name}={value}")));
    let mut own = Map::new();
    let mut add = |key: &str, values: Vec<Value>| {
        if !values.is_empty() {
            own.insert(key.to_owned(), Value::Array(values));
        }
    };
    add("env", env.collect());
    add("deviceNodes", edits.device_nodes.iter().map(node).collect());
    add("mounts", edits.mounts.iter().map(mount).collect());
    own
}

/// Writes the spec of a claim, if the file is not as it should be. Does not wait for the disk: after a crash of the
/// machine every claim is prepared anew, and its spec compared again.
pub(super) fn write(folder: &Path, uid: &str, text: &str) -> io::Result<()> {
    let path = path(folder, uid);
    if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    files::write_for_this_boot(&path, text.as_bytes(), MODE)
}

/// Returns true if a claim has a spec.
pub(super) fn exists(folder: &Path, uid: &str) -> bool {
    path(folder, uid).is_file()
}

/// Removes the spec of a claim, if it has one.
pub(super) fn remove(folder: &Path, uid: &str) -> io::Result<()> {
    files::remove_for_this_boot(&path(folder, uid)).map(drop)
}

/// The UIDs of claims that have a spec in the folder.
pub(super) fn claims(folder: &Path) -> Vec<String> {
    let prefix = file_name(CLAIM_KIND) + "-";
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let uids = names.filter_map(|name| Some(name.strip_prefix(&prefix)?.strip_suffix(".json")?.to_owned()));
    uids.filter(|uid| is_uid(uid)).collect()
}

fn path(folder: &Path, uid: &str) -> PathBuf {
    folder.join(format!("{}-{uid}.json", file_name(CLAIM_KIND)))
}

fn file_name(kind: &str) -> String {
    kind.replace('/', "-")
}

fn node(node: &DeviceNode) -> Value {
    json!({ "path": node.container, "hostPath": node.host })
}

fn mount(mount: &Mount) -> Value {
    let access = if mount.read_only { "ro" } else { "rw" };
    json!({
        "hostPath": mount.host,
        "containerPath": mount.container,
        "options": [access, "nosuid", "nodev", "bind"],
    })
}
