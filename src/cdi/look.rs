//! The look at this node: device nodes, hook and driver files, joined with the snapshot into a [`Description`].
//!
//! Reads folders and asks for files; changes nothing. It may wait for a disk, so nobody calls it on the path of an admission.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::ALL;
use super::description::{Description, Extra, ExtraFiles, GpuEntry, MigEntry, imex_node};
use super::driver;
use super::oddity::Oddity;
use crate::state::{Device, NodeState};
use crate::topology::{GpuUuid, MigDevice, MigUuid, PciAddress};

/// The control device of the driver.
const CONTROL_NODE: &str = "/dev/nvidiactl";

/// Device nodes that every container with a GPU needs, where the node has them.
const CONTROL_NODES: [&str; 4] = [CONTROL_NODE, "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// Where nvidia-container-toolkit's packages put the hooks' program.
const DEFAULT_HOOK: &str = "/usr/bin/nvidia-cdi-hook";

/// Where things are: on the host, for those who will read the spec, and here, for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The driver root on the host: `/`, or that of a driver container, such as `/run/nvidia/driver`.
    pub driver: PathBuf,
    /// The same folder in our container.
    pub driver_here: PathBuf,
    /// The root of `/dev` on the host.
    pub dev: PathBuf,
    /// Where the host's /sys is, here.
    pub sysfs: PathBuf,
}

/// What the specs are to hold beside GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The hooks' program, on the host. `None`: the toolkit's, where it is to be seen. One that is named is taken at
    /// its word: it may lie where our container does not see it.
    pub hook: Option<String>,
    /// Hooks that are left out, by name; `all` is every one.
    pub disabled_hooks: BTreeSet<String>,
    /// What is handed in beside GPUs.
    pub extras: BTreeSet<Extra>,
    /// The IMEX channels that are offered, where they are there.
    pub imex_channels: Vec<u32>,
}

/// What was seen, and what was odd about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// What was seen.
    pub description: Description,
    /// What is missing.
    pub oddities: Vec<Oddity>,
}

impl Roots {
    /// Where `/dev` is looked at: below the driver root where that has the driver's nodes, else our own.
    fn dev_here(&self) -> &Path {
        let has_nodes = is_device(&below(&self.driver_here, CONTROL_NODE));
        if has_nodes { &self.driver_here } else { Path::new("/") }
    }
}

/// Looks at the node.
pub fn look(roots: &Roots, options: &Options, snapshot: &NodeState) -> Look {
    let mut oddities = Vec::new();
    let loaded = fs::read_to_string(roots.sysfs.join("module/nvidia/version")).ok();
    let loaded = loaded.as_deref().map(str::trim).filter(|version| !version.is_empty());
    let (files, oddity) = driver::look(&roots.driver_here, loaded);
    oddities.extend(oddity);
    let control_nodes = control_nodes(roots);
    if !control_nodes.iter().any(|node| node == CONTROL_NODE) {
        let root = roots.dev_here().display().to_string();
        oddities.push(Oddity::NoControlNode { node: CONTROL_NODE.to_owned(), root });
    }
    let gpus = gpus(roots, snapshot, &mut oddities);
    let description = Description {
        driver_root: roots.driver.display().to_string(),
        dev_root: roots.dev.display().to_string(),
        migs: migs(snapshot, &mut oddities),
        gpus,
        control_nodes,
        driver: files,
        hook: hook(roots, options, &mut oddities),
        disabled_hooks: options.disabled_hooks.clone(),
        extras: options.extras.iter().map(|extra| (*extra, extra_files(roots, *extra))).collect(),
        imex_channels: imex_channels(roots, options),
    };
    Look { description, oddities }
}

/// The nodes that every container with a GPU needs, those that are there.
pub fn control_nodes(roots: &Roots) -> Vec<String> {
    let there = CONTROL_NODES.iter().filter(|node| is_device(&below(roots.dev_here(), node)));
    there.map(|node| (*node).to_owned()).collect()
}

/// The IMEX channels that are offered, those that are there.
pub fn imex_channels(roots: &Roots, options: &Options) -> Vec<u32> {
    let is_there = |channel: &u32| is_device(&below(roots.dev_here(), &imex_node(*channel)));
    let channels: BTreeSet<u32> = options.imex_channels.iter().copied().filter(is_there).collect();
    channels.into_iter().collect()
}

/// All GPUs that the kubelet was ever told of. One that is gone stays, for its containers may be started anew.
fn gpus(roots: &Roots, snapshot: &NodeState, oddities: &mut Vec<Oddity>) -> Vec<GpuEntry> {
    let mut devices: BTreeMap<(PciAddress, &GpuUuid), &Device> = BTreeMap::new();
    for device in snapshot.offers().devices() {
        devices.insert((device.gpu.pci, &device.gpu.uuid), device);
    }
    let entry = |device: &&Device| {
        let gpu = &device.gpu;
        let Some(minor) = gpu.minor else {
            oddities.push(Oddity::NoMinor { uuid: gpu.uuid.clone() });
            return None;
        };
        let present = snapshot.topology().position(&gpu.uuid).is_some();
        let dri = if present { dri(roots, gpu.pci) } else { Vec::new() };
        Some(GpuEntry { uuid: gpu.uuid.clone(), index: gpu.index, pci: gpu.pci, minor, present, dri })
    };
    devices.values().filter_map(entry).collect()
}

/// The MIG devices that the kubelet was told of and that are there.
///
/// One that is gone does not stay, other than a GPU: its instances' numbers are given to whatever is made next, and with
/// them its nodes. A container that is started again under the old name would be let into somebody else's device.
fn migs(snapshot: &NodeState, oddities: &mut Vec<Oddity>) -> Vec<MigEntry> {
    let offered = snapshot.offers().devices().filter_map(|device| device.mig.as_ref());
    let offered: BTreeSet<&MigUuid> = offered.map(|mig| &mig.uuid).collect();
    let topology = snapshot.topology();
    let entry = |mig: &MigDevice| {
        let gpu = topology.gpus().get(mig.parent)?;
        // A GPU of unknown minor number was told of.
        let gpu_minor = gpu.minor?;
        let Some(capabilities) = mig.capabilities else {
            oddities.push(Oddity::NoCapabilities { uuid: mig.uuid.clone() });
            return None;
        };
        Some(MigEntry { uuid: mig.uuid.clone(), gpu_index: gpu.index, gpu_minor, index: mig.index, capabilities })
    };
    topology.mig_devices().iter().filter(|mig| offered.contains(&mig.uuid)).filter_map(entry).collect()
}

/// A GPU's nodes under /dev/dri: the kernel lists them below its PCI device.
fn dri(roots: &Roots, pci: PciAddress) -> Vec<String> {
    let names = driver::entries(&roots.sysfs.join(format!("bus/pci/devices/{pci}/drm")));
    let is_node = |name: &String| {
        let kind = name.starts_with("card") || name.starts_with("renderD");
        kind && is_device(&below(roots.dev_here(), &format!("/dev/dri/{name}")))
    };
    names.into_iter().filter(is_node).collect()
}

fn extra_files(roots: &Roots, extra: Extra) -> ExtraFiles {
    let nodes = |folder: &str, wanted: &dyn Fn(&str) -> bool| {
        let names = driver::entries(&below(roots.dev_here(), folder)).into_iter().filter(|name| wanted(name));
        let paths = names.map(|name| format!("{folder}/{name}"));
        paths.filter(|path| is_device(&below(roots.dev_here(), path))).collect()
    };
    match extra {
        Extra::GdrCopy => ExtraFiles { nodes: nodes("/dev", &|name| name == "gdrdrv"), files: Vec::new() },
        Extra::Gds => {
            let files = ["/run/udev", "/etc/cufile.json"].into_iter();
            let files = files.filter(|path| below(&roots.driver_here, path).exists()).map(str::to_owned).collect();
            ExtraFiles { nodes: nodes("/dev", &|name| name.starts_with("nvidia-fs")), files }
        }
        Extra::Mofed => {
            let wanted = |name: &str| name.starts_with("uverbs") || name == "rdma_cm";
            ExtraFiles { nodes: nodes("/dev/infiniband", &wanted), files: Vec::new() }
        }
    }
}

/// The hooks' program: the one that is named, else the toolkit's where the host has it.
fn hook(roots: &Roots, options: &Options, oddities: &mut Vec<Oddity>) -> Option<String> {
    if options.disabled_hooks.contains(ALL) {
        return None;
    }
    if let Some(named) = &options.hook {
        return Some(named.clone());
    }
    // Only a driver root that is the host's own root shows the host's programs.
    if roots.driver == Path::new("/") && below(&roots.driver_here, DEFAULT_HOOK).is_file() {
        return Some(DEFAULT_HOOK.to_owned());
    }
    oddities.push(Oddity::NoHook { path: DEFAULT_HOOK.to_owned() });
    None
}

/// A path from a root, below another one.
fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Whether there is a character device.
fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.file_type().is_char_device())
}
