//! Builds specs from a description: the same description gives the same specs, byte for byte. Pure.
//!
//! [`Spec`] is the part of the format that linkwise uses. Field names and rules: SPEC.md of
//! cncf-tags/container-device-interface.

use std::collections::BTreeSet;

use serde::Serialize;

use super::scan::{
    CREATE_SYMLINKS, DISABLE_DEVICE_NODE_MODIFICATION, ENABLE_CUDA_COMPAT, UPDATE_APPLICATION_PROFILE, UPDATE_LDCACHE,
};
use super::{ALL, Description, DeviceEntry, GPU_CLASS, kind};
use linkwise_core::names::is_word;
use linkwise_core::publish::below;

/// The options of mounts from the driver root: the container cannot change the files, and gains no rights by them.
const MOUNT_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

/// The options of mounts of sockets, which are writable: a container within the container could not mount a read-only
/// one.
const SOCKET_OPTIONS: [&str; 5] = ["nosuid", "nodev", "noexec", "rbind", "rprivate"];

/// The variable that keeps the NVIDIA runtime from adding GPUs to those of CDI, whatever NVIDIA_VISIBLE_DEVICES the
/// image sets.
const NO_GPUS_BY_ENVIRONMENT: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The specs of a node: one for each kind that has devices.
pub fn specs(description: &Description) -> Vec<Spec> {
    let gpus = Spec::new(GPU_CLASS, gpu_devices(description), common(description));
    let others = description.others.iter().filter_map(|(class, entries)| {
        let devices = entries.iter().flat_map(|entry| description.devices(entry));
        Spec::new(class, devices.collect(), ContainerEdits::default())
    });
    gpus.into_iter().chain(others).collect()
}

/// The devices of the GPU kind: one for each valid name of a GPU or MIG device, and `all`.
fn gpu_devices(description: &Description) -> Vec<Device> {
    let mut devices: Vec<Device> = description.gpus.iter().flat_map(|gpu| description.devices(gpu)).collect();
    let mut taken = BTreeSet::new();
    devices.retain(|device| is_name(&device.name) && taken.insert(device.name.clone()));
    let present = description.gpus.iter().filter(|gpu| gpu.is_present).flat_map(|gpu| &gpu.nodes);
    let all: BTreeSet<DeviceNode> = present.map(|path| description.node(path)).collect();
    if !all.is_empty() {
        let container_edits = ContainerEdits { device_nodes: all.into_iter().collect(), ..ContainerEdits::default() };
        devices.push(Device { name: ALL.to_owned(), container_edits });
    }
    devices
}

/// The edits for every container with a GPU: control nodes and the driver.
fn common(description: &Description) -> ContainerEdits {
    let driver = &description.driver;
    let read_only = |host: &str, container: &str| description.mount(host, container, &MOUNT_OPTIONS);
    let mut mounts: Vec<Mount> = driver.libraries.iter().map(|path| read_only(path, path)).collect();
    if !description.has_hook(CREATE_SYMLINKS) {
        mounts.extend(driver.links.iter().map(|link| read_only(&link.library, &link.path)));
    }
    mounts.extend(driver.files.iter().map(|file| read_only(&file.host, &file.container)));
    let sockets = driver.sockets.iter();
    mounts.extend(sockets.map(|socket| description.mount(&socket.host, &socket.container, &SOCKET_OPTIONS)));
    ContainerEdits {
        env: vec![NO_GPUS_BY_ENVIRONMENT.to_owned()],
        device_nodes: description.control_nodes.iter().map(|path| description.node(path)).collect(),
        mounts,
        hooks: hooks(description),
    }
}

/// The hooks, in the order in which they have to run: the linker's cache is updated after the links and the libraries
/// are there.
fn hooks(description: &Description) -> Vec<Hook> {
    let (Some(hooks), driver) = (&description.hooks, &description.driver) else { return Vec::new() };
    let program = hooks.program.rsplit('/').next().unwrap_or(&hooks.program);
    // The hooks of nvidia-ctk are below its subcommand `hook`.
    let subcommand = (program == "nvidia-ctk").then_some("hook");
    let each = |option: &str, values: &mut dyn Iterator<Item = String>| {
        let words: Vec<String> = values.flat_map(|value| [option.to_owned(), value]).collect();
        (!words.is_empty()).then_some(words)
    };
    let folders: BTreeSet<&str> = driver.libraries.iter().filter_map(|path| Some(path.rsplit_once('/')?.0)).collect();
    let links = driver.links.iter().map(|link| format!("{}::{}", link.target, link.path));
    let version = driver.version.as_ref().filter(|_| !driver.libraries.is_empty());
    let named = [
        (CREATE_SYMLINKS, each("--link", &mut links.into_iter())),
        (ENABLE_CUDA_COMPAT, version.map(|version| vec![format!("--host-driver-version={version}")])),
        (UPDATE_LDCACHE, each("--folder", &mut folders.into_iter().map(str::to_owned))),
        (DISABLE_DEVICE_NODE_MODIFICATION, Some(Vec::new())),
        (UPDATE_APPLICATION_PROFILE, Some(Vec::new())),
    ];
    let used = named.into_iter().filter(|(name, _)| description.has_hook(name));
    let hook = |(name, words): (&str, Option<Vec<String>>)| {
        let own = [Some(program), subcommand, Some(name)].into_iter().flatten().map(str::to_owned);
        let args = own.chain(words?).collect();
        Some(Hook { hook_name: "createContainer", path: hooks.program.clone(), args })
    };
    used.filter_map(hook).collect()
}

impl Description {
    fn has_hook(&self, name: &str) -> bool {
        self.hooks.as_ref().is_some_and(|hooks| hooks.names.contains(name))
    }

    /// The devices of an entry, one for each of its names.
    fn devices(&self, entry: &DeviceEntry) -> impl Iterator<Item = Device> {
        let container_edits = ContainerEdits {
            device_nodes: entry.nodes.iter().map(|path| self.node(path)).collect(),
            mounts: entry.files.iter().map(|path| self.mount(path, path, &MOUNT_OPTIONS)).collect(),
            ..ContainerEdits::default()
        };
        entry.names.iter().map(move |name| Device { name: name.clone(), container_edits: container_edits.clone() })
    }

    fn node(&self, path: &str) -> DeviceNode {
        let host = below(&self.dev_root, path);
        DeviceNode { path: path.to_owned(), host_path: (host != path).then_some(host) }
    }

    fn mount(&self, host: &str, container: &str, options: &[&'static str]) -> Mount {
        let host_path = below(&self.driver_root, host);
        Mount { host_path, container_path: container.to_owned(), options: options.to_vec() }
    }
}

/// Returns true if the text can be a device's name in CDI. MIG UUIDs of drivers before R470 (`MIG-GPU-.../1/0`) cannot.
fn is_name(text: &str) -> bool {
    is_word(text, b"_-.:")
}

/// One spec, in one file: a kind and its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The least version of the format that has all fields used here, so that old runtimes accept the spec too.
    pub cdi_version: &'static str,
    /// `vendor/class`.
    pub kind: String,
    /// The devices, by name.
    pub devices: Vec<Device>,
    /// The edits for every container that asks for any of the devices.
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
    /// The arguments, the program's name first.
    pub args: Vec<String>,
}

impl Spec {
    /// A spec of a class; `None` without devices, because the format requires one.
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

/// The least version of the format that has all fields of these devices and edits. Of the fields that linkwise uses,
/// 0.5.0 brought names that begin with a digit, and `hostPath` of device nodes; 0.3.0, the oldest version that runtimes
/// still read, has all others.
fn least_version(devices: &[Device], edits: &ContainerEdits) -> &'static str {
    let begins_with_digit = |device: &Device| !device.name.starts_with(|c: char| c.is_ascii_alphabetic());
    let all = devices.iter().map(|device| &device.container_edits).chain([edits]);
    let mut nodes = all.flat_map(|edits| &edits.device_nodes);
    if devices.iter().any(begins_with_digit) || nodes.any(|node| node.host_path.is_some()) { "0.5.0" } else { "0.3.0" }
}
