//! The options of `linkwise gang`.

use clap::{Args, ValueEnum};

use super::dra::label;
use super::{FleetArgs, ManifestFormat, Near};

/// `linkwise gang`.
#[derive(Clone, Debug, Args)]
pub struct GangArgs {
    /// How many pods, all of which run or none
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub pods: u32,
    /// How many GPUs each pod has: 1 to 32
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub gpus: u8,
    /// The scheduler that places the pods
    #[arg(long)]
    pub scheduler: GangScheduler,
    /// Beside each GPU ask for an RDMA NIC of DRANET on its PCIe root, or for CPUs of dra-driver-cpu on its NUMA node; for
    /// up to 16 GPUs
    #[arg(long, value_name = "DEVICE")]
    pub near: Option<Near>,
    /// Name one group instead of alternatives, as linkwise claim does; kueue and kai read no alternatives, and always get
    /// such claims
    #[arg(long)]
    pub exact: bool,
    /// Name the groups of this machine, or of several: a built-in name or a file, as --node of linkwise claim
    #[arg(long, value_name = "NAME|FILE")]
    pub node: Vec<String>,
    /// The cluster of the claims.
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Place all pods on nodes with one value of this label: nvlink (linkwise.dev/nvlink-fabric, and an IMEX channel of
    /// NVIDIA's ComputeDomain for each pod), of Topograph leaf, spine or accelerator (fabric.topograph.run/tier-0,
    /// fabric.topograph.run/tier-1, accelerator.topograph.run/domain), or any other label
    #[arg(long, value_name = "LABEL", value_parser = label_key)]
    pub within: Option<String>,
    /// Prefer such nodes only, and take others while there are too few of them
    #[arg(long, requires = "within")]
    pub prefer: bool,
    /// The queue; by default gpus for kueue, default-queue for kai, default for volcano
    #[arg(long, value_name = "NAME", value_parser = label)]
    pub queue: Option<String>,
    /// The name of the objects
    #[arg(long, value_name = "NAME", default_value = "gang", value_parser = label)]
    pub name: String,
    /// The image of the pods; its container prints the GPUs that it has
    #[arg(long, value_name = "IMAGE", default_value = "ubuntu:24.04")]
    pub image: String,
    /// The form of the manifest
    #[arg(long, default_value = "yaml")]
    pub format: ManifestFormat,
}

/// The scheduler of a gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GangScheduler {
    /// kube-scheduler with its own PodGroup, from Kubernetes 1.37
    Kube,
    /// Kueue before kube-scheduler
    Kueue,
    /// KAI Scheduler
    Kai,
    /// Volcano
    Volcano,
}

/// A label by one of our words, or by its key.
fn label_key(text: &str) -> Result<String, String> {
    let key = match text {
        "nvlink" => "linkwise.dev/nvlink-fabric",
        "leaf" => "fabric.topograph.run/tier-0",
        "spine" => "fabric.topograph.run/tier-1",
        "accelerator" => "accelerator.topograph.run/domain",
        other => other,
    };
    let (prefix, name) = key.split_once('/').unwrap_or(("kubernetes.io", key));
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_name = name.len() <= 63 && name.bytes().all(inner);
    let is_name = is_name && is_end(name.bytes().next()) && is_end(name.bytes().last());
    let is_prefix = prefix.len() <= 253 && prefix.split('.').all(|part| label(part).is_ok());
    (is_name && is_prefix)
        .then(|| key.to_owned())
        .ok_or_else(|| "expected nvlink, leaf, spine, accelerator, or the key of a node's label".to_owned())
}
