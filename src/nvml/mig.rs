//! MIG as NVML and the kernel describe it: the mode, the MIG devices, their profiles and capabilities.
//!
//! Called by `probe` for each GPU. One call that fails costs one fact; a device without a UUID or instance ids is left
//! out, with a failure that names the call. A GPU or a driver without MIG is silence.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, answer};
use super::probe::Findings;
use super::raw;
use crate::topology::{MigCapabilities, MigDeviceObservation, MigExtension, MigObservation, MigUuid};

/// The kernel's list of MIG capabilities, the same in every container.
const MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";

/// What is seen of a GPU's MIG; `minor` is N of the GPU's /dev/nvidiaN.
pub fn observe(device: &Device<'_>, minor: Option<u32>, findings: &mut Findings<'_>) -> Option<MigObservation> {
    let mode = findings.fact(answer("nvmlDeviceGetMigMode", device.mig_mode()))?;
    let enabled = mode.current == sys::NVML_DEVICE_MIG_ENABLE;
    let count = if enabled { answer("nvmlDeviceGetMaxMigDeviceCount", device.mig_device_count()) } else { Ok(None) };
    // Absent where the driver has no MIG; then no device has capabilities.
    let minors = if enabled { std::fs::read_to_string(MINORS).unwrap_or_default() } else { String::new() };
    let devices = (0..findings.fact(count).unwrap_or(0)).filter_map(|index| {
        let mut found = mig_device(device, index, findings)?;
        let find = |minor| MigCapabilities::find(&minors, minor, found.gpu_instance, found.compute_instance);
        found.capabilities = minor.and_then(find);
        Some(found)
    });
    Some(MigObservation { enabled, devices: devices.collect() })
}

fn mig_device(parent: &Device<'_>, index: u32, findings: &mut Findings<'_>) -> Option<MigDeviceObservation> {
    let device = match answer("nvmlDeviceGetMigDeviceHandleByIndex", parent.mig_device_by_index(index)) {
        // An index that nothing was created for.
        Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND) => return None,
        other => findings.fact(other)?,
    };
    let uuid = answer("nvmlDeviceGetUUID", device.uuid()).and_then(|uuid| match uuid.map(|uuid| uuid.parse()) {
        Some(Ok(uuid)) => Ok(Some::<MigUuid>(uuid)),
        Some(Err(error)) => Err(CallError::unreadable("nvmlDeviceGetUUID", error)),
        None => Ok(None),
    });
    let uuid = findings.fact(uuid)?;
    let gpu_instance = findings.fact(raw::gpu_instance_id(&device))?;
    let compute_instance = findings.fact(raw::compute_instance_id(&device))?;
    let attributes = findings.fact(answer("nvmlDeviceGetAttributes_v2", device.attributes()))?;
    Some(MigDeviceObservation {
        index,
        uuid,
        gpu_instance,
        compute_instance,
        gpu_slices: attributes.gpu_instance_slice_count,
        compute_slices: attributes.compute_instance_slice_count,
        memory_mib: attributes.memory_size_mb,
        extension: findings.fact(extension(parent, gpu_instance)),
        capabilities: None,
    })
}

/// The GPU instance says the id of its profile; which profile that is, only a walk over all of them tells.
fn extension(parent: &Device<'_>, gpu_instance: u32) -> Answer<MigExtension> {
    let Some(id) = raw::gpu_instance_profile(parent, gpu_instance)? else { return Ok(None) };
    for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        match raw::profile_id(parent, number) {
            Ok(Some(known)) if known == id => return Ok(Some(MigExtension::of_profile(number))),
            // A profile that this GPU does not have.
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => {}
            other => drop(other?),
        }
    }
    Ok(None)
}
