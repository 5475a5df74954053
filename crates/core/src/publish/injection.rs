//! [`Injection`]: a container's environment, device nodes, mounts, CDI devices and annotations for its GPUs.
//!
//! [`InjectionOptions::inject`] is pure and runs on the path of an admission. It takes the chosen hardware, the
//! operator's options and the last host scan. The device plugin writes the result into the kubelet's API
//! (`device_plugin/convert.rs`), `claims::containers` into the CDI devices of claims. The strategies are those of the
//! NVIDIA device plugin (`internal/plugin/server.go` of NVIDIA/k8s-device-plugin).
//!
//! The folders of an MPS client ([`MpsClient`]) and the RDMA NICs nearest to the GPUs ([`RdmaNodes`], `--expose-nics`)
//! are parts of an injection. The MPS daemon enforces the limits. `inject` does not repeat them, so that a
//! container cannot get other limits than those in effect; a claim may add lower ones.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::names::shortened;
use crate::state::{Device, ResourceName};
use crate::topology::{Gpu, MigDevice, NodeTopology};

/// The variable that names the GPUs for NVIDIA's container runtime.
const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The variable that names the IMEX channels for NVIDIA's container runtime.
const NVIDIA_IMEX_CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";

/// The folder in which NVIDIA's container runtime looks for device names, if it takes them from mounts.
const MOUNTS_FOLDER: &str = "/var/run/nvidia-container-devices";

/// The file that is mounted in [`MOUNTS_FOLDER`]; only the mount's name matters.
const MOUNTED: &str = "/dev/null";

/// The variable with the folder of the MPS control daemon's sockets, for the CUDA libraries.
const CUDA_MPS_PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The first part of a CDI annotation's name, as the NVIDIA device plugin writes it.
const ANNOTATION_PLUGIN: &str = "nvidia-device-plugin";

/// The longest name of an annotation without its prefix, in bytes (Kubernetes).
const MAX_ANNOTATION: usize = 63;

/// The operator's options: the strategies by which containers get their GPUs, several at once if wanted, and their
/// settings.
#[derive(Clone, Debug, Default)]
pub struct InjectionOptions {
    /// The GPUs' names in NVIDIA_VISIBLE_DEVICES, for NVIDIA's container runtime.
    pub envvar: bool,
    /// The GPUs' names as mounts below `/var/run/nvidia-container-devices`, for the same runtime.
    pub volume_mounts: bool,
    /// The GPUs as CDI devices, for any runtime that supports CDI.
    pub cdi: Option<CdiOptions>,
    /// The kind of names by which containers get the GPUs.
    pub ids: DeviceIds,
    /// More variables, for NVIDIA's container runtime and for the container: `NVIDIA_GDS=enabled` ...
    pub env: BTreeMap<String, String>,
    /// True to pass device nodes with `envvar` and `volume_mounts` (`--pass-device-specs`), for runtimes that give a
    /// container only the nodes that are listed.
    pub device_nodes: bool,
    /// The MPS root on the host.
    pub mps_root: String,
}

/// The names of CDI devices, and the place in the device plugin API that has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdiOptions {
    /// The kind of our GPUs, `vendor/class`.
    pub kind: String,
    /// The prefix of an annotation's key that carries the names; runtimes look under `cdi.k8s.io/`.
    pub annotation_prefix: Option<String>,
    /// True to use the field of the device plugin API that the kubelet passes on over CRI.
    pub cri: bool,
}

crate::words! {
    /// The names of devices in environment, mounts and CDI.
    #[derive(Default)]
    pub enum DeviceIds {
        /// The UUID, which is the same after a reboot.
        #[default]
        Uuid = "uuid",
        /// NVML's index: `0` for a GPU, `0:1` for a MIG device.
        Index = "index",
    }
}

/// The host's devices other than GPUs, as last scanned. Device nodes of a kernel module that is loaded later come with
/// a later scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostDevices {
    /// The folder on the host that has `/dev` in it.
    pub dev_root: String,
    /// Device nodes that every container with a GPU needs: `/dev/nvidiactl` ...
    pub control_nodes: Vec<String>,
    /// The IMEX channels, by number.
    pub imex_channels: Vec<u32>,
    /// The full names of CDI devices that every container with a GPU gets.
    pub cdi_devices: Vec<String>,
    /// The RDMA NICs' nodes, if containers are to get those nearest to their GPUs.
    pub rdma: Option<RdmaNodes>,
}

/// A piece of hardware that was chosen for a container: a whole GPU, or a MIG device of it.
#[derive(Clone, Copy, Debug)]
pub struct ChosenDevice<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// The MIG device; `None` for the whole GPU.
    pub mig: Option<&'a MigDevice>,
}

/// The hardware that one container was granted.
#[derive(Clone, Debug)]
pub struct Granted<'a> {
    /// The graph of the node.
    pub topology: &'a NodeTopology,
    /// The hardware. Slots of one device are adjacent and count once.
    pub devices: Vec<ChosenDevice<'a>>,
    /// The folders that the container shares with the MPS daemon, if the hardware is shared by MPS.
    pub mps: Option<MpsClient>,
}

/// The environment, nodes, mounts and names that one container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Injection {
    /// Environment.
    pub env: BTreeMap<String, String>,
    /// Device nodes, to be read and written.
    pub device_nodes: Vec<HostPath>,
    /// Bind mounts, to be read and written.
    pub mounts: Vec<HostPath>,
    /// Full names of CDI devices, `vendor/class=name`.
    pub cdi_devices: Vec<String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// A device node, file or folder of the host in a container, by its absolute paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// The path on the host.
    pub host: String,
    /// The path in the container.
    pub container: String,
}

/// The error for a granted GPU or MIG device whose minor number is unknown. Neither an injection nor the CDI spec can
/// name its device node.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("cannot pass the device node of {0}: its minor number is unknown")]
pub struct InjectionError(String);

impl InjectionOptions {
    /// Makes the injection of a container.
    ///
    /// # Errors
    ///
    /// The minor number of a needed device node is unknown. The container would start without its GPU.
    pub fn inject(&self, granted: &Granted<'_>, host: &HostDevices) -> Result<Injection, InjectionError> {
        let mut devices = granted.devices.clone();
        devices.dedup_by_key(|device| device.uuid());
        let mut injection = self.gpus(&devices, host)?;
        // Done with every strategy, because no container runtime supports MPS.
        if let Some(MpsClient { pipe, shm }) = &granted.mps {
            injection.env.insert(CUDA_MPS_PIPE_DIRECTORY.to_owned(), pipe.container.clone());
            injection.mounts.extend([pipe.clone(), shm.clone()]);
        }
        if let Some(rdma) = &host.rdma {
            rdma.inject(granted.topology, &devices, &mut injection);
        }
        Ok(injection)
    }

    /// Makes the injection of the GPUs themselves, by each enabled strategy.
    fn gpus(&self, devices: &[ChosenDevice<'_>], host: &HostDevices) -> Result<Injection, InjectionError> {
        let mut injection = Injection::default();
        let ids: Vec<String> = devices.iter().map(|device| device.id(self.ids)).collect();
        let mut nodes = Vec::new();
        if self.cdi.is_some() || self.device_nodes {
            for device in devices {
                nodes.extend(device.nodes()?);
            }
        }
        if let Some(cdi) = &self.cdi {
            let gpus = ids.iter().map(|id| format!("{}={id}", cdi.kind));
            injection.cdi_devices = gpus.chain(host.cdi_devices.iter().cloned()).collect();
        }
        // Set with CDI too, because programs in the container read it.
        injection.env = self.env.clone();
        // The rest is for NVIDIA's runtime. With CDI it is in the specs.
        if !self.envvar && !self.volume_mounts {
            return Ok(injection);
        }
        let channels: Vec<String> = host.imex_channels.iter().map(u32::to_string).collect();
        if self.envvar {
            injection.env.insert(NVIDIA_VISIBLE_DEVICES.to_owned(), ids.join(","));
            if !channels.is_empty() {
                injection.env.insert(NVIDIA_IMEX_CHANNELS.to_owned(), channels.join(","));
            }
        }
        if self.volume_mounts {
            // The variable's value is the folder; the names are the mounts in it.
            injection.env.insert(NVIDIA_VISIBLE_DEVICES.to_owned(), MOUNTS_FOLDER.to_owned());
            for name in ids.into_iter().chain(channels.iter().map(|channel| format!("imex/{channel}"))) {
                let container = format!("{MOUNTS_FOLDER}/{name}");
                injection.mounts.push(HostPath { host: MOUNTED.to_owned(), container });
            }
        }
        if self.device_nodes {
            let channels = host.imex_channels.iter().copied().map(imex_node);
            for path in nodes.into_iter().chain(host.control_nodes.iter().cloned()).chain(channels) {
                let node = HostPath { host: below(&host.dev_root, &path), container: path };
                // MIG devices of one GPU share its node.
                if !injection.device_nodes.contains(&node) {
                    injection.device_nodes.push(node);
                }
            }
        }
        Ok(injection)
    }
}

impl CdiOptions {
    /// Moves the CDI devices to the place in the device plugin API that carries them. A container gets one answer for
    /// each resource, so the annotation's name contains the resource. A name that is too long is cut and ends with a
    /// hash of the whole name.
    pub fn place(&self, resource: &ResourceName, injection: &mut Injection) {
        if let Some(prefix) = &self.annotation_prefix {
            let name = format!("{ANNOTATION_PLUGIN}_{}", resource.as_str().replace('/', "_"));
            let key = format!("{prefix}{}", shortened(&name, MAX_ANNOTATION));
            injection.annotations.insert(key, injection.cdi_devices.join(","));
        }
        if !self.cri {
            injection.cdi_devices.clear();
        }
    }
}

impl<'a> From<&'a Device> for ChosenDevice<'a> {
    fn from(device: &'a Device) -> Self {
        Self { gpu: &device.gpu, mig: device.mig.as_ref() }
    }
}

impl<'a> ChosenDevice<'a> {
    /// NVML's UUID of the MIG device, otherwise of the GPU.
    pub fn uuid(&self) -> &'a str {
        self.mig.map_or(self.gpu.uuid.as_str(), |mig| mig.uuid.as_str())
    }

    /// Its name in environment, mounts and CDI.
    pub fn id(&self, ids: DeviceIds) -> String {
        match (ids, self.mig) {
            (DeviceIds::Uuid, _) => self.uuid().to_owned(),
            (DeviceIds::Index, None) => self.gpu.index.to_string(),
            (DeviceIds::Index, Some(mig)) => format!("{}:{}", self.gpu.index, mig.index),
        }
    }

    /// Its nodes below /dev: the GPU's, then those of the MIG device's capabilities.
    ///
    /// # Errors
    ///
    /// A minor number is unknown.
    pub fn nodes(&self) -> Result<Vec<String>, InjectionError> {
        let no_minor = || InjectionError(self.uuid().to_owned());
        let mut nodes = vec![format!("/dev/nvidia{}", self.gpu.facts.minor.ok_or_else(no_minor)?)];
        if let Some(mig) = self.mig {
            nodes.extend(mig.facts.capabilities.ok_or_else(no_minor)?.device_nodes());
        }
        Ok(nodes)
    }
}

/// The node of an IMEX channel.
pub fn imex_node(channel: u32) -> String {
    format!("/dev/nvidia-caps-imex-channels/channel{channel}")
}

/// The path of the MPS root in the containers of the daemon, of the plugin and of the pods.
pub const MPS_CONTAINER_ROOT: &str = "/mps";

/// The folder of the control daemon's sockets, below the folder of its resource.
pub const MPS_PIPE: &str = "pipe";

/// The folder of shared memory: below the MPS root for all daemons, below a daemon's folder for that daemon alone.
pub const MPS_SHM: &str = "shm";

/// The /dev/shm of a control daemon and its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpsShm {
    /// One for the daemons of all resources, as with the NVIDIA plugin, and for the claims' daemons that an older
    /// release started.
    Common,
    /// One for the daemon alone. This release starts claims' daemons with it.
    Own,
}

/// The folders that a client shares with its daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsClient {
    /// The control daemon's sockets.
    pub pipe: HostPath,
    /// The shared memory.
    pub shm: HostPath,
}

impl MpsClient {
    /// Makes a client of the daemon of `resource`; `host_root` is the MPS root on the host (`--mps-root`).
    pub fn new(host_root: &str, resource: &ResourceName, shm: MpsShm) -> Self {
        let host_root = host_root.trim_end_matches('/');
        let pipe = |root: &str| format!("{root}/{resource}/{MPS_PIPE}");
        let shm = match shm {
            MpsShm::Common => format!("{host_root}/{MPS_SHM}"),
            MpsShm::Own => format!("{host_root}/{resource}/{MPS_SHM}"),
        };
        Self {
            pipe: HostPath { host: pipe(host_root), container: pipe(MPS_CONTAINER_ROOT) },
            shm: HostPath { host: shm, container: "/dev/shm".to_owned() },
        }
    }
}

/// The variable with the kernel's names of the container's NICs, `mlx5_0,mlx5_1`: fit for NCCL_IB_HCA.
const LINKWISE_NICS: &str = "LINKWISE_NICS";

/// The device nodes of the host's RDMA devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaNodes {
    /// The nodes by the device's name: `mlx5_0` has `/dev/infiniband/uverbs0`.
    pub devices: BTreeMap<String, String>,
    /// The nodes that all of them need: `/dev/infiniband/rdma_cm`.
    pub common: Vec<String>,
}

impl RdmaNodes {
    /// Adds the NICs nearest to each GPU ([`NodeTopology::nearest_nics`]). If there are none, the variable is set and
    /// empty; it is missing if the operator did not enable NICs.
    pub(super) fn inject(&self, topology: &NodeTopology, devices: &[ChosenDevice<'_>], injection: &mut Injection) {
        let positions = devices.iter().filter_map(|device| topology.position(&device.gpu.uuid));
        let nearest: BTreeSet<usize> = positions.flat_map(|position| topology.nearest_nics(position)).collect();
        let nics = nearest.into_iter().filter_map(|nic| topology.nics().get(nic));
        // The map has no network interfaces, because they are not RDMA devices.
        let mut rdma: Vec<_> =
            nics.flat_map(|nic| &nic.names).filter_map(|name| self.devices.get_key_value(name)).collect();
        rdma.dedup();
        let names: Vec<&str> = rdma.iter().map(|(name, _)| name.as_str()).collect();
        injection.env.insert(LINKWISE_NICS.to_owned(), names.join(","));
        if !rdma.is_empty() {
            // These nodes are in the host's own /dev, not in the driver root.
            let paths = rdma.into_iter().map(|(_, path)| path).chain(&self.common);
            injection.device_nodes.extend(paths.map(|path| HostPath { host: path.clone(), container: path.clone() }));
        }
    }
}

/// Joins a root on the host and an absolute `path` in a container or driver root: the path of the same file on the
/// host.
pub fn below(root: &str, path: &str) -> String {
    format!("{}/{}", root.trim_end_matches('/'), path.trim_start_matches('/'))
}
