//! MIG as NVML and the kernel describe it: the mode, the MIG devices, their profiles and capabilities.
//!
//! Called by `full_scan`, `poll` and `mig_order`. In a scan, an NVML call that fails costs one fact. If it was for a
//! required fact of a MIG device, such as the UUID, the error takes the device's place.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError};
use super::calls::Calls;
use super::full_scan::UUID;
use super::raw::{self, GpuInstanceHandle};
use super::scan::{MigDeviceScan, MigScan, known};
use linkwise_core::topology::{
    MAX_MEMORY_MIB, MigCapabilities, MigDeviceObservation, MigEngines, MigExtension, MigPlacement,
    MigProfileObservation, MigSlot, MigUuid,
};

/// The call that gives a MIG device's handle.
const HANDLE: &str = "nvmlDeviceGetMigDeviceHandleByIndex";

/// The number of profiles of GPU instances: NVML_GPU_INSTANCE_PROFILE_COUNT of NVML 13. The bindings have 17.
const PROFILES: u32 = 18;

/// The kernel's list of MIG capabilities below /proc, the same in every container.
const MINORS: &str = "driver/nvidia-caps/mig-minors";

/// Scans the MIG of a GPU; `minor` is N of the GPU's /dev/nvidiaN.
pub fn scan(device: &Device<'_>, calls: &Calls, minor: &Answer<u32>, procfs: &Path) -> Answer<MigScan> {
    let Some(mode) = calls.ask("nvmlDeviceGetMigMode", || device.mig_mode())? else { return Ok(None) };
    if mode.current != sys::NVML_DEVICE_MIG_ENABLE {
        return Ok(Some(MigScan { enabled: false, devices: Ok(None), profiles: Ok(None) }));
    }
    // The file is absent if the driver has no MIG; then no device has capabilities.
    let minors = std::fs::read_to_string(procfs.join(MINORS)).unwrap_or_default();
    let all_profiles = all_profiles(device, calls);
    let count = calls.ask("nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count());
    let devices = count.map(|count| {
        let found = |index| (index, mig_device(device, calls, index, &all_profiles, minor, &minors));
        count.map(|count| (0..count).map(found).collect::<Devices>())
    });
    let devices = devices.and_then(|devices| visible(devices, known(minor).copied(), procfs));
    Ok(Some(MigScan { enabled: true, devices, profiles: all_profiles.and_then(|all| profiles(device, calls, &all)) }))
}

/// MIG devices by index.
type Devices = BTreeMap<u32, Answer<MigDeviceScan>>;

/// The MIG devices; an error if NVML shows none while the kernel has some. To a process that may not see them, NVML
/// answers NOT_FOUND, as for an index without a device.
fn visible(devices: Option<Devices>, minor: Option<u32>, procfs: &Path) -> Answer<Devices> {
    let shows_none = devices.as_ref().is_some_and(|devices| devices.values().all(|found| matches!(found, Ok(None))));
    let made = minor.filter(|_| shows_none).map_or(0, |minor| compute_instances(minor, procfs));
    if made == 0 {
        return Ok(devices);
    }
    let why = format!(
        "NVML shows none of the {made} MIG device(s) that the kernel lists for this GPU: this process lacks the right \
         to see them; give it CAP_SYS_ADMIN or the driver's capability mig/monitor (docs/mig.md)"
    );
    Err(CallError::in_words(HANDLE, why))
}

/// The number of compute instances that the kernel lists of a GPU (`os.c` of open-gpu-kernel-modules); 0 if the
/// container runtime hides their folder.
fn compute_instances(minor: u32, procfs: &Path) -> usize {
    let folder = procfs.join(format!("driver/nvidia/capabilities/gpu{minor}/mig"));
    let entries = |folder: &Path, prefix: &'static str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter(move |entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()))
    };
    entries(&folder, "gi").map(|instance| entries(&instance.path(), "ci").count()).sum()
}

/// The UUIDs of the MIG devices of a GPU in MIG mode; polls compare them to find changes. If one call fails, all UUIDs
/// are unknown, because a MIG device that did not answer has not vanished.
pub fn uuids(device: &Device<'_>, calls: &Calls) -> Result<Vec<MigUuid>, CallError> {
    let count = calls.ask("nvmlDeviceGetMaxMigDeviceCount", || device.mig_device_count())?;
    let mut uuids = Vec::new();
    for index in 0..count.unwrap_or(0) {
        let Some(mig) = handle(device, calls, index)? else { continue };
        let uuid = calls.ask(UUID, || mig.uuid())?;
        uuids.extend(uuid.and_then(|uuid| uuid.parse().ok()));
    }
    Ok(uuids)
}

/// A MIG device's handle; `Ok(None)` if the index has no device.
pub fn handle<'nvml>(parent: &Device<'nvml>, calls: &Calls, index: u32) -> Answer<Device<'nvml>> {
    match calls.ask(HANDLE, || parent.mig_device_by_index(index)) {
        Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND) => Ok(None),
        answer => answer,
    }
}

/// Scans the MIG device at an index. "Not offered" if the index has no device, or the device lacks a required fact.
fn mig_device(
    parent: &Device<'_>,
    calls: &Calls,
    index: u32,
    all_profiles: &Result<Profiles, CallError>,
    minor: &Answer<u32>,
    minors: &str,
) -> Answer<MigDeviceScan> {
    let Some(device) = handle(parent, calls, index)? else { return Ok(None) };
    let uuid = calls.ask(UUID, || device.uuid())?.map(|uuid| uuid.parse::<MigUuid>()).transpose();
    let uuid = uuid.map_err(|error| CallError::in_words(UUID, error))?;
    let gpu_instance = calls.raw("nvmlDeviceGetGpuInstanceId", || raw::gpu_instance_id(&device))?;
    let compute_instance = calls.raw("nvmlDeviceGetComputeInstanceId", || raw::compute_instance_id(&device))?;
    let attributes = calls.ask("nvmlDeviceGetAttributes_v2", || device.attributes())?;
    let (Some(uuid), Some(gpu_instance), Some(compute_instance), Some(attributes)) =
        (uuid, gpu_instance, compute_instance, attributes)
    else {
        return Ok(None);
    };
    let find = |minor| MigCapabilities::find(minors, minor, gpu_instance, compute_instance);
    let handle = calls.raw("nvmlDeviceGetGpuInstanceById", || GpuInstanceHandle::by_id(parent, gpu_instance));
    let info = |handle: GpuInstanceHandle<'_, '_>| calls.raw("nvmlGpuInstanceGetInfo", || handle.info());
    let instance = handle.and_then(|handle| handle.map_or(Ok(None), info)).map(|instance| {
        instance.map(|info| MigSlot {
            profile_id: info.profileId,
            placement: MigPlacement { start: info.placement.start, size: info.placement.size },
        })
    });
    Ok(Some(MigDeviceScan {
        extension: extension(all_profiles, &instance),
        instance,
        capabilities: minor.clone().map(|minor| minor.and_then(find)),
        device: MigDeviceObservation {
            index,
            uuid,
            gpu_instance,
            compute_instance,
            gpu_slices: attributes.gpu_instance_slice_count,
            compute_slices: attributes.compute_instance_slice_count,
            memory_mib: attributes.memory_size_mb.min(MAX_MEMORY_MIB),
            profile_id: None,
            placement: None,
            extension: None,
            engines: Some(MigEngines {
                multiprocessors: attributes.multiprocessor_count,
                copy: attributes.shared_copy_engine_count,
                decoder: attributes.shared_decoder_count,
                encoder: attributes.shared_encoder_count,
                jpeg: attributes.shared_jpeg_count,
                ofa: attributes.shared_ofa_count,
            }),
            capabilities: None,
        },
    }))
}

/// NVML's number of each profile that the GPU has, and the profile.
type Profiles = Vec<(u32, sys::nvmlGpuInstanceProfileInfo_t)>;

fn all_profiles(device: &Device<'_>, calls: &Calls) -> Result<Profiles, CallError> {
    let mut found = Vec::new();
    for number in 0..PROFILES {
        match calls.raw("nvmlDeviceGetGpuInstanceProfileInfo", || raw::profile(device, number)) {
            // This GPU does not have the profile.
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => {}
            info => found.extend(info?.map(|info| (number, info))),
        }
    }
    Ok(found)
}

/// The extension of a device's profile. NVML reports the driver's id of the GPU instance's profile; the extension
/// follows from NVML's number of the profile with that id.
fn extension(all_profiles: &Result<Profiles, CallError>, instance: &Answer<MigSlot>) -> Answer<MigExtension> {
    let Some(MigSlot { profile_id: id, .. }) = instance.clone()? else { return Ok(None) };
    let mut known = all_profiles.as_ref().map_err(Clone::clone)?.iter();
    Ok(known.find(|(_, info)| info.id == id).map(|(number, _)| MigExtension::of_profile(*number)))
}

/// The profiles that can be placed on the GPU.
fn profiles(device: &Device<'_>, calls: &Calls, all_profiles: &Profiles) -> Answer<Vec<MigProfileObservation>> {
    const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let mut profiles = Vec::new();
    for (number, info) in all_profiles {
        let placements = match calls.raw(CALL, || raw::placements(device, info.id)) {
            Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => None,
            placements => placements?,
        };
        profiles.push(MigProfileObservation {
            id: info.id,
            number: *number,
            gpu_slices: info.sliceCount,
            memory_mib: info.memorySizeMB.min(MAX_MEMORY_MIB),
            instances: info.instanceCount,
            engines: MigEngines {
                multiprocessors: info.multiprocessorCount,
                copy: info.copyEngineCount,
                decoder: info.decoderCount,
                encoder: info.encoderCount,
                jpeg: info.jpegCount,
                ofa: info.ofaCount,
            },
            placements: placements.unwrap_or_default(),
        });
    }
    profiles.retain(|profile| !profile.placements.is_empty());
    Ok(Some(profiles))
}
