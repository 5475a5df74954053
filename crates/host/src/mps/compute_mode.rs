//! The compute mode of GPUs that MPS shares: EXCLUSIVE_PROCESS while they are shared, as NVIDIA's daemon sets it. A
//! client that does not go through MPS would otherwise take memory that no limit covers. Nothing else in linkwise
//! changes a GPU.
//!
//! Called by `supervise`, and by the program at the start. Before a GPU's mode is set, a record of it goes to the MPS
//! root; the record is removed once the mode is DEFAULT again. So even if this process is killed, the next one sets
//! back the modes that this one set, and never a mode that an operator set.

use std::fs::{self, File};
use std::path::PathBuf;

use futures_util::future::{join_all, try_join_all};
use tokio::process::Command;

use super::daemon::{MpsError, Settings};
use super::orders::exclusive_gpus;
use super::program;
use linkwise_core::topology::GpuUuid;

const EXCLUSIVE_PROCESS: &str = "EXCLUSIVE_PROCESS";
const DEFAULT: &str = "DEFAULT";

/// Sets GPUs to EXCLUSIVE_PROCESS, each with a record. If one cannot be set, the modes of others may be; [`set_back`]
/// covers them all.
pub async fn set_exclusive(settings: &Settings, gpus: &[&GpuUuid]) -> Result<(), MpsError> {
    let folder = settings.layout.exclusive();
    let record = |path: &PathBuf| fs::create_dir_all(&folder).and_then(|()| File::create(path).map(drop));
    for path in gpus.iter().map(|gpu| folder.join(gpu.as_str())) {
        record(&path).map_err(|source| MpsError::Write(path, source))?;
    }
    try_join_all(gpus.iter().map(|gpu| set(settings, gpu, EXCLUSIVE_PROCESS))).await.map(drop)
}

/// Sets recorded GPUs for which `is_due` is true back to DEFAULT. All are tried; those that failed stay on record, and
/// the first error is returned.
pub async fn set_back(settings: &Settings, is_due: impl Fn(&GpuUuid) -> bool) -> Result<(), MpsError> {
    let folder = settings.layout.exclusive();
    let recorded = exclusive_gpus(&settings.layout);
    let recorded = recorded.map_err(|source| MpsError::Write(folder.clone(), source))?;
    let gpus: Vec<GpuUuid> = recorded.into_iter().filter(is_due).collect();
    let set_back = async |gpu: &GpuUuid| {
        set(settings, gpu, DEFAULT).await?;
        let path = folder.join(gpu.as_str());
        fs::remove_file(&path).map_err(|source| MpsError::Write(path, source))
    };
    join_all(gpus.iter().map(set_back)).await.into_iter().collect()
}

async fn set(settings: &Settings, gpu: &GpuUuid, mode: &'static str) -> Result<(), MpsError> {
    let mut command = Command::new(&settings.programs.smi);
    command.args(["-i", gpu.as_str(), "-c", mode]);
    let set = program::run(&mut command, "", settings.pace.answer).await;
    set.map(drop).map_err(|source| MpsError::ComputeMode(gpu.clone(), mode, source))
}
