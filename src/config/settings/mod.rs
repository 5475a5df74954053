//! The effective configuration: each setting with its value and where that comes from.
//!
//! A flag beats a variable, a variable beats the file, the file beats the default; the table in this file is the one
//! place that says which flag, variable and key a setting has. Plain data: the composition roots build live objects from
//! it, and `linkwise config show` prints it. Called by the composition roots; only [`load`] touches the file system.

mod choices;
mod environment;
mod given;
mod load;
mod plan;
mod row;
mod rules;
mod selection;
mod sharing;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use clap::Arg;
use serde::Serialize;
use serde_json::Value as Json;

use super::file::{File, Finding};
use super::{NumaHintsArg, PolicyArg};
use crate::state::ResourceName;
use given::{
    absolute, address, boolean, choice, choices, imex_channels, interval, maybe_absolute, maybe_boolean, maybe_path,
    path, text, texts, uids,
};
use row::Row;

pub use choices::{
    DeviceIdStrategy, DeviceListStrategy, DiscoveryStrategy, MigStrategy, OnNvmlLoss, SharedPolicy, XidAction,
};
pub use environment::Environment;
pub use given::Interval;
pub(in crate::config) use load::LONGEST_FILE;
pub use load::{ConfigError, Loaded, check, load};
pub use row::{Flags, Sources};
pub use selection::{Excluded, GpuFilter, NamedPattern, Resources};
pub use sharing::{Replicated, ReplicatedDevices, ReplicatedResource, Sharing};

/// A setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting<T> {
    /// What counts.
    pub value: T,
    /// Who says so.
    pub origin: Origin,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag {
        /// The flag, without dashes.
        flag: &'static str,
    },
    /// The environment.
    Environment {
        /// The variable.
        variable: &'static str,
    },
    /// The file.
    File {
        /// The line, from 1.
        line: u64,
    },
    /// Nobody said anything.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag { flag } => write!(f, "flag --{flag}"),
            Self::Environment { variable } => write!(f, "environment {variable}"),
            Self::File { line } => write!(f, "file, line {line}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One setting as people and scripts see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Its key in the file; for the few that no file can say, the flag's name in the same letters.
    pub key: &'static str,
    /// Its value as the file would have it.
    pub value: Json,
    /// Who says so.
    pub origin: Origin,
}

/// The value as JSON. All are plain data whose keys are texts, so that null, the answer to what JSON cannot say, is
/// never seen.
fn json<T: Serialize>(value: &T) -> Json {
    serde_json::to_value(value).unwrap_or(Json::Null)
}

/// The value as a person writes it: a text without quotes, a list of texts with commas.
pub fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Null => String::new(),
        Json::Object(entries) if entries.is_empty() => String::new(),
        Json::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Makes [`Settings`] and all that goes over each of its single values, from one list of them.
macro_rules! settings {
    ($($(#[doc = $help:literal])+ $field:ident: $type:ty = $default:expr, $key:literal, $row:expr;)+) => {
        /// The effective configuration.
        ///
        /// The names of `sharing` and `resources` are those that count: what the NVIDIA plugin ignores is in them only under
        /// `linkwise.naming`.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Settings {
            $($(#[doc = $help])+ pub $field: Setting<$type>,)+
            /// How devices are shared
            pub sharing: Setting<Sharing>,
            /// Names for GPUs and MIG devices by what they are
            pub resources: Setting<Resources>,
            /// What XIDs mean, where not what our table says
            pub xids: Setting<BTreeMap<u64, XidAction>>,
            /// How devices are chosen, by resource
            pub policies: Setting<BTreeMap<ResourceName, PolicyArg>>,
            /// GPUs that are left out
            pub exclude: Setting<Vec<Excluded>>,
        }

        impl Settings {
            /// The effective configuration of what was said; what is wrong is told, and counts as not said.
            pub fn build(sources: &Sources<'_>, findings: &mut Vec<Finding>) -> Self {
                $(
                    let row: Row<$type> = $row.key($key);
                    let $field = row.pick($default, sources, findings);
                )+
                let mut settings = Self {
                    sharing: Setting { value: Sharing::default(), origin: Origin::Default },
                    resources: Setting { value: Resources::default(), origin: Origin::Default },
                    xids: selection::xids(sources.file, findings),
                    policies: selection::policies(sources.file, findings),
                    exclude: selection::exclude(sources.file, findings),
                    $($field,)+
                };
                let naming = settings.naming.value;
                settings.sharing = sharing::read(sources.file, naming, findings);
                settings.resources = selection::resources(sources.file, naming, findings);
                if settings.dev_root.origin == Origin::Default {
                    settings.dev_root.value.clone_from(&settings.driver_root.value);
                }
                rules::check(&settings, findings);
                findings.sort_by_key(|finding| finding.line.unwrap_or(0));
                settings
            }

            /// Each setting, in the order of the documentation.
            pub fn shown(&self) -> Vec<Shown> {
                vec![
                    $(Shown { key: $key, value: json(&self.$field.value), origin: self.$field.origin },)+
                    Shown { key: "resources", value: json(&self.resources.value), origin: self.resources.origin },
                    Shown { key: "sharing", value: json(&self.sharing.value), origin: self.sharing.origin },
                    Shown { key: "linkwise.health.xids", value: json(&self.xids.value), origin: self.xids.origin },
                    Shown { key: "linkwise.policies", value: json(&self.policies.value), origin: self.policies.origin },
                    Shown { key: "linkwise.filter.exclude", value: json(&self.exclude.value), origin: self.exclude.origin },
                ]
            }
        }

        /// The flags, for clap.
        fn args() -> Vec<Arg> {
            let args = [$({
                let row: Row<$type> = $row;
                row.arg(concat!($($help),+).trim(), &plain(&json::<$type>(&$default)))
            },)+];
            args.into_iter().flatten().collect()
        }

        /// The names of the flags.
        fn flags() -> Vec<&'static str> {
            [$({ let row: Row<$type> = $row; row.flag },)+].into_iter().flatten().collect()
        }

        /// The variables.
        fn variables() -> Vec<&'static str> {
            [$({ let row: Row<$type> = $row; row.variables },)+].concat()
        }

        /// The keys that a file may have for them.
        pub(super) fn keys() -> Vec<&'static str> {
            [$($key,)+].into_iter().filter(|key| key.contains('.')).collect()
        }
    };
}

settings! {
    /// The configuration file, in the NVIDIA plugin's format with our own keys under linkwise:. It is read again when it
    /// changes and at SIGHUP
    config_file: Option<PathBuf> = None, "configFile",
        Row::new(maybe_path).flag("config-file", "FILE").variables(&["CONFIG_FILE"]);
    /// How MIG devices are offered: none, single or mixed
    mig_strategy: MigStrategy = MigStrategy::None, "flags.migStrategy",
        Row::new(choice).flag("mig-strategy", "STRATEGY").variables(&["MIG_STRATEGY"]);
    /// End when NVML cannot be initialised (true), or stay up, say so and look again (false). Without it: end where the
    /// PCI bus has an NVIDIA GPU, stay up where it has none
    fail_on_init_error: Option<bool> = None, "flags.failOnInitError",
        Row::new(maybe_boolean).flag("fail-on-init-error", "BOOL").variables(&["FAIL_ON_INIT_ERROR"]);
    /// Where MPS keeps its pipes, logs and shared memory on the host
    mps_root: PathBuf = PathBuf::from("/run/nvidia/mps"), "flags.mpsRoot",
        Row::new(absolute).flag("mps-root", "PATH").variables(&["MPS_ROOT"]);
    /// The root of the driver's installation on the host: / or such as /run/nvidia/driver
    driver_root: PathBuf = PathBuf::from("/"), "flags.nvidiaDriverRoot",
        Row::new(absolute).flag("driver-root", "PATH").aliases(&["nvidia-driver-root"]).variables(&["NVIDIA_DRIVER_ROOT"]);
    /// The root of the device nodes on the host; without it, the driver's root
    dev_root: PathBuf = PathBuf::new(), "flags.nvidiaDevRoot",
        Row::new(absolute).flag("dev-root", "PATH").aliases(&["nvidia-dev-root"]).variables(&["NVIDIA_DEV_ROOT"]);
    /// Start containers with GDRCopy's devices
    gdrcopy_enabled: bool = false, "flags.gdrcopyEnabled",
        Row::new(boolean).flag("gdrcopy-enabled", "BOOL").variables(&["GDRCOPY_ENABLED"]);
    /// Start containers with GPUDirect Storage's devices
    gds_enabled: bool = false, "flags.gdsEnabled",
        Row::new(boolean).flag("gds-enabled", "BOOL").variables(&["GDS_ENABLED"]);
    /// Start containers with Mellanox's devices
    mofed_enabled: bool = false, "flags.mofedEnabled",
        Row::new(boolean).flag("mofed-enabled", "BOOL").variables(&["MOFED_ENABLED"]);
    /// Whether gpu-feature-discovery uses the NodeFeature API
    use_node_feature_api: bool = false, "flags.useNodeFeatureAPI", Row::new(boolean);
    /// Where devices are looked for: auto, nvml or tegra; linkwise knows NVML only
    device_discovery_strategy: DiscoveryStrategy = DiscoveryStrategy::Auto, "flags.deviceDiscoveryStrategy",
        Row::new(choice).flag("device-discovery-strategy", "STRATEGY").variables(&["DEVICE_DISCOVERY_STRATEGY"]);
    /// Name the device nodes (/dev/nvidia0, /dev/nvidiactl ...) in the answer to Allocate, for runtimes that give a
    /// container only the nodes that are named
    pass_device_specs: bool = false, "flags.plugin.passDeviceSpecs",
        Row::new(boolean).flag("pass-device-specs", "BOOL").variables(&["PASS_DEVICE_SPECS"]);
    /// How the container runtime learns of the GPUs: envvar, volume-mounts, cdi-annotations, cdi-cri, several with commas
    device_list_strategy: Vec<DeviceListStrategy> = vec![DeviceListStrategy::Envvar], "flags.plugin.deviceListStrategy",
        Row::new(choices).flag("device-list-strategy", "LIST").variables(&["DEVICE_LIST_STRATEGY"]);
    /// How GPUs are named to it: uuid or index
    device_id_strategy: DeviceIdStrategy = DeviceIdStrategy::Uuid, "flags.plugin.deviceIDStrategy",
        Row::new(choice).flag("device-id-strategy", "STRATEGY").variables(&["DEVICE_ID_STRATEGY"]);
    /// What the keys of CDI's annotations begin with
    cdi_annotation_prefix: String = "cdi.k8s.io/".to_owned(), "flags.plugin.cdiAnnotationPrefix",
        Row::new(text).flag("cdi-annotation-prefix", "PREFIX").variables(&["CDI_ANNOTATION_PREFIX"]);
    /// nvidia-cdi-hook (or nvidia-ctk) on the host, for the hooks of CDI specs. Without it: /usr/bin/nvidia-cdi-hook, where
    /// the driver root shows it, else no hooks
    nvidia_cdi_hook_path: Option<PathBuf> = None, "flags.plugin.nvidiaCTKPath",
        Row::new(maybe_absolute).flag("nvidia-cdi-hook-path", "PATH").aliases(&["nvidia-ctk-path"])
            .variables(&["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"]);
    /// Where the driver's root is mounted in our own container
    driver_root_ctr_path: PathBuf = PathBuf::from("/driver-root"), "flags.plugin.containerDriverRoot",
        Row::new(absolute).flag("driver-root-ctr-path", "PATH").aliases(&["container-driver-root"])
            .variables(&["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"]);
    /// How slots and MIG devices are chosen: distributed or packed
    shared_devices_allocation_policy: SharedPolicy = SharedPolicy::Distributed, "flags.plugin.sharedDevicesAllocationPolicy",
        Row::new(choice).flag("shared-devices-allocation-policy", "POLICY").variables(&["SHARED_DEVICES_ALLOCATION_POLICY"]);
    /// The kubelet's registration socket; our own sockets are made beside it
    kubelet_socket: PathBuf = PathBuf::from("/var/lib/kubelet/device-plugins/kubelet.sock"), "flags.plugin.kubeletSocket",
        Row::new(path).flag("kubelet-socket", "PATH").variables(&["KUBELET_SOCKET"]);
    /// Features of the CDI spec to switch on, with commas
    cdi_feature_flags: Vec<String> = Vec::new(), "flags.plugin.cdiFeatureFlags",
        Row::new(texts).flag("cdi-feature-flags", "LIST").variables(&["CDI_FEATURE_FLAGS"]);
    /// Hooks to leave out of the CDI spec, with commas; all for all
    cdi_disable_hooks: Vec<String> = Vec::new(), "flags.plugin.cdiDisableHooks",
        Row::new(texts).flag("cdi-disable-hooks", "LIST").aliases(&["cdi-disabled-hooks"]).variables(&["CDI_DISABLE_HOOKS"]);
    /// Whether gpu-feature-discovery ends after one look
    gfd_oneshot: bool = false, "flags.gfd.oneshot", Row::new(boolean);
    /// Whether gpu-feature-discovery leaves its timestamp out
    gfd_no_timestamp: bool = false, "flags.gfd.noTimestamp", Row::new(boolean);
    /// How long gpu-feature-discovery sleeps
    gfd_sleep_interval: Option<Interval> = None, "flags.gfd.sleepInterval", Row::new(interval);
    /// Where gpu-feature-discovery writes
    gfd_output_file: Option<PathBuf> = None, "flags.gfd.outputFile", Row::new(maybe_path);
    /// Where gpu-feature-discovery finds the machine's type
    gfd_machine_type_file: Option<PathBuf> = None, "flags.gfd.machineTypeFile", Row::new(maybe_path);
    /// IMEX channels for every container with a GPU: none, or 0
    imex_channel_ids: Vec<u32> = Vec::new(), "imex.channelIDs",
        Row::new(imex_channels).flag("imex-channel-ids", "LIST").variables(&["IMEX_CHANNEL_IDS"]);
    /// Whether these channels must be there
    imex_required: bool = false, "imex.required",
        Row::new(boolean).flag("imex-required", "BOOL").variables(&["IMEX_REQUIRED"]);
    /// Whether rename, devices and resources count, which the NVIDIA plugin ignores
    naming: bool = false, "linkwise.naming", Row::new(boolean);
    /// Which NUMA nodes devices claim, for a kubelet with a Topology Manager: node, package or off (see
    /// docs/topology-manager.md)
    numa_hints: NumaHintsArg = NumaHintsArg::Node, "linkwise.numaHints",
        Row::new(choice).flag("numa-hints", "HINTS").variables(&["LINKWISE_NUMA_HINTS"]);
    /// Users beside root and our own that may call our sockets, by uid
    allowed_uids: Vec<u32> = Vec::new(), "linkwise.allowedUids",
        Row::new(uids).flag("allowed-uids", "LIST").variables(&["LINKWISE_ALLOWED_UIDS"]);
    /// What becomes of the devices when NVML stays away: keep or unhealthy
    on_nvml_loss: OnNvmlLoss = OnNvmlLoss::Keep, "linkwise.onNvmlLoss",
        Row::new(choice).flag("on-nvml-loss", "ACTION").variables(&["LINKWISE_ON_NVML_LOSS"]);
    /// Whether GPUs with a display are offered all the same
    keep_display: bool = false, "linkwise.filter.keepDisplay", Row::new(boolean);
    /// Give containers the RDMA NICs nearest to their GPUs too: names in LINKWISE_NICS, and device nodes
    expose_nics: bool = false, "linkwise.expose.nics",
        Row::new(boolean).flag("expose-nics", "BOOL").variables(&["LINKWISE_EXPOSE_NICS"]);
    /// Give containers with GPUs an NCCL topology file of this machine, and NCCL_TOPO_FILE
    expose_nccl_topology: bool = false, "linkwise.expose.ncclTopology",
        Row::new(boolean).flag("expose-nccl-topology", "BOOL").variables(&["LINKWISE_EXPOSE_NCCL_TOPOLOGY"]);
    /// The folder in which that file is, that of the host at the same path
    nccl_topology_dir: PathBuf = PathBuf::from("/run/linkwise/nccl"), "linkwise.ncclTopologyDir",
        Row::new(absolute).flag("nccl-topology-dir", "PATH").variables(&["LINKWISE_NCCL_TOPOLOGY_DIR"]);
    /// The folder of CDI specs, that of the host at the same path
    cdi_dir: PathBuf = PathBuf::from("/var/run/cdi"), "linkwise.cdiDir",
        Row::new(absolute).flag("cdi-dir", "PATH").variables(&["LINKWISE_CDI_DIR"]);
    /// Where /metrics, /livez and /readyz are served; port 0 takes a free one and the log names it
    metrics_address: SocketAddr = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9400)), "linkwise.metricsAddress",
        Row::new(address).flag("metrics-address", "ADDRESS").variables(&["LINKWISE_METRICS_ADDRESS"]);
    /// The kubelet's PodResources socket
    pod_resources_socket: PathBuf = PathBuf::from("/var/lib/kubelet/pod-resources/kubelet.sock"), "linkwise.podResourcesSocket",
        Row::new(path).flag("pod-resources-socket", "PATH").variables(&["LINKWISE_POD_RESOURCES_SOCKET"]);
    /// Serve `linkwise admin` on this Unix socket, for root and our own user; without it nowhere
    admin_socket: Option<PathBuf> = None, "linkwise.adminSocket",
        Row::new(maybe_path).flag("admin-socket", "PATH").variables(&["LINKWISE_ADMIN_SOCKET"]);
}

impl Settings {
    /// The keys whose values differ from another configuration's.
    pub fn changed(&self, other: &Self) -> Vec<&'static str> {
        let pairs = self.shown().into_iter().zip(other.shown());
        pairs.filter(|(ours, theirs)| ours.value != theirs.value).map(|(ours, _)| ours.key).collect()
    }

    /// The defaults, as if nobody had said anything.
    pub fn defaults() -> Self {
        let sources =
            Sources { flags: &Flags::default(), environment: &Environment::default(), file: &File::parse("").0 };
        Self::build(&sources, &mut Vec::new())
    }
}

#[cfg(test)]
mod tests;
