//! The scan of this node: device nodes, hook and driver files, joined with the snapshot into a [`Description`].
//!
//! It reads folders and file metadata, and changes nothing. A disk may make it wait: never call it on the path of an admission.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::ALL;
use super::description::{Description, Extra, ExtraFiles, GpuEntry, MigEntry, imex_node};
use super::driver;
use super::libraries::{self, LibraryFinder};
use super::warning::Warning;
use crate::state::{Device, NodeState};
use crate::topology::{GpuUuid, MigUuid, PciAddress};

/// The control device of the driver.
const CONTROL_NODE: &str = "/dev/nvidiactl";

/// Device nodes that every container with a GPU needs, where the node has them.
const CONTROL_NODES: [&str; 4] = [CONTROL_NODE, "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// Where nvidia-container-toolkit's packages put the hooks' program.
const DEFAULT_HOOK: &str = "/usr/bin/nvidia-cdi-hook";

/// Where things are: on the host, for the runtime that reads the spec, and here, in our container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The driver root on the host: `/`, or that of a driver container, such as `/run/nvidia/driver`.
    pub driver: PathBuf,
    /// The same folder in our container.
    pub driver_here: PathBuf,
    /// The folder on the host that has `/dev` in it.
    pub dev: PathBuf,
    /// The host's /sys in our container.
    pub sysfs: PathBuf,
}

/// What the specs hold beside GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The hooks' program, on the host; it may lie where our container does not see it. `None`: the toolkit's, where it is.
    pub hook: Option<String>,
    /// Hooks that are left out, by name; `all` is every one.
    pub disabled_hooks: BTreeSet<String>,
    /// What containers can get beside GPUs.
    pub extras: BTreeSet<Extra>,
    /// The IMEX channels that are offered, where they exist.
    pub imex_channels: Vec<u32>,
}

/// The result of one scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// What was found.
    pub description: Description,
    /// What is missing.
    pub warnings: Vec<Warning>,
}

/// Scans one node again and again.
#[derive(Debug)]
pub struct Scanner {
    roots: Roots,
    options: Options,
    libraries: LibraryFinder,
}

impl Scanner {
    /// A scanner that has read nothing yet.
    pub fn new(roots: Roots, options: Options) -> Self {
        let libraries = LibraryFinder::new(roots.driver_here.clone());
        Self { roots, options, libraries }
    }

    /// Where things are.
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The nodes that every container with a GPU needs, those that exist.
    pub fn control_nodes(&self) -> Vec<String> {
        let dev = self.dev_here();
        let nodes = CONTROL_NODES.iter().filter(|node| is_device(&below(dev, node)));
        nodes.map(|node| (*node).to_owned()).collect()
    }

    /// The IMEX channels that are offered, those that exist.
    pub fn imex_channels(&self) -> Vec<u32> {
        let dev = self.dev_here();
        let exists = |channel: &u32| is_device(&below(dev, &imex_node(*channel)));
        let channels: BTreeSet<u32> = self.options.imex_channels.iter().copied().filter(exists).collect();
        channels.into_iter().collect()
    }

    /// Scans the node.
    pub fn scan(&mut self, snapshot: &NodeState) -> Scan {
        let mut warnings = Vec::new();
        let loaded = fs::read_to_string(self.roots.sysfs.join("module/nvidia/version")).unwrap_or_default();
        let loaded = Some(loaded.trim()).filter(|version| !version.is_empty());
        let found = self.libraries.find(loaded);
        if found.is_none() {
            warnings.push(Warning::NoLibraries {
                wanted: format!("{}{}", libraries::LIBCUDA, loaded.unwrap_or("*")),
                root: self.roots.driver_here.display().to_string(),
                folders: libraries::FOLDERS.join(", "),
            });
        }
        let driver = driver::files(&self.roots.driver_here, loaded, found);
        let control_nodes = self.control_nodes();
        if !control_nodes.iter().any(|node| node == CONTROL_NODE) {
            let root = self.dev_here().display().to_string();
            warnings.push(Warning::NoControlNode { node: CONTROL_NODE.to_owned(), root });
        }
        let gpus = self.gpus(snapshot, &mut warnings);
        let extras = self.options.extras.iter();
        let description = Description {
            driver_root: self.roots.driver.display().to_string(),
            dev_root: self.roots.dev.display().to_string(),
            migs: migs(snapshot, &mut warnings),
            gpus,
            control_nodes,
            driver,
            hook: self.hook(&mut warnings),
            disabled_hooks: self.options.disabled_hooks.clone(),
            extras: extras.map(|extra| (*extra, self.extra_files(*extra))).collect(),
            imex_channels: self.imex_channels(),
        };
        Scan { description, warnings }
    }

    /// The folder that has `/dev` in it, in our container: the driver root where that has the driver's nodes.
    fn dev_here(&self) -> &Path {
        let in_driver_root = is_device(&below(&self.roots.driver_here, CONTROL_NODE));
        if in_driver_root { &self.roots.driver_here } else { Path::new("/") }
    }

    /// All GPUs that were ever offered. One that is gone stays, for its containers may be started again.
    fn gpus(&self, snapshot: &NodeState, warnings: &mut Vec<Warning>) -> Vec<GpuEntry> {
        let mut offered: BTreeMap<(PciAddress, &GpuUuid), &Device> = BTreeMap::new();
        for device in snapshot.resources().values().flat_map(BTreeMap::values) {
            offered.insert((device.gpu.pci, &device.gpu.uuid), device);
        }
        let mut entries = Vec::new();
        for gpu in offered.into_values().map(|device| &device.gpu) {
            let Some(minor) = gpu.minor else {
                warnings.push(Warning::NoMinor { uuid: gpu.uuid.clone() });
                continue;
            };
            let present = snapshot.topology().position(&gpu.uuid).is_some();
            let dri = if present { self.dri(gpu.pci) } else { Vec::new() };
            entries.push(GpuEntry { uuid: gpu.uuid.clone(), index: gpu.index, pci: gpu.pci, minor, present, dri });
        }
        entries
    }

    /// A GPU's nodes under /dev/dri: the kernel lists them below its PCI device.
    fn dri(&self, pci: PciAddress) -> Vec<String> {
        let dev = self.dev_here();
        let mut names = driver::entries(&self.roots.sysfs.join(format!("bus/pci/devices/{pci}/drm")));
        names.retain(|name| {
            let kind = name.starts_with("card") || name.starts_with("renderD");
            kind && is_device(&below(dev, &format!("/dev/dri/{name}")))
        });
        names
    }

    fn extra_files(&self, extra: Extra) -> ExtraFiles {
        let nodes = |folder: &str, is_wanted: fn(&str) -> bool| {
            let mut paths = driver::entries(&below(self.dev_here(), folder));
            paths.retain(|name| is_wanted(name));
            paths.iter_mut().for_each(|name| *name = format!("{folder}/{name}"));
            paths.retain(|path| is_device(&below(self.dev_here(), path)));
            paths
        };
        match extra {
            Extra::GdrCopy => ExtraFiles { nodes: nodes("/dev", |name| name == "gdrdrv"), files: Vec::new() },
            Extra::Gds => {
                let files = ["/run/udev", "/etc/cufile.json"].into_iter();
                let files = files.filter(|path| below(&self.roots.driver_here, path).exists());
                ExtraFiles {
                    nodes: nodes("/dev", |name| name.starts_with("nvidia-fs")),
                    files: files.map(str::to_owned).collect(),
                }
            }
            Extra::Mofed => {
                let nodes = nodes("/dev/infiniband", |name| name.starts_with("uverbs") || name == "rdma_cm");
                ExtraFiles { nodes, files: Vec::new() }
            }
        }
    }

    /// The hooks' program: the one that is named, else the toolkit's where the host has it.
    fn hook(&self, warnings: &mut Vec<Warning>) -> Option<String> {
        if self.options.disabled_hooks.contains(ALL) {
            return None;
        }
        if let Some(named) = &self.options.hook {
            return Some(named.clone());
        }
        // The host's programs are below a driver root that is the host's own root, and below no other.
        if self.roots.driver == Path::new("/") && below(&self.roots.driver_here, DEFAULT_HOOK).is_file() {
            return Some(DEFAULT_HOOK.to_owned());
        }
        warnings.push(Warning::NoHook { path: DEFAULT_HOOK.to_owned() });
        None
    }
}

/// The MIG devices that are offered and exist.
///
/// Unlike a GPU, one that is gone does not stay: the numbers of its instances, and with them its nodes, go to the next
/// device that is made. A container that is started again under the old name would get somebody else's device.
fn migs(snapshot: &NodeState, warnings: &mut Vec<Warning>) -> Vec<MigEntry> {
    let offered = snapshot.resources().values().flat_map(BTreeMap::values).filter_map(|device| device.mig.as_ref());
    let offered: BTreeSet<&MigUuid> = offered.map(|mig| &mig.uuid).collect();
    let topology = snapshot.topology();
    let mut entries = Vec::new();
    for mig in topology.mig_devices().iter().filter(|mig| offered.contains(&mig.uuid)) {
        // There is a warning about a GPU without a minor number already.
        let Some((gpu, gpu_minor)) = topology.gpus().get(mig.parent).and_then(|gpu| Some((gpu, gpu.minor?))) else {
            continue;
        };
        match mig.capabilities {
            Some(capabilities) => entries.push(MigEntry {
                uuid: mig.uuid.clone(),
                gpu_index: gpu.index,
                gpu_minor,
                index: mig.index,
                capabilities,
            }),
            None => warnings.push(Warning::NoCapabilities { uuid: mig.uuid.clone() }),
        }
    }
    entries
}

/// A path from a root, below another one.
fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}
