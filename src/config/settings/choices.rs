//! The values of settings that are one of a few words.

use clap::ValueEnum;
use serde::Serialize;

use crate::state::XidClass;

/// How MIG devices are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigStrategy {
    /// Not: a GPU is a GPU.
    None,
    /// As `nvidia.com/gpu`, all of one kind.
    Single,
    /// Each kind as a resource of its own.
    Mixed,
}

/// How the container runtime learns which GPUs a container gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`.
    Envvar,
    /// Mounts below /var/run/nvidia-container-devices.
    VolumeMounts,
    /// CDI names in annotations.
    CdiAnnotations,
    /// CDI names in the CRI's own field.
    CdiCri,
}

/// How GPUs are named to the container runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceIdStrategy {
    /// By NVML's UUID.
    Uuid,
    /// By NVML's index.
    Index,
}

/// Where the NVIDIA plugin looks for devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoveryStrategy {
    /// What there is.
    Auto,
    /// NVML.
    Nvml,
    /// Tegra's integrated GPUs.
    Tegra,
}

/// How slots and MIG devices are chosen, by the NVIDIA plugin's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedPolicy {
    /// The least used GPU first.
    Distributed,
    /// The most used GPU first.
    Packed,
    /// Distinct GPUs for one request; `distributed` does so here.
    Spread,
}

/// What becomes of the devices when NVML stays away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNvmlLoss {
    /// They stay as they were.
    Keep,
    /// They become unhealthy.
    Unhealthy,
}

/// What an XID means, where the operator knows better than our table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum XidAction {
    /// Nothing at all.
    Ignore,
    /// An application's fault: counted, the GPU stays healthy.
    Application,
    /// The GPU needs a reset.
    ResetGpu,
    /// The node needs a reboot.
    RebootNode,
}

impl From<XidAction> for XidClass {
    fn from(action: XidAction) -> Self {
        match action {
            XidAction::Ignore => Self::Ignore,
            XidAction::Application => Self::Application,
            XidAction::ResetGpu => Self::ResetGpu,
            XidAction::RebootNode => Self::RebootNode,
        }
    }
}
