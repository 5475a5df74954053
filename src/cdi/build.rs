//! From a description to specs. Pure: the same description gives the same specs, byte for byte.

use std::collections::BTreeSet;

use super::description::{Description, DeviceEntry};
use super::spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, Spec};
use super::{ALL, GPU_CLASS};
use crate::publish::below;

/// Mounts from the driver root: the container cannot change them, and gains no rights by them.
const MOUNT_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

/// The same for sockets, which no container needs to run.
const SOCKET_OPTIONS: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"];

/// With this value the NVIDIA runtime adds no GPUs of its own to those of CDI, whatever NVIDIA_VISIBLE_DEVICES the
/// image has.
const NOTHING_BY_ENVIRONMENT: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The hook that makes links in the container.
const CREATE_SYMLINKS: &str = "create-symlinks";

/// The hook that brings the dynamic linker's cache up to date.
const UPDATE_LDCACHE: &str = "update-ldcache";

/// The specs of a node, at most one a kind; a kind without devices has none.
pub fn specs(description: &Description) -> Vec<Spec> {
    let gpus = Spec::new(GPU_CLASS, gpu_devices(description), common(description));
    let others = description.others.iter().filter_map(|(class, entries)| {
        let devices = entries.iter().flat_map(|entry| description.devices(entry));
        Spec::new(class, devices.collect(), ContainerEdits::default())
    });
    gpus.into_iter().chain(others).collect()
}

/// Each GPU and MIG device under each of its names, and all of them.
fn gpu_devices(description: &Description) -> Vec<Device> {
    let mut devices: Vec<Device> = description.gpus.iter().flat_map(|gpu| description.devices(gpu)).collect();
    let mut taken = BTreeSet::new();
    devices.retain(|device| is_name(&device.name) && taken.insert(device.name.clone()));
    let present = description.gpus.iter().filter(|gpu| gpu.present).flat_map(|gpu| &gpu.nodes);
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
    let folder = driver.library_folder.trim_end_matches('/');
    let library = |name: &str| format!("{folder}/{name}");
    let mut mounts = Vec::new();
    let mut links = Vec::new();
    for found in &driver.libraries {
        let path = library(&found.name);
        mounts.push(description.mount(&path, &path, &MOUNT_OPTIONS));
        for (name, target) in &found.links {
            if description.has_hook(CREATE_SYMLINKS) {
                links.push(format!("{target}::{}", library(name)));
            } else {
                mounts.push(description.mount(&path, &library(name), &MOUNT_OPTIONS));
            }
        }
    }
    mounts.extend(driver.files.iter().map(|path| description.mount(path, path, &MOUNT_OPTIONS)));
    let sockets = driver.sockets.iter();
    mounts.extend(sockets.map(|socket| description.mount(&socket.host, &socket.container, &SOCKET_OPTIONS)));
    let cache = description.has_hook(UPDATE_LDCACHE) && !driver.libraries.is_empty();
    let folder = cache.then(|| driver.library_folder.clone());
    let hooks = description.hook.as_deref().map_or_else(Vec::new, |path| hooks_with(path, links, folder));
    ContainerEdits {
        env: vec![NOTHING_BY_ENVIRONMENT.to_owned()],
        device_nodes: description.control_nodes.iter().map(|path| description.node(path)).collect(),
        mounts,
        hooks,
    }
}

/// The links first, then the cache of the dynamic linker. Both subcommands are in every release that has CDI hooks;
/// newer ones (`enable-cuda-compat` ...) would keep all containers from starting under an older toolkit, and are not
/// used.
fn hooks_with(path: &str, links: Vec<String>, folder: Option<String>) -> Vec<Hook> {
    let program = path.rsplit('/').next().unwrap_or(path).to_owned();
    // In nvidia-ctk the hooks are one level down.
    let nested = (program == "nvidia-ctk").then(|| "hook".to_owned());
    let hook = |name: &str, option: &str, values: Vec<String>| {
        let words = [program.clone()].into_iter().chain(nested.clone()).chain([name.to_owned()]);
        let values = values.into_iter().flat_map(|value| [option.to_owned(), value]);
        Hook { hook_name: "createContainer", path: path.to_owned(), args: words.chain(values).collect() }
    };
    let symlinks = (!links.is_empty()).then(|| hook(CREATE_SYMLINKS, "--link", links));
    symlinks.into_iter().chain(folder.map(|folder| hook(UPDATE_LDCACHE, "--folder", vec![folder]))).collect()
}

impl Description {
    /// Whether this hook is to run: there is a program for it, and the operator did not disable it.
    fn has_hook(&self, name: &str) -> bool {
        self.hook.is_some() && ![ALL, name].iter().any(|name| self.disabled_hooks.contains(*name))
    }

    /// A device under each of its names.
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

/// Whether it can be a device's name in CDI. MIG UUIDs of drivers before R470 (`MIG-GPU-.../1/0`) cannot.
fn is_name(text: &str) -> bool {
    let edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b':');
    edge(text.bytes().next()) && edge(text.bytes().last()) && text.bytes().all(inner)
}
