//! Settings whose value is one of a few words.

use serde::Serialize;

use linkwise_core::allocation::AllocationPolicy;
use linkwise_core::words;

/// The way in which the container runtime gets the list of a container's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

words!(DeviceListStrategy {
    Envvar = "envvar",
    VolumeMounts = "volume-mounts",
    CdiAnnotations = "cdi-annotations",
    CdiCri = "cdi-cri",
});

/// The way in which GPUs are named to the container runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceIdStrategy {
    /// NVML's UUID.
    Uuid,
    /// NVML's index.
    Index,
}

words!(DeviceIdStrategy { Uuid = "uuid", Index = "index" });

/// The NVIDIA plugin's source of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiscoveryStrategy {
    /// The first source that is present.
    Auto,
    /// NVML.
    Nvml,
    /// Tegra's integrated GPUs.
    Tegra,
    /// GPUs that are bound to vfio-pci, as gpu-feature-discovery finds them.
    Vfio,
}

words!(DiscoveryStrategy { Auto = "auto", Nvml = "nvml", Tegra = "tegra", Vfio = "vfio" });

/// The choice of slots and MIG devices, by the NVIDIA plugin's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedPolicy {
    /// The least used GPU first.
    Distributed,
    /// The most used GPU first.
    Packed,
    /// Distinct GPUs for one request: the same as `distributed` here.
    Spread,
}

words!(SharedPolicy { Distributed = "distributed", Packed = "packed", Spread = "spread" });

impl From<SharedPolicy> for AllocationPolicy {
    fn from(policy: SharedPolicy) -> Self {
        match policy {
            SharedPolicy::Distributed | SharedPolicy::Spread => Self::Distributed,
            SharedPolicy::Packed => Self::Packed,
        }
    }
}

/// The health of the devices while NVML is unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnNvmlLoss {
    /// Their health stays as it was.
    Keep,
    /// The devices become unhealthy.
    Unhealthy,
}

words!(OnNvmlLoss { Keep = "keep", Unhealthy = "unhealthy" });
