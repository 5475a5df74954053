//! Opaque configuration of claims: NVIDIA's `GpuConfig` and `MigDeviceConfig` (`resource.nvidia.com/v1beta1`).
//!
//! The reader is as strict as NVIDIA's driver: an unknown kind, version, field or value is an error of the claim.
//! Every setting is either enforced or refused by name. Time slices of the default length need nothing, because a GPU
//! has them anyway.

use crate::prelude::*;
use alloc::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::claim::{AllocatedConfig, base};
use super::mps::MpsConfig;
use crate::quantity;
use crate::quote::{one_line, quoted};
use crate::state::DRA_DRIVER;

/// The API group and version of NVIDIA's configuration.
const API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// The sources of configuration; the claim's own overrides its class's.
const SOURCES: [&str; 2] = ["FromClass", "FromClaim"];

/// The lengths of time slices that NVIDIA's API has.
const INTERVALS: [&str; 4] = ["Default", "Short", "Medium", "Long"];

/// The kind of device that a configuration is for.
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

/// The error in the configuration of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The configuration has no opaque parameters.
    #[error("configuration without opaque parameters is not supported")]
    NotOpaque,
    /// The source is neither the claim nor its class.
    #[error("configuration from {} is not supported; supported are FromClass and FromClaim", quoted(.0))]
    Source(String),
    /// The parameters are not a JSON object.
    #[error("opaque parameters: {}", one_line(.0))]
    NoObject(String),
    /// The configuration belongs to another API.
    #[error("opaque parameters: apiVersion {} is not supported; use resource.nvidia.com/v1beta1", quoted(.0))]
    ApiVersion(String),
    /// The configuration is another kind of object of that API.
    #[error("opaque parameters: kind {} is not supported; use GpuConfig or MigDeviceConfig", quoted(.0))]
    Kind(String),
    /// A field or value is not valid.
    #[error("{0}: {why}", why = one_line(.1))]
    Field(&'static str, String),
    /// The configuration asks for time slices of another length than the default.
    #[error(
        "{0}: sharing.timeSlicingConfig.interval {1} is not supported: linkwise leaves time slices to the \
         driver; use Default"
    )]
    Interval(&'static str, String),
    /// The configuration asks for MPS on MIG devices.
    #[error(
        "{0}: sharing.strategy MPS is not supported: linkwise runs MPS control daemons for whole GPUs, not for MIG \
         devices; use TimeSlicing"
    )]
    MpsOnMig(&'static str),
    /// The configuration is for GPUs and a MIG device was allocated, or the other way round.
    #[error("{kind} is given for the request {}, whose device {device} is of another kind", quoted(.request))]
    OtherDevice {
        /// The configuration's kind.
        kind: &'static str,
        /// The device's request.
        request: String,
        /// The device.
        device: String,
    },
}

/// The configurations that were read, in ascending priority: the last that fits a device is used.
#[derive(Clone, Debug, Default)]
pub(super) struct Configs(Vec<Config>);

/// One configuration.
#[derive(Clone, Debug)]
struct Config {
    kind: Kind,
    requests: Vec<String>,
    mps: RequestedMps,
}

/// The MPS that a configuration requests, or the reason why its sharing cannot be enforced. `None` if containers get
/// time slices of the device.
type RequestedMps = Result<Option<MpsConfig>, ConfigError>;

impl Configs {
    /// Reads all configurations for our driver: those of classes first, then the claim's own.
    pub fn read(configs: &[AllocatedConfig]) -> Result<Self, ConfigError> {
        if let Some(unknown) = configs.iter().find(|config| !SOURCES.contains(&config.source.as_str())) {
            return Err(ConfigError::Source(unknown.source.clone()));
        }
        let mut read = Vec::new();
        for source in SOURCES {
            for config in configs.iter().filter(|config| config.source == source) {
                let opaque = config.opaque.as_ref().ok_or(ConfigError::NotOpaque)?;
                if opaque.driver == DRA_DRIVER {
                    let (kind, mps) = parse(&opaque.parameters)?;
                    read.push(Config { kind, requests: config.requests.clone(), mps });
                }
            }
        }
        Ok(Self(read))
    }

    /// The index and the MPS settings of a device's configuration, if that requests MPS. `request` may have an
    /// alternative, `gpus/quad`; a configuration for `gpus` applies to it too. A configuration that names no request is
    /// for all devices of its kind.
    ///
    /// # Errors
    ///
    /// The device's configuration cannot be enforced, or is for the other kind of device.
    pub fn mps(&self, request: &str, device: &str, kind: Kind) -> Result<Option<(usize, &MpsConfig)>, ConfigError> {
        for (number, config) in self.0.iter().enumerate().rev() {
            let is_named = config.requests.iter().any(|named| named == request || named == base(request));
            if is_named && config.kind != kind {
                let (kind, request) = (config.kind.name(), request.to_owned());
                return Err(ConfigError::OtherDevice { kind, request, device: device.to_owned() });
            }
            if is_named || (config.requests.is_empty() && config.kind == kind) {
                let mps = config.mps.as_ref().map_err(Clone::clone)?;
                return Ok(mps.as_ref().map(|mps| (number, mps)));
            }
        }
        Ok(None)
    }
}

/// The fields of `GpuConfig` or `MigDeviceConfig` without those that every object has.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<T> {
    sharing: Option<T>,
}

/// The sharing of whole GPUs.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GpuSharing {
    strategy: Strategy,
    time_slicing_config: Option<TimeSlicing>,
    mps_config: Option<Mps>,
}

/// The sharing of MIG devices.
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

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mps {
    default_active_thread_percentage: Option<u32>,
    default_pinned_device_memory_limit: Option<Value>,
    default_per_device_pinned_memory_limit: Option<BTreeMap<String, Value>>,
    multi_user: Option<bool>,
}

impl Mps {
    /// Reads the limits; `Err` has the reason why they are wrong.
    fn read(self) -> Result<MpsConfig, String> {
        if self.multi_user == Some(true) {
            return Err("mpsConfig.multiUser is not supported: an MPS server of linkwise serves one user only".into());
        }
        let thread_percentage = self.default_active_thread_percentage;
        if let Some(wrong) = thread_percentage.filter(|percent| !(1..=100).contains(percent)) {
            return Err(format!("mpsConfig.defaultActiveThreadPercentage is {wrong}, not 1 to 100"));
        }
        let mib = |field: &str, limit: &Value| {
            let text = limit.as_str().map_or_else(|| limit.to_string(), str::to_owned);
            let mib = quantity::parse(&text).map(|bytes| bytes >> 20).filter(|mib| *mib > 0);
            mib.ok_or_else(|| format!("mpsConfig.{field} is {}, not an amount of at least 1Mi", quoted(&text)))
        };
        let all = self.default_pinned_device_memory_limit;
        let all = all.map(|limit| mib("defaultPinnedDeviceMemoryLimit", &limit)).transpose()?;
        let each = self.default_per_device_pinned_memory_limit.unwrap_or_default().into_iter();
        let each = each.map(|(device, limit)| Ok((device, mib("defaultPerDevicePinnedMemoryLimit", &limit)?)));
        Ok(MpsConfig { thread_percentage, mib: all, mib_by_device: each.collect::<Result<_, String>>()? })
    }
}

/// Reads one object: its kind, and the MPS that it requests.
fn parse(parameters: &str) -> Result<(Kind, RequestedMps), ConfigError> {
    let mut object = match serde_json::from_str(parameters) {
        Ok(Value::Object(object)) => object,
        Ok(_) => return Err(ConfigError::NoObject("not a JSON object".to_owned())),
        Err(error) => return Err(ConfigError::NoObject(error.to_string())),
    };
    let mut text = |field: &str| match object.remove(field) {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let (version, kind) = (text("apiVersion"), text("kind"));
    if version != API_VERSION {
        return Err(ConfigError::ApiVersion(version));
    }
    let kinds = [Kind::Gpu, Kind::Mig];
    let kind = kinds.into_iter().find(|known| known.name() == kind).ok_or(ConfigError::Kind(kind))?;
    let object = Value::Object(object);
    let field = |why: String| ConfigError::Field(kind.name(), why);
    let sharing = match kind {
        Kind::Gpu => serde_json::from_value::<Fields<GpuSharing>>(object).map(|config| config.sharing),
        Kind::Mig => serde_json::from_value::<Fields<MigSharing>>(object).map(|config| {
            let as_gpu_sharing =
                |MigSharing { strategy, mps_config }| GpuSharing { strategy, time_slicing_config: None, mps_config };
            config.sharing.map(as_gpu_sharing)
        }),
    };
    let Some(sharing) = sharing.map_err(|error| field(error.to_string()))? else {
        return Ok((kind, Ok(None)));
    };
    let interval = sharing.time_slicing_config.as_ref().map(|config| config.interval.as_deref().unwrap_or("Default"));
    if let Some(unknown) = interval.filter(|interval| !INTERVALS.contains(interval)) {
        return Err(field(format!("unknown interval {}, expected one of {}", quoted(unknown), INTERVALS.join(", "))));
    }
    let mps = match (sharing.strategy, interval) {
        (Strategy::Mps, Some(_)) => return Err(field("timeSlicingConfig is given with the strategy MPS".to_owned())),
        (Strategy::TimeSlicing, _) if sharing.mps_config.is_some() => {
            return Err(field("mpsConfig is given with the strategy TimeSlicing".to_owned()));
        }
        (Strategy::Mps, None) => {
            let limits = sharing.mps_config.unwrap_or_default().read().map_err(field)?;
            match kind {
                Kind::Gpu => Ok(Some(limits)),
                Kind::Mig => Err(ConfigError::MpsOnMig(kind.name())),
            }
        }
        (Strategy::TimeSlicing, None | Some("Default")) => Ok(None),
        (Strategy::TimeSlicing, Some(interval)) => Err(ConfigError::Interval(kind.name(), interval.to_owned())),
    };
    Ok((kind, mps))
}
