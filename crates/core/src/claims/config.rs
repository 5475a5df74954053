//! Opaque configuration of claims: NVIDIA's `GpuConfig` and `MigDeviceConfig` (`resource.nvidia.com/v1beta1`).
//!
//! Strict, as NVIDIA's driver: an unknown kind, version, field or value is the claim's error. What is asked for is
//! enforced or refused by name; time slices of the default length are what a GPU has anyway.

use crate::prelude::*;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use thiserror::Error;

use super::AllocatedConfig;
use crate::quote::{one_line, quoted};

/// The API group and version of NVIDIA's configuration.
const API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// Where configuration comes from: the claim's own counts more than its class's.
const SOURCES: [&str; 2] = ["FromClass", "FromClaim"];

/// The lengths of time slices that NVIDIA's API has.
const INTERVALS: [&str; 4] = ["Default", "Short", "Medium", "Long"];

/// What a configuration is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Whole GPUs.
    Gpu,
    /// MIG devices.
    Mig,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GpuConfig",
            Self::Mig => "MigDeviceConfig",
        }
    }
}

/// What is wrong with the configuration of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// Something else than opaque parameters.
    #[error("configuration without opaque parameters is not supported")]
    NotOpaque,
    /// Neither of the claim nor of its class.
    #[error("configuration from {} is not supported; known are FromClass and FromClaim", quoted(.source_name))]
    Source {
        /// What it says.
        source_name: String,
    },
    /// The parameters are no JSON object.
    #[error("opaque parameters: {}", one_line(.why))]
    NoObject {
        /// Why not.
        why: String,
    },
    /// Another API.
    #[error("opaque parameters: apiVersion {} is not supported; known is resource.nvidia.com/v1beta1", quoted(.found))]
    ApiVersion {
        /// What it says.
        found: String,
    },
    /// Another kind of that API.
    #[error("opaque parameters: kind {} is not supported; known are GpuConfig and MigDeviceConfig", quoted(.found))]
    Kind {
        /// What it says.
        found: String,
    },
    /// An unknown field or value, or one of another type.
    #[error("{kind}: {}", one_line(.why))]
    Field {
        /// Of which kind.
        kind: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Time slices of another length.
    #[error(
        "{kind}: sharing.timeSlicingConfig.interval {interval} is not supported: linkwise leaves time slices to the \
         driver; supported is Default"
    )]
    Interval {
        /// Of which kind.
        kind: &'static str,
        /// Which.
        interval: String,
    },
    /// MPS.
    #[error(
        "{kind}: sharing.strategy MPS is not supported: linkwise runs MPS control daemons for resources of the device \
         plugin, not for claims; supported is TimeSlicing"
    )]
    Mps {
        /// Of which kind.
        kind: &'static str,
    },
    /// Configuration for GPUs where a MIG device was allocated, or the other way round.
    #[error("{kind} is given for the request {}, whose device {device} is of another kind", quoted(.request))]
    OtherDevice {
        /// The configuration's kind.
        kind: &'static str,
        /// The request that it names.
        request: String,
        /// The device.
        device: String,
    },
}

/// Configuration that was read, in the order in which it counts: the last that fits a device is the device's.
#[derive(Clone, Debug, Default)]
pub(super) struct Configs(Vec<Config>);

/// One configuration.
#[derive(Clone, Debug)]
struct Config {
    kind: Kind,
    requests: Vec<String>,
    /// Why it cannot be enforced.
    refusal: Option<ConfigError>,
}

impl Configs {
    /// Reads all configuration for a driver: that of classes first, then the claim's own.
    pub fn read(configs: &[AllocatedConfig], driver: &str) -> Result<Self, ConfigError> {
        if let Some(unknown) = configs.iter().find(|config| !SOURCES.contains(&config.source.as_str())) {
            return Err(ConfigError::Source { source_name: unknown.source.clone() });
        }
        let mut read = Vec::new();
        for source in SOURCES {
            for config in configs.iter().filter(|config| config.source == source) {
                let opaque = config.opaque.as_ref().ok_or(ConfigError::NotOpaque)?;
                if opaque.driver == driver {
                    let (kind, refusal) = parse(&opaque.parameters)?;
                    read.push(Config { kind, requests: config.requests.clone(), refusal });
                }
            }
        }
        Ok(Self(read))
    }

    /// Checks that the configuration of a device can be enforced. `request` may have an alternative, `gpus/quad`; a
    /// configuration for `gpus` is for it too. One that names no request is for all devices of its kind.
    pub fn check(&self, request: &str, device: &str, kind: Kind) -> Result<(), ConfigError> {
        for config in self.0.iter().rev() {
            let is_named = config.requests.iter().any(|named| named == request || named == super::base(request));
            if is_named && config.kind != kind {
                let (kind, request) = (config.kind.name(), request.to_owned());
                return Err(ConfigError::OtherDevice { kind, request, device: device.to_owned() });
            }
            if is_named || (config.requests.is_empty() && config.kind == kind) {
                return config.refusal.clone().map_or(Ok(()), Err);
            }
        }
        Ok(())
    }
}

/// The fields of `GpuConfig` beside those of every object.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuConfig {
    sharing: Option<GpuSharing>,
}

/// See [`GpuConfig`].
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GpuSharing {
    strategy: Strategy,
    time_slicing_config: Option<TimeSlicing>,
    mps_config: Option<Mps>,
}

/// The fields of `MigDeviceConfig` beside those of every object.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MigDeviceConfig {
    sharing: Option<MigSharing>,
}

/// See [`MigDeviceConfig`].
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MigSharing {
    strategy: Strategy,
    mps_config: Option<Mps>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
enum Strategy {
    TimeSlicing,
    #[serde(rename = "MPS")]
    Mps,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeSlicing {
    interval: Option<String>,
}

/// Its fields are read so that a wrong one is named before MPS is refused.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mps {
    #[serde(rename = "defaultActiveThreadPercentage")]
    _threads: Option<u32>,
    #[serde(rename = "defaultPinnedDeviceMemoryLimit")]
    _memory: Option<IgnoredAny>,
    #[serde(rename = "defaultPerDevicePinnedMemoryLimit")]
    _memory_by_device: Option<IgnoredAny>,
    #[serde(rename = "multiUser")]
    _multi_user: Option<bool>,
}

/// Reads one object: its kind, and why it cannot be enforced.
fn parse(parameters: &str) -> Result<(Kind, Option<ConfigError>), ConfigError> {
    let no_object = |why: String| ConfigError::NoObject { why };
    let mut object = match serde_json::from_str(parameters) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return Err(no_object("not a JSON object".to_owned())),
        Err(error) => return Err(no_object(error.to_string())),
    };
    let mut text = |field: &str| match object.remove(field) {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let (version, kind) = (text("apiVersion"), text("kind"));
    if version != API_VERSION {
        return Err(ConfigError::ApiVersion { found: version });
    }
    let kinds = [Kind::Gpu, Kind::Mig];
    let kind = kinds.into_iter().find(|known| known.name() == kind).ok_or(ConfigError::Kind { found: kind })?;
    let object = Value::Object(object);
    let field = |why: String| ConfigError::Field { kind: kind.name(), why };
    let sharing = match kind {
        Kind::Gpu => serde_json::from_value::<GpuConfig>(object).map(|config| config.sharing),
        Kind::Mig => serde_json::from_value::<MigDeviceConfig>(object).map(|config| {
            let all =
                |MigSharing { strategy, mps_config }| GpuSharing { strategy, time_slicing_config: None, mps_config };
            config.sharing.map(all)
        }),
    };
    let Some(sharing) = sharing.map_err(|error| field(error.to_string()))? else { return Ok((kind, None)) };
    let interval = sharing.time_slicing_config.as_ref().map(|config| config.interval.as_deref().unwrap_or("Default"));
    if let Some(unknown) = interval.filter(|interval| !INTERVALS.contains(interval)) {
        let known = INTERVALS.join(", ");
        return Err(field(format!("unknown interval {}, expected one of {known}", quoted(unknown))));
    }
    let refusal = match (sharing.strategy, interval) {
        (Strategy::Mps, Some(_)) => return Err(field("timeSlicingConfig is given with the strategy MPS".to_owned())),
        (Strategy::TimeSlicing, _) if sharing.mps_config.is_some() => {
            return Err(field("mpsConfig is given with the strategy TimeSlicing".to_owned()));
        }
        (Strategy::Mps, None) => Some(ConfigError::Mps { kind: kind.name() }),
        (Strategy::TimeSlicing, None | Some("Default")) => None,
        (Strategy::TimeSlicing, Some(interval)) => {
            Some(ConfigError::Interval { kind: kind.name(), interval: interval.to_owned() })
        }
    };
    Ok((kind, refusal))
}
