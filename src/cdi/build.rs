//! From a description to specs. Pure: the same description gives the same specs, byte for byte.

use std::collections::BTreeSet;

use super::description::{Description, Extra, ExtraFiles, GpuEntry, MigEntry, imex_node};
use super::spec::{ContainerEdits, Device, DeviceNode, Hook, Mount, Spec};
use super::{ALL, GPU_CLASS, IMEX_CLASS};
use crate::publish::below;

/// What is mounted from the driver root cannot be changed by the container, and opens nothing to it.
const MOUNT_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

/// The same for sockets, of which nothing is run either.
const SOCKET_OPTIONS: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"];

/// Keeps the NVIDIA runtime's older ways from adding GPUs to those that CDI gave, whatever the image's own
/// NVIDIA_VISIBLE_DEVICES says: with this value it adds none.
const NOTHING_BY_ENVIRONMENT: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The hook that makes links in the container.
const CREATE_SYMLINKS: &str = "create-symlinks";

/// The hook that brings the dynamic linker's cache up to date.
const UPDATE_LDCACHE: &str = "update-ldcache";

/// The specs of a node, at most one a kind; a kind of which the node has nothing has none.
pub fn specs(description: &Description) -> Vec<Spec> {
    let gpus = Spec::new(GPU_CLASS, gpu_devices(description), common(description));
    let imex = Spec::new(IMEX_CLASS, imex_devices(description), ContainerEdits::default());
    let extras = description.extras.iter().filter_map(|(extra, files)| extra_spec(description, *extra, files));
    gpus.into_iter().chain(imex).chain(extras).collect()
}

/// Each GPU and MIG device under each of its names, and all of them.
fn gpu_devices(description: &Description) -> Vec<Device> {
    let mut devices = Vec::new();
    let mut taken = BTreeSet::new();
    let mut all = Vec::new();
    let mut add = |names: [Option<String>; 2], nodes: Vec<String>, present: bool| {
        let edits = ContainerEdits { device_nodes: description.nodes(&nodes), ..ContainerEdits::default() };
        for name in names.into_iter().flatten().filter(|name| is_name(name) && taken.insert(name.clone())) {
            devices.push(Device { name, container_edits: edits.clone() });
        }
        if present {
            all.extend(edits.device_nodes);
        }
    };
    for gpu in &description.gpus {
        let index = gpu.present.then(|| gpu.index.to_string());
        add([index, Some(gpu.uuid.as_str().to_owned())], gpu_nodes(gpu), gpu.present);
    }
    for mig in &description.migs {
        let index = format!("{}:{}", mig.gpu_index, mig.index);
        add([Some(index), Some(mig.uuid.as_str().to_owned())], mig_nodes(mig), true);
    }
    if !all.is_empty() {
        all.sort_unstable();
        all.dedup();
        let container_edits = ContainerEdits { device_nodes: all, ..ContainerEdits::default() };
        devices.push(Device { name: ALL.to_owned(), container_edits });
    }
    devices
}

fn gpu_nodes(gpu: &GpuEntry) -> Vec<String> {
    let dri = gpu.dri.iter().map(|name| format!("/dev/dri/{name}"));
    [format!("/dev/nvidia{}", gpu.minor)].into_iter().chain(dri).collect()
}

fn mig_nodes(mig: &MigEntry) -> Vec<String> {
    let gpu = format!("/dev/nvidia{}", mig.gpu_minor);
    [gpu].into_iter().chain(mig.capabilities.device_nodes()).collect()
}

fn imex_devices(description: &Description) -> Vec<Device> {
    let device = |channel: &u32| {
        let device_nodes = description.nodes(&[imex_node(*channel)]);
        Device { name: channel.to_string(), container_edits: ContainerEdits { device_nodes, ..Default::default() } }
    };
    description.imex_channels.iter().map(device).collect()
}

fn extra_spec(description: &Description, extra: Extra, files: &ExtraFiles) -> Option<Spec> {
    // Files without nodes serve nothing.
    if files.nodes.is_empty() {
        return None;
    }
    let mounts = files.files.iter().map(|path| description.mount(path, path, &MOUNT_OPTIONS)).collect();
    let device_nodes = description.nodes(&files.nodes);
    let container_edits = ContainerEdits { device_nodes, mounts, ..ContainerEdits::default() };
    Spec::new(extra.class(), vec![Device { name: ALL.to_owned(), container_edits }], ContainerEdits::default())
}

/// What every container with a GPU gets: control nodes and the driver.
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
        device_nodes: description.nodes(&description.control_nodes),
        mounts,
        hooks,
    }
}

/// The links first, then the cache of the dynamic linker. Both subcommands are in every release that has CDI hooks; newer
/// ones (`enable-cuda-compat` ...) would keep all containers from starting under an older toolkit, and are not used.
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
    /// Whether this hook is to run: there is a program for it, and nobody leaves it out.
    fn has_hook(&self, name: &str) -> bool {
        self.hook.is_some() && ![ALL, name].iter().any(|name| self.disabled_hooks.contains(*name))
    }

    fn nodes(&self, paths: &[String]) -> Vec<DeviceNode> {
        let node = |path: &String| {
            let host = below(&self.dev_root, path);
            DeviceNode { path: path.clone(), host_path: (host != *path).then_some(host) }
        };
        paths.iter().map(node).collect()
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
