//! The states of a GPU's NVLinks, for scans and polls.
//!
//! One call answers for all links where the driver has the state as a field, as NCCL asks for it from Hopper on
//! (src/graph/xml.cc). Elsewhere each link is asked by itself; each such call may be a request to the GPU's own
//! processor under the GPU's lock.

use nvml_wrapper::Device;
use nvml_wrapper_sys::bindings as sys;

use super::call::{Answer, offered};
use super::calls::Calls;
use super::raw::{self, FIELDS};

/// The most links of a GPU: NVML_NVLINK_MAX_LINKS of NVML 13. The bindings have the 18 of NVML 12.
pub const MAX_LINKS: u32 = 36;

/// The field with the state of a link.
pub const BY_FIELD: &str = "NVML_FI_DEV_NVLINK_GET_STATE";

/// The call for the state of one link.
pub const ONE: &str = "nvmlDeviceGetNvLinkState";

/// Reads by one call which links are up, from link 0 on. "Not offered" if no link has the field.
pub fn all(device: &Device<'_>, calls: &Calls) -> Answer<Vec<Answer<bool>>> {
    let states = offered(calls.raw(FIELDS, || raw::nvlink_states(device, MAX_LINKS)))?;
    let ups = states.map(|states| states.into_iter().map(|state| Ok(state?.and_then(up))).collect::<Vec<_>>());
    Ok(ups.filter(|ups| ups.iter().any(|up| matches!(up, Ok(Some(_))))))
}

/// Reads whether one link is up.
pub fn one(device: &Device<'_>, calls: &Calls, link: u32) -> Answer<bool> {
    offered(calls.ask(ONE, || device.link_wrapper_for(link).is_active()))
}

/// Returns true for a link that works. One that sleeps wakes up when it is used.
fn up(state: u32) -> Option<bool> {
    match state {
        sys::NVML_NVLINK_STATE_ACTIVE | sys::NVML_NVLINK_STATE_SLEEP => Some(true),
        sys::NVML_NVLINK_STATE_INACTIVE => Some(false),
        _ => None,
    }
}
