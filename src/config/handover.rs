//! The options that say how a container gets its GPUs, by the names that the NVIDIA device plugin gives them.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// How a container gets its GPUs.
#[derive(Clone, Debug, Args)]
pub struct HandoverArgs {
    /// How containers get their GPUs, one way or several with commas (see docs/cdi.md)
    #[arg(long, value_name = "LIST", env = "DEVICE_LIST_STRATEGY", value_delimiter = ',', default_value = "envvar")]
    pub device_list_strategy: Vec<DeviceListStrategyArg>,
    /// Which names of the GPUs a container gets
    #[arg(long, value_name = "NAMES", env = "DEVICE_ID_STRATEGY", default_value = "uuid")]
    pub device_id_strategy: DeviceIdStrategyArg,
    /// What the keys of CDI annotations begin with
    #[arg(long, value_name = "PREFIX", env = "CDI_ANNOTATION_PREFIX", default_value = "cdi.k8s.io/")]
    pub cdi_annotation_prefix: String,
    /// nvidia-cdi-hook (or nvidia-ctk) on the host, for the hooks of CDI specs. Without it:
    /// /usr/bin/nvidia-cdi-hook, where the driver root shows it, else no hooks
    #[arg(long, value_name = "PATH", env = "NVIDIA_CDI_HOOK_PATH", alias = "nvidia-ctk-path", value_parser = absolute)]
    pub nvidia_cdi_hook_path: Option<String>,
    /// Where this container has the driver root, to look for what CDI specs name
    #[arg(
        long,
        value_name = "PATH",
        env = "DRIVER_ROOT_CTR_PATH",
        alias = "container-driver-root",
        value_parser = absolute,
        default_value = "/driver-root"
    )]
    pub driver_root_ctr_path: String,
    /// Where the host has the driver: / or the root of a driver container, such as /run/nvidia/driver
    #[arg(long, value_name = "PATH", env = "NVIDIA_DRIVER_ROOT", alias = "driver-root", value_parser = absolute, default_value = "/")]
    pub nvidia_driver_root: String,
    /// The root of /dev on the host; without it, the driver root
    #[arg(long, value_name = "PATH", env = "NVIDIA_DEV_ROOT", alias = "nvidia-dev-root", value_parser = absolute)]
    pub dev_root: Option<String>,
    /// The folder of CDI specs, that of the host at the same path
    #[arg(long, value_name = "PATH", env = "LINKWISE_CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Give containers the RDMA NICs nearest to their GPUs too: names in LINKWISE_NICS, and device nodes
    #[arg(long, value_name = "BOOL", env = "LINKWISE_EXPOSE_NICS", num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_parser = super::list::boolean, action = clap::ArgAction::Set)]
    pub expose_nics: bool,
}

/// `--device-list-strategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceListStrategyArg {
    /// NVIDIA_VISIBLE_DEVICES, for NVIDIA's container runtime
    Envvar,
    /// Mounts below /var/run/nvidia-container-devices, for NVIDIA's container runtime
    VolumeMounts,
    /// CDI names in an annotation of the container
    CdiAnnotations,
    /// CDI names in the field that the kubelet hands on over CRI
    CdiCri,
}

/// `--device-id-strategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceIdStrategyArg {
    /// The UUID
    Uuid,
    /// NVML's index
    Index,
}

/// A path that means the same to whoever reads it in a CDI spec. None at all is as if the option were not given, as the
/// NVIDIA plugin has it: charts set variables to nothing.
fn absolute(text: &str) -> Result<String, &'static str> {
    if text.is_empty() || text.starts_with('/') { Ok(text.to_owned()) } else { Err("expected an absolute path") }
}
