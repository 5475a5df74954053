//! The options of `linkwise run` and `linkwise mps-control-daemon`: the API server, NVML, XIDs, the MPS root.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use linkwise_cluster::{Access, AccessError};

use super::{Flags, HostArgs, LogArgs};
use linkwise_core::state::{XidPolicy, XidSet};

/// `linkwise run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The settings' flags.
    #[command(flatten)]
    pub flags: Flags,
    /// Deadlines and intervals.
    #[command(flatten)]
    pub nvml: NvmlArgs,
    /// The folder in which the GPUs' health is stored for the next start, as linkwise_health.json; by default the
    /// folder linkwise beside the kubelet's socket
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// The node's name, for labels, DRA, the node's condition and events
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node_name: Option<String>,
    /// The API server, for DRA, the node's condition and events.
    #[command(flatten)]
    pub api: ApiServerArgs,
    /// The UID of this process's pod, so that a container of it that starts again does not take over a second time
    #[arg(long, value_name = "UID", env = "LINKWISE_POD_UID", default_value = "")]
    pub pod_uid: String,
    /// The MPS root.
    #[command(flatten)]
    pub mps: MpsRootArgs,
    /// Serve gRPC's health service (grpc.health.v1.Health, the services "" and "liveness") on this port too, as
    /// NVIDIA's DRA driver does for the GPU Operator's probes; 0 takes a free port, which is logged
    #[arg(long, value_name = "PORT", env = "LINKWISE_HEALTHCHECK_PORT")]
    pub healthcheck_port: Option<u16>,
    /// XIDs that do not make a GPU unhealthy: numbers with commas, or all (see docs/health.md)
    #[arg(long, value_name = "LIST", env = "DP_DISABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub disable_healthchecks: String,
    /// XIDs that make a GPU unhealthy; only linkwise.health.xids wins over this list: numbers with commas, or all
    #[arg(long, value_name = "LIST", env = "DP_ENABLE_HEALTHCHECKS", default_value = "", hide_default_value = true)]
    pub enable_healthchecks: String,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The folder of a ServiceAccount's credentials in every pod.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The API server and the credentials for it.
#[derive(Clone, Debug, Args)]
pub struct ApiServerArgs {
    /// The kubeconfig file that names the API server and the credentials; by default those of the pod's ServiceAccount
    #[arg(long, value_name = "FILE", env = "KUBECONFIG", default_value = "", hide_default_value = true)]
    pub kubeconfig: String,
    /// The API server's host, as Kubernetes sets it in every pod; empty outside of a cluster
    #[arg(long, value_name = "HOST", env = "KUBERNETES_SERVICE_HOST", default_value = "", hide = true)]
    pub api_server_host: String,
    /// The API server's port, as Kubernetes sets it in every pod
    #[arg(long, value_name = "PORT", env = "KUBERNETES_SERVICE_PORT", default_value_t = 443, hide = true)]
    pub api_server_port: u16,
    /// The folder into which the kubelet mounts the pod's token and the API server's CA
    #[arg(long, value_name = "FOLDER", env = "LINKWISE_SERVICE_ACCOUNT_DIR", default_value = SERVICE_ACCOUNT)]
    #[arg(hide = true)]
    pub service_account_dir: PathBuf,
}

impl ApiServerArgs {
    /// The access that these options name. Fails if they name none.
    pub fn access(&self) -> Result<Access, AccessError> {
        Access::of(&self.kubeconfig, (&self.api_server_host, self.api_server_port), &self.service_account_dir)
    }

    /// Returns true if a kubeconfig is given or the ServiceAccount has a token. Reads a file's metadata: may block.
    pub fn has_credentials(&self) -> bool {
        !self.kubeconfig.is_empty() || self.service_account_dir.join("token").exists()
    }

    /// Returns true if a kubeconfig or the pod's environment names an API server.
    pub fn is_given(&self) -> bool {
        !self.kubeconfig.is_empty() || !self.api_server_host.is_empty()
    }
}

/// Deadlines and intervals of NVML, health and doors.
#[derive(Clone, Debug, Args)]
pub struct NvmlArgs {
    /// The interval of polls
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub nvml_poll_ms: u64,
    /// The longest time for one NVML call
    #[arg(long, value_name = "N", default_value_t = 30_000, hide = true)]
    pub nvml_call_ms: u64,
    /// The longest time for initialising NVML, and for the first call to each GPU
    #[arg(long, value_name = "N", default_value_t = 120_000, hide = true)]
    pub nvml_start_ms: u64,
    /// The pause before a failed agent is restarted; doubles, up to 60 times this value
    #[arg(long, value_name = "N", default_value_t = 1_000, hide = true)]
    pub nvml_pause_ms: u64,
    /// The time for which NVML may be unavailable before --on-nvml-loss applies
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_grace_ms: u64,
    /// The time for which a GPU is quarantined before its first trial; doubles, up to 60 times this value
    #[arg(long, value_name = "N", default_value_t = 60_000, hide = true)]
    pub nvml_trial_ms: u64,
    /// The time for which polls have to show a GPU as recovered, by default 60000; doubles, up to 60 times this value
    #[arg(long, value_name = "N", hide = true)]
    pub health_hold_ms: Option<u64>,
    /// The time for which the kubelet's lists may lack a claim that a container has, by default 90000
    #[arg(long, value_name = "N", hide = true)]
    pub claims_listed_ms: Option<u64>,
    /// The interval of PCI bus scans on a node without GPUs
    #[arg(long, value_name = "N", default_value_t = 10_000, hide = true)]
    pub bus_look_ms: u64,
}

impl RunArgs {
    /// The policy of the two lists of XIDs, and each of their items that is not an XID, with its variable.
    pub fn xid_policy(&self) -> (XidPolicy, impl Iterator<Item = (&'static str, String)> + use<>) {
        let (disabled, of_disabled) = XidSet::parse(&self.disable_healthchecks);
        let (enabled, of_enabled) = XidSet::parse(&self.enable_healthchecks);
        let of_disabled = of_disabled.into_iter().map(|item| ("DP_DISABLE_HEALTHCHECKS", item));
        let passed_over = of_disabled.chain(of_enabled.into_iter().map(|item| ("DP_ENABLE_HEALTHCHECKS", item)));
        (XidPolicy { disabled, enabled, ..XidPolicy::default() }, passed_over)
    }
}

/// The flag for [`MpsControlDaemonArgs::init`].
pub const INIT_FLAG: &str = "--init";

/// `linkwise mps-control-daemon`.
#[derive(Clone, Debug, Args)]
pub struct MpsControlDaemonArgs {
    /// A task other than running the daemons.
    #[command(subcommand)]
    pub command: Option<MpsCommand>,
    /// Act as the container's first process, and run the daemons in a child; process 1 does so without this flag
    #[arg(long, hide = true)]
    pub init: bool,
    /// The MPS root.
    #[command(flatten)]
    pub root: MpsRootArgs,
    /// The settings' flags, because the NVIDIA plugin's command takes them. Only the kubelet's socket has an effect: an
    /// operator's order to release the driver lies beside it.
    #[command(flatten)]
    pub flags: Flags,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// The folder that the plugin and the daemons share.
#[derive(Clone, Debug, Args)]
pub struct MpsRootArgs {
    /// The path at which the host's MPS root is mounted in this container (--mps-root is its path on the host)
    #[arg(
        long = "mps-container-root",
        value_name = "PATH",
        env = "LINKWISE_MPS_CONTAINER_ROOT",
        default_value = "/mps",
        global = true
    )]
    pub container_root: PathBuf,
}

/// Other tasks of `linkwise mps-control-daemon`.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum MpsCommand {
    /// Mount the shared memory of MPS under the MPS root, if it is not mounted yet (in the privileged init container)
    MountShm,
}
