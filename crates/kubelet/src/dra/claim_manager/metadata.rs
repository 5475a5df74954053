//! The metadata of a claim's devices, which its containers read (KEP-5304): a file for each request, with the
//! attributes that the node publishes of the devices. The claim's CDI spec mounts the file at the path that the API
//! defines.
//!
//! Layout and fields are those of `k8s.io/dynamic-resource-allocation/api/metadata` of Kubernetes 1.36.2.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use linkwise_core::publish::dra::slice::Pool;
use linkwise_core::state::DRA_DRIVER;
use linkwise_system::files;
use serde_json::{Value, json};

use crate::dra::checkpoint::Checkpoint;

/// The folder of all metadata in a container (`ContainerDir`).
const CONTAINER_FOLDER: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The beginning of the name of a claim's folder, before the UID. The folder lies among the CDI specs, whose readers
/// look into no folder.
pub(super) const FOLDER: &str = "linkwise.dev-metadata-";

/// The metadata of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    text: String,
    /// True if the node publishes all devices of the request now. If not, an earlier file stays: it says more.
    is_whole: bool,
    /// The file's path in a container.
    pub in_container: String,
}

/// The metadata of each request of a claim, with the devices as the node publishes them.
pub(super) fn of_claim(checkpoint: &Checkpoint, published: Option<&Pool>) -> BTreeMap<String, Metadata> {
    let (claim, prepared) = (&checkpoint.claim, &checkpoint.prepared);
    let pod_claim_name = prepared.pod_claim_name.as_deref();
    let (kind, name) = match pod_claim_name {
        Some(name) => ("resourceclaimtemplates", name),
        None => ("resourceclaims", claim.name.as_str()),
    };
    let mut requests: BTreeMap<&str, (String, Vec<Value>, bool)> = BTreeMap::new();
    for device in &prepared.devices {
        let full = device.alternative.as_ref().map(|alternative| format!("{}/{alternative}", device.request));
        let (_, devices, is_whole) = requests
            .entry(&device.request)
            .or_insert_with(|| (full.unwrap_or_else(|| device.request.clone()), Vec::new(), true));
        // A set of GPUs is one device with several GPUs, which follow each other.
        if devices.last().is_some_and(|last| last["name"] == device.device.as_str()) {
            continue;
        }
        let known = published.and_then(|pool| pool.devices.iter().find(|known| known.name == device.device));
        *is_whole &= known.is_some();
        let mut value = json!({"driver": DRA_DRIVER, "pool": device.pool, "name": device.device});
        if let Some(known) = known {
            value["attributes"] = json!(known.attributes);
        }
        devices.push(value);
    }
    let metadata = |(request, (full, devices, is_whole)): (&str, (String, Vec<Value>, bool))| {
        let mut value = json!({
            "apiVersion": "metadata.resource.k8s.io/v1alpha1",
            "kind": "DeviceMetadata",
            "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid},
            "requests": [{"name": full, "devices": devices}],
        });
        if let Some(name) = pod_claim_name {
            value["podClaimName"] = name.into();
        }
        let in_container = format!("{CONTAINER_FOLDER}/{kind}/{name}/{request}/{DRA_DRIVER}-metadata.json");
        (request.to_owned(), Metadata { text: format!("{value}\n"), is_whole, in_container })
    };
    requests.into_iter().map(metadata).collect()
}

/// The path of a request's file on the host; `cdi` is the folder of CDI specs.
pub(super) fn path(cdi: &Path, uid: &str, request: &str) -> PathBuf {
    folder(cdi, uid).join(format!("{request}.json"))
}

fn folder(cdi: &Path, uid: &str) -> PathBuf {
    cdi.join(format!("{FOLDER}{uid}"))
}

/// Writes the files of a claim that differ from its metadata. Each is replaced as a whole, because a container keeps
/// the file with which it started.
pub(super) fn write(cdi: &Path, uid: &str, requests: &BTreeMap<String, Metadata>) -> io::Result<()> {
    if !requests.is_empty() {
        fs::create_dir_all(folder(cdi, uid))?;
    }
    for (request, Metadata { text, is_whole, .. }) in requests {
        let path = path(cdi, uid, request);
        let there = fs::read(&path).ok();
        if there.is_none_or(|there| *is_whole && there != text.as_bytes()) {
            files::write_for_this_boot(&path, text.as_bytes(), super::specs::MODE)?;
        }
    }
    Ok(())
}

/// Removes the files of a claim, if it has any.
pub(super) fn remove(cdi: &Path, uid: &str) -> io::Result<()> {
    match fs::remove_dir_all(folder(cdi, uid)) {
        Err(error) if ![ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => Err(error),
        _ => Ok(()),
    }
}
