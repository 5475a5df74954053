//! Event sets. A wait ends early for an event or a fault, and after `loss-ends-waits` for a lost GPU.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, UNSUPPORTED, exports, put};
use crate::state::{self, Event, EventSet, FAKE, enter, enter_gpu};

const SUPPORTED: u64 = (nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError) as u64;
/// NVML's number for an event that concerns no instance.
const NO_INSTANCE: c_uint = 0xffff_ffff;

fn data(event: Event) -> nvmlEventData_t {
    nvmlEventData_t {
        device: state::handle(event.gpu),
        eventType: event.kind,
        eventData: event.data,
        gpuInstanceId: event.gpu_instance.unwrap_or(NO_INSTANCE),
        computeInstanceId: event.compute_instance.unwrap_or(NO_INSTANCE),
    }
}

exports! {
    fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) {
        let mut state = enter("nvmlEventSetCreate")?;
        state.sets_made += 1;
        let number = state.sets_made;
        state.sets.insert(number, EventSet::default());
        put(set, std::ptr::without_provenance_mut(number))
    }

    fn nvmlDeviceGetSupportedEventTypes([device => _state, _], types: *mut c_ulonglong) {
        put(types, SUPPORTED)
    }

    fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: c_ulonglong, set: nvmlEventSet_t) {
        let (mut state, at) = enter_gpu("nvmlDeviceRegisterEvents", device).inspect_err(|code| {
            // By NVML's reference, the set is undefined after this error.
            if *code == nvmlReturn_enum_NVML_ERROR_UNKNOWN {
                state::lock().sets.remove(&set.addr());
            }
        })?;
        if types & !SUPPORTED != 0 {
            return Err(UNSUPPORTED);
        }
        let set = state.sets.get_mut(&set.addr()).ok_or(INVALID)?;
        *set.registered.entry(at).or_default() |= types;
        Ok(())
    }

    fn nvmlEventSetWait_v2(set: nvmlEventSet_t, event: *mut nvmlEventData_t, milliseconds: c_uint) {
        let deadline = Instant::now() + Duration::from_millis(milliseconds.into());
        loop {
            let mut state = enter("nvmlEventSetWait_v2")?;
            if state.loss_ends(state.sets.get(&set.addr()).ok_or(INVALID)?) {
                return Err(nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
            }
            let queue = &mut state.sets.get_mut(&set.addr()).ok_or(INVALID)?.queue;
            if let Some(first) = queue.pop_front() {
                return put(event, data(first));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(nvmlReturn_enum_NVML_ERROR_TIMEOUT);
            }
            drop(FAKE.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn nvmlEventSetFree(set: nvmlEventSet_t) {
        let mut state = enter("nvmlEventSetFree")?;
        state.sets.remove(&set.addr()).map(drop).ok_or(INVALID)
    }
}
