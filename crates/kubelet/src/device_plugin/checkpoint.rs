//! The kubelet's own list of devices: `kubelet_internal_checkpoint` in its device-plugins folder.
//!
//! PodResources leaves out init containers that have ended, though the kubelet keeps their devices until the pod ends.
//! This file has those devices. The kubelet writes the file at each allocation and at each device list: until the next
//! write, the file may still name a pod that has ended. `pod_resources` reads it, off the path of an admission.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use thiserror::Error;

use linkwise_core::allocation::DeviceId;
use linkwise_core::state::ResourceDevice;

/// The file's name: `kubeletDeviceManagerCheckpoint` of k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.
const NAME: &str = "kubelet_internal_checkpoint";
/// The longest file that is read, in bytes: a node with 1024 held slots on each of 16 GPUs has a file below 1 MiB.
const MAX_FILE: u64 = 16 << 20;
/// The longest time that reading may take: a file system that hangs must not hide what PodResources lists.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The cause of a failure to read the kubelet's checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The file could not be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// The file does not have the form that kubelets from 1.26 on write.
    #[error("{} is not a checkpoint of the kubelet's device manager", .0.display())]
    Form(PathBuf, #[source] serde_json::Error),
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID", default)]
    pod_uid: String,
    #[serde(default)]
    container_name: String,
    resource_name: String,
    /// The devices of each NUMA node; -1 for devices without one.
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ContainerId {
    pub pod_uid: String,
    pub name: String,
}

/// A container's devices of one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContainerDevices {
    pub container: ContainerId,
    pub devices: Vec<ResourceDevice>,
}

/// Reads the devices that the kubelet counts as held, by container. `folder` is the kubelet's device-plugins folder. A
/// kubelet that has had neither an allocation nor a device list yet has no such file.
pub(super) async fn read(folder: &Path) -> Result<Vec<ContainerDevices>, CheckpointError> {
    let path = folder.join(NAME);
    let text = match tokio::time::timeout(TIMEOUT, bounded(&path)).await {
        Err(late) => return Err(CheckpointError::Read(path, late.into())),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Ok(Err(error)) => return Err(CheckpointError::Read(path, error)),
        Ok(Ok(text)) => text,
    };
    let checkpoint: Checkpoint = serde_json::from_slice(&text).map_err(|error| CheckpointError::Form(path, error))?;
    let entries = checkpoint.data.pod_device_entries.into_iter().flatten();
    let containers = entries.filter_map(|entry| {
        let resource: linkwise_core::state::ResourceName = entry.resource_name.parse().ok()?;
        let ids = entry.device_ids.into_iter().flat_map(BTreeMap::into_values).flatten().flatten();
        let devices = ids.map(|id| (resource.clone(), DeviceId::from(id))).collect();
        let container = ContainerId { pod_uid: entry.pod_uid, name: entry.container_name };
        Some(ContainerDevices { container, devices })
    });
    Ok(containers.collect())
}

async fn bounded(path: &Path) -> io::Result<Vec<u8>> {
    use tokio::io::AsyncReadExt;
    let mut text = Vec::new();
    tokio::fs::File::open(path).await?.take(MAX_FILE).read_to_end(&mut text).await?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn of(text: &str) -> Result<Vec<(String, String)>, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(NAME), text).unwrap();
        let devices = read(folder.path()).await?.into_iter().flat_map(|container| container.devices);
        Ok(devices.map(|(resource, id)| (resource.to_string(), id.to_string())).collect())
    }

    #[tokio::test]
    async fn checkpoint_lists_devices_of_all_numa_nodes() {
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"a","ContainerName":"init","ResourceName":"nvidia.com/gpu",
             "DeviceIDs":{"0":["GPU-1"],"-1":["GPU-2"]},"AllocResp":"Eg=="},
            {"PodUID":"b","ContainerName":"main","ResourceName":"example.com/nic",
             "DeviceIDs":{"1":["eth0"]},"AllocResp":""},
            {"PodUID":"c","ContainerName":"main","ResourceName":"no name","DeviceIDs":{"0":null},"AllocResp":""}],
            "RegisteredDevices":{"nvidia.com/gpu":["GPU-1","GPU-2","GPU-3"]}},"Checksum":1}"#;
        let expected = [("nvidia.com/gpu", "GPU-2"), ("nvidia.com/gpu", "GPU-1"), ("example.com/nic", "eth0")];
        assert_eq!(of(text).await.unwrap(), expected.map(|(resource, id)| (resource.to_owned(), id.to_owned())));
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert!(of(empty).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn hung_checkpoint_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        // Opening a pipe that has no writer does not return.
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = read(folder.path()).await.unwrap_err();
        assert!(matches!(&error, CheckpointError::Read(_, source) if source.kind() == io::ErrorKind::TimedOut));
        // Lets the thread that opens the pipe end.
        drop(std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
    }

    #[tokio::test]
    async fn unreadable_checkpoint_is_an_error_that_names_it() {
        for text in ["", "{}", r#"{"Data":{"PodDeviceEntries":[{"ResourceName":"a/b","DeviceIDs":["GPU-1"]}]}}"#] {
            let error = of(text).await.unwrap_err();
            assert!(error.to_string().contains(NAME), "{text}: {error}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).await.unwrap().is_empty(), "no file: nothing was allocated yet");
        std::fs::create_dir(folder.path().join(NAME)).unwrap();
        assert!(matches!(read(folder.path()).await, Err(CheckpointError::Read(..))));
    }
}
