//! The options of `linkwise dra` and `linkwise claim`.

use clap::{Args, ValueEnum};

use super::{ApiServerArgs, Flags, NodeArgs, Rails};
use linkwise_core::names::is_word;
use linkwise_core::quantity;
use linkwise_core::topology::MigProfile;

/// The most characters of a DNS subdomain, such as a node's name.
const MAX_NAME: usize = 253;

/// `linkwise dra`.
#[derive(Clone, Debug, Args)]
pub struct DraArgs {
    /// The settings' flags: which GPUs are offered.
    #[command(flatten)]
    pub flags: Flags,
    /// The machine.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The form of the manifest
    #[arg(long, default_value = "json")]
    pub format: ManifestFormat,
    /// The node's name
    #[arg(long, value_name = "NAME", default_value = "node", value_parser = dns_subdomain)]
    pub node_name: String,
}

/// `linkwise claim`.
#[derive(Clone, Debug, Args)]
pub struct ClaimArgs {
    /// Number of GPUs, or of MIG devices with --mig: 1 to 32
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub gpus: u8,
    /// Ask for MIG devices of this profile, such as 1g.10gb, instead of whole GPUs
    #[arg(long, value_name = "PROFILE")]
    pub mig: Option<MigProfile>,
    /// Ask for this number of shares of a shared GPU (docs/sharing.md). The claim gets the memory of one share, unless
    /// --memory asks for more
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with_all = ["mig", "strict", "node"])]
    pub shares: Option<u32>,
    /// Ask for this amount of memory of a shared GPU, such as 20Gi
    #[arg(long, value_name = "QUANTITY", value_parser = memory, conflicts_with_all = ["mig", "strict", "node"])]
    pub memory: Option<String>,
    /// Ask for a device near each GPU: an RDMA NIC of DRANET on its PCIe root, or CPUs of dra-driver-cpu on its NUMA
    /// node; for up to 16 GPUs
    #[arg(long, value_name = "DEVICE", conflicts_with = "mig")]
    pub near: Option<Near>,
    /// Take the same number of GPUs on each of these rails, such as 0-3 or 0,2,4-5, so that the pods of a job get the
    /// same rails on each node
    #[arg(long, value_name = "LIST", conflicts_with_all = ["mig", "near", "shares", "memory", "strict", "exact"])]
    pub rails: Option<Rails>,
    /// Take GPUs of one group only: wait while no group has enough of them free, instead of taking any GPUs
    #[arg(long, conflicts_with_all = ["mig", "near"])]
    pub strict: bool,
    /// Kind of object: a claim that pods share, a template from which each pod gets its own claim, or a pod or
    /// deployment with its template
    #[arg(long, default_value = "claim")]
    pub kind: ClaimKind,
    /// The name of the objects; by default gpu, gpus-N, or mig- and the profile
    #[arg(long, value_name = "NAME", value_parser = label)]
    pub name: Option<String>,
    /// List the groups of this machine only, or check that it has the rails: a built-in name or a file, as for --node
    /// of other commands. Given several times: the groups of these machines, the best of all first. With --cluster:
    /// machines that give the bandwidths of nodes with the same groups
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "mig")]
    pub node: Vec<String>,
    /// The form of the manifest
    #[arg(long, default_value = "yaml")]
    pub format: ManifestFormat,
    /// Name one kind of group instead of alternatives, for schedulers that do not read alternatives
    /// (docs/schedulers.md). With --node or --cluster it is the kind that is the best one on most machines. The claim
    /// waits while no such group has enough free GPUs; its disadvantages are printed to standard error. Kueue needs a
    /// deviceClassMapping of gpu.nvidia.com, and a request of CPU in each pod
    #[arg(long, conflicts_with_all = ["mig", "strict", "shares", "memory"])]
    pub exact: bool,
    /// The cluster for the claim.
    #[command(flatten)]
    pub fleet: FleetArgs,
}

/// The cluster in which a claim is to find its groups.
#[derive(Clone, Debug, Args)]
pub struct FleetArgs {
    /// List the groups of this cluster's nodes, the best of all nodes first; with --exact name the kind of group that
    /// is the best one on most nodes. The nodes are read from the ResourceSlices at the API server, or from a file with
    /// them (`kubectl get resourceslices -o json`; - for standard input)
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub cluster: Option<String>,
    /// The API server.
    #[command(flatten)]
    pub api: ApiServerArgs,
}

/// The form of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ManifestFormat {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The device that each GPU is to be near to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Near {
    /// An RDMA NIC.
    Nic,
    /// CPUs.
    Cpu,
}

/// The kind of object that requests devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClaimKind {
    /// A ResourceClaim.
    Claim,
    /// A ResourceClaimTemplate. If it lists alternatives and --strict is not given, it comes after another
    /// template, without alternatives, for further claims of the same pod.
    Template,
    /// A ResourceClaimTemplate, and a Pod that uses it.
    Pod,
    /// A ResourceClaimTemplate, and a Deployment whose pods use it.
    Deployment,
}

fn memory(text: &str) -> Result<String, String> {
    let fits = quantity::parse(text).is_some_and(|bytes| bytes > 0);
    fits.then(|| text.to_owned()).ok_or_else(|| "expected a quantity above 0, such as 20Gi".to_owned())
}

pub(super) fn dns_subdomain(text: &str) -> Result<String, String> {
    let fits = text.len() <= MAX_NAME && text.split('.').all(is_label);
    fits.then(|| text.to_owned()).ok_or_else(|| {
        format!("expected a DNS subdomain: lower-case letters, digits, '-' and '.', at most {MAX_NAME} of them")
    })
}

/// Checks that a name is a DNS label.
pub(super) fn label(text: &str) -> Result<String, String> {
    let fits = text.len() <= 63 && is_label(text);
    fits.then(|| text.to_owned())
        .ok_or_else(|| "expected a DNS label: lower-case letters, digits and '-', at most 63 of them".into())
}

fn is_label(label: &str) -> bool {
    is_word(label, b"-") && !label.bytes().any(|byte| byte.is_ascii_uppercase())
}
