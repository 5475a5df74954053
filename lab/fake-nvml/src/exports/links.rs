//! NVLinks and the fabric.

use std::ffi::c_uint;
use std::mem::size_of;

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, UNSUPPORTED, exports, pci_info, put, version};
use crate::machine::{NvLinks, Remote};
use crate::state::{Answer, State, enter_gpu};

/// A link's remote end, and its state. If the machine file does not mention NVLinks, the GPU cannot tell:
/// UNKNOWN. If the file lists none, the GPU supports none. A number beyond the links is invalid.
fn link(state: &State, at: usize, link: c_uint) -> Answer<(Remote, c_uint)> {
    let gpu = state.machine.gpus.get(at).ok_or(INVALID)?;
    let groups = gpu.nvlinks.as_ref().ok_or(nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let group = groups.iter().find(|group| group.links.contains(&link));
    let none = if groups.is_empty() { UNSUPPORTED } else { INVALID };
    let group: &NvLinks = group.ok_or(none)?;
    let usual = if group.active { NVML_NVLINK_STATE_ACTIVE } else { NVML_NVLINK_STATE_INACTIVE };
    let now = state.links.get(&(at, link)).copied().unwrap_or(Some(usual));
    Ok((group.remote, now.ok_or(UNSUPPORTED)?))
}

/// Returns true for a GPU of the generation Hopper or a later one.
fn is_from_hopper_on(state: &State, at: usize) -> bool {
    let capability = state.machine.gpus.get(at).and_then(|gpu| gpu.compute_capability.as_deref());
    let major = capability.and_then(|capability| capability.split('.').next()?.parse::<c_uint>().ok());
    major.is_some_and(|major| major >= 9)
}

/// A link's state as a field has it. Drivers have the field for Hopper and later; NCCL asks for it there.
pub(super) fn link_state(state: &State, at: usize, number: c_uint) -> Answer<c_uint> {
    let has_field = !state.without_link_fields && is_from_hopper_on(state, at);
    if has_field { Ok(link(state, at, number)?.1) } else { Err(UNSUPPORTED) }
}

/// What the older calls say of a link: they know no sleep.
fn is_up(state: &State, at: usize, number: c_uint) -> Answer<bool> {
    Ok(link(state, at, number)?.1 == NVML_NVLINK_STATE_ACTIVE)
}

/// A GPU's registration at the fabric: joined, unless a test says otherwise. For a GPU without a fabric the call
/// succeeds with the state NOT_SUPPORTED, as 580.159.04 answered on an H200 without NVLinks; before Hopper the call itself
/// fails with that code.
fn fabric(state: &State, at: usize) -> Answer<nvmlGpuFabricInfo_t> {
    let ordered = state.fabrics.get(&at).map(|(joined, status, _)| (*joined, *status));
    let Some(fabric) = state.machine.gpus.get(at).and_then(|gpu| gpu.fabric.as_ref()) else {
        if !is_from_hopper_on(state, at) {
            return Err(UNSUPPORTED);
        }
        let (joined, status) = ordered.unwrap_or((NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, nvmlReturn_enum_NVML_SUCCESS));
        return Ok(nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state: joined as _ });
    };
    let digits: String = fabric.cluster.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).map_err(|_| nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let (joined, status) = ordered.unwrap_or((NVML_GPU_FABRIC_STATE_COMPLETED, nvmlReturn_enum_NVML_SUCCESS));
    Ok(nvmlGpuFabricInfo_t { clusterUuid: number.to_be_bytes(), status, cliqueId: fabric.clique, state: joined as _ })
}

exports! {
    fn nvmlDeviceGetNvLinkState(device: nvmlDevice_t, number: c_uint, active: *mut nvmlEnableState_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetNvLinkState", device)?;
        put(active, is_up(&state, at, number)?.into())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: nvmlDevice_t, number: c_uint, pci: *mut nvmlPciInfo_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetNvLinkRemotePciInfo_v2", device)?;
        let remote = match link(&state, at, number)?.0 {
            Remote::Gpu(remote) => Some(remote),
            Remote::Switch(remote) => remote,
            Remote::Cpu | Remote::Unknown => return Err(UNSUPPORTED),
        };
        put(pci, pci_info(remote))
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(
        device: nvmlDevice_t,
        number: c_uint,
        kind: *mut nvmlIntNvLinkDeviceType_t,
    ) {
        let (state, at) = enter_gpu("nvmlDeviceGetNvLinkRemoteDeviceType", device)?;
        put(kind, match link(&state, at, number)?.0 {
            Remote::Gpu(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            Remote::Cpu => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU,
            Remote::Switch(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
            Remote::Unknown => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
        })
    }

    fn nvmlDeviceGetGpuFabricInfo(device: nvmlDevice_t, info: *mut nvmlGpuFabricInfo_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetGpuFabricInfo", device)?;
        put(info, fabric(&state, at)?)
    }

    fn nvmlDeviceGetGpuFabricInfoV(device: nvmlDevice_t, info: *mut nvmlGpuFabricInfoV_t) {
        let (state, at) = enter_gpu("nvmlDeviceGetGpuFabricInfoV", device)?;
        let healthMask = state.fabrics.get(&at).map_or(0, |(.., mask)| *mask);
        let nvmlGpuFabricInfo_t { clusterUuid, status, cliqueId, state } = fabric(&state, at)?;
        let known = [(size_of::<nvmlGpuFabricInfo_v2_t>(), 2), (size_of::<nvmlGpuFabricInfo_v3_t>(), 3)];
        let version = version(info, &known)?;
        // Version 3 begins as version 2 does.
        let info = info.cast();
        put(info, nvmlGpuFabricInfo_v2_t { version, clusterUuid, status, cliqueId, state, healthMask })
    }
}
