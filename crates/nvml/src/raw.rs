//! The only `unsafe` of the package: NVML calls that nvml-wrapper 0.13 lacks or answers wrongly, and `_exit`, which no
//! safe library has.
//!
//! Called by the other files of the agent. Most functions make one C call, and interpret only the return code.
//! A handle from a [`Device`] or an [`EventSet`] is live, because these borrow the `Nvml` that keeps the library
//! initialised.

#![allow(unsafe_code, reason = "the one file that may: NVML's C calls that nvml-wrapper lacks or has wrong")]

use std::mem::size_of;
use std::time::Duration;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, CallError, offered, returned};
use linkwise_core::state::RowRemapping;
use linkwise_core::topology::MigPlacement;

/// Returns true if two handles are the same GPU.
pub fn same(one: &Device<'_>, two: &Device<'_>) -> bool {
    // JUSTIFICATION: an event names its GPU by handle, and a lost GPU can no longer be asked for its UUID.
    // SAFETY: the pointers are compared, never followed.
    unsafe { one.handle() == two.handle() }
}

/// An NVML structure for which all-zero bits are valid: numbers, unions of numbers, and pointers.
trait Zeroed: Copy {}

impl Zeroed for sys::nvmlFieldValue_t {}
impl Zeroed for sys::nvmlGpuFabricInfo_v3_t {}
impl Zeroed for sys::nvmlGpuFabricInfo_t {}
impl Zeroed for sys::nvmlGpuInstanceInfo_t {}
impl Zeroed for sys::nvmlComputeInstanceProfileInfo_t {}
impl Zeroed for sys::nvmlGpuInstanceProfileInfo_t {}
impl Zeroed for sys::nvmlEventData_t {}

/// A structure whose bits are all zero, for a call to fill.
fn zeroed<T: Zeroed>() -> T {
    // JUSTIFICATION: the bindings have no `Default`, and their fields are many.
    // SAFETY: all-zero bits are a value of each type that is `Zeroed`, all of which are in this file.
    unsafe { std::mem::zeroed() }
}

/// A call that writes one answer about a GPU or MIG device.
type Getter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, *mut T) -> sys::nvmlReturn_t;

/// Makes a call that writes one answer, into `answer`; "not offered" if the library lacks the call.
fn get<T, E>(name: &'static str, call: &Result<Getter<T>, E>, device: &Device<'_>, mut answer: T) -> Answer<T> {
    let Ok(call) = call else { return Ok(None) };
    // JUSTIFICATION: nvml-wrapper lacks the call, or has it wrong where the caller says so.
    // SAFETY: the handle is live, and `answer` is a valid place for what the call writes, by the call's own type.
    let code = unsafe { call(device.handle(), &mut answer) };
    returned(name, code, || Some(answer))
}

/// The call for fields.
pub const FIELDS: &str = "nvmlDeviceGetFieldValues";

/// The states of the first NVLinks, as `NVML_NVLINK_STATE_*`, by one call.
pub fn nvlink_states(device: &Device<'_>, links: u32) -> Answer<Vec<Answer<u32>>> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetFieldValues else { return Ok(None) };
    let field = |link| sys::nvmlFieldValue_t {
        fieldId: sys::field_id::NVML_FI_DEV_NVLINK_GET_STATE,
        scopeId: link,
        valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
        nvmlReturn: sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN,
        ..zeroed()
    };
    let mut fields: Vec<sys::nvmlFieldValue_t> = (0..links).map(field).collect();
    let count = fields.len().try_into().unwrap_or(0);
    // JUSTIFICATION: nvml-wrapper cannot ask for the field of a link: it leaves the scope at 0.
    // SAFETY: the handle is live, and `fields` has `count` structures of the type that this call fills.
    let code = unsafe { call(device.handle(), count, fields.as_mut_ptr()) };
    // JUSTIFICATION: the value is a union.
    // SAFETY: all of the union's bits are set above, and any bits are an integer.
    let state = |field: &sys::nvmlFieldValue_t| unsafe { field.value.uiVal };
    let answer = |field: &sys::nvmlFieldValue_t| offered(returned(FIELDS, field.nvmlReturn, || Some(state(field))));
    returned(FIELDS, code, || Some(fields.iter().map(answer).collect()))
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

/// The status of P2P from one GPU to another, as `nvmlGpuP2PStatus_t`; `capability` is an `nvmlGpuP2PCapsIndex_t`.
pub fn p2p_status(one: &Device<'_>, two: &Device<'_>, capability: u32) -> Answer<u32> {
    let Ok(call) = &one.nvml().lib().nvmlDeviceGetP2PStatus else { return Ok(None) };
    let mut status = sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_UNKNOWN;
    // JUSTIFICATION: nvml-wrapper makes an error of a status that is newer than it.
    // SAFETY: both handles are live, and `status` is a valid place for the answer.
    let code = unsafe { call(one.handle(), two.handle(), capability, &mut status) };
    returned("nvmlDeviceGetP2PStatus", code, || Some(status))
}

/// The total memory in bytes, by the call of drivers before nvmlDeviceGetMemoryInfo_v2.
pub fn memory_total(device: &Device<'_>) -> Answer<u64> {
    // nvml-wrapper has version 2 only, which drivers before R510 lack.
    let memory = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
    let memory = get("nvmlDeviceGetMemoryInfo", &device.nvml().lib().nvmlDeviceGetMemoryInfo, device, memory)?;
    Ok(memory.map(|memory| memory.total))
}

/// Returns true if NVLink-C2C joins the GPU to a processor.
pub fn c2c(device: &Device<'_>) -> Answer<bool> {
    let mode = sys::nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 };
    let mode = get("nvmlDeviceGetC2cModeInfoV", &device.nvml().lib().nvmlDeviceGetC2cModeInfoV, device, mode)?;
    Ok(mode.map(|mode| mode.isC2cEnabled != 0))
}

/// The CUDA version, by the call that needs no libcuda.
pub fn cuda_version(nvml: &Nvml) -> Answer<u32> {
    let Ok(call) = &nvml.lib().nvmlSystemGetCudaDriverVersion else { return Ok(None) };
    let mut version = 0;
    // JUSTIFICATION: nvml-wrapper has version 2 only, which fails without libcuda.
    // SAFETY: the library is initialised while `nvml` lives, and `version` is a valid place for the answer.
    let code = unsafe { call(&mut version) };
    returned("nvmlSystemGetCudaDriverVersion", code, || u32::try_from(version).ok())
}

/// The brand, as `nvmlBrandType_t`.
pub fn brand(device: &Device<'_>) -> Answer<u32> {
    // nvml-wrapper makes an error of a brand that is newer than it.
    let unknown = sys::nvmlBrandType_enum_NVML_BRAND_UNKNOWN;
    get("nvmlDeviceGetBrand", &device.nvml().lib().nvmlDeviceGetBrand, device, unknown)
}

/// The architecture, as `nvmlDeviceArchitecture_t`.
pub fn architecture(device: &Device<'_>) -> Answer<u32> {
    // nvml-wrapper makes an error of an architecture that is newer than it.
    let unknown = sys::NVML_DEVICE_ARCH_UNKNOWN;
    get("nvmlDeviceGetArchitecture", &device.nvml().lib().nvmlDeviceGetArchitecture, device, unknown)
}

/// The way in which the GPU addresses the host's memory, as `nvmlDeviceAddressingModeType_t`.
pub fn addressing_mode(device: &Device<'_>) -> Answer<u32> {
    #[expect(clippy::cast_possible_truncation, reason = "a struct of two words")]
    const VERSION_1: u32 = size_of::<sys::nvmlDeviceAddressingMode_v1_t>() as u32 | 1 << 24;
    let mode = sys::nvmlDeviceAddressingMode_v1_t { version: VERSION_1, value: 0 };
    let mode = get("nvmlDeviceGetAddressingMode", &device.nvml().lib().nvmlDeviceGetAddressingMode, device, mode)?;
    Ok(mode.map(|mode| mode.value))
}

/// NVML 13's call for a temperature.
pub const TEMPERATURE: &str = "nvmlDeviceGetTemperatureV";

/// Reads the GPU's temperature, and drops the value.
pub fn temperature(device: &Device<'_>) -> Answer<()> {
    #[expect(clippy::cast_possible_truncation, reason = "a struct of three words")]
    const VERSION_1: u32 = size_of::<sys::nvmlTemperature_v1_t>() as u32 | 1 << 24;
    let sensor = sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
    let reading = sys::nvmlTemperature_v1_t { version: VERSION_1, sensorType: sensor, temperature: 0 };
    Ok(get(TEMPERATURE, &device.nvml().lib().nvmlDeviceGetTemperatureV, device, reading)?.map(drop))
}

/// The state of the row remapping.
pub fn remapped_rows(device: &Device<'_>) -> Answer<RowRemapping> {
    let Ok(call) = &device.nvml().lib().nvmlDeviceGetRemappedRows else { return Ok(None) };
    let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and each pointer is a valid place for an answer.
    let code = unsafe { call(device.handle(), &mut corrected, &mut uncorrected, &mut pending, &mut failed) };
    returned("nvmlDeviceGetRemappedRows", code, || Some(RowRemapping { pending: pending != 0, failed: failed != 0 }))
}

/// A GPU's fabric registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fabric {
    pub cluster: [u8; 16],
    pub clique: u32,
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub state: u32,
    /// The `nvmlReturn_t` of the registration.
    pub status: u32,
    /// Set if the driver reports an unhealthy route to the fabric.
    pub bad_route: bool,
}

/// The fabric registration, by the versioned call if the library has it, otherwise by the first one, which does not
/// report routes.
pub fn fabric(device: &Device<'_>) -> Answer<Fabric> {
    #[expect(clippy::cast_possible_truncation, reason = "a struct of some dozens of bytes")]
    const VERSION_2: u32 = size_of::<sys::nvmlGpuFabricInfo_v2_t>() as u32 | 2 << 24;
    let lib = device.nvml().lib();
    let info = if lib.nvmlDeviceGetGpuFabricInfoV.is_ok() {
        // Version 2 suffices. It is the head of version 3, which the bindings call V, so `info` has room for the
        // answer that the version word asks for.
        let info = sys::nvmlGpuFabricInfo_v3_t { version: VERSION_2, ..zeroed() };
        get("nvmlDeviceGetGpuFabricInfoV", &lib.nvmlDeviceGetGpuFabricInfoV, device, info)?
    } else {
        get("nvmlDeviceGetGpuFabricInfo", &lib.nvmlDeviceGetGpuFabricInfo, device, zeroed())?.map(|first| {
            let sys::nvmlGpuFabricInfo_t { clusterUuid, status, cliqueId, state } = first;
            sys::nvmlGpuFabricInfo_v3_t { clusterUuid, status, cliqueId, state, ..zeroed() }
        })
    };
    Ok(info.map(|info| Fabric {
        cluster: info.clusterUuid,
        clique: info.cliqueId,
        state: info.state.into(),
        status: info.status,
        bad_route: bad_route(info.healthMask),
    }))
}

/// Returns true if a fabric's health mask has an unhealthy route (nvml.h, `NVML_GPU_FABRIC_HEALTH_MASK_*`). The driver
/// repairs the route itself, or needs an operator.
fn bad_route(mask: u32) -> bool {
    let route = mask >> sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY;
    route & sys::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY
        == sys::NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE
}

/// The id of a MIG device's GPU instance.
pub fn gpu_instance_id(mig_device: &Device<'_>) -> Answer<u32> {
    get("nvmlDeviceGetGpuInstanceId", &mig_device.nvml().lib().nvmlDeviceGetGpuInstanceId, mig_device, 0)
}

/// The id of a MIG device's compute instance, within its GPU instance.
pub fn compute_instance_id(mig_device: &Device<'_>) -> Answer<u32> {
    get("nvmlDeviceGetComputeInstanceId", &mig_device.nvml().lib().nvmlDeviceGetComputeInstanceId, mig_device, 0)
}

/// A GPU instance by NVML's handle, which is valid until the instance is destroyed.
pub struct GpuInstanceHandle<'a, 'nvml> {
    device: &'a Device<'nvml>,
    handle: sys::nvmlGpuInstance_t,
}

impl<'a, 'nvml> GpuInstanceHandle<'a, 'nvml> {
    /// Finds a GPU instance by its id.
    pub fn by_id(device: &'a Device<'nvml>, id: u32) -> Answer<Self> {
        let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstanceById else { return Ok(None) };
        let mut handle: sys::nvmlGpuInstance_t = std::ptr::null_mut();
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: the GPU's handle is live, and `handle` is a valid place for the answer.
        let code = unsafe { call(device.handle(), id, &mut handle) };
        returned("nvmlDeviceGetGpuInstanceById", code, || Some(Self { device, handle }))
    }

    /// Lists the GPU instances of a profile, by the driver's id of it.
    pub fn of_profile(device: &'a Device<'nvml>, profile: u32) -> Answer<Vec<Self>> {
        /// The room for answers, more than the seven instances that a GPU can have.
        const MAX_INSTANCES: u32 = 64;
        let Ok(call) = &device.nvml().lib().nvmlDeviceGetGpuInstances else { return Ok(None) };
        let (mut handles, mut count) = ([std::ptr::null_mut(); MAX_INSTANCES as usize], MAX_INSTANCES);
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

    /// Destroys the instance. Its compute instances have to be destroyed before.
    pub fn destroy(self) -> Answer<()> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceDestroy else { return Ok(None) };
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and it is not used again: this takes it.
        let code = unsafe { call(self.handle) };
        returned("nvmlGpuInstanceDestroy", code, || Some(()))
    }

    /// Its id, the id of its profile, and its place in memory slices. Ids of profiles are the driver's own, see
    /// [`profile`].
    pub fn info(&self) -> Answer<sys::nvmlGpuInstanceInfo_t> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceGetInfo else { return Ok(None) };
        let mut info: sys::nvmlGpuInstanceInfo_t = zeroed();
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `info` is the structure this call fills.
        let code = unsafe { call(self.handle, &mut info) };
        returned("nvmlGpuInstanceGetInfo", code, || Some(info))
    }

    /// A profile of compute instances by its number (`NVML_COMPUTE_INSTANCE_PROFILE_*`). The only engine profile is the
    /// shared one.
    pub fn compute_profile(&self, number: u32) -> Answer<sys::nvmlComputeInstanceProfileInfo_t> {
        let Ok(call) = &self.device.nvml().lib().nvmlGpuInstanceGetComputeInstanceProfileInfo else { return Ok(None) };
        let mut info: sys::nvmlComputeInstanceProfileInfo_t = zeroed();
        let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        // JUSTIFICATION: nvml-wrapper does not have this call.
        // SAFETY: NVML gave the handle, and `info` is the structure this call fills.
        let code = unsafe { call(self.handle, number, engines, &mut info) };
        returned("nvmlGpuInstanceGetComputeInstanceProfileInfo", code, || Some(info))
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

    /// Destroys the compute instance with this id.
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
    let mut info: sys::nvmlGpuInstanceProfileInfo_t = zeroed();
    // JUSTIFICATION: nvml-wrapper does not have this call.
    // SAFETY: the handle is live, and `info` is the structure this call fills.
    let code = unsafe { call(device.handle(), number, &mut info) };
    returned("nvmlDeviceGetGpuInstanceProfileInfo", code, || Some(info))
}

/// The possible placements of GPU instances of a profile, by the driver's id of it.
pub fn placements(device: &Device<'_>, profile: u32) -> Answer<Vec<MigPlacement>> {
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
    returned(CALL, code, || Some(found.iter().map(|at| MigPlacement { start: at.start, size: at.size }).collect()))
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
    pub gpu_instance: Option<u32>,
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

    /// Registers a GPU's events, a union of `nvmlEventType*`.
    ///
    /// After NVML_ERROR_UNKNOWN the set is undefined, as NVML's reference says, and must be dropped.
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
        /// NVML's number in an event that is not about an instance.
        const NO_INSTANCE: u32 = 0xffff_ffff;
        let Ok(call) = &self.nvml.lib().nvmlEventSetWait_v2 else {
            return Err(CallError::in_words(CALL, "the library does not have this call"));
        };
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let mut data = sys::nvmlEventData_t { gpuInstanceId: NO_INSTANCE, computeInstanceId: NO_INSTANCE, ..zeroed() };
        // JUSTIFICATION: nvml-wrapper drops the instance ids.
        // SAFETY: the set is live, and `data` is the structure this call fills.
        let code = unsafe { call(self.set, &mut data, milliseconds) };
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => return Ok(None),
            sys::nvmlReturn_enum_NVML_SUCCESS => {}
            // Even "not supported" is an error here: as a timeout, it would be tried again at once.
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

/// Ends the process at once, without destructors and exit handlers: those of a library can hang if another thread hangs
/// in it.
pub fn exit_now(status: i32) -> ! {
    // JUSTIFICATION: std's exit runs the exit handlers, its abort counts as a crash.
    unsafe extern "C" {
        /// POSIX `_exit`.
        safe fn _exit(status: i32) -> !;
    }
    _exit(status)
}
