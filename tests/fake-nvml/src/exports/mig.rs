//! MIG: the mode, the MIG devices, their instances and profiles.
//!
//! A MIG device's handle and a GPU instance's stand for the GPU's position and a number on it.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, UNSUPPORTED, exports, put};
use crate::machine::{Engines, Mig, MigDevice, Placement};
use crate::state::{self, Answer, State, enter_gpu, enter_mig};

const NOT_FOUND: nvmlReturn_t = nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
/// The most MIG devices that a GPU of today can have.
const MOST: c_uint = 7;
/// Drivers number profiles as they like (19 is 1g on an A100); never as the profiles' own numbers.
const PROFILE_IDS: c_uint = 100;

fn mig(state: &State, at: usize) -> Answer<&Mig> {
    state.machine.gpus.get(at).and_then(|gpu| gpu.mig.as_ref()).ok_or(UNSUPPORTED)
}

fn profile(device: &MigDevice) -> Answer<c_uint> {
    let number = |suffixes: [Option<c_uint>; 8]| {
        let slices = usize::try_from(device.gpu_slices).ok()?.checked_sub(1)?;
        suffixes.get(slices).copied().flatten()
    };
    let none = None;
    match device.extension.as_deref().unwrap_or("none") {
        "none" => number([Some(0), Some(1), Some(2), Some(3), none, Some(6), Some(4), Some(5)]),
        "media" => number([Some(7), Some(8), none, none, none, none, none, none]),
        "graphics" => number([Some(10), Some(11), none, Some(12), none, none, none, none]),
        "no-media" => number([Some(13), Some(14), none, none, none, none, none, none]),
        "all-media" => number([Some(15), Some(16), none, none, none, none, none, none]),
        _ => none,
    }
    .ok_or(nvmlReturn_enum_NVML_ERROR_UNKNOWN)
}

/// The driver's id of a device's profile.
fn profile_id(device: &MigDevice) -> Answer<c_uint> {
    device.profile_id.map_or_else(|| Ok(PROFILE_IDS + profile(device)?), Ok)
}

/// Where a GPU instance is; without a place in the file behind the instances before it.
fn placement(mig: &Mig, device: &MigDevice) -> nvmlGpuInstancePlacement_t {
    if let Some(Placement { start, size }) = device.placement {
        return nvmlGpuInstancePlacement_t { start, size };
    }
    let before = mig.devices.iter().filter(|other| other.gpu_instance < device.gpu_instance);
    let slices: BTreeMap<c_uint, c_uint> = before.map(|other| (other.gpu_instance, other.gpu_slices)).collect();
    nvmlGpuInstancePlacement_t { start: slices.values().sum(), size: device.gpu_slices }
}

exports! {
    fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) {
        let (state, at) = enter_gpu("nvmlDeviceGetMigMode", device)?;
        let mode = if mig(&state, at)?.enabled { NVML_DEVICE_MIG_ENABLE } else { NVML_DEVICE_MIG_DISABLE };
        put(current, mode)?;
        put(pending, mode)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut c_uint) {
        let (state, at) = enter_gpu("nvmlDeviceGetMaxMigDeviceCount", device)?;
        put(count, mig(&state, at).map_or(0, |_| MOST))
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, index: c_uint, mig_device: *mut nvmlDevice_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetMigDeviceHandleByIndex", device)?;
        let mig = mig(&state, at)?;
        if index >= MOST {
            return Err(INVALID);
        }
        let found = mig.devices.iter().any(|device| mig.enabled && device.index == index);
        put(mig_device, if found { state::mig_handle(at, index) } else { return Err(NOT_FOUND) })
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig_device: nvmlDevice_t, device: *mut nvmlDevice_t) {
        let (_state, at, _) = enter_mig("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", mig_device)?;
        put(device, state::handle(at))
    }

    fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is_mig: *mut c_uint) {
        put(is_mig, state::mig_position(device).is_some().into())
    }

    fn nvmlDeviceGetGpuInstanceId(mig_device: nvmlDevice_t, id: *mut c_uint) {
        let (state, at, index) = enter_mig("nvmlDeviceGetGpuInstanceId", mig_device)?;
        put(id, mig(&state, at)?.device(index).ok_or(NOT_FOUND)?.gpu_instance)
    }

    fn nvmlDeviceGetComputeInstanceId(mig_device: nvmlDevice_t, id: *mut c_uint) {
        let (state, at, index) = enter_mig("nvmlDeviceGetComputeInstanceId", mig_device)?;
        put(id, mig(&state, at)?.device(index).ok_or(NOT_FOUND)?.compute_instance)
    }

    fn nvmlDeviceGetAttributes_v2(mig_device: nvmlDevice_t, attributes: *mut nvmlDeviceAttributes_t) {
        let (state, at, index) = enter_mig("nvmlDeviceGetAttributes_v2", mig_device)?;
        let device = mig(&state, at)?.device(index).ok_or(NOT_FOUND)?;
        let (multiprocessors, copy) = (14 * device.compute_slices, device.gpu_slices);
        let usual = Engines { multiprocessors, copy, decoder: 0, encoder: 0, jpeg: 0, ofa: 0 };
        let engines = device.engines.unwrap_or(usual);
        put(attributes, nvmlDeviceAttributes_t {
            multiprocessorCount: engines.multiprocessors,
            sharedCopyEngineCount: engines.copy,
            sharedDecoderCount: engines.decoder,
            sharedEncoderCount: engines.encoder,
            sharedJpegCount: engines.jpeg,
            sharedOfaCount: engines.ofa,
            gpuInstanceSliceCount: device.gpu_slices,
            computeInstanceSliceCount: device.compute_slices,
            memorySizeMB: device.memory_mib,
        })
    }

    fn nvmlDeviceGetGpuInstanceById(device: nvmlDevice_t, id: c_uint, instance: *mut nvmlGpuInstance_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetGpuInstanceById", device)?;
        mig(&state, at)?.instance(id).ok_or(NOT_FOUND)?;
        put(instance, state::mig_handle(at, id).cast())
    }

    fn nvmlGpuInstanceGetInfo(instance: nvmlGpuInstance_t, info: *mut nvmlGpuInstanceInfo_t) {
        let (at, id) = state::mig_position(instance.cast()).ok_or(INVALID)?;
        let (state, at) = enter_gpu("nvmlGpuInstanceGetInfo", state::handle(at))?;
        let device = mig(&state, at)?.instance(id).ok_or(NOT_FOUND)?;
        put(info, nvmlGpuInstanceInfo_t {
            device: state::handle(at),
            id,
            profileId: profile_id(device)?,
            placement: placement(mig(&state, at)?, device),
        })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: nvmlDevice_t,
        number: c_uint,
        info: *mut nvmlGpuInstanceProfileInfo_t,
    ) {
        let (state, at) = enter_gpu("nvmlDeviceGetGpuInstanceProfileInfo", device)?;
        mig(&state, at)?;
        match number {
            // 8_SLICE: what no GPU of today has; 6_SLICE: one that the driver has never heard of.
            5 => return Err(UNSUPPORTED),
            6 | NVML_GPU_INSTANCE_PROFILE_COUNT.. => return Err(INVALID),
            _ => {}
        }
        // Where a file has a driver's own id of the profile, that is the profile's.
        let named = |device: &&MigDevice| device.profile_id.is_some() && profile(device) == Ok(number);
        let named = mig(&state, at)?.devices.iter().find(named).and_then(|device| device.profile_id);
        put(info, nvmlGpuInstanceProfileInfo_t {
            id: named.unwrap_or(PROFILE_IDS + number),
            isP2pSupported: 0,
            sliceCount: 0,
            instanceCount: 0,
            multiprocessorCount: 0,
            copyEngineCount: 0,
            decoderCount: 0,
            encoderCount: 0,
            jpegCount: 0,
            ofaCount: 0,
            memorySizeMB: 0,
        })
    }
}
