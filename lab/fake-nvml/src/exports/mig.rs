//! MIG: the mode, the MIG devices, their instances and profiles, and the creation and destruction of instances.
//!
//! Every changed layout is written to the journal of the control socket, because a driver keeps its instances while
//! processes come and go. The handle of a MIG device or an instance encodes the position of the GPU and a number.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU32, Ordering};

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, UNSUPPORTED, exports, put};
use crate::control;
use crate::machine::{BareInstance, Engines, Mig, MigDevice, MigProfile, Placement};
use crate::state::{self, Answer, State, enter_mig};

const NOT_FOUND: nvmlReturn_t = nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
/// The most MIG devices of a GPU.
const MAX_MIG_DEVICES: c_uint = 7;
/// `NVML_GPU_INSTANCE_PROFILE_COUNT` of NVML 13; the bindings have the count of NVML 12.
const PROFILES: c_uint = 18;
/// The number in a compute instance's handle is this plus the id of its GPU instance.
const COMPUTE: c_uint = 0x80;
/// The number of compute instances that this process has made.
static MADE: AtomicU32 = AtomicU32::new(0);
/// The driver's id of a profile without an id in the machine file is this plus NVML's number. A real driver's ids are
/// not NVML's numbers either (19 is 1g on an A100).
const PROFILE_IDS: c_uint = 100;

fn mig(state: &State, at: usize) -> Answer<&Mig> {
    state.machine.gpus.get(at).and_then(|gpu| gpu.mig.as_ref()).ok_or(UNSUPPORTED)
}

/// The number of a MIG device's profile, `NVML_GPU_INSTANCE_PROFILE_*`.
fn profile(device: &MigDevice) -> Answer<c_uint> {
    let number = |by_slices: [Option<c_uint>; 8]| {
        let slices = usize::try_from(device.gpu_slices).ok()?.checked_sub(1)?;
        by_slices.get(slices).copied().flatten()
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

/// The driver's id of a MIG device's profile.
fn profile_id(device: &MigDevice) -> Answer<c_uint> {
    device.profile_id.map_or_else(|| Ok(PROFILE_IDS + profile(device)?), Ok)
}

/// The placement of a GPU instance. If the machine file has none, the instance follows the instances with lower ids.
fn placement(mig: &Mig, device: &MigDevice) -> Placement {
    device.placement.unwrap_or_else(|| {
        let before = mig.devices.iter().filter(|other| other.gpu_instance < device.gpu_instance);
        let slices: BTreeMap<c_uint, c_uint> = before.map(|other| (other.gpu_instance, other.gpu_slices)).collect();
        Placement { start: slices.values().sum(), size: device.gpu_slices }
    })
}

/// A placement in NVML's structure.
fn placement_info(Placement { start, size }: Placement) -> nvmlGpuInstancePlacement_t {
    nvmlGpuInstancePlacement_t { start, size }
}

/// The GPU instance with this id.
fn instance_of(mig: &Mig, id: c_uint) -> Answer<BareInstance> {
    instances_of(mig)?.into_iter().find(|instance| instance.id == id).ok_or(NOT_FOUND)
}

exports! {
    fn nvmlDeviceGetMigMode([device => state, at], current: *mut c_uint, pending: *mut c_uint) {
        let mode = if mig(&state, at)?.enabled { NVML_DEVICE_MIG_ENABLE } else { NVML_DEVICE_MIG_DISABLE };
        put(current, mode)?;
        put(pending, mode)
    }

    fn nvmlDeviceGetMaxMigDeviceCount([device => state, at], count: *mut c_uint) {
        put(count, mig(&state, at).map_or(0, |_| MAX_MIG_DEVICES))
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex([device => state, at], index: c_uint, mig_device: *mut nvmlDevice_t) {
        let mig = mig(&state, at)?;
        if index >= MAX_MIG_DEVICES {
            return Err(INVALID);
        }
        let found = mig.devices.iter().any(|device| mig.enabled && device.index == index);
        put(mig_device, if found { state::mig_handle(at, index) } else { return Err(NOT_FOUND) })
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

    fn nvmlDeviceGetGpuInstanceById([device => state, at], id: c_uint, instance: *mut nvmlGpuInstance_t) {
        mig(&state, at)?.instance(id).ok_or(NOT_FOUND)?;
        put(instance, state::mig_handle(at, id).cast())
    }

    fn nvmlGpuInstanceGetInfo(instance: nvmlGpuInstance_t, info: *mut nvmlGpuInstanceInfo_t) {
        let (state, at, id) = enter_mig("nvmlGpuInstanceGetInfo", instance.cast())?;
        let BareInstance { profile_id, placement, .. } = instance_of(mig(&state, at)?, id)?;
        let (device, placement) = (state::handle(at), placement_info(placement));
        put(info, nvmlGpuInstanceInfo_t { device, id, profileId: profile_id, placement })
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(
        [device => state, at],
        number: c_uint,
        info: *mut nvmlGpuInstanceProfileInfo_t,
    ) {
        mig(&state, at)?;
        match number {
            // No GPU has 8_SLICE; 6_SLICE stands for a profile that the driver does not know.
            5 => return Err(UNSUPPORTED),
            6 | PROFILES.. => return Err(INVALID),
            _ => {}
        }
        let profiles = &mig(&state, at)?.profiles;
        if !profiles.is_empty() {
            return put(info, profile_info(profiles.iter().find(|profile| profile.number == number).ok_or(INVALID)?));
        }
        // A MIG device in the machine file may name the driver's id of its profile.
        let named = |device: &&MigDevice| device.profile_id.is_some() && profile(device) == Ok(number);
        let named = mig(&state, at)?.devices.iter().find(named).and_then(|device| device.profile_id);
        let id = named.unwrap_or(PROFILE_IDS + number);
        put(info, profile_info(&MigProfile { id, ..MigProfile::default() }))
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        [device => state, at],
        profile: c_uint,
        placements: *mut nvmlGpuInstancePlacement_t,
        count: *mut c_uint,
    ) {
        let found = mig(&state, at)?.profiles.iter().find(|known| known.id == profile).ok_or(UNSUPPORTED)?;
        put_all(placements, count, &found.placements.iter().copied().map(placement_info).collect::<Vec<_>>())
    }

    fn nvmlDeviceGetGpuInstances(
        [device => state, at],
        profile: c_uint,
        instances: *mut nvmlGpuInstance_t,
        count: *mut c_uint,
    ) {
        let found = instances_of(mig(&state, at)?)?.into_iter().filter(|instance| instance.profile_id == profile);
        let handles: Vec<nvmlGpuInstance_t> = found.map(|instance| state::mig_handle(at, instance.id).cast()).collect();
        put_all(instances, count, &handles)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        [device => mut state, at],
        profile: c_uint,
        placement: *const nvmlGpuInstancePlacement_t,
        instance: *mut nvmlGpuInstance_t,
    ) {
        // SAFETY: null, or a pointer that the caller promises to be valid.
        let wanted = unsafe { placement.as_ref() }.ok_or(INVALID)?;
        let wanted = Placement { start: wanted.start, size: wanted.size };
        let layout = mig(&state, at)?;
        let known = layout.profiles.iter().find(|known| known.id == profile).ok_or(INVALID)?;
        if !layout.enabled || !known.placements.contains(&wanted) {
            return Err(INVALID);
        }
        let existing = instances_of(layout)?;
        let end = |placement: Placement| placement.start + placement.size;
        let overlaps = |other: &BareInstance| {
            wanted.start < end(other.placement) && other.placement.start < end(wanted)
        };
        if existing.iter().any(overlaps) {
            return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES);
        }
        let id = (1..).find(|id| existing.iter().all(|other| other.id != *id)).ok_or(INVALID)?;
        put(instance, state::mig_handle(at, id).cast())?;
        change(&mut state, at, |mig| mig.bare.push(BareInstance { id, profile_id: profile, placement: wanted }))?;
        keep(state, at)
    }

    fn nvmlGpuInstanceDestroy(instance: nvmlGpuInstance_t) {
        let (mut state, at, id) = enter_mig("nvmlGpuInstanceDestroy", instance.cast())?;
        if mig(&state, at)?.instance(id).is_some() {
            return Err(nvmlReturn_enum_NVML_ERROR_IN_USE);
        }
        change(&mut state, at, |mig| mig.bare.retain(|bare| bare.id != id))?;
        keep(state, at)
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: nvmlGpuInstance_t,
        number: c_uint,
        engines: c_uint,
        info: *mut nvmlComputeInstanceProfileInfo_t,
    ) {
        let (state, at, id) = enter_mig("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance.cast())?;
        let bare = mig(&state, at)?.bare.iter().find(|bare| bare.id == id).ok_or(NOT_FOUND)?;
        let profile = mig(&state, at)?.profiles.iter().find(|known| known.id == bare.profile_id).ok_or(NOT_FOUND)?;
        // In the order of NVML_COMPUTE_INSTANCE_PROFILE_*.
        let slices = [1, 2, 3, 4, 7, 8, 6].get(number as usize).copied().ok_or(INVALID)?;
        if engines != NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED || slices > profile.gpu_slices {
            return Err(UNSUPPORTED);
        }
        put(info, nvmlComputeInstanceProfileInfo_t {
            id: number,
            sliceCount: slices,
            instanceCount: 1,
            multiprocessorCount: profile.engines.multiprocessors,
            sharedCopyEngineCount: profile.engines.copy,
            sharedDecoderCount: profile.engines.decoder,
            sharedEncoderCount: profile.engines.encoder,
            sharedJpegCount: profile.engines.jpeg,
            sharedOfaCount: profile.engines.ofa,
        })
    }

    fn nvmlGpuInstanceCreateComputeInstance(
        instance: nvmlGpuInstance_t,
        profile: c_uint,
        compute_instance: *mut nvmlComputeInstance_t,
    ) {
        let (mut state, at, id) = enter_mig("nvmlGpuInstanceCreateComputeInstance", instance.cast())?;
        let layout = mig(&state, at)?;
        let bare = *layout.bare.iter().find(|bare| bare.id == id).ok_or(NOT_FOUND)?;
        let known = layout.profiles.iter().find(|known| known.id == bare.profile_id).ok_or(NOT_FOUND)?.clone();
        let compute_slices = [1, 2, 3, 4, 7, 8, 6].get(profile as usize).copied().ok_or(INVALID)?;
        let index = (0..MAX_MIG_DEVICES).find(|index| layout.device(*index).is_none()).ok_or(INVALID)?;
        let extension = match known.number {
            7 | 8 => "media",
            10..=12 => "graphics",
            13 | 14 => "no-media",
            15 | 16 => "all-media",
            _ => "none",
        };
        // UUIDs are unique while the driver is loaded, even among instances of different processes.
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let uuid = format!("MIG-{:08x}-{made:04x}-0000-0000-00000000{at:04x}", std::process::id());
        let device = MigDevice {
            index,
            uuid,
            gpu_instance: id,
            compute_instance: 0,
            gpu_slices: known.gpu_slices,
            compute_slices,
            memory_mib: known.memory_mib,
            profile_id: Some(bare.profile_id),
            placement: Some(bare.placement),
            extension: Some(extension.to_owned()),
            engines: Some(known.engines),
        };
        put(compute_instance, state::mig_handle(at, COMPUTE + id).cast())?;
        change(&mut state, at, |mig| {
            mig.bare.retain(|bare| bare.id != id);
            mig.devices.push(device);
        })?;
        keep(state, at)
    }

    fn nvmlGpuInstanceGetComputeInstanceById(
        instance: nvmlGpuInstance_t,
        compute: c_uint,
        compute_instance: *mut nvmlComputeInstance_t,
    ) {
        let (state, at, id) = enter_mig("nvmlGpuInstanceGetComputeInstanceById", instance.cast())?;
        mig(&state, at)?.instance(id).filter(|device| device.compute_instance == compute).ok_or(NOT_FOUND)?;
        put(compute_instance, state::mig_handle(at, COMPUTE + id).cast())
    }

    fn nvmlComputeInstanceDestroy(compute_instance: nvmlComputeInstance_t) {
        let (mut state, at, number) = enter_mig("nvmlComputeInstanceDestroy", compute_instance.cast())?;
        let id = number.checked_sub(COMPUTE).ok_or(INVALID)?;
        let device = mig(&state, at)?.instance(id).ok_or(NOT_FOUND)?.clone();
        let (profile_id, placement) = (profile_id(&device)?, placement(mig(&state, at)?, &device));
        change(&mut state, at, |mig| {
            mig.devices.retain(|other| other.uuid != device.uuid);
            mig.bare.push(BareInstance { id, profile_id, placement });
        })?;
        keep(state, at)
    }
}

fn profile_info(profile: &MigProfile) -> nvmlGpuInstanceProfileInfo_t {
    let Engines { multiprocessors, copy, decoder, encoder, jpeg, ofa } = profile.engines;
    nvmlGpuInstanceProfileInfo_t {
        id: profile.id,
        isP2pSupported: 0,
        sliceCount: profile.gpu_slices,
        instanceCount: profile.instances,
        multiprocessorCount: multiprocessors,
        copyEngineCount: copy,
        decoderCount: decoder,
        encoderCount: encoder,
        jpegCount: jpeg,
        ofaCount: ofa,
        memorySizeMB: profile.memory_mib,
    }
}

/// All GPU instances of a layout.
fn instances_of(mig: &Mig) -> Answer<Vec<BareInstance>> {
    let mut found: BTreeMap<c_uint, BareInstance> = mig.bare.iter().map(|bare| (bare.id, *bare)).collect();
    for device in &mig.devices {
        let (id, placement) = (device.gpu_instance, placement(mig, device));
        found.insert(id, BareInstance { id, profile_id: profile_id(device)?, placement });
    }
    Ok(found.into_values().collect())
}

fn change(state: &mut State, at: usize, change: impl FnOnce(&mut Mig)) -> Answer {
    change(state.machine.gpus.get_mut(at).and_then(|gpu| gpu.mig.as_mut()).ok_or(UNSUPPORTED)?);
    Ok(())
}

/// Writes the layout of a GPU to the journal, for other processes and for later ones.
fn keep(state: MutexGuard<'static, State>, at: usize) -> Answer {
    let Some(gpu) = state.machine.gpus.get(at) else { return Ok(()) };
    let layout = serde_json::to_string(&gpu.mig).map_err(|_| nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let line = format!("mig {} {layout}", gpu.index);
    // A client locks the journal while a command waits for the state. So the state is released first.
    drop(state);
    control::keep(&line).map_err(|_| nvmlReturn_enum_NVML_ERROR_UNKNOWN)
}

/// Writes a list and its length, or only its length if the caller has no buffer.
fn put_all<T: Copy>(out: *mut T, count: *mut c_uint, values: &[T]) -> Answer {
    if !out.is_null() {
        // SAFETY: not null; `count` holds the length of the caller's buffer.
        let room = unsafe { count.as_ref() }.copied().ok_or(INVALID)?;
        if values.len() > room as usize {
            return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
        }
        // SAFETY: as above.
        unsafe { out.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }
    put(count, values.len() as c_uint)
}
