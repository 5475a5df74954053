//! NVLinks and the fabric.

use std::ffi::c_uint;
use std::mem::size_of;

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, UNSUPPORTED, exports, pci_info, put, version};
use crate::machine::{NvLinks, Remote};
use crate::state::{Answer, State};

/// A link's remote end, and its state. UNKNOWN if the machine file does not mention the GPU's NVLinks; NOT_SUPPORTED if
/// it lists none, or after `link … absent`; INVALID_ARGUMENT for a number that it does not list.
fn link(state: &State, at: usize, link: c_uint) -> Answer<(Remote, c_uint)> {
    let gpu = state.machine.gpus.get(at).ok_or(INVALID)?;
    let groups = gpu.nvlinks.as_ref().ok_or(nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let group = groups.iter().find(|group| group.links.contains(&link));
    let group: &NvLinks = group.ok_or(if groups.is_empty() { UNSUPPORTED } else { INVALID })?;
    let listed = if group.active { NVML_NVLINK_STATE_ACTIVE } else { NVML_NVLINK_STATE_INACTIVE };
    let now = state.links.get(&(at, link)).copied().unwrap_or(Some(listed));
    Ok((group.remote, now.ok_or(UNSUPPORTED)?))
}

/// Returns true for a GPU of the Hopper generation or later.
fn is_from_hopper_on(state: &State, at: usize) -> bool {
    let capability = state.machine.gpus.get(at).and_then(|gpu| gpu.compute_capability.as_deref());
    let major = capability.and_then(|capability| capability.split('.').next()?.parse::<c_uint>().ok());
    major.is_some_and(|major| major >= 9)
}

/// A link's state in a field. Drivers have the field for GPUs since Hopper, and NCCL reads it for these.
pub(super) fn link_state(state: &State, at: usize, number: c_uint) -> Answer<c_uint> {
    let has_field = !state.without_link_fields && is_from_hopper_on(state, at);
    if has_field { Ok(link(state, at, number)?.1) } else { Err(UNSUPPORTED) }
}

/// Returns true if a link is active. This is the answer of the older calls, for which a sleeping link is not active.
fn is_up(state: &State, at: usize, number: c_uint) -> Answer<bool> {
    Ok(link(state, at, number)?.1 == NVML_NVLINK_STATE_ACTIVE)
}

/// A GPU's registration with the fabric, which is complete unless a command set another state. For a GPU without a
/// fabric the call succeeds with the state NOT_SUPPORTED, as driver 580.159.04 did on an H200 without NVLinks. If the
/// GPU is older than Hopper, the call itself fails with NOT_SUPPORTED.
fn fabric(state: &State, at: usize) -> Answer<nvmlGpuFabricInfo_t> {
    let commanded = state.fabrics.get(&at).map(|(joined, status, _)| (*joined, *status));
    let Some(fabric) = state.machine.gpus.get(at).and_then(|gpu| gpu.fabric.as_ref()) else {
        if !is_from_hopper_on(state, at) {
            return Err(UNSUPPORTED);
        }
        let (joined, status) = commanded.unwrap_or((NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, nvmlReturn_enum_NVML_SUCCESS));
        return Ok(nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state: joined as _ });
    };
    let digits: String = fabric.cluster.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).map_err(|_| nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
    let (joined, status) = commanded.unwrap_or((NVML_GPU_FABRIC_STATE_COMPLETED, nvmlReturn_enum_NVML_SUCCESS));
    Ok(nvmlGpuFabricInfo_t { clusterUuid: number.to_be_bytes(), status, cliqueId: fabric.clique, state: joined as _ })
}

exports! {
    fn nvmlDeviceGetNvLinkState([device => state, at], number: c_uint, active: *mut nvmlEnableState_t) {
        put(active, is_up(&state, at, number)?.into())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2([device => state, at], number: c_uint, pci: *mut nvmlPciInfo_t) {
        let remote = match link(&state, at, number)?.0 {
            Remote::Gpu(remote) => Some(remote),
            Remote::Switch(remote) => remote,
            Remote::Cpu | Remote::Unknown => return Err(UNSUPPORTED),
        };
        put(pci, pci_info(remote))
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(
        [device => state, at],
        number: c_uint,
        kind: *mut nvmlIntNvLinkDeviceType_t,
    ) {
        put(kind, match link(&state, at, number)?.0 {
            Remote::Gpu(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            Remote::Cpu => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU,
            Remote::Switch(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
            Remote::Unknown => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
        })
    }

    fn nvmlDeviceGetGpuFabricInfo([device => state, at], info: *mut nvmlGpuFabricInfo_t) {
        put(info, fabric(&state, at)?)
    }

    fn nvmlDeviceGetGpuFabricInfoV([device => state, at], info: *mut nvmlGpuFabricInfoV_t) {
        let healthMask = state.fabrics.get(&at).map_or(0, |(.., mask)| *mask);
        let nvmlGpuFabricInfo_t { clusterUuid, status, cliqueId, state } = fabric(&state, at)?;
        let known = [(size_of::<nvmlGpuFabricInfo_v2_t>(), 2), (size_of::<nvmlGpuFabricInfo_v3_t>(), 3)];
        let version = version(info, &known)?;
        // Version 3 begins with the fields of version 2.
        let info = info.cast();
        put(info, nvmlGpuFabricInfo_v2_t { version, clusterUuid, status, cliqueId, state, healthMask })
    }
}
