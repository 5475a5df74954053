//! The states of a GPU's NVLinks, for scans and polls.
//!
//! If the driver has the state as a field, one call reads all links; NCCL reads them so from Hopper on
//! (src/graph/xml.cc). Otherwise each link takes a call of its own, which may be a request to the GPU's own processor
//! under the GPU's lock.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, offered};
use super::calls::Calls;
use super::raw::{self, FIELDS};

/// The most links of a GPU: NVML_NVLINK_MAX_LINKS of NVML 13. The bindings have the 18 of NVML 12.
pub const MAX_LINKS: u32 = 36;

/// The field with the state of a link.
pub const STATE_FIELD: &str = "NVML_FI_DEV_NVLINK_GET_STATE";

/// The call for the state of one link.
pub const STATE_CALL: &str = "nvmlDeviceGetNvLinkState";

/// Reads by one call which links are up, from link 0 on. "Not offered" if no link has the field.
pub fn states(device: &Device<'_>, calls: &Calls) -> Answer<Vec<Answer<bool>>> {
    let states = offered(calls.raw(FIELDS, || raw::nvlink_states(device, MAX_LINKS)))?;
    let ups = states.map(|states| states.into_iter().map(|state| Ok(state?.and_then(is_up))).collect::<Vec<_>>());
    Ok(ups.filter(|ups| ups.iter().any(|up| matches!(up, Ok(Some(_))))))
}

/// Reads whether one link is up.
pub fn state(device: &Device<'_>, calls: &Calls, link: u32) -> Answer<bool> {
    offered(calls.ask(STATE_CALL, || device.link_wrapper_for(link).is_active()))
}

/// Returns true for a link that works: a sleeping one wakes up when it is used. `None` if the state is unknown.
fn is_up(state: u32) -> Option<bool> {
    match state {
        sys::NVML_NVLINK_STATE_ACTIVE | sys::NVML_NVLINK_STATE_SLEEP => Some(true),
        sys::NVML_NVLINK_STATE_INACTIVE => Some(false),
        _ => None,
    }
}
