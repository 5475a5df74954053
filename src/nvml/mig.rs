//! MIG as NVML and the kernel describe it: the mode, the MIG devices, their profiles and capabilities.
//!
//! Called by `probe` for each GPU. One call that fails costs one fact; a device without a UUID or instance ids is left
//! out, with a failure that names the call. A GPU or a driver without MIG is silence.

use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError};
use super::calls::Calls;
use super::probe::Findings;
use super::raw;
use crate::topology::{MigCapabilities, MigDeviceObservation, MigExtension, MigObservation, MigUuid};

/// An index that nothing was created for is no failure of this call.
const HANDLE: &str = "nvmlDeviceGetMigDeviceHandleByIndex";

/// The kernel's list of MIG capabilities below /proc, the same in every container.
const MINORS: &str = "driver/nvidia-caps/mig-minors";

/// What is seen of a GPU's MIG; `minor` is N of the GPU's /dev/nvidiaN.
pub fn observe(
    device: &Device<'_>,
    calls: &Calls,
    minor: Option<u32>,
    procfs: &Path,
    findings: &mut Findings<'_>,
) -> Option<MigObservation> {
    let mode = findings.fact(calls.ask("nvmlDeviceGetMigMode", || device.mig_mode()))?;
    let enabled = mode.current == sys::NVML_DEVICE_MIG_ENABLE;
    let count =
        if enabled { calls.ask("nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count()) } else { Ok(None) };
    // Absent where the driver has no MIG; then no device has capabilities.
    let minors = if enabled { std::fs::read_to_string(procfs.join(MINORS)).unwrap_or_default() } else { String::new() };
    let devices = (0..findings.fact(count).unwrap_or(0)).filter_map(|index| {
        let mut found = mig_device(device, calls, index, findings)?;
        let find = |minor| MigCapabilities::find(&minors, minor, found.gpu_instance, found.compute_instance);
        found.capabilities = minor.and_then(find);
        Some(found)
    });
    Some(MigObservation { enabled, devices: devices.collect() })
}

/// The names of the MIG devices of a GPU in MIG mode: what a look finds changed. `None` where a call failed: one that does not
/// say its name is no device less.
pub fn names(device: &Device<'_>, calls: &Calls) -> Option<Vec<MigUuid>> {
    let count = calls.ask("nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count()).ok()?;
    let mut names = Vec::new();
    for index in 0..count.unwrap_or(0) {
        let mig = match calls.ask(HANDLE, || device.mig_device_by_index(index)) {
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND) => continue,
            mig => mig.ok()?,
        };
        let Some(mig) = mig else { continue };
        let uuid = calls.ask("nvmlDeviceGetUUID", || mig.uuid()).ok()?;
        names.extend(uuid.and_then(|uuid| uuid.parse().ok()));
    }
    Some(names)
}

fn mig_device(
    parent: &Device<'_>,
    calls: &Calls,
    index: u32,
    findings: &mut Findings<'_>,
) -> Option<MigDeviceObservation> {
    let device = match calls.ask(HANDLE, || parent.mig_device_by_index(index)) {
        // An index that nothing was created for.
        Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND) => return None,
        other => findings.fact(other)?,
    };
    let uuid = calls.ask("nvmlDeviceGetUUID", || device.uuid()).and_then(|uuid| match uuid.map(|uuid| uuid.parse()) {
        Some(Ok(uuid)) => Ok(Some::<MigUuid>(uuid)),
        Some(Err(error)) => Err(CallError::unreadable("nvmlDeviceGetUUID", error)),
        None => Ok(None),
    });
    let uuid = findings.fact(uuid)?;
    let gpu_instance = findings.fact(calls.raw("nvmlDeviceGetGpuInstanceId", || raw::gpu_instance_id(&device)))?;
    let compute_instance =
        findings.fact(calls.raw("nvmlDeviceGetComputeInstanceId", || raw::compute_instance_id(&device)))?;
    let attributes = findings.fact(calls.ask("nvmlDeviceGetAttributes_v2", || device.attributes()))?;
    Some(MigDeviceObservation {
        index,
        uuid,
        gpu_instance,
        compute_instance,
        gpu_slices: attributes.gpu_instance_slice_count,
        compute_slices: attributes.compute_instance_slice_count,
        memory_mib: attributes.memory_size_mb,
        extension: findings.fact(extension(parent, calls, gpu_instance)),
        capabilities: None,
    })
}

/// The GPU instance says the id of its profile; which profile that is, only a walk over all of them tells.
fn extension(parent: &Device<'_>, calls: &Calls, gpu_instance: u32) -> Answer<MigExtension> {
    let Some(id) = calls.raw("nvmlGpuInstanceGetInfo", || raw::gpu_instance_profile(parent, gpu_instance))? else {
        return Ok(None);
    };
    for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        match calls.raw("nvmlDeviceGetGpuInstanceProfileInfo", || raw::profile_id(parent, number)) {
            Ok(Some(known)) if known == id => return Ok(Some(MigExtension::of_profile(number))),
            // A profile that this GPU does not have.
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => {}
            other => drop(other?),
        }
    }
    Ok(None)
}
