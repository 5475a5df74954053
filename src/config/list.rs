//! GPUs and their slots as a person writes them on the command line.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

use crate::quote::quoted;
use crate::topology::{Gpu, GpuUuid};

/// A GPU by NVML index or by UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// NVML's index.
    Index(u32),
    /// NVML's UUID.
    Uuid(GpuUuid),
}

/// A GPU, or one slot of a shared GPU: `0`, `0::3`, `GPU-...`, `GPU-...::3`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Written")]
pub struct UnitName {
    /// The GPU.
    pub gpu: GpuName,
    /// The slot, from 0; without one, the whole GPU.
    pub slot: Option<usize>,
}

/// A GPU in JSON: a number, or what could stand on a command line.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a GPU index or a GPU UUID")]
enum Written {
    Number(u32),
    Text(String),
}

/// Why a text names no GPU.
#[derive(Debug, Error)]
#[error("{} is neither a GPU index nor a GPU UUID", quoted(.0))]
pub struct GpuNameError(String);

impl GpuName {
    /// Whether it names this GPU.
    pub fn names(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Index(index) => gpu.index == *index,
            Self::Uuid(uuid) => gpu.uuid == *uuid,
        }
    }
}

impl TryFrom<Written> for UnitName {
    type Error = GpuNameError;

    fn try_from(written: Written) -> Result<Self, Self::Error> {
        match written {
            Written::Number(index) => Ok(Self { gpu: GpuName::Index(index), slot: None }),
            Written::Text(text) => text.parse(),
        }
    }
}

impl FromStr for UnitName {
    type Err = GpuNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let slot = text.rsplit_once("::").and_then(|(gpu, slot)| Some((gpu, slot.trim().parse().ok()?)));
        match slot {
            Some((gpu, slot)) => Ok(Self { gpu: gpu.parse()?, slot: Some(slot) }),
            None => Ok(Self { gpu: text.parse()?, slot: None }),
        }
    }
}

impl FromStr for GpuName {
    type Err = GpuNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let index = || text.parse().map(Self::Index).ok();
        // No UUID is all digits: NVML's begin with GPU- or MIG-.
        let uuid = || text.parse().map(Self::Uuid).ok().filter(|_| !text.bytes().all(|b| b.is_ascii_digit()));
        index().or_else(uuid).ok_or_else(|| GpuNameError(text.to_owned()))
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}
