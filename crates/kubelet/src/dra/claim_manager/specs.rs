//! The CDI specs of claims. Each claim has a file with a CDI device for each of its requests, and a second file with a
//! CDI device for each of the claim's devices. The second file's CDI devices have no edits that matter.
//!
//! The CDI device of a request has everything that a container of the request gets: the edits of its GPUs and of what
//! belongs to them, copied from the node's CDI devices, and the claim's own edits. So the device's name means this
//! claim's part of the node as long as the claim lives, even if the node's CDI devices get other names. The specs are
//! made from the current state, and written again when it changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::{OptionFuture, join_all};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::metadata::{self, Metadata};
use super::prepare::{PrepareError, plan_inputs};
use super::{ClaimManager, Turn};
use crate::dra::api::{CdiDevices, MpsLink};
use crate::dra::checkpoint::{Checkpoint, is_uid};
use linkwise_core::claims::{
    CLAIM_KIND, ClaimError, DEVICE_KIND, NodeDevice, Prepared, RequestEdits, claim_device, containers,
};
use linkwise_core::publish::injection::{HostPath, Injection};
use linkwise_system::{files, or_never};

/// The mode of a spec, which every user may read: runtimes run as other users.
pub(super) const MODE: u32 = 0o644;

/// Writes the claims' CDI specs for ever: each time that the node's CDI devices change (a driver was updated, a device
/// node appeared late, an operator removed files), that the host's or the published devices change, or that a control
/// daemon of an older release ends.
pub(in crate::dra) async fn keep_specs(manager: &ClaimManager) {
    let settings = &manager.settings;
    let (mut cdi, mut host) = (settings.cdi.clone(), settings.host_devices.clone());
    let mut published = settings.published.clone();
    loop {
        let common_shm = settings.mps.as_ref().map(MpsLink::with_common_shm).unwrap_or_default();
        if cdi.borrow_and_update().is_some() {
            host.mark_unchanged();
            published.mark_unchanged();
            manager.renew_specs().await;
        }
        let daemons = OptionFuture::from(settings.mps.as_ref().map(|mps| mps.await_common_shm_change(&common_shm)));
        tokio::select! {
            Ok(()) = cdi.changed() => {}
            Ok(()) = host.changed() => {}
            Ok(()) = published.changed() => {}
            Some(()) = daemons => {}
            // The node is ending.
            else => std::future::pending().await,
        }
    }
}

impl ClaimManager {
    /// Writes the CDI specs of all prepared claims that differ from the current state, for containers that restart.
    async fn renew_specs(&self) {
        let boot = self.settings.boot.as_deref();
        let prepared = self.checkpoints().into_iter().filter(|checkpoint| checkpoint.is_completed_in(boot));
        let renewals = prepared.map(|checkpoint| async move {
            let uid = &checkpoint.claim.uid;
            let turn = self.turn(uid).await;
            if let Some(checkpoint) = self.checkpoint(uid).filter(|now| now.is_completed_in(boot)) {
                self.renew_spec(&checkpoint, &turn).await;
            }
        });
        join_all(renewals).await;
        self.tidy();
    }

    /// The texts of a claim's CDI specs by the current state. Fails with the missing names if the last scan of the host
    /// is older than the state, and with `None` before the first scan.
    fn spec(&self, checkpoint: &Checkpoint) -> Result<Result<Specs, Option<Vec<String>>>, ClaimError> {
        let (state, host) = (self.snapshot.borrow().clone(), self.settings.host_devices.borrow().clone());
        let common_shm = self.with_common_shm();
        let requests = containers(&checkpoint.prepared, plan_inputs(&self.settings, &state, &host, &common_shm))?;
        let Some(devices) = self.settings.cdi.borrow().clone() else { return Ok(Err(None)) };
        let metadata = metadata::of_claim(checkpoint, self.settings.published.borrow().as_deref());
        let claim = text(&self.settings.cdi_folder, &checkpoint.claim.uid, (&requests, &metadata), &devices);
        let devices = devices_text(&checkpoint.prepared);
        Ok(claim.map(|claim| Specs { claim, devices, metadata }).map_err(Some))
    }

    /// The texts of a claim's CDI specs. Waits until a scan of the host has found the claim's devices: a scan follows
    /// each change of the snapshot, such as a new MIG device.
    pub(super) async fn await_spec(&self, checkpoint: &Checkpoint) -> Result<Specs, PrepareError> {
        let (mut cdi, mut last) = (self.settings.cdi.clone(), None);
        let found = async {
            loop {
                cdi.mark_unchanged();
                match self.spec(checkpoint)? {
                    Ok(specs) => return Ok(specs),
                    Err(missing) => last = missing,
                }
                or_never(cdi.changed()).await;
            }
        };
        let found: Result<Result<Specs, ClaimError>, _> = timeout(self.settings.specs_timeout, found).await;
        match found {
            Ok(specs) => Ok(specs?),
            Err(_) => Err(PrepareError::NoDevices(last.map_or("any device".to_owned(), |names| names.join(", ")))),
        }
    }

    /// Writes those specs of a prepared claim that differ from the current state. Returns true if the specs then give
    /// containers the claim's devices.
    pub(super) async fn write_if_intact(&self, checkpoint: &Checkpoint, turn: &Turn) -> bool {
        if checkpoint.has_mig() {
            self.await_mig().await;
        }
        match self.await_spec(checkpoint).await {
            Ok(specs) => self.write_spec(&checkpoint.claim.uid, specs, turn).await.is_ok(),
            Err(PrepareError::Claim(_)) => self.keeps_spec(checkpoint).await,
            Err(_) => false,
        }
    }

    /// Writes the spec of a prepared claim by the current state, if it changed. If a device of the claim is gone and
    /// its nodes could be another claim's by now, the spec is removed.
    pub(super) async fn renew_spec(&self, checkpoint: &Checkpoint, turn: &Turn) {
        let uid = &checkpoint.claim.uid;
        match self.spec(checkpoint) {
            // If the spec cannot be written now, the next sweep writes it.
            Ok(Ok(specs)) => drop(self.write_spec(uid, specs, turn).await),
            // The next scan of the host brings another call.
            Ok(Err(_)) => {}
            Err(_) if !self.keeps_spec(checkpoint).await => drop(self.remove_spec(uid, turn).await),
            Err(_) => {}
        }
    }

    /// Returns true if the spec of a claim whose devices are not all in the snapshot stays as it is, for containers
    /// that restart: a GPU keeps its nodes while the driver runs. A claim with MIG devices does not keep its spec once
    /// they are known to be gone, because the next MIG device gets their nodes.
    async fn keeps_spec(&self, checkpoint: &Checkpoint) -> bool {
        let (folder, uid) = (self.settings.cdi_folder.clone(), checkpoint.claim.uid.clone());
        let sees_gpus = !self.snapshot.borrow().topology().gpus().is_empty();
        if sees_gpus && self.knows_mig() && checkpoint.has_mig() {
            return false;
        }
        files::blocking(move || Ok(exists(&folder, &uid))).await.unwrap_or_default()
    }

    async fn write_spec(&self, uid: &str, specs: Specs, turn: &Turn) -> std::io::Result<()> {
        let (folder, uid) = (self.settings.cdi_folder.clone(), uid.to_owned());
        files::blocking_with(Arc::clone(turn), move || write(&folder, &uid, &specs)).await
    }

    pub(super) async fn remove_spec(&self, uid: &str, turn: &Turn) -> std::io::Result<()> {
        let (folder, uid) = (self.settings.cdi_folder.clone(), uid.to_owned());
        files::blocking_with(Arc::clone(turn), move || remove(&folder, &uid)).await
    }
}

/// The texts of a claim's specs, and its metadata. An empty text is not written.
pub(super) struct Specs {
    claim: String,
    /// The spec that names the claim's devices; empty for a claim of an older release, whose devices have no such
    /// names.
    devices: String,
    metadata: BTreeMap<String, Metadata>,
}

/// The specs that are known before the claim has its hardware: only the one that names the claim's devices.
pub(super) fn of_names(prepared: &Prepared) -> Specs {
    Specs { claim: String::new(), devices: devices_text(prepared), metadata: BTreeMap::new() }
}

/// Makes the text of the spec that names a claim's devices. A CDI device has to have an edit; this edit is in the
/// claim's other spec too.
fn devices_text(prepared: &Prepared) -> String {
    let names = prepared.devices.iter().flat_map(|device| &device.cdi);
    let own: BTreeSet<&str> = names.filter_map(|name| name.strip_prefix(DEVICE_KIND)?.strip_prefix('=')).collect();
    if own.is_empty() {
        return String::new();
    }
    let device = |name: &str| json!({ "name": name, "containerEdits": { "env": ["NVIDIA_VISIBLE_DEVICES=void"] } });
    let devices = Value::Array(own.into_iter().map(device).collect());
    format!("{{\"cdiVersion\":\"0.5.0\",\"kind\":\"{DEVICE_KIND}\",\"devices\":{devices}}}\n")
}

/// Makes the text of a claim's spec. Fails with the names of the node's CDI devices that are missing, or that lack
/// nodes which they have by the snapshot.
fn text(
    folder: &Path,
    uid: &str,
    (requests, metadata): (&BTreeMap<String, RequestEdits>, &BTreeMap<String, Metadata>),
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
        if let Some(Metadata { in_container, .. }) = metadata.get(request) {
            let path = metadata::path(folder, uid, request);
            let options = ["ro", "nosuid", "nodev", "noexec", "bind"];
            let mount = json!({"hostPath": path, "containerPath": in_container, "options": options});
            append(&mut edits, &Map::from_iter([("mounts".to_owned(), json!([mount]))]));
        }
        let name = claim_device(uid, request);
        let name = name.split_once('=').map_or("", |(_, name)| name);
        devices.push(json!({ "name": name, "containerEdits": edits }));
    }
    if !missing.is_empty() {
        return Err(missing);
    }
    let devices = Value::Array(devices);
    let common = if node.common.is_empty() { String::new() } else { format!(",\"containerEdits\":{}", node.common) };
    // CDI 0.5.0 has names that begin with a digit, and `hostPath` of device nodes.
    Ok(format!("{{\"cdiVersion\":\"0.5.0\",\"kind\":\"{CLAIM_KIND}\",\"devices\":{devices}{common}}}\n"))
}

/// Returns true if the edits have all device nodes that the device has by the snapshot.
fn has_nodes(edits: &Map<String, Value>, device: &NodeDevice) -> bool {
    let nodes = || edits.get("deviceNodes").and_then(Value::as_array).into_iter().flatten();
    device.nodes.iter().all(|path| nodes().any(|node| node["path"] == path.as_str()))
}

/// Adds edits that are not there yet: MIG devices of one GPU share its node.
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

fn own_edits(edits: &Injection) -> Map<String, Value> {
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

/// Writes those files of a claim that differ from its specs. Does not wait for the disk: after a crash of the machine
/// every claim is prepared again, and its files are compared again.
pub(super) fn write(folder: &Path, uid: &str, specs: &Specs) -> io::Result<()> {
    // Metadata is written first, because the spec mounts it.
    metadata::write(folder, uid, &specs.metadata)?;
    for (kind, text) in [(DEVICE_KIND, &specs.devices), (CLAIM_KIND, &specs.claim)] {
        let path = path(folder, kind, uid);
        if !text.is_empty() && !fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
            fs::create_dir_all(folder)?;
            files::write_for_this_boot(&path, text.as_bytes(), MODE)?;
        }
    }
    Ok(())
}

/// Returns true if a claim has a spec.
fn exists(folder: &Path, uid: &str) -> bool {
    path(folder, CLAIM_KIND, uid).is_file()
}

/// Removes the specs and the metadata of a claim, if it has any.
fn remove(folder: &Path, uid: &str) -> io::Result<()> {
    let removed = |kind| files::remove_for_this_boot(&path(folder, kind, uid)).map(drop);
    removed(CLAIM_KIND).and(removed(DEVICE_KIND)).and(metadata::remove(folder, uid))
}

/// The UIDs of claims that have a spec or metadata in the folder.
pub(super) fn claims(folder: &Path) -> Vec<String> {
    let prefixes = [CLAIM_KIND, DEVICE_KIND].map(|kind| file_name(kind) + "-");
    let uid_of = |name: &str| {
        let mut uids = prefixes.iter().filter_map(|prefix| name.strip_prefix(prefix)?.strip_suffix(".json"));
        uids.next().or_else(|| name.strip_prefix(metadata::FOLDER)).map(ToOwned::to_owned)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let uids: BTreeSet<String> = names.filter_map(|name| uid_of(&name)).filter(|uid| is_uid(uid)).collect();
    uids.into_iter().collect()
}

fn path(folder: &Path, kind: &str, uid: &str) -> PathBuf {
    folder.join(format!("{}-{uid}.json", file_name(kind)))
}

fn file_name(kind: &str) -> String {
    kind.replace('/', "-")
}

fn node(node: &HostPath) -> Value {
    json!({ "path": node.container, "hostPath": node.host })
}

fn mount(mount: &HostPath) -> Value {
    json!({
        "hostPath": mount.host,
        "containerPath": mount.container,
        "options": ["rw", "nosuid", "nodev", "bind"],
    })
}
