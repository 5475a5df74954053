//! Makes and destroys GPU instances for claims, and lists MIG devices, in the agent. See docs/mig.md.
//!
//! Called by `watch` for an order of the parent, one at a time. Each call is reported before it is made. If it
//! hangs, the parent knows the call, and kills this process after the limit of a call.

use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, Fault};
use super::full_scan::{Gpu, UUID};
use super::mig::{handle, uuids};
use super::raw::{self, GpuInstanceHandle};
use linkwise_core::claims::{MigOrder, MigOrderError, MigTask};
use linkwise_core::topology::{MigSlot, MigUuid};

/// The advice for an operator whose container may not change MIG devices.
const NO_RIGHTS: &str = ": this container lacks the rights for MIG on demand; use the overlay dra-mig, or set \
    dra.migRights in the chart (docs/mig.md)";

/// The failure of an order because of a call. `may_exist` is true if the instance of the order may exist.
fn failed(error: &CallError, may_exist: bool) -> MigOrderError {
    let rights = if error.fault() == Fault::NoPermission { NO_RIGHTS } else { "" };
    MigOrderError { why: format!("{error}{rights}"), may_exist }
}

/// Carries out an order. `hides_gpus` is true if `gpus` may lack a GPU that is not lost.
pub fn carry_out(gpus: &[Gpu<'_>], hides_gpus: bool, order: &MigOrder) -> Result<Vec<MigUuid>, MigOrderError> {
    let gpu = gpus.iter().find(|gpu| gpu.uuid == order.gpu);
    match (&order.task, gpu) {
        (MigTask::Make(_) | MigTask::List, None) => {
            let why = format!("NVML does not list {}", order.gpu);
            Err(MigOrderError { why, may_exist: false })
        }
        (MigTask::Destroy(..), None) if hides_gpus => {
            let why = format!("NVML does not list {}: the agent skips it, or it does not answer", order.gpu);
            Err(MigOrderError { why, may_exist: true })
        }
        // A vanished GPU took its instances with it.
        (MigTask::Destroy(..), None) => Ok(Vec::new()),
        (MigTask::Make(slot), Some(gpu)) => make(gpu, *slot).map(|made| vec![made]),
        (MigTask::List, Some(gpu)) => uuids(&gpu.device, &gpu.calls).map_err(|error| failed(&error, false)),
        (MigTask::Destroy(slot, device), Some(gpu)) => match destroy(gpu, *slot, device.as_ref()) {
            Ok(()) => Ok(Vec::new()),
            // A lost GPU took its instances with it.
            Err(error) if error.fault() == Fault::GpuLost => Ok(Vec::new()),
            Err(error) => Err(failed(&error, true)),
        },
    }
}

/// The answer of a call without which an order cannot go on: "not offered" is an error too.
fn required<T>(call: &'static str, answer: Answer<T>) -> Result<T, CallError> {
    answer?.ok_or_else(|| CallError::returned(call, sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED))
}

fn make(gpu: &Gpu<'_>, slot: MigSlot) -> Result<MigUuid, MigOrderError> {
    const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";
    let create = || GpuInstanceHandle::create(&gpu.device, slot.profile_id, slot.placement.start, slot.placement.size);
    let instance = required(CREATE, gpu.calls.raw(CREATE, create)).map_err(|error| failed(&error, false))?;
    let info = gpu.calls.raw(INFO, || instance.info());
    let made = required(INFO, info).and_then(|info| fill(gpu, &instance, info.id));
    // A half-made instance is destroyed; if that fails, the error is still that of the creation.
    made.map_err(|error| failed(&error, destroy(gpu, slot, None).is_err()))
}

const INFO: &str = "nvmlGpuInstanceGetInfo";

/// Makes the compute instance that takes a whole GPU instance; returns its MIG device.
fn fill(gpu: &Gpu<'_>, instance: &GpuInstanceHandle<'_, '_>, id: u32) -> Result<MigUuid, CallError> {
    const PROFILE: &str = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
    const CREATE: &str = "nvmlGpuInstanceCreateComputeInstance";
    let mut whole: Option<sys::nvmlComputeInstanceProfileInfo_t> = None;
    // Of equally large profiles the first is taken: 7_SLICE before 7_SLICE_NVL of NVML 13, which the bindings lack.
    for number in 0..sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        match gpu.calls.raw(PROFILE, || instance.compute_profile(number)) {
            // This instance does not have the profile.
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => {}
            found => {
                let larger = found?.filter(|found| whole.is_none_or(|whole| found.sliceCount > whole.sliceCount));
                whole = larger.or(whole);
            }
        }
    }
    let profile = required(PROFILE, Ok(whole))?.id;
    required(CREATE, gpu.calls.raw(CREATE, || instance.create_compute_instance(profile)))?;
    let (_, device) = devices(gpu, id)?
        .pop()
        .ok_or_else(|| CallError::in_words(CREATE, "NVML lists no MIG device for the new compute instance"))?;
    Ok(device)
}

/// The MIG devices of a GPU instance: the ids of their compute instances, and their UUIDs.
fn devices(gpu: &Gpu<'_>, instance: u32) -> Result<Vec<(u32, MigUuid)>, CallError> {
    const COUNT: &str = "nvmlDeviceGetMaxMigDeviceCount";
    let mut found = Vec::new();
    let count = required(COUNT, gpu.calls.ask(COUNT, || gpu.device.mig_device_count()))?;
    for index in 0..count {
        let Some(device) = handle(&gpu.device, &gpu.calls, index)? else { continue };
        if gpu.calls.raw("nvmlDeviceGetGpuInstanceId", || raw::gpu_instance_id(&device))? != Some(instance) {
            continue;
        }
        const COMPUTE: &str = "nvmlDeviceGetComputeInstanceId";
        let compute = required(COMPUTE, gpu.calls.raw(COMPUTE, || raw::compute_instance_id(&device)))?;
        let uuid = required(UUID, gpu.calls.ask(UUID, || device.uuid()))?;
        found.push((compute, uuid.parse().map_err(|error| CallError::in_words(UUID, error))?));
    }
    Ok(found)
}

/// Destroys the GPU instance in a slot and its compute instances. With `only`, an instance that has another MIG device
/// stays.
fn destroy(gpu: &Gpu<'_>, slot: MigSlot, only: Option<&MigUuid>) -> Result<(), CallError> {
    const LIST: &str = "nvmlDeviceGetGpuInstances";
    let of_profile = || GpuInstanceHandle::of_profile(&gpu.device, slot.profile_id);
    // Without MIG mode there is no instance.
    let Some(instances) = gpu.calls.raw(LIST, of_profile)? else { return Ok(()) };
    for instance in instances {
        let info = required(INFO, gpu.calls.raw(INFO, || instance.info()))?;
        if info.placement.start != slot.placement.start {
            continue;
        }
        let devices = devices(gpu, info.id)?;
        if only.is_some_and(|only| devices.iter().any(|(_, uuid)| uuid != only)) {
            return Ok(());
        }
        for (compute, _) in devices {
            const COMPUTE: &str = "nvmlComputeInstanceDestroy";
            required(COMPUTE, gpu.calls.raw(COMPUTE, || instance.destroy_compute_instance(compute)))?;
        }
        const DESTROY: &str = "nvmlGpuInstanceDestroy";
        return required(DESTROY, gpu.calls.raw(DESTROY, || instance.destroy()));
    }
    Ok(())
}
