//! GPUs and their slots as a person writes them on the command line.

use std::str::FromStr;

use thiserror::Error;

use linkwise_core::quote::quoted;
use linkwise_core::state::GpuSelector;

/// A GPU, or one slot of a shared GPU: `0`, `0::3`, `GPU-...`, `GPU-...::3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitName {
    /// The GPU.
    pub gpu: GpuSelector,
    /// The slot, from 0; `None`: the whole GPU.
    pub slot: Option<usize>,
}

/// The reason why a text does not name a GPU.
#[derive(Debug, Error)]
#[error("{} is neither a GPU index nor a GPU UUID", quoted(.0))]
pub struct GpuNameError(String);

/// One GPU by index, UUID or PCI address.
pub(super) fn gpu(text: &str) -> Result<GpuSelector, GpuNameError> {
    match GpuSelector::from(text.trim()) {
        // A UUID that does not begin with GPU-: node files may have such.
        GpuSelector::Model(_) => {
            text.trim().parse().map(GpuSelector::Uuid).map_err(|_| GpuNameError(text.trim().to_owned()))
        }
        gpu => Ok(gpu),
    }
}

impl FromStr for UnitName {
    type Err = GpuNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let slot = text.rsplit_once("::").and_then(|(gpu, slot)| Some((gpu, slot.trim().parse().ok()?)));
        match slot {
            Some((text, slot)) => Ok(Self { gpu: gpu(text)?, slot: Some(slot) }),
            None => Ok(Self { gpu: gpu(text)?, slot: None }),
        }
    }
}
