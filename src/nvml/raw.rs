//! The only `unsafe` of the package: NVML calls that nvml-wrapper 0.13 lacks or answers wrongly, and one of the system's
//! that no safe library has.
//!
//! Called by the other files of the agent. Each function is one C call; it interprets nothing beyond the return code.
//! Handles are live wherever they come from a [`Device`], because that borrows the `Nvml` which keeps the library
//! initialised; the same holds for an [`EventSet`].

#![allow(unsafe_code, reason = "the one file that may: NVML's C calls that nvml-wrapper lacks or has wrong")]

use std::mem::size_of;
use std::time::Duration;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, returned};

/// Whether two handles are the same GPU.
pub fn same(one: &Device<'_>, two: &Device<'_>) -> bool {
    // JUSTIFICATION: an event names its GPU by handle, and a lost GPU can no longer be asked for its UUID.
    // SAFETY: the pointers are compared, never followed.
    unsafe { one.handle() == two.handle() }
}

/// The kind of device at an NVLink's far end, as `nvmlIntNvLinkDeviceType_t`.
pub fn remote_device_type(device: &Device<'_>, link: u32) -> Answer<u32> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetNvLinkRemoteDeviceType else { return Ok(None) };
    let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // JUSTIFICATION: nvml-wrapper lets NVML write into a temporary, so that its answer is always Unknown.
    // SAFETY: the handle is live, and `kind` is a valid place for the answer.
    let code = unsafe { call(device.handle(), link, &mut kind) };
    returned("nvmlDeviceGetNvLinkRemoteDeviceType", code, || Some(kind))
}

/// The common ancestor of two GPUs, as `nvmlGpuTopologyLevel_t`.
pub fn common_ancestor(one: &Device<'_>, two: &Device<'_>) -> Answer<u32> {
    let Ok(call) = &one.nvml().lib().nvmlDeviceGetTopologyCommonAncestor else { return Ok(None) };
    let mut level = 0;
    // JUSTIFICATION: nvml-wrapper takes its second device by value, and a Device cannot be copied.
    // SAFETY: both handles are live, and `level` is a valid place for the answer.
    let code = unsafe { call(one.handle(), two.handle(), &mut level) };
    returned("nvmlDeviceGetTopologyCommonAncestor", code, || Some(level))
}

/// The total memory in bytes, asked in the way of drivers before nvmlDeviceGetMemoryInfo_v2.
pub fn memory_total(device: &Device<'_>) -> Answer<u64> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetMemoryInfo else { return Ok(None) };
    let mut memory = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
    // JUSTIFICATION: nvml-wrapper has version 2 only, which drivers before R510 lack.
    // SAFETY: the handle is live, and `memory` is the structure this call fills.
    let code = unsafe { call(device.handle(), &mut memory) };
    returned("nvmlDeviceGetMemoryInfo", code, || Some(memory.total))
}

/// Whether NVLink-C2C joins the GPU to a processor.
pub fn c2c(device: &Device<'_>) -> Answer<bool> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetC2cModeInfoV else { return Ok(None) };
    let mut mode = sys::nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 };
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `mode` is the structure this call fills.
    let code = unsafe { call(device.handle(), &mut mode) };
    returned("nvmlDeviceGetC2cModeInfoV", code, || Some(mode.isC2cEnabled != 0))
}

/// The brand, as `nvmlBrandType_t`.
pub fn brand(device: &Device<'_>) -> Answer<u32> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetBrand else { return Ok(None) };
    let mut brand = sys::nvmlBrandType_enum_NVML_BRAND_UNKNOWN;
    // JUSTIFICATION: nvml-wrapper makes an error of a brand that is newer than it.
    // SAFETY: the handle is live, and `brand` is a valid place for the answer.
    let code = unsafe { call(device.handle(), &mut brand) };
    returned("nvmlDeviceGetBrand", code, || Some(brand))
}

/// The architecture, as `nvmlDeviceArchitecture_t`.
pub fn architecture(device: &Device<'_>) -> Answer<u32> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetArchitecture else { return Ok(None) };
    let mut architecture = sys::NVML_DEVICE_ARCH_UNKNOWN;
    // JUSTIFICATION: nvml-wrapper makes an error of an architecture that is newer than it.
    // SAFETY: the handle is live, and `architecture` is a valid place for the answer.
    let code = unsafe { call(device.handle(), &mut architecture) };
    returned("nvmlDeviceGetArchitecture", code, || Some(architecture))
}

/// How the GPU addresses memory of the host, as `nvmlDeviceAddressingModeType_t`.
pub fn addressing_mode(device: &Device<'_>) -> Answer<u32> {
    #[expect(clippy::cast_possible_truncation, reason = "a struct of two words")]
    const VERSION_1: u32 = size_of::<sys::nvmlDeviceAddressingMode_v1_t>() as u32 | 1 << 24;
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetAddressingMode else { return Ok(None) };
    let mut mode = sys::nvmlDeviceAddressingMode_v1_t { version: VERSION_1, value: 0 };
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `mode` is the structure of the version that it names.
    let code = unsafe { call(device.handle(), &mut mode) };
    returned("nvmlDeviceGetAddressingMode", code, || Some(mode.value))
}

/// Whether a row remapping is pending, and whether one failed.
pub fn remapped_rows(device: &Device<'_>) -> Answer<(bool, bool)> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetRemappedRows else { return Ok(None) };
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and each pointer is a valid place for an answer.
    let code = unsafe { call(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed) };
    returned("nvmlDeviceGetRemappedRows", code, || Some((pending != 0, failed != 0)))
}

/// A GPU's fabric registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// The cluster's UUID.
    pub cluster: [u8; 16],
    /// The clique within the cluster.
    pub clique: u32,
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub state: u32,
    /// The `nvmlReturn_t` of the registration.
    pub status: u32,
}

/// The fabric registration, by the versioned call where there is one and else by the first one.
pub fn fabric(device: &Device<'_>) -> Answer<Fabric> {
    #[expect(clippy::cast_possible_truncation, reason = "a struct of some dozens of bytes")]
    const VERSION_2: u32 = size_of::<sys::nvmlGpuFabricInfo_v2_t>() as u32 | 2 << 24;
    let lib = device.nvml().lib();
    let Ok(call) = &lib.nvmlDeviceGetGpuFabricInfoV else { return first_fabric(device) };
    // Version 2 suffices, and it is the head of version 3, which is what the bindings call V.
    let mut info = sys::nvmlGpuFabricInfo_v3_t {
        version: VERSION_2,
        clusterUuid: [0; 16],
        status: 0,
        cliqueId: 0,
        state: 0,
        healthMask: 0,
        healthSummary: 0,
    };
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live; `info` is as large as the version word says, and larger.
    let code = unsafe { call(device.handle(), &mut info) };
    returned("nvmlDeviceGetGpuFabricInfoV", code, || {
        let state = info.state.into();
        Some(Fabric { cluster: info.clusterUuid, clique: info.cliqueId, state, status: info.status })
    })
}

fn first_fabric(device: &Device<'_>) -> Answer<Fabric> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuFabricInfo else { return Ok(None) };
    let mut info = sys::nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `info` is the structure this call fills.
    let code = unsafe { call(device.handle(), &mut info) };
    returned("nvmlDeviceGetGpuFabricInfo", code, || {
        let state = info.state.into();
        Some(Fabric { cluster: info.clusterUuid, clique: info.cliqueId, state, status: info.status })
    })
}

/// The id of the GPU instance that a MIG device is of.
pub fn gpu_instance_id(mig_device: &Device<'_>) -> Answer<u32> {
    let Ok(call) = &mig_device.nvml().lib().nvmlDeviceGetGpuInstanceId else { return Ok(None) };
    let mut id = 0;
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `id` is a valid place for the answer.
    let code = unsafe { call(mig_device.handle(), &mut id) };
    returned("nvmlDeviceGetGpuInstanceId", code, || Some(id))
}

/// The id of the compute instance that a MIG device is, within its GPU instance.
pub fn compute_instance_id(mig_device: &Device<'_>) -> Answer<u32> {
    let Ok(call) = &mig_device.nvml().lib().nvmlDeviceGetComputeInstanceId else { return Ok(None) };
    let mut id = 0;
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `id` is a valid place for the answer.
    let code = unsafe { call(mig_device.handle(), &mut id) };
    returned("nvmlDeviceGetComputeInstanceId", code, || Some(id))
}

/// What a GPU instance was made by, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuInstance {
    /// Its id on its GPU.
    pub id: u32,
    /// The id of its profile; ids are the driver's own, see [`profile`].
    pub profile_id: u32,
    /// Its first memory slice.
    pub start: u32,
    /// How many memory slices it has.
    pub size: u32,
}

/// A GPU instance by NVML's handle, which is valid until the instance is destroyed.
pub struct GpuInstanceHandle<'a, 'nvml> {
    device: &'a Device<'nvml>,
    handle: sys::nvmlGpuInstance_t,
}

impl<'a, 'nvml> GpuInstanceHandle<'a, 'nvml> {
    /// The GPU instance of an id.
    pub fn by_id(device: &'a Device<'nvml>, id: u32) -> Answer<Self> {
        let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstanceById else { return Ok(None) };
        let mut handle: sys::nvmlGpuInstance_t = std::ptr::null_mut();
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: the GPU's handle is live, and `handle` is a valid place for the answer.
        let code = unsafe { call(device.handle(), id, &mut handle) };
        returned("nvmlDeviceGetGpuInstanceById", code, || Some(Self { device, handle }))
    }

    /// The GPU instances of a profile, by the driver's id of it.
    pub fn of_profile(device: &'a Device<'nvml>, profile: u32) -> Answer<Vec<Self>> {
        /// No GPU has a tenth of it.
        const MOST: u32 = 64;
        let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstances else { return Ok(None) };
        let (mut handles, mut count) = ([std::ptr::null_mut(); MOST as usize], MOST);
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: the GPU's handle is live; `handles` has room for `count` answers, and for more than any GPU has.
        let code = unsafe { call(device.handle(), profile, handles.as_mut_ptr(), &mut count) };
        returned("nvmlDeviceGetGpuInstances", code, || {
            let found = handles.into_iter().take(usize::try_from(count).unwrap_or(0));
            Some(found.map(|handle| Self { device, handle }).collect())
        })
    }

    /// Makes a GPU instance of a profile, by the driver's id of it, at a place in memory slices.
    pub fn create(device: &'a Device<'nvml>, profile: u32, start: u32, size: u32) -> Answer<Self> {
        let Ok(call) = &device.nvml().lib().nvmlDeviceCreateGpuInstanceWithPlacement else { return Ok(None) };
        let (placement, mut handle) = (sys::nvmlGpuInstancePlacement_t { start, size }, std::ptr::null_mut());
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: the GPU's handle is live, `placement` is read, and `handle` is a valid place for the answer.
        let code = unsafe { call(device.handle(), profile, &placement, &mut handle) };
        returned("nvmlDeviceCreateGpuInstanceWithPlacement", code, || Some(Self { device, handle }))
    }

    /// Destroys it. Its compute instances have to be destroyed before.
    pub fn destroy(self) -> Answer<()> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceDestroy else { return Ok(None) };
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and it is not used again: this takes it.
        let code = unsafe { call(self.handle) };
        returned("nvmlGpuInstanceDestroy", code, || Some(()))
    }

    /// Its profile and its place.
    pub fn info(&self) -> Answer<GpuInstance> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceGetInfo else { return Ok(None) };
        let placement = sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 };
        let mut info = sys::nvmlGpuInstanceInfo_t { device: std::ptr::null_mut(), id: 0, profileId: 0, placement };
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `info` is the structure this call fills.
        let code = unsafe { call(self.handle, &mut info) };
        returned("nvmlGpuInstanceGetInfo", code, || {
            let sys::nvmlGpuInstancePlacement_t { start, size } = info.placement;
            Some(GpuInstance { id: info.id, profile_id: info.profileId, start, size })
        })
    }

    /// A profile of compute instances by its number (`NVML_COMPUTE_INSTANCE_PROFILE_*`): the driver's id of it, and its
    /// compute slices. Of the engine profiles, shared is the only one there is.
    pub fn compute_profile(&self, number: u32) -> Answer<(u32, u32)> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceGetComputeInstanceProfileInfo else { return Ok(None) };
        let mut info = sys::nvmlComputeInstanceProfileInfo_t {
            id: 0,
            sliceCount: 0,
            instanceCount: 0,
            multiprocessorCount: 0,
            sharedCopyEngineCount: 0,
            sharedDecoderCount: 0,
            sharedEncoderCount: 0,
            sharedJpegCount: 0,
            sharedOfaCount: 0,
        };
        let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `info` is the structure this call fills.
        let code = unsafe { call(self.handle, number, engines, &mut info) };
        returned("nvmlGpuInstanceGetComputeInstanceProfileInfo", code, || Some((info.id, info.sliceCount)))
    }

    /// Makes a compute instance of a profile, by the driver's id of it.
    pub fn create_compute_instance(&self, profile: u32) -> Answer<()> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceCreateComputeInstance else { return Ok(None) };
        let mut instance = std::ptr::null_mut();
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `instance` is a valid place for the answer.
        let code = unsafe { call(self.handle, profile, &mut instance) };
        returned("nvmlGpuInstanceCreateComputeInstance", code, || Some(()))
    }

    /// Destroys its compute instance of an id.
    pub fn destroy_compute_instance(&self, id: u32) -> Answer<()> {
        let lib = self.device.nvml().lib();
        let (Ok(find), Ok(destroy)) = (&lib.nvmlGpuInstanceGetComputeInstanceById, &lib.nvmlComputeInstanceDestroy)
        else {
            return Ok(None);
        };
        let mut instance = std::ptr::null_mut();
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `instance` is a valid place for the answer.
        let code = unsafe { find(self.handle, id, &mut instance) };
        if returned("nvmlGpuInstanceGetComputeInstanceById", code, || Some(()))?.is_none() {
            return Ok(None);
        }
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML has just given `instance`, and it is not used again.
        let code = unsafe { destroy(instance) };
        returned("nvmlComputeInstanceDestroy", code, || Some(()))
    }
}

/// A profile of GPU instances, by its number (`NVML_GPU_INSTANCE_PROFILE_*`).
pub fn profile(device: &Device<'_>, number: u32) -> Answer<sys::nvmlGpuInstanceProfileInfo_t> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstanceProfileInfo else { return Ok(None) };
    let mut info = sys::nvmlGpuInstanceProfileInfo_t {
        id: 0,
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
    };
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `info` is the structure this call fills.
    let code = unsafe { call(device.handle(), number, &mut info) };
    returned("nvmlDeviceGetGpuInstanceProfileInfo", code, || Some(info))
}

/// Where GPU instances of a profile, by the driver's id of it, may be: first memory slice and number of slices.
pub fn placements(device: &Device<'_>, profile: u32) -> Answer<Vec<(u32, u32)>> {
    const CALL: &str = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2 else { return Ok(None) };
    let mut count = 0;
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live; without a buffer the call only counts.
    let code = unsafe { call(device.handle(), profile, std::ptr::null_mut(), &mut count) };
    if returned(CALL, code, || Some(()))?.is_none() {
        return Ok(None);
    }
    let mut found = vec![sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; usize::try_from(count).unwrap_or(0)];
    if found.is_empty() {
        return Ok(Some(Vec::new()));
    }
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `found` has room for `count` answers.
    let code = unsafe { call(device.handle(), profile, found.as_mut_ptr(), &mut count) };
    found.truncate(usize::try_from(count).unwrap_or(0));
    returned(CALL, code, || Some(found.into_iter().map(|placement| (placement.start, placement.size)).collect()))
}

/// A set of events to wait for; freed when dropped.
pub struct EventSet<'nvml> {
    nvml: &'nvml Nvml,
    set: sys::nvmlEventSet_t,
}

/// One event, with the instances that nvml-wrapper leaves out.
pub struct Event<'nvml> {
    /// The GPU; compare with [`same`].
    pub device: Device<'nvml>,
    /// One of `nvmlEventType*`.
    pub kind: u64,
    /// The XID, for an XID event.
    pub data: u64,
    /// The MIG GPU instance it is about.
    pub gpu_instance: Option<u32>,
    /// The MIG compute instance it is about.
    pub compute_instance: Option<u32>,
}

impl<'nvml> EventSet<'nvml> {
    /// An empty set.
    pub fn create(nvml: &'nvml Nvml) -> Answer<Self> {
        let Ok(call) = &nvml.lib().nvmlEventSetCreate else { return Ok(None) };
        let mut set = std::ptr::null_mut();
        // JUSTIFICATION: nvml-wrapper's set cannot register a GPU without being lost on an error.
        // SAFETY: the library is initialised while `nvml` lives, and `set` is a place for the answer.
        let code = unsafe { call(&mut set) };
        returned("nvmlEventSetCreate", code, || Some(Self { nvml, set }))
    }

    /// Adds a GPU's events, a union of `nvmlEventType*`.
    ///
    /// After NVML_ERROR_UNKNOWN the set is undefined, by NVML's reference, and must be dropped.
    pub fn register(&self, device: &Device<'nvml>, kinds: u64) -> Answer<()> {
        let Ok(call) = &self.nvml.lib().nvmlDeviceRegisterEvents else { return Ok(None) };
        // JUSTIFICATION: nvml-wrapper's call takes the set and frees it on any error.
        // SAFETY: handle and set are live: both borrow an initialised Nvml.
        let code = unsafe { call(device.handle(), kinds, self.set) };
        returned("nvmlDeviceRegisterEvents", code, || Some(()))
    }

    /// Waits for one event; `None` when none came in time.
    pub fn wait(&self, timeout: Duration) -> Answer<Event<'nvml>> {
        const CALL: &str = "nvmlEventSetWait_v2";
        /// What NVML gives for an event that is not about an instance.
        const NO_INSTANCE: u32 = 0xffff_ffff;
        let Ok(call) = &self.nvml.lib().nvmlEventSetWait_v2 else {
            return Err(CallError::unreadable(CALL, "the library does not have this call"));
        };
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        };
        // JUSTIFICATION: nvml-wrapper drops the instance ids.
        // SAFETY: the set is live, and `data` is the structure this call fills.
        let code = unsafe { call(self.set, &mut data, milliseconds) };
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => return Ok(None),
            sys::nvmlReturn_enum_NVML_SUCCESS => {}
            // Even "not supported" is an error here: taken for a timeout, it would be asked again at once.
            code => return Err(CallError::returned(CALL, code)),
        }
        // JUSTIFICATION: nvml-wrapper makes a Device from a handle in this way only.
        // SAFETY: NVML has just given this handle for a GPU of this library.
        let device = unsafe { Device::new(data.device, self.nvml) };
        let instance = |id| Some(id).filter(|id| *id != NO_INSTANCE);
        Ok(Some(Event {
            device,
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: instance(data.gpuInstanceId),
            compute_instance: instance(data.computeInstanceId),
        }))
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        if let Ok(call) = &self.nvml.lib().nvmlEventSetFree {
            // JUSTIFICATION: a set made by a raw call is freed by one.
            // SAFETY: the set is live and is not used again.
            unsafe { call(self.set) };
        }
    }
}

/// Ends the process at once, without destructors and exit handlers: those of a library in which
/// another thread hangs can hang too.
pub fn exit_now(status: i32) -> ! {
    // JUSTIFICATION: std's exit runs the exit handlers, its abort counts as a crash.
    unsafe extern "C" {
        /// POSIX `_exit`.
        safe fn _exit(status: i32) -> !;
    }
    _exit(status)
}
