//! A CDI spec: the part of the format that we use.
//!
//! Field names and rules: SPEC.md of cncf-tags/container-device-interface. Pure; `build` makes it, `write` writes it.

use serde::Serialize;

use super::kind;

/// One spec: a kind and its devices. One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The least version of the format that has all fields used here, so that old runtimes accept it too.
    pub cdi_version: &'static str,
    /// `vendor/class`.
    pub kind: String,
    /// The devices, by name.
    pub devices: Vec<Device>,
    /// The edits for every container that asks for any of them.
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device: a name that a container asks for, and its edits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Letters, digits and `_ - . :`, a letter or digit first and last.
    pub name: String,
    pub container_edits: ContainerEdits,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Programs of the host that are run for the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
}

/// A device node; type, numbers and rights are those on the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    pub path: String,
    /// The path on the host; `None` if it is the same. Since version 0.5.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    pub options: Vec<&'static str>,
}

/// A hook of the OCI runtime specification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// The moment: `createContainer` is after the mounts, before the container's own program, in its mount namespace.
    pub hook_name: &'static str,
    pub path: String,
    /// Its arguments, its own name first.
    pub args: Vec<String>,
}

impl Spec {
    /// A spec of a class; `None` without devices, which the format does not allow.
    pub(super) fn new(class: &str, devices: Vec<Device>, container_edits: ContainerEdits) -> Option<Self> {
        let cdi_version = least_version(&devices, &container_edits);
        (!devices.is_empty()).then(|| Self { cdi_version, kind: kind(class), devices, container_edits })
    }

    /// The name of its file: `k8s.device-plugin.nvidia.com-gpu.json`.
    pub fn file_name(&self) -> String {
        format!("{}.json", self.kind.replace('/', "-"))
    }

    /// The full names of its devices, by which containers ask for them: `k8s.device-plugin.nvidia.com/gpu=0`.
    pub fn names(&self) -> impl Iterator<Item = String> + use<'_> {
        self.devices.iter().map(|device| format!("{}={}", self.kind, device.name))
    }

    /// The text of its file.
    pub fn json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

impl ContainerEdits {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The least version that has all of it. Of the fields used here, 0.5.0 brought names that begin with a digit and
/// `hostPath` of device nodes; the rest is in 0.3.0, the oldest that runtimes still read.
fn least_version(devices: &[Device], edits: &ContainerEdits) -> &'static str {
    let digit = |device: &Device| !device.name.starts_with(|c: char| c.is_ascii_alphabetic());
    let all = devices.iter().map(|device| &device.container_edits).chain([edits]);
    let mut nodes = all.flat_map(|edits| &edits.device_nodes);
    if devices.iter().any(digit) || nodes.any(|node| node.host_path.is_some()) { "0.5.0" } else { "0.3.0" }
}
