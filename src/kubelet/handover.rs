//! How a container gets the GPUs it was granted: the answer to Allocate beyond the grant itself.
//!
//! Owns the ways and what each of them says, as the NVIDIA device plugin has them (`internal/plugin/server.go` of
//! NVIDIA/k8s-device-plugin); `convert` puts it on the wire. Built by the runtime from the configuration. Pure, and on the
//! path of an admission: what changes is read from a snapshot, nothing is looked at.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;
use tokio::sync::watch;

use super::nics::RdmaNodes;
use crate::state::{Device, NodeState, ResourceName};

/// The variable by which NVIDIA's container runtime knows which GPUs to hand in.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The same for IMEX channels.
const IMEX_CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";

/// The folder in which NVIDIA's container runtime looks for device names, where it takes them from mounts.
const MOUNTS_FOLDER: &str = "/var/run/nvidia-container-devices";

/// What is mounted there: the name is all that counts.
const NOTHING: &str = "/dev/null";

/// The variable in which NCCL finds the name of a topology file.
const NCCL_TOPO_FILE: &str = "NCCL_TOPO_FILE";

/// The folder that the file is in, as a container sees it.
const NCCL_FOLDER: &str = "/run/linkwise/nccl";

/// The file's name in its folder.
pub const NCCL_FILE: &str = "topology.xml";

/// Whom a CDI annotation comes from: the first part of its name, as the NVIDIA device plugin writes it.
const ANNOTATION_PLUGIN: &str = "nvidia-device-plugin";

/// The longest name of an annotation, without its prefix (Kubernetes).
const LONGEST_NAME: usize = 63;

/// The ways by which containers get their GPUs; several at once are allowed.
#[derive(Clone, Debug)]
pub struct Handover {
    /// The GPUs' names in NVIDIA_VISIBLE_DEVICES, for NVIDIA's container runtime.
    pub envvar: bool,
    /// The GPUs' names as mounts below `/var/run/nvidia-container-devices`, for the same runtime.
    pub volume_mounts: bool,
    /// The GPUs as CDI devices, for any runtime that knows CDI.
    pub cdi: Option<CdiNames>,
    /// By which names.
    pub ids: DeviceIds,
    /// More variables, for NVIDIA's container runtime: `NVIDIA_GDS=enabled` ...
    pub variables: BTreeMap<String, String>,
    /// Whether device nodes are named in the answer (`--pass-device-specs`): for runtimes that give a container
    /// only the nodes that are named.
    pub device_nodes: bool,
    /// What clients of an MPS daemon get beside their GPUs.
    pub mps: MpsClients,
    /// The folder on the host with [`NCCL_FILE`] in it, where containers are to get that.
    pub nccl_topology: Option<PathBuf>,
    /// What the node has beside its GPUs, as last looked at.
    pub surroundings: watch::Receiver<Arc<Surroundings>>,
}

/// How CDI devices are named, and to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdiNames {
    /// The kind of our GPUs, `vendor/class`.
    pub kind: String,
    /// In an annotation whose key begins with this prefix; runtimes look under `cdi.k8s.io/`.
    pub annotations: Option<String>,
    /// In the field of the device plugin API that the kubelet hands on over CRI.
    pub cri: bool,
}

/// What a container gets that shares its GPUs by MPS.
#[derive(Clone, Debug)]
pub struct MpsClients {
    /// The MPS root on the host.
    pub root: PathBuf,
    /// What it is for a resource under this root. Its caller is on the path of an admission: it has to be pure.
    pub grant: fn(&Path, &ResourceName) -> MpsClient,
}

/// What one such container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsClient {
    /// Environment.
    pub variables: Vec<(String, String)>,
    /// Folders: on the host, in the container.
    pub mounts: Vec<(String, String)>,
}

impl Default for MpsClients {
    /// Nothing, for nodes that share nothing by MPS.
    fn default() -> Self {
        Self { root: PathBuf::new(), grant: |_, _| MpsClient::default() }
    }
}

/// By which names devices are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeviceIds {
    /// The UUID: the same after a reboot.
    #[default]
    Uuid,
    /// NVML's index.
    Index,
}

/// What every container with a GPU gets beside it. It follows the node: a module that is loaded later brings its nodes later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The root of `/dev` on the host.
    pub dev_root: PathBuf,
    /// Device nodes: `/dev/nvidiactl` ...
    pub control_nodes: Vec<String>,
    /// The IMEX channels, by number.
    pub imex_channels: Vec<u32>,
    /// The full names of CDI devices.
    pub cdi: Vec<String>,
    /// The nodes of RDMA NICs, where a container is to get those nearest to its GPUs.
    pub rdma: Option<RdmaNodes>,
}

/// What one container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// Environment.
    pub variables: BTreeMap<String, String>,
    /// Device nodes: on the host, in the container.
    pub nodes: Vec<(String, String)>,
    /// Mounts: on the host, in the container.
    pub mounts: Vec<(String, String)>,
    /// Mounts that are read only.
    pub read_only: Vec<(String, String)>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Full names of CDI devices.
    pub cdi: Vec<String>,
}

/// Why a granted GPU cannot be handed over.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum HandoverError {
    /// No minor number, no /dev/nvidiaN, neither to pass nor in the CDI spec.
    #[error("the minor number of {0} is unknown: no device node to pass")]
    NoMinor(String),
}

impl Default for Handover {
    /// As the NVIDIA device plugin does it: by environment, by UUID.
    fn default() -> Self {
        Self {
            envvar: true,
            volume_mounts: false,
            cdi: None,
            ids: DeviceIds::default(),
            variables: BTreeMap::new(),
            device_nodes: false,
            mps: MpsClients::default(),
            nccl_topology: None,
            surroundings: watch::channel(Arc::default()).1,
        }
    }
}

impl Handover {
    /// What a container gets that was granted these devices of a resource.
    ///
    /// A GPU whose minor number is unknown has no node, and the order is refused where the node is what would be given: a
    /// container without its GPU is worse than none.
    pub(super) fn answer(
        &self,
        resource: &ResourceName,
        snapshot: &NodeState,
        devices: &[&Device],
    ) -> Result<Answer, HandoverError> {
        let around = Arc::clone(&self.surroundings.borrow());
        // Slots of one device lie beside each other, and are that device once.
        let mut devices = devices.to_vec();
        devices.dedup_by_key(|device| device.uuid());
        let mut answer = self.gpus(resource, &devices, &around)?;
        // Whatever the way: no runtime knows of MPS.
        if snapshot.mps_shares().contains_key(resource) && devices.iter().any(|device| device.slot.is_some()) {
            let MpsClient { variables, mounts } = (self.mps.grant)(&self.mps.root, resource);
            answer.variables.extend(variables);
            answer.mounts.extend(mounts);
        }
        if let Some(rdma) = &around.rdma {
            rdma.answer(snapshot.topology(), &devices, &mut answer);
        }
        if let Some(folder) = &self.nccl_topology {
            // The folder, not the file: a container that runs sees what is moved to the file's place later.
            answer.read_only.push((folder.display().to_string(), NCCL_FOLDER.to_owned()));
            answer.variables.insert(NCCL_TOPO_FILE.to_owned(), format!("{NCCL_FOLDER}/{NCCL_FILE}"));
        }
        Ok(answer)
    }

    fn gpus(
        &self,
        resource: &ResourceName,
        devices: &[&Device],
        around: &Surroundings,
    ) -> Result<Answer, HandoverError> {
        let mut answer = Answer::default();
        let names: Vec<String> = devices.iter().map(|device| self.ids.name(device)).collect();
        if let Some(cdi) = &self.cdi {
            for device in devices {
                device_nodes(device)?;
            }
            cdi.answer(resource, &names, around, &mut answer);
        }
        // The rest is for runtimes that do without CDI.
        if !self.envvar && !self.volume_mounts {
            return Ok(answer);
        }
        answer.variables = self.variables.clone();
        let channels = || around.imex_channels.iter().map(u32::to_string);
        if self.envvar {
            answer.variables.insert(VISIBLE_DEVICES.to_owned(), names.join(","));
            if !around.imex_channels.is_empty() {
                answer.variables.insert(IMEX_CHANNELS.to_owned(), channels().collect::<Vec<_>>().join(","));
            }
        }
        if self.volume_mounts {
            // The folder in the variable says that the names are mounts in it.
            answer.variables.insert(VISIBLE_DEVICES.to_owned(), MOUNTS_FOLDER.to_owned());
            let channels = channels().map(|channel| format!("imex/{channel}"));
            let paths = names.into_iter().chain(channels).map(|name| format!("{MOUNTS_FOLDER}/{name}"));
            answer.mounts = paths.map(|path| (NOTHING.to_owned(), path)).collect();
        }
        if self.device_nodes {
            for device in devices {
                for node in device_nodes(device)? {
                    let node = around.node(&node);
                    // MIG devices of one GPU share its node.
                    if !answer.nodes.contains(&node) {
                        answer.nodes.push(node);
                    }
                }
            }
            answer.nodes.extend(around.control_nodes.iter().map(|path| around.node(path)));
        }
        Ok(answer)
    }
}

impl CdiNames {
    fn answer(&self, resource: &ResourceName, names: &[String], around: &Surroundings, answer: &mut Answer) {
        let devices = names.iter().map(|name| format!("{}={name}", self.kind));
        let devices: Vec<String> = devices.chain(around.cdi.iter().cloned()).collect();
        if let Some(prefix) = &self.annotations {
            answer.annotations.insert(format!("{prefix}{}", annotation(resource)), devices.join(","));
        }
        if self.cri {
            answer.cdi = devices;
        }
    }
}

impl DeviceIds {
    fn name(self, device: &Device) -> String {
        match self {
            Self::Uuid => device.uuid().to_owned(),
            Self::Index => device.index(),
        }
    }
}

impl Surroundings {
    /// Where the host has a node, and where the container.
    fn node(&self, path: &str) -> (String, String) {
        (self.dev_root.join(path.trim_start_matches('/')).display().to_string(), path.to_owned())
    }
}

fn device_nodes(device: &Device) -> Result<Vec<String>, HandoverError> {
    device.device_nodes().ok_or_else(|| HandoverError::NoMinor(device.uuid().to_owned()))
}

/// The annotation's name without its prefix. A container gets one answer for each resource, so the resource tells its
/// annotations apart; what is too long for a name is cut and told apart by a hash.
fn annotation(resource: &ResourceName) -> String {
    let name = format!("{ANNOTATION_PLUGIN}_{}", resource.as_str().replace('/', "_"));
    if name.len() <= LONGEST_NAME {
        return name;
    }
    let mut hasher = DefaultHasher::new();
    resource.hash(&mut hasher);
    let hash = format!("_{:016x}", hasher.finish());
    let kept: String = name.chars().take(LONGEST_NAME - hash.len()).collect();
    kept + &hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Event, NodeState};
    use crate::topology::{HostObservation, NodeObservation};

    fn snapshot(minor: &str) -> NodeState {
        let gpu = format!("[{{index: 4, uuid: GPU-a, pci: '0000:01:00.0'{minor}}}]");
        let gpus = serde_saphyr::from_str(&gpu).unwrap();
        let observed = NodeObservation { gpus, host: HostObservation::default(), ..NodeObservation::default() };
        NodeState::default().apply(Event::Observed(Box::new(observed)), std::time::Duration::ZERO).0
    }

    fn answer(handover: &Handover, snapshot: &NodeState) -> Result<Answer, HandoverError> {
        let devices: Vec<&Device> = snapshot.devices(&ResourceName::gpu()).map(|(_, device)| device).collect();
        handover.answer(&ResourceName::gpu(), snapshot, &devices)
    }

    fn around(surroundings: Surroundings) -> watch::Receiver<Arc<Surroundings>> {
        watch::channel(Arc::new(surroundings)).1
    }

    fn cdi() -> CdiNames {
        CdiNames { kind: "vendor/gpu".to_owned(), annotations: Some(String::new()), cri: true }
    }

    #[test]
    fn imex_channels_go_the_way_of_the_gpus() {
        let surroundings = Surroundings {
            imex_channels: vec![0, 3],
            cdi: vec!["vendor/imex-channel=0".to_owned(), "vendor/gds=all".to_owned()],
            ..Surroundings::default()
        };
        let variables = BTreeMap::from([("NVIDIA_GDS".to_owned(), "enabled".to_owned())]);
        let base = Handover { surroundings: around(surroundings), variables, ..Handover::default() };
        let got = answer(&base, &snapshot("")).unwrap();
        let variables = [("NVIDIA_GDS", "enabled"), (IMEX_CHANNELS, "0,3"), (VISIBLE_DEVICES, "GPU-a")];
        let texts = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(got, Answer { variables: texts(&variables), ..Answer::default() });

        let mounts = Handover { envvar: false, volume_mounts: true, ids: DeviceIds::Index, ..base.clone() };
        let got = answer(&mounts, &snapshot("")).unwrap();
        assert_eq!(got.variables, texts(&[("NVIDIA_GDS", "enabled"), (VISIBLE_DEVICES, MOUNTS_FOLDER)]));
        let mount = |name: &str| (NOTHING.to_owned(), format!("{MOUNTS_FOLDER}/{name}"));
        assert_eq!(got.mounts, [mount("4"), mount("imex/0"), mount("imex/3")]);

        let cdi = Handover { envvar: false, cdi: Some(cdi()), ..base };
        let got = answer(&cdi, &snapshot(", minor: 0")).unwrap();
        assert_eq!(got.cdi, ["vendor/gpu=GPU-a", "vendor/imex-channel=0", "vendor/gds=all"]);
        assert_eq!(got.annotations["nvidia-device-plugin_nvidia.com_gpu"], got.cdi.join(","));
        assert_eq!((got.variables.len(), got.mounts.len()), (0, 0));
    }

    #[test]
    fn a_gpu_without_a_node_is_refused_where_the_node_is_what_is_given() {
        let without = snapshot("");
        let by_name = Handover::default();
        assert!(answer(&by_name, &without).is_ok());
        for handover in [
            Handover { device_nodes: true, ..by_name.clone() },
            Handover { envvar: false, cdi: Some(cdi()), ..by_name.clone() },
        ] {
            assert!(answer(&handover, &snapshot(", minor: 0")).is_ok());
            let refusal = answer(&handover, &without).unwrap_err().to_string();
            assert_eq!(refusal, "the minor number of GPU-a is unknown: no device node to pass");
        }
    }

    #[test]
    fn annotations_of_resources_with_long_names_stay_apart() {
        let name = |end: &str| -> ResourceName { format!("nvidia.com/{}{end}", "x".repeat(60)).parse().unwrap() };
        let (a, b) = (annotation(&name("a")), annotation(&name("b")));
        assert_ne!(a, b);
        assert_eq!((a.len(), b.len()), (LONGEST_NAME, LONGEST_NAME));
        assert_eq!(a, annotation(&name("a")), "always the same");
    }
}
