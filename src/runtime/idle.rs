//! Nodes with nothing to offer: why, for /readyz, and the look at the PCI bus that ends the wait on a node without GPUs.
//!
//! Called by `driver`, read by `node`. It starts no child and asks NVML nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::hwloc;
use crate::topology::PciAddress;

/// Why a node offers nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Idle {
    /// It may still come right, or be put right: the node is not ready.
    Waiting(String),
    /// This host has no NVIDIA GPU: nothing is to be done, and the node is as ready as it will be.
    NoGpu(String),
}

impl Idle {
    /// Why, for people.
    pub fn reason(&self) -> &str {
        match self {
            Self::Waiting(reason) | Self::NoGpu(reason) => reason,
        }
    }
}

/// The NVIDIA GPUs on the PCI bus, however long that takes.
async fn on_bus(sysfs: &Path) -> Result<Vec<PciAddress>> {
    let sysfs = PathBuf::from(sysfs);
    // A file of a device in trouble may not answer, and would hold a thread that admissions need.
    let gpus = tokio::task::spawn_blocking(move || hwloc::nvidia_gpus_on_bus(&sysfs));
    gpus.await.context("the look at the PCI bus broke off")
}

/// Waits until the PCI bus has an NVIDIA GPU, and gives its address. A look is one folder and two short files of each
/// device in it.
pub(super) async fn gpu_appears(sysfs: &Path, between_looks: Duration) -> Result<PciAddress> {
    loop {
        tokio::time::sleep(between_looks).await;
        if let Some(first) = on_bus(sysfs).await?.first() {
            return Ok(*first);
        }
    }
}
