//! The labels of a node, for schedulers and people: those of NVIDIA's GPU Feature Discovery (`nvidia.com/..`), and
//! linkwise's own about the node's links (`linkwise.dev/..`). docs/labels.md lists them.
//!
//! Pure: takes hardware, plan and a few facts of the host; returns a sorted map. `LabelSource` (`src/run/labels.rs`)
//! calls it when a fact may have changed, `linkwise labels` with `--node` or `--oneshot` once. `gpus` has the labels of
//! whole GPUs, `mig` those of MIG devices, `links` our own and the clique's. An unknown fact costs its own labels and
//! no other. A value that Kubernetes would refuse is left out and reported, because NFD drops it silently.

mod gpus;
mod links;
mod mig;
#[cfg(test)]
mod tests;

use crate::prelude::*;
use alloc::collections::BTreeMap;

use crate::names::is_word;
use crate::quote::quoted;
use crate::state::{DriverVersions, ResourceName, ResourcePlan, SharingKind};
use crate::topology::NodeTopology;

/// The prefix of GPU Feature Discovery's labels.
const NVIDIA: &str = "nvidia.com";

/// The prefix of our own labels.
const LINKWISE: &str = "linkwise.dev";

/// The facts from which the labels of a node are made.
#[derive(Clone, Copy, Debug)]
pub struct LabelFacts<'a> {
    /// The GPUs and their links.
    pub topology: &'a NodeTopology,
    /// The driver's versions.
    pub versions: &'a DriverVersions,
    /// The operator's plan.
    pub plan: &'a ResourcePlan,
    /// The facts of the host.
    pub host: &'a HostFacts,
    /// The settings.
    pub settings: &'a LabelSettings,
}

/// The facts of the host that labels use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// The content of the machine type file; `None` if there is no such file.
    pub machine_type: Option<String>,
    /// NVIDIA vGPU, if this host is a VM.
    pub vgpu: Vgpu,
}

/// NVIDIA vGPU, as the PCI devices of a guest show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Vgpu {
    /// The PCI configuration space of a device cannot be read as a whole, which only root may do.
    #[default]
    Unknown,
    /// No device is a virtual GPU.
    Absent,
    /// At least one device is a virtual GPU.
    Present {
        /// The version of the host's driver, such as `550.54.16`.
        driver_version: Option<String>,
        /// Its branch, such as `r550_40`.
        driver_branch: Option<String>,
    },
}

/// The settings of labels, beside those of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelSettings {
    /// `nvidia.com/gfd.timestamp`, seconds since the Unix epoch; `None` leaves it out.
    pub timestamp: Option<u64>,
    /// True to write `nvidia.com/gpu.clique`; false if another program writes it.
    pub clique: bool,
    /// The value of `linkwise.dev/nvlink-fabric` for a node that is a fabric of its own; unique in the cluster. Without
    /// it none of our own labels is written, because schedulers need each on every GPU node or on none.
    pub own_fabric: Option<String>,
}

impl Default for LabelSettings {
    fn default() -> Self {
        Self { timestamp: None, clique: true, own_fabric: None }
    }
}

/// A problem with a node's labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum LabelProblem {
    /// Kubernetes would refuse a label.
    #[error("label {key} left out: {} is not a label value (at most 63 letters, digits, '-', '_', '.')", quoted(value))]
    Dropped {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
    },
    /// MPS is configured, and MIG is on.
    #[error("nvidia.com/mps.capable is false: MPS cannot share MIG devices, and MIG is enabled on this node")]
    MpsWithMig,
    /// The GPUs' NVLink cliques differ.
    #[error("nvidia.com/gpu.clique left out: the GPUs are in different NVLink cliques ({})", .0.join(", "))]
    CliquesDiffer(Vec<String>),
    /// The GPUs' models differ, and a label has room for one.
    #[error("labels nvidia.com/gpu.* describe only {chosen}: the node has {1} GPU models", chosen = quoted(.0))]
    SeveralModels(String, usize),
    /// The NVLinks of a GPU are unknown.
    #[error("linkwise.dev/gpu.link and linkwise.dev/gpu.island-size left out: the NVLinks of a GPU are unknown")]
    NvLinksUnknown,
    /// The node's own NVLink fabric has no name.
    #[error("labels linkwise.dev/* left out: the node's name is unknown; set NODE_NAME")]
    NoNodeName,
}

/// Makes the labels of a node, and reports the problems with them.
///
/// A node that offers no GPU has a timestamp and the labels of vGPU, and nothing else.
pub fn labels(facts: LabelFacts<'_>) -> (BTreeMap<String, String>, Vec<LabelProblem>) {
    let LabelFacts { topology: seen, versions, plan, host, settings } = facts;
    let mut labels = Labels::default();
    if let Some(timestamp) = settings.timestamp {
        labels.put("nvidia.com/gfd.timestamp", timestamp);
    }
    let offered = seen.gpus().iter().enumerate().filter(|(_, gpu)| plan.filter.offers(gpu));
    let places: Vec<usize> = offered.map(|(place, _)| place).collect();
    let topology = seen.restricted(&places);
    if !topology.gpus().is_empty() {
        let machine = host.machine_type.as_deref().map_or_else(|| "unknown".to_owned(), |text| sanitised(text.trim()));
        labels.put("nvidia.com/gpu.machine", machine);
        labels.versions(versions);
        labels.capabilities(&topology, plan);
        gpus::labels(&topology, plan, &mut labels);
        mig::labels(&topology, plan, &mut labels);
        links::labels(&topology, settings, &mut labels);
    }
    labels.vgpu(&host.vgpu);
    (labels.map, labels.problems)
}

/// Labels being made.
#[derive(Default)]
struct Labels {
    map: BTreeMap<String, String>,
    problems: Vec<LabelProblem>,
}

impl Labels {
    /// Sets a label and replaces an earlier value. An invalid value is left out, and the earlier one is removed.
    fn put(&mut self, key: impl Into<String>, value: impl ToString) {
        let (key, value) = (key.into(), value.to_string());
        if is_key(&key) && is_value(&value) {
            self.map.insert(key, value);
        } else {
            self.map.remove(&key);
            self.problems.push(LabelProblem::Dropped { key, value });
        }
    }

    /// Sets a label if its value is known.
    fn put_known(&mut self, key: impl Into<String>, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }

    /// Sets the labels of the versions. Each part of a version has an older name too.
    fn versions(&mut self, versions: &DriverVersions) {
        if let Some(full) = &versions.driver {
            self.put("nvidia.com/cuda.driver-version.full", full);
            let mut parts = full.splitn(3, '.');
            if let (Some(major), Some(minor)) = (parts.next(), parts.next()) {
                let revision = parts.next().unwrap_or_default();
                for (name, older, value) in
                    [("major", "major", major), ("minor", "minor", minor), ("revision", "rev", revision)]
                {
                    self.put(format!("{NVIDIA}/cuda.driver-version.{name}"), value);
                    self.put(format!("{NVIDIA}/cuda.driver.{older}"), value);
                }
            }
        }
        if let Some(cuda) = versions.cuda {
            self.put("nvidia.com/cuda.runtime-version.full", format!("{}.{}", cuda.major, cuda.minor));
            for (name, value) in [("major", cuda.major), ("minor", cuda.minor)] {
                self.put(format!("{NVIDIA}/cuda.runtime-version.{name}"), value);
                self.put(format!("{NVIDIA}/cuda.runtime.{name}"), value);
            }
        }
    }

    fn capabilities(&mut self, topology: &NodeTopology, plan: &ResourcePlan) {
        self.put("nvidia.com/mig.capable", topology.gpus().iter().any(|gpu| gpu.facts.mig.is_some()));
        let by_mps = plan.sharing.as_ref().filter(|sharing| sharing.kind == SharingKind::Mps);
        let by_mps = by_mps.is_some_and(|sharing| sharing.resources.iter().any(|resource| resource.replicas > 1));
        let mig = topology.gpus().iter().any(|gpu| gpu.mig_enabled);
        if by_mps && mig {
            self.problems.push(LabelProblem::MpsWithMig);
        }
        self.put("nvidia.com/mps.capable", by_mps && !mig);
    }

    fn vgpu(&mut self, vgpu: &Vgpu) {
        match vgpu {
            Vgpu::Unknown => {}
            Vgpu::Absent => self.put("nvidia.com/vgpu.present", false),
            Vgpu::Present { driver_version, driver_branch } => {
                self.put("nvidia.com/vgpu.present", true);
                self.put_known("nvidia.com/vgpu.host-driver-version", driver_version.as_ref());
                self.put_known("nvidia.com/vgpu.host-driver-branch", driver_branch.as_ref());
            }
        }
    }
}

/// The sharing of a resource's devices, as labels show it.
struct Shared {
    replicas: u32,
    strategy: &'static str,
    /// The suffix of the product's name.
    suffix: &'static str,
}

impl Shared {
    /// Not shared: a device goes to one container.
    const NOT: Self = Self { replicas: 1, strategy: "none", suffix: "" };

    /// Reads the plan's sharing of a resource. A resource that is shared under another name adds no suffix to the
    /// product's name.
    fn of(plan: &ResourcePlan, resource: &ResourceName) -> Self {
        let Some(sharing) = &plan.sharing else { return Self::NOT };
        let mut resources = sharing.resources.iter();
        let Some(shared) = resources.find(|shared| shared.name == *resource && shared.replicas > 1) else {
            return Self::NOT;
        };
        let is_renamed = shared.rename.as_ref().map_or(sharing.rename_by_default, |name| name != resource);
        Self {
            replicas: shared.replicas,
            strategy: match sharing.kind {
                SharingKind::TimeSlicing => "time-slicing",
                SharingKind::Mps => "mps",
            },
            suffix: if is_renamed { "" } else { "-SHARED" },
        }
    }
}

/// The longest value, and the longest name behind the slash of a key, in bytes (Kubernetes,
/// apimachinery/pkg/util/validation).
const MAX_VALUE: usize = 63;

/// Makes a text fit to be part of a value, as GPU Feature Discovery does: characters other than letters, digits, '-',
/// '_' and '.' are removed, and the words that are left are joined by '-'. The result may be too long for a value, or
/// begin or end with '-', '_' or '.'.
pub fn sanitised(text: &str) -> String {
    let is_kept = |c: &char| c.is_ascii_alphanumeric() || c.is_ascii_whitespace() || matches!(c, '-' | '_' | '.');
    let kept: String = text.chars().filter(is_kept).collect();
    kept.split_ascii_whitespace().collect::<Vec<_>>().join("-")
}

/// Returns true if Kubernetes, and with it NFD, accepts this value. An empty one is valid.
fn is_value(value: &str) -> bool {
    value.is_empty() || is_name(value)
}

/// Returns true if Kubernetes accepts this key. Prefixes are constants, and valid.
fn is_key(key: &str) -> bool {
    key.split_once('/').is_some_and(|(_, name)| is_name(name))
}

fn is_name(text: &str) -> bool {
    text.len() <= MAX_VALUE && is_word(text, b"-_.")
}
