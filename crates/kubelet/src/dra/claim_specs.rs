//! The CDI specs of claims: a claim that has edits beside its GPUs gets a spec of its own. Checks also that a runtime
//! will find the CDI names of a claim.
//!
//! Called by `claim_manager`, in blocking tasks. The module `cdi` writes the specs of GPUs; this module reads the names
//! in them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::checkpoint::is_uid;
use linkwise_core::claims::{CLAIM_KIND, Edits, claim_device};
use linkwise_core::publish::injection::{DeviceNode, Mount};
use linkwise_system::files;

/// The longest spec that is read: one of 64 GPUs with all files of the driver has less than 1 MiB.
const LONGEST: u64 = 16 << 20;

/// The mode of a spec, which every user may read: runtimes run as other users.
const MODE: u32 = 0o644;

/// The names of devices in a spec.
#[derive(Deserialize)]
struct Spec {
    kind: String,
    devices: Vec<Device>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

/// Returns the names that no spec in the folder has. `uid` is the claim's, whose own spec has a file of its own.
pub(super) fn missing(folder: &Path, names: BTreeSet<String>, uid: &str) -> Vec<String> {
    let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let is_known = |name: &String| {
        let Some((kind, device)) = name.split_once('=') else { return false };
        let of_kind = known.entry(kind.to_owned()).or_insert_with(|| {
            let path = if kind == CLAIM_KIND { path(folder, uid) } else { folder.join(file_name(kind) + ".json") };
            let spec = files::read(&path, LONGEST).ok().and_then(|text| serde_json::from_slice::<Spec>(&text).ok());
            let devices = spec.filter(|spec| spec.kind == kind).into_iter().flat_map(|spec| spec.devices);
            devices.map(|device| device.name).collect()
        });
        of_kind.contains(device)
    };
    let mut is_known = is_known;
    names.into_iter().filter(|name| !is_known(name)).collect()
}

/// Writes the spec of a claim, where it has edits and the file is not as it should be.
pub(super) fn write(folder: &Path, uid: &str, edits: &BTreeMap<String, Edits>) -> io::Result<()> {
    if edits.is_empty() {
        return Ok(());
    }
    let devices = edits.iter().map(|(request, edits)| {
        let env = edits.env.iter().map(|(name, value)| format!("{name}={value}"));
        let mut container = serde_json::Map::new();
        let mut add = |key: &str, values: Vec<Value>| {
            if !values.is_empty() {
                container.insert(key.to_owned(), Value::Array(values));
            }
        };
        add("env", env.map(Value::String).collect());
        add("deviceNodes", edits.device_nodes.iter().map(node).collect());
        add("mounts", edits.mounts.iter().map(mount).collect());
        json!({ "name": claim_device(uid, request), "containerEdits": container })
    });
    // The version with names that begin with a digit, and `hostPath` of device nodes.
    let spec = json!({ "cdiVersion": "0.5.0", "kind": CLAIM_KIND, "devices": devices.collect::<Vec<_>>() });
    let text = serde_json::to_string_pretty(&spec)? + "\n";
    files::write_if_changed(&path(folder, uid), text.as_bytes(), MODE).map(drop)
}

/// Removes the spec of a claim, if it has one.
pub(super) fn remove(folder: &Path, uid: &str) -> io::Result<()> {
    files::remove(&path(folder, uid)).map(drop)
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
