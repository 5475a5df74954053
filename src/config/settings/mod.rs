//! The effective configuration: each setting with its value and the origin of that value.
//!
//! A flag wins over a variable, a variable over the file, the file over the default. Only the table in this file lists
//! a setting's key, reader, flag, variables and default, and whether a change applies at once (mappings and lists:
//! `lists`). Plain data: `src/run` and `src/commands` build live objects from it, and `linkwise config show` prints it.
//! Only [`load`], [`check`] and `read` touch the file system.

mod file;
mod lists;
mod rules;
mod source;
mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Arg;
use serde::Serialize;
use serde_json::{Value as Json, json};

use linkwise_core::publish::injection::DeviceIds;
use linkwise_core::state::{
    Door, Expectation, Filter, GpuSelector, MigStrategy, NumaHints, ResourcePlan, Sharing, XidClass,
};
use linkwise_core::topology::{GpuObservation, NodeTopology};
use linkwise_host::machines;
use lists::{Reader, from_file, values};
use source::{Row, Sources};
use value::{
    absolute, address, annotation_prefix, boolean, choice, choices, imex_channels, interval, path, path_or_empty,
    texts, whole,
};

pub use file::{Finding, Severity};
pub use lists::Resources;
pub(in crate::config) use source::read;
pub use source::{ConfigError, Environment, Flags, Loaded, check, load, load_text};
pub(in crate::config) use value::go_boolean;
pub use value::{DeviceListStrategy, DiscoveryStrategy, Interval, OnNvmlLoss, SharedPolicy};

/// The usual path of the kubelet's registration socket.
pub(super) const KUBELET_SOCKET: &str = "/var/lib/kubelet/device-plugins/kubelet.sock";

/// The usual path of the kubelet's PodResources socket.
pub(super) const POD_RESOURCES_SOCKET: &str = "/var/lib/kubelet/pod-resources/kubelet.sock";

/// The kubelet's usual folder in which DRA drivers register.
pub(super) const DRA_REGISTRY: &str = "/var/lib/kubelet/plugins_registry";

/// The default percentage of the machine's best bandwidth below which an event is due. Bandwidths of NVLinks and PCIe
/// paths mostly differ by a factor of two or more (docs/bandwidth.md), so it lies between the best and half of it.
const EVENTS_BELOW: u8 = 75;

/// A setting's effective value and its origin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting<T> {
    /// The effective value.
    pub value: T,
    /// The origin of the value.
    pub origin: Origin,
}

/// The origin of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag(&'static str),
    /// The environment.
    Environment(&'static str),
    /// The file.
    File(u64),
    /// No source has a value.
    #[default]
    Default,
}

impl Origin {
    /// A finding at the origin of the value of a key.
    fn finding(self, key: &str, severity: Severity, problem: impl Into<String>) -> Finding {
        let (line, key) = match self {
            Self::File(line) => (Some(line), key.to_owned()),
            Self::Environment(variable) => (None, variable.to_owned()),
            Self::Flag(flag) => (None, format!("--{flag}")),
            Self::Default => (None, key.to_owned()),
        };
        Finding::at(line, key, severity, problem)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "flag --{flag}"),
            Self::Environment(variable) => write!(f, "environment {variable}"),
            Self::File(line) => write!(f, "file, line {line}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One setting as people and scripts see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Its key in the file; `configFile`, which no file can have, is named in the same way.
    pub key: &'static str,
    /// Its value as the file would have it.
    pub value: Json,
    /// The origin of the value.
    pub origin: Origin,
    /// Set if a change applies while linkwise runs; otherwise it applies at the next start.
    pub at_once: bool,
}

fn shown<T: Serialize>(key: &'static str, setting: &Setting<T>, at_once: bool) -> Shown {
    Shown { key, value: json(&setting.value), origin: setting.origin, at_once }
}

/// The value as JSON. This does not fail: each setting is plain data with texts as keys.
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

/// Makes [`Settings`], and all functions about the settings, from the table below.
macro_rules! settings {
    (@flag) => { None };
    (@flag $flag:literal $takes:literal) => { Some(($flag, $takes)) };
    (@at_once) => { false };
    (@at_once at once) => { true };
    ($($(#[doc = $help:literal])+ $field:ident: $type:ty = $default:expr, $key:literal $($at:ident $once:ident)?,
        $read:expr $(, $flag:literal $takes:literal $(or [$($alias:literal),+])? [$($variable:literal),+])?;)+) => {
        /// The effective configuration. Without `linkwise.naming`, `sharing` and `resources` lack the values that the
        /// NVIDIA plugin ignores.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Settings {
            $($(#[doc = $help])+ pub $field: Setting<$type>,)+
            /// The sharing of devices
            pub sharing: Setting<Option<Sharing>>,
            /// Names for GPUs by model and for MIG devices by profile
            pub resources: Setting<Resources>,
            /// Classes of XIDs that differ from the built-in table
            pub xids: Setting<BTreeMap<u64, XidClass>>,
            /// GPUs that are not offered
            pub exclude: Setting<Vec<GpuSelector>>,
        }

        #[allow(non_upper_case_globals, reason = "a row has the name of its setting")]
        mod rows {
            use super::*;

            $(pub const $field: Row<$type> = Row {
                key: $key,
                read: $read,
                flag: settings!(@flag $($flag $takes)?),
                aliases: &[$($($($alias),+)?)?],
                variables: &[$($($variable),+)?],
            };)+
        }

        impl Settings {
            /// The effective configuration of these flags, this environment and the text of a file, without wrong
            /// values; and the findings, by line.
            pub fn build(flags: &Flags, environment: &Environment, text: &str) -> (Self, Vec<Finding>) {
                let (ref file, mut findings) = file::Node::parse(text);
                findings.extend(environment.removed());
                let sources = Sources { flags, environment, file };
                $(let $field = rows::$field.pick($default, &sources, &mut findings);)+
                let (sharing, resources, xids, exclude) = Default::default();
                let mut settings = Self { sharing, resources, xids, exclude, $($field,)+ };
                let naming = settings.naming.value;
                let mut reader = Reader { file, naming, findings: &mut findings };
                settings.xids = reader.xids();
                let lists = reader.lists();
                settings.sharing = from_file(file, "sharing", lists.sharing.clone().map(Some));
                let resources = Resources { gpus: values(&lists.gpus), mig: values(&lists.mig) };
                settings.resources = from_file(file, "resources", naming.then_some(resources));
                settings.exclude = from_file(file, "linkwise.filter.exclude", Some(values(&lists.exclude)));
                if settings.dev_root.origin == Origin::Default {
                    settings.dev_root.value.clone_from(&settings.driver_root.value);
                }
                rules::check(&settings, &lists, &mut findings);
                findings.sort_by_key(|finding| finding.line.unwrap_or(0));
                (settings, findings)
            }

            /// Each setting, in the order of the table; mappings and lists last.
            pub fn shown(&self) -> Vec<Shown> {
                let sharing = self.sharing.value.as_ref().map_or_else(|| json!({}), |sharing| {
                    json!({ lists::key(sharing.kind): sharing })
                });
                vec![
                    $(shown($key, &self.$field, settings!(@at_once $($at $once)?)),)+
                    shown("resources", &self.resources, true),
                    shown("sharing", &Setting { value: sharing, origin: self.sharing.origin }, true),
                    shown("linkwise.health.xids", &self.xids, false),
                    shown("linkwise.filter.exclude", &self.exclude, true),
                ]
            }
        }

        /// The flags, for clap.
        fn args() -> Vec<Arg> {
            let args = [$(rows::$field.arg(concat!($($help),+).trim(), &plain(&json::<$type>(&$default))),)+];
            args.into_iter().flatten().collect()
        }

        const VARIABLES: &[&[&str]] = &[$(rows::$field.variables,)+];

        #[cfg(test)]
        const FLAGS: &[Option<(&str, &str)>] = &[$(rows::$field.flag,)+];

        /// The keys of the table's settings in a file: all but `configFile`.
        fn keys() -> impl Iterator<Item = &'static str> {
            [$($key,)+].into_iter().filter(|key| key.contains('.'))
        }
    };
}

settings! {
    /// The configuration file, in the NVIDIA plugin's format with linkwise's own keys under linkwise:. It is reloaded
    /// when it changes and at SIGHUP
    config_file: Option<PathBuf> = None, "configFile", |value| path(value).map(Some),
        "config-file" "FILE" ["GFD_CONFIG_FILE", "CONFIG_FILE"];
    /// The strategy for offering MIG devices: none, single or mixed
    mig_strategy: MigStrategy = MigStrategy::None, "flags.migStrategy" at once, choice,
        "mig-strategy" "STRATEGY" ["GFD_MIG_STRATEGY", "MIG_STRATEGY"];
    /// If NVML cannot be initialised, exit with an error (true), or log it and retry (false). Without this setting,
    /// exit if the PCI bus has an NVIDIA GPU, and retry if it has none
    fail_on_init_error: Option<bool> = None, "flags.failOnInitError", |value| boolean(value).map(Some),
        "fail-on-init-error" "BOOL" ["GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR"];
    /// The folder on the host for the pipes, logs and shared memory of MPS
    mps_root: PathBuf = PathBuf::from("/run/nvidia/mps"), "flags.mpsRoot", absolute, "mps-root" "PATH" ["MPS_ROOT"];
    /// The root of the driver's installation on the host, such as / or /run/nvidia/driver
    driver_root: PathBuf = PathBuf::from("/"), "flags.nvidiaDriverRoot", absolute,
        "driver-root" "PATH" or ["nvidia-driver-root"] ["NVIDIA_DRIVER_ROOT"];
    /// The root of the device nodes on the host; by default the driver's root
    dev_root: PathBuf = PathBuf::new(), "flags.nvidiaDevRoot", absolute,
        "dev-root" "PATH" or ["nvidia-dev-root"] ["NVIDIA_DEV_ROOT"];
    /// Give containers GDRCopy's devices
    gdrcopy_enabled: bool = false, "flags.gdrcopyEnabled", boolean, "gdrcopy-enabled" "BOOL" ["GDRCOPY_ENABLED"];
    /// Give containers GPUDirect Storage's devices
    gds_enabled: bool = false, "flags.gdsEnabled", boolean, "gds-enabled" "BOOL" ["GDS_ENABLED"];
    /// Give containers Mellanox's devices
    mofed_enabled: bool = false, "flags.mofedEnabled", boolean, "mofed-enabled" "BOOL" ["MOFED_ENABLED"];
    /// linkwise labels: write the labels to a NodeFeature object (true), or to the file that NFD reads (false)
    use_node_feature_api: bool = true, "flags.useNodeFeatureAPI", boolean,
        "use-node-feature-api" "BOOL" ["GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"];
    /// The source of devices: auto or nvml, which both mean NVML; tegra and vfio are refused
    device_discovery_strategy: DiscoveryStrategy = DiscoveryStrategy::Auto, "flags.deviceDiscoveryStrategy", choice,
        "device-discovery-strategy" "STRATEGY" ["DEVICE_DISCOVERY_STRATEGY"];
    /// List the device nodes (/dev/nvidia0, /dev/nvidiactl ...) in the answer to Allocate, for runtimes that give a
    /// container only the listed nodes
    pass_device_specs: bool = false, "flags.plugin.passDeviceSpecs", boolean,
        "pass-device-specs" "BOOL" ["PASS_DEVICE_SPECS"];
    /// The way in which the container runtime gets the list of GPUs: envvar, volume-mounts, cdi-annotations, cdi-cri,
    /// several with commas
    device_list_strategy: Vec<DeviceListStrategy> = vec![DeviceListStrategy::Envvar],
        "flags.plugin.deviceListStrategy", choices,
        "device-list-strategy" "LIST" ["DEVICE_LIST_STRATEGY"];
    /// The names of GPUs in the container runtime's list: uuid or index
    device_id_strategy: DeviceIds = DeviceIds::Uuid, "flags.plugin.deviceIDStrategy", choice,
        "device-id-strategy" "STRATEGY" ["DEVICE_ID_STRATEGY"];
    /// The prefix of the keys of CDI annotations
    cdi_annotation_prefix: String = "cdi.k8s.io/".to_owned(), "flags.plugin.cdiAnnotationPrefix",
        annotation_prefix,
        "cdi-annotation-prefix" "PREFIX" ["CDI_ANNOTATION_PREFIX"];
    /// The path of nvidia-cdi-hook (or nvidia-ctk) on the host, for the hooks of CDI specs. Without it:
    /// /usr/bin/nvidia-cdi-hook if that program is found, else no hooks
    nvidia_cdi_hook_path: Option<PathBuf> = None, "flags.plugin.nvidiaCTKPath", |value| absolute(value).map(Some),
        "nvidia-cdi-hook-path" "PATH" or ["nvidia-ctk-path"] ["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"];
    /// The path at which the driver's root is mounted in linkwise's own container
    driver_root_ctr_path: PathBuf = PathBuf::from("/driver-root"), "flags.plugin.containerDriverRoot", absolute,
        "driver-root-ctr-path" "PATH" or ["container-driver-root"] ["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"];
    /// The policy for choosing slots and MIG devices: distributed or packed
    shared_devices_allocation_policy: SharedPolicy = SharedPolicy::Distributed,
        "flags.plugin.sharedDevicesAllocationPolicy" at once, choice,
        "shared-devices-allocation-policy" "POLICY" ["SHARED_DEVICES_ALLOCATION_POLICY"];
    /// The kubelet's registration socket; the plugins' sockets are made in its folder
    kubelet_socket: PathBuf = PathBuf::from(KUBELET_SOCKET), "flags.plugin.kubeletSocket", path,
        "kubelet-socket" "PATH" ["KUBELET_SOCKET"];
    /// Features of the CDI spec to enable, with commas
    cdi_feature_flags: Vec<String> = Vec::new(), "flags.plugin.cdiFeatureFlags", texts,
        "cdi-feature-flags" "LIST" ["CDI_FEATURE_FLAGS"];
    /// Hooks to leave out of the CDI spec, with commas; all leaves out every hook
    cdi_disable_hooks: Vec<String> = Vec::new(), "flags.plugin.cdiDisableHooks", texts,
        "cdi-disable-hooks" "LIST" or ["cdi-disabled-hooks"] ["CDI_DISABLE_HOOKS"];
    /// linkwise labels: end after the labels are written once
    gfd_oneshot: bool = false, "flags.gfd.oneshot", boolean, "oneshot" "BOOL" ["GFD_ONESHOT"];
    /// Leave out the label with the time at which the labels were first made
    gfd_no_timestamp: bool = false, "flags.gfd.noTimestamp", boolean, "no-timestamp" "BOOL" ["GFD_NO_TIMESTAMP"];
    /// The interval at which the written labels are checked, such as 60s; infinite: only when the node changes
    gfd_sleep_interval: Interval = Interval::Every(Duration::from_secs(60)), "flags.gfd.sleepInterval", interval,
        "sleep-interval" "DURATION" ["GFD_SLEEP_INTERVAL"];
    /// The file for the labels, which NFD reads; empty: standard output
    gfd_output_file: PathBuf = PathBuf::from("/etc/kubernetes/node-feature-discovery/features.d/gfd"),
        "flags.gfd.outputFile", path_or_empty,
        "output-file" "OUTPUT" or ["output", "o"] ["GFD_OUTPUT_FILE"];
    /// The file with the machine's type
    gfd_machine_type_file: PathBuf = PathBuf::from("/sys/class/dmi/id/product_name"), "flags.gfd.machineTypeFile", path,
        "machine-type-file" "FILE" ["GFD_MACHINE_TYPE_FILE"];
    /// IMEX channels for every container with a GPU: none, or 0
    imex_channel_ids: Vec<u32> = Vec::new(), "imex.channelIDs", imex_channels,
        "imex-channel-ids" "LIST" ["IMEX_CHANNEL_IDS"];
    /// Fail at the start if one of the IMEX channels does not exist
    imex_required: bool = false, "imex.required", boolean, "imex-required" "BOOL" ["IMEX_REQUIRED"];
    /// Apply rename, devices and resources, which the NVIDIA plugin ignores
    naming: bool = false, "linkwise.naming" at once, boolean;
    /// The NUMA nodes that devices report to the kubelet's Topology Manager: node, package or off (see
    /// docs/topology-manager.md)
    numa_hints: NumaHints = NumaHints::Node, "linkwise.numaHints" at once, choice,
        "numa-hints" "HINTS" ["LINKWISE_NUMA_HINTS"];
    /// Health of the devices while NVML is unavailable: keep or unhealthy
    on_nvml_loss: OnNvmlLoss = OnNvmlLoss::Keep, "linkwise.onNvmlLoss", choice,
        "on-nvml-loss" "ACTION" ["LINKWISE_ON_NVML_LOSS"];
    /// Number of GPUs that the node should have; linkwise reports it if the node has fewer
    expect_gpus: Option<usize> = None, "linkwise.expect.gpus",
        |value| whole(value, 1, NodeTopology::MAX_GPUS).map(Some),
        "expect-gpus" "NUMBER" ["LINKWISE_EXPECT_GPUS"];
    /// The model that each GPU should be, as nvidia-smi or the label nvidia.com/gpu.product names it
    expect_model: Option<String> = None, "linkwise.expect.model", |value| value::text(value).map(Some),
        "expect-model" "MODEL" ["LINKWISE_EXPECT_MODEL"];
    /// The built-in machine whose GPUs and NVLinks the node should have (linkwise topology --list)
    expect_machine: Option<String> = None, "linkwise.expect.machine", |value| value::machine(value).map(Some),
        "expect-machine" "NAME" ["LINKWISE_EXPECT_MACHINE"];
    /// Do not offer GPUs with an active display
    exclude_displays: bool = false, "linkwise.filter.excludeDisplays" at once, boolean,
        "exclude-displays" "BOOL" ["LINKWISE_EXCLUDE_DISPLAYS"];
    /// linkwise run: write the node's labels to --output-file too
    write_labels_file: bool = false, "linkwise.labels.writeFile", boolean,
        "write-labels-file" "BOOL" ["LINKWISE_WRITE_LABELS_FILE"];
    /// Write the label nvidia.com/gpu.clique; false leaves it to another writer, such as NVIDIA's DRA driver
    gpu_clique_label: bool = true, "linkwise.labels.gpuClique", boolean,
        "gpu-clique-label" "BOOL" ["LINKWISE_GPU_CLIQUE_LABEL"];
    /// Give containers also the RDMA NICs nearest to their GPUs: their names in LINKWISE_NICS, and their device nodes
    expose_nics: bool = false, "linkwise.expose.nics", boolean, "expose-nics" "BOOL" ["LINKWISE_EXPOSE_NICS"];
    /// The folder for CDI specs; the host's folder, mounted at the same path
    cdi_dir: PathBuf = PathBuf::from("/var/run/cdi"), "linkwise.cdiDir", absolute,
        "cdi-dir" "PATH" ["LINKWISE_CDI_DIR"];
    /// The address of the node's page, /metrics, /livez and /readyz; port 0 takes a free port, which is logged
    metrics_address: SocketAddr = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9400)), "linkwise.metricsAddress", address,
        "metrics-address" "ADDRESS" ["LINKWISE_METRICS_ADDRESS"];
    /// Further host names by which clients may call --metrics-address, with commas: those of proxies and of an Ingress
    metrics_hosts: Vec<String> = Vec::new(), "linkwise.metricsHosts", texts,
        "metrics-hosts" "LIST" ["LINKWISE_METRICS_HOSTS"];
    /// Show hashes instead of pods' names in /metrics and on the node's page, which any pod of the cluster can read
    hide_pod_names: bool = false, "linkwise.hidePodNames", boolean, "hide-pod-names" "BOOL" ["LINKWISE_HIDE_POD_NAMES"];
    /// The kubelet's PodResources socket
    pod_resources_socket: PathBuf = PathBuf::from(POD_RESOURCES_SOCKET), "linkwise.podResourcesSocket", path,
        "pod-resources-socket" "PATH" ["LINKWISE_POD_RESOURCES_SOCKET"];
    /// Serve `linkwise admin` on this Unix socket, for root and linkwise's own user; by default it is not served
    admin_socket: Option<PathBuf> = None, "linkwise.adminSocket", |value| path(value).map(Some),
        "admin-socket" "PATH" ["LINKWISE_ADMIN_SOCKET"];
    /// Offer the GPUs through the device plugin (none) or through DRA (all)
    dra_gpus: Door = Door::Plugin, "linkwise.dra.gpus" at once, value::dra_gpus,
        "dra-gpus" "GPUS" ["LINKWISE_DRA_GPUS"];
    /// Evict pods from a GPU that is lost, by a taint with the effect NoExecute
    dra_evict_lost: bool = false, "linkwise.dra.evictLost", boolean,
        "dra-evict-lost" "BOOL" ["LINKWISE_DRA_EVICT_LOST"];
    /// Offer through DRA the MIG devices that GPUs in MIG mode could have, and make and destroy them for claims
    dra_dynamic_mig: bool = false, "linkwise.dra.dynamicMig", boolean,
        "dra-dynamic-mig" "BOOL" ["LINKWISE_DRA_DYNAMIC_MIG"];
    /// The kubelet's folder for the sockets of DRA drivers; linkwise makes its own in a folder of the driver's name
    dra_plugins_dir: PathBuf = PathBuf::from("/var/lib/kubelet/plugins"), "linkwise.dra.pluginsDir", absolute,
        "dra-plugins-dir" "PATH" ["LINKWISE_DRA_PLUGINS_DIR"];
    /// The kubelet's folder in which DRA drivers register
    dra_registry_dir: PathBuf = PathBuf::from(DRA_REGISTRY), "linkwise.dra.registryDir", absolute,
        "dra-registry-dir" "PATH" ["LINKWISE_DRA_REGISTRY_DIR"];
    /// Write a condition of the node that reports whether its GPUs are available; needs the API server
    node_condition: bool = false, "linkwise.nodeCondition.enabled", boolean,
        "node-condition" "BOOL" ["LINKWISE_NODE_CONDITION"];
    /// The type of the node's condition
    node_condition_type: String = "linkwise.dev/GPUsReady".to_owned(), "linkwise.nodeCondition.type",
        value::condition_type,
        "node-condition-type" "TYPE" ["LINKWISE_NODE_CONDITION_TYPE"];
    /// Keys of the taints to remove from the node once its condition is True for the first time since the boot, with
    /// commas
    startup_taints: Vec<String> = Vec::new(), "linkwise.nodeCondition.startupTaints",
        |value| value.items("a list of keys", value::qualified),
        "startup-taints" "LIST" ["LINKWISE_STARTUP_TAINTS"];
    /// Write an event about a pod whose GPUs are linked far worse than the best set of as many GPUs on this machine;
    /// needs the API server
    events: bool = false, "linkwise.events.write", boolean, "events" "BOOL" ["LINKWISE_EVENTS"];
    /// Percentage of the bandwidth of the machine's best set of as many GPUs below which an event is written
    events_below: u8 = EVENTS_BELOW, "linkwise.events.below", |value| whole(value, 1, 100),
        "events-below" "PERCENT" ["LINKWISE_EVENTS_BELOW"];
}

impl Settings {
    /// The settings whose values differ from those of `before`.
    pub fn changed(&self, before: &Self) -> Vec<Shown> {
        let pairs = self.shown().into_iter().zip(before.shown());
        pairs.filter(|(now, before)| now.value != before.value).map(|(now, _)| now).collect()
    }

    /// The hardware that the node should have: that of the built-in machine, except for a given number or model of
    /// GPUs.
    pub fn expected(&self) -> Expectation {
        let machine = self.expect_machine.value.as_ref().and_then(|name| machines::load(name).ok());
        let gpus = machine.map(|machine| machine.observed.gpus).unwrap_or_default();
        let count = self.expect_gpus.value.or(Some(gpus.len()).filter(|count| *count > 0));
        Expectation {
            gpus: count.and_then(|count| u32::try_from(count).ok()),
            model: self.expect_model.value.clone().or_else(|| gpus.first()?.model.clone()),
            nvlinks: gpus.iter().map(GpuObservation::active_nvlinks).min().flatten(),
        }
    }

    /// The resources to make of the node's GPUs.
    pub fn plan(&self) -> ResourcePlan {
        let shared_policy = &self.shared_devices_allocation_policy;
        ResourcePlan {
            mig_strategy: self.mig_strategy.value,
            gpu_names: self.resources.value.gpus.clone(),
            mig_names: self.resources.value.mig.clone(),
            sharing: self.sharing.value.clone(),
            door: self.dra_gpus.value,
            filter: Filter { exclude: self.exclude.value.clone(), exclude_displays: self.exclude_displays.value },
            shared_policy: (shared_policy.origin != Origin::Default).then(|| shared_policy.value.into()),
        }
    }
}

#[cfg(test)]
mod tests;
