//! The scan of this node: device nodes, hook and driver files, joined with the snapshot into a [`Description`].
//!
//! The scan reads files and folders, and changes nothing. A disk may make it wait: never call it during an admission.
//!
//! [`Hooks`]: a runtime refuses every container whose spec names a hook that the toolkit's program does not have. So
//! hooks that came after the first release are used only if the program contains their names. The program is read, not
//! run: this container may lack the host's libraries, which the program needs, and the right to run it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::driver::{self, below};
use super::libraries::{self, LibraryFinder, Stamp};
use super::{ALL, Description, DeviceEntry, Extra, Hooks, IMEX_CLASS, Warning};
use linkwise_core::publish::injection::{ChosenDevice, DeviceIds, imex_node};
use linkwise_core::state::NodeState;
use linkwise_core::topology::{Gpu, GpuUuid, MigExtension, MigUuid, PciAddress};

const CONTROL_NODE: &str = "/dev/nvidiactl";

/// Device nodes that every container with a GPU needs, if the node has them.
const CONTROL_NODES: [&str; 4] = [CONTROL_NODE, "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"];

/// The path at which nvidia-container-toolkit's packages put the hooks' program.
const DEFAULT_HOOK: &str = "/usr/bin/nvidia-cdi-hook";

/// The mount of the host's root in the plugin's container of NVIDIA's GPU Operator (v26.7.0,
/// assets/state-device-plugin/0500_daemonset.yaml).
const HOST_ROOT: &str = "/host";

/// The paths of the roots: on the host, for the program that reads the spec, and here, in our container.
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

/// The settings of a scan: the hooks, and the devices beside GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The hooks' program, on the host; our container need not see its path. `None` stands for the toolkit's program,
    /// if it exists.
    pub hook: Option<String>,
    /// Hooks to leave out, by name; `all` stands for every one.
    pub disabled_hooks: BTreeSet<String>,
    /// The devices that containers can get beside GPUs.
    pub extras: BTreeSet<Extra>,
    /// The IMEX channels that are offered if they exist.
    pub imex_channels: Vec<u32>,
}

/// The result of one scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// The findings.
    pub description: Description,
    /// The missing parts.
    pub warnings: Vec<Warning>,
}

/// Scans one node repeatedly.
#[derive(Debug)]
pub struct Scanner {
    roots: Roots,
    options: Options,
    libraries: LibraryFinder,
    hooks: HookReader,
}

impl Scanner {
    /// A scanner that has read nothing yet.
    pub fn new(roots: Roots, options: Options) -> Self {
        let libraries = LibraryFinder::new(roots.driver_here.clone());
        Self { roots, options, libraries, hooks: HookReader::default() }
    }

    /// The roots.
    pub fn roots(&self) -> &Roots {
        &self.roots
    }

    /// The nodes that every container with a GPU needs and that exist.
    pub fn control_nodes(&self) -> Vec<String> {
        self.existing(CONTROL_NODES.map(str::to_owned))
    }

    /// The offered IMEX channels that exist.
    pub fn imex_channels(&self) -> Vec<u32> {
        let channels: BTreeSet<u32> = self.options.imex_channels.iter().copied().collect();
        channels.into_iter().filter(|channel| !self.existing([imex_node(*channel)]).is_empty()).collect()
    }

    /// The paths, as containers have them, at which there are device nodes.
    fn existing(&self, paths: impl IntoIterator<Item = String>) -> Vec<String> {
        let dev = self.dev_here();
        paths.into_iter().filter(|path| is_device(&below(dev, path))).collect()
    }

    /// Scans the node.
    pub fn scan(&mut self, snapshot: &NodeState) -> Scan {
        let mut warnings = Vec::new();
        let loaded = fs::read_to_string(self.roots.sysfs.join("module/nvidia/version")).unwrap_or_default();
        let loaded = Some(loaded.trim()).filter(|version| !version.is_empty());
        let found = self.libraries.find(loaded);
        if found.is_none() {
            warnings.push(Warning::NoLibraries(
                format!("{}{}", libraries::LIBCUDA, loaded.unwrap_or("*")),
                self.roots.driver_here.display().to_string(),
                libraries::FOLDERS.join(", "),
            ));
        }
        let driver = driver::files(&self.roots.driver_here, &self.roots.sysfs, loaded, found);
        let control_nodes = self.control_nodes();
        if !control_nodes.iter().any(|node| node == CONTROL_NODE) {
            let root = self.dev_here().display().to_string();
            warnings.push(Warning::NoControlNode(CONTROL_NODE.to_owned(), root));
        }
        let gpus = self.devices(snapshot, &mut warnings);
        let description = Description {
            driver_root: self.roots.driver.display().to_string(),
            dev_root: self.roots.dev.display().to_string(),
            gpus,
            others: self.others(),
            control_nodes,
            driver,
            hooks: self.hooks(&mut warnings),
        };
        Scan { description, warnings }
    }

    /// The folder that has `/dev` in it, in our container: the driver root if it has the driver's nodes.
    fn dev_here(&self) -> &Path {
        let in_driver_root = is_device(&below(&self.roots.driver_here, CONTROL_NODE));
        if in_driver_root { &self.roots.driver_here } else { Path::new("/") }
    }

    /// The GPUs that are offered or held, and the MIG devices that are offered and exist.
    ///
    /// A GPU that has left stays while it is held, because its containers may be started again. A MIG device that has
    /// left does not: the numbers of its instances, and with them its nodes, go to the next device that is made. A
    /// container that is started again under the old name would get another container's device.
    fn devices(&self, snapshot: &NodeState, warnings: &mut Vec<Warning>) -> Vec<DeviceEntry> {
        let topology = snapshot.topology();
        let offers = snapshot.offers();
        let offered = || offers.devices().chain(offers.through_dra()).chain(offers.withheld());
        let gpus: BTreeMap<(PciAddress, &GpuUuid), &Gpu> =
            offered().map(|device| ((device.gpu.pci, &device.gpu.uuid), &device.gpu)).collect();
        let gpus = gpus.into_values().map(|gpu| (gpu, None, topology.position(&gpu.uuid).is_some()));
        let migs: BTreeSet<&MigUuid> = offered().filter_map(|device| Some(&device.mig.as_ref()?.uuid)).collect();
        let migs = topology.mig_devices().iter().filter(|mig| migs.contains(&mig.uuid));
        let migs = migs.filter_map(|mig| Some((topology.gpus().get(mig.parent)?, Some(mig), true)));
        let mut entries = Vec::new();
        for (gpu, mig, is_present) in gpus.chain(migs) {
            let chosen = ChosenDevice { gpu, mig };
            let Ok(mut nodes) = chosen.nodes() else {
                match mig {
                    None => warnings.push(Warning::NoMinor(gpu.uuid.clone())),
                    // A GPU without a minor number has a warning already.
                    Some(_) if gpu.facts.minor.is_none() => {}
                    Some(mig) => warnings.push(Warning::NoCapabilities(mig.uuid.clone())),
                }
                continue;
            };
            if is_present && mig.is_none_or(|mig| mig.profile.extension == MigExtension::Graphics) {
                nodes.extend(self.dri(gpu.pci));
            }
            let ids = is_present.then_some(DeviceIds::Index).into_iter().chain([DeviceIds::Uuid]);
            let names = ids.map(|ids| chosen.id(ids)).collect();
            entries.push(DeviceEntry { names, nodes, files: Vec::new(), is_present });
        }
        entries
    }

    /// A GPU's nodes under /dev/dri: the kernel lists them below its PCI device.
    fn dri(&self, pci: PciAddress) -> Vec<String> {
        let names = driver::entries(&self.roots.sysfs.join(format!("bus/pci/devices/{pci}/drm")));
        let names = names.iter().filter(|name| name.starts_with("card") || name.starts_with("renderD"));
        self.existing(names.map(|name| format!("/dev/dri/{name}")))
    }

    /// The node's devices beside GPUs that are to be offered.
    fn others(&self) -> Vec<(&'static str, Vec<DeviceEntry>)> {
        let channels = self.imex_channels();
        let imex = channels.iter().map(|channel| DeviceEntry {
            names: vec![channel.to_string()],
            nodes: vec![imex_node(*channel)],
            ..DeviceEntry::default()
        });
        let mut others = vec![(IMEX_CLASS, imex.collect())];
        for extra in &self.options.extras {
            type IsNode = fn(&str) -> bool;
            let (class, folder, is_node, files): (_, _, IsNode, &[&str]) = match extra {
                Extra::GdrCopy => ("gdrcopy", "/dev", |name| name == "gdrdrv", &[]),
                Extra::Gds => ("gds", "/dev", |name| name.starts_with("nvidia-fs"), &["/run/udev", "/etc/cufile.json"]),
                Extra::Mofed => {
                    ("mofed", "/dev/infiniband", |name| name.starts_with("uverbs") || name == "rdma_cm", &[])
                }
            };
            let names = driver::entries(&below(self.dev_here(), folder)).into_iter().filter(|name| is_node(name));
            let nodes = self.existing(names.map(|name| format!("{folder}/{name}")));
            // Files are of no use without nodes.
            if !nodes.is_empty() {
                let files = files.iter().filter(|path| below(&self.roots.driver_here, path).exists());
                let files = files.map(|path| (*path).to_owned()).collect();
                others.push((class, vec![DeviceEntry { names: vec![ALL.to_owned()], nodes, files, is_present: true }]));
            }
        }
        others
    }

    /// The hooks of the named program, or else of the toolkit's if the host has it, without those that the operator
    /// disabled.
    fn hooks(&mut self, warnings: &mut Vec<Warning>) -> Option<Hooks> {
        if self.options.disabled_hooks.contains(ALL) {
            return None;
        }
        let program = self.options.hook.clone().unwrap_or_else(|| DEFAULT_HOOK.to_owned());
        // The host's programs are below a driver root only if that is the host's own root; otherwise the operator may
        // have mounted the program at its path on the host, or the host's root as NVIDIA's GPU Operator does.
        let in_root = (self.roots.driver == Path::new("/")).then(|| below(&self.roots.driver_here, &program));
        let elsewhere = [PathBuf::from(&program), below(Path::new(HOST_ROOT), &program)];
        let seen = in_root.into_iter().chain(elsewhere).find(|path| path.is_file());
        if self.options.hook.is_none() && seen.is_none() {
            warnings.push(Warning::NoHook(program));
            return None;
        }
        let mut names = self.hooks.of(seen.as_deref());
        names.retain(|name| !self.options.disabled_hooks.contains(*name));
        Some(Hooks { program, names })
    }
}

fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device())
}

pub(super) const CREATE_SYMLINKS: &str = "create-symlinks";

/// Lets the container use CUDA libraries of its image that are newer than the driver (toolkit 1.17.5).
pub(super) const ENABLE_CUDA_COMPAT: &str = "enable-cuda-compat";

pub(super) const UPDATE_LDCACHE: &str = "update-ldcache";

/// Keeps nvidia-smi and NVML in the container from making device nodes (toolkit 1.17.8).
pub(super) const DISABLE_DEVICE_NODE_MODIFICATION: &str = "disable-device-node-modification";

/// Shows only the container's own GPUs to EGL and Vulkan (toolkit 1.20).
pub(super) const UPDATE_APPLICATION_PROFILE: &str = "update-application-profile";

/// The hooks of every release that has CDI hooks (from 1.16).
const FIRST_HOOKS: [&str; 2] = [CREATE_SYMLINKS, UPDATE_LDCACHE];

/// The hooks of later releases.
const LATER_HOOKS: [&str; 3] = [ENABLE_CUDA_COMPAT, DISABLE_DEVICE_NODE_MODIFICATION, UPDATE_APPLICATION_PROFILE];

/// The number of bytes that are read at once; longer than any name.
const CHUNK: usize = 64 << 10;

/// Reads the names of a program's hooks, once for each state of its file.
#[derive(Debug, Default)]
pub(super) struct HookReader {
    last: Option<([Option<Stamp>; 2], BTreeSet<&'static str>)>,
}

impl HookReader {
    /// The hooks of the program at `path` in this container; without a path, those that every release has.
    pub fn of(&mut self, path: Option<&Path>) -> BTreeSet<&'static str> {
        // If NVIDIA's operator installed the toolkit, the program is a script that starts `NAME.real`.
        let real = |path: &Path| PathBuf::from(format!("{}.real", path.display()));
        let files: Vec<PathBuf> = path.into_iter().flat_map(|path| [path.to_owned(), real(path)]).collect();
        let stamps = [0, 1].map(|file| files.get(file).and_then(|path| Stamp::of(path)));
        if self.last.as_ref().is_none_or(|(last, _)| *last != stamps) {
            // An unreadable program counts as having only the first hooks.
            let later = files.iter().flat_map(|path| later_hooks(path).unwrap_or_default());
            self.last = Some((stamps, FIRST_HOOKS.into_iter().chain(later).collect()));
        }
        self.last.as_ref().map(|(_, hooks)| hooks.clone()).unwrap_or_default()
    }
}

/// The hooks of later releases whose names are in a file.
fn later_hooks(path: &Path) -> io::Result<BTreeSet<&'static str>> {
    let mut file = File::open(path)?;
    let mut hooks = BTreeSet::new();
    let mut window = Vec::new();
    while file.by_ref().take(CHUNK as u64).read_to_end(&mut window)? > 0 {
        let is_in = |name: &&str| window.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        hooks.extend(LATER_HOOKS.into_iter().filter(is_in));
        // A name may lie across two chunks.
        window.drain(..window.len().saturating_sub(64));
    }
    Ok(hooks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn hooks_are_those_named_in_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvidia-cdi-hook");
        let mut reader = HookReader::default();
        let mut hooks = || reader.of(Some(&path)).into_iter().collect::<Vec<_>>();
        assert_eq!(hooks(), FIRST_HOOKS, "there is no program");
        fs::write(&path, "create-symlinks update-ldcache chmod").unwrap();
        assert_eq!(hooks(), FIRST_HOOKS);
        // The names lie across two chunks, and at the end of the file.
        let text = ["x".repeat(CHUNK - 5).as_str(), ENABLE_CUDA_COMPAT, &"y".repeat(CHUNK), LATER_HOOKS[1]].concat();
        fs::write(&path, text).unwrap();
        assert_eq!(hooks(), [CREATE_SYMLINKS, DISABLE_DEVICE_NODE_MODIFICATION, ENABLE_CUDA_COMPAT, UPDATE_LDCACHE]);
        fs::write(&path, "#!/bin/sh").unwrap();
        fs::write(folder.path().join("nvidia-cdi-hook.real"), UPDATE_APPLICATION_PROFILE).unwrap();
        assert_eq!(hooks(), [CREATE_SYMLINKS, UPDATE_APPLICATION_PROFILE, UPDATE_LDCACHE]);
        assert_eq!(HookReader::default().of(None).into_iter().collect::<Vec<_>>(), FIRST_HOOKS);
    }
}
