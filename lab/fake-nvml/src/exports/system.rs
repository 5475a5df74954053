//! Initialisation, shutdown, versions, and the handles of GPUs.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::*;

use super::{INVALID, exports, put, put_text};
use crate::state::{self, enter, enter_with};

const DRIVER_VERSION: &str = "580.95.05";
const NVML_VERSION: &str = "13.580.95.05";
/// CUDA 13.0: 1000 times the major version plus 10 times the minor.
const CUDA_VERSION: c_int = 13_000;

exports! {
    fn nvmlInit_v2() {
        state::init()
    }

    fn nvmlShutdown() {
        let mut state = enter("nvmlShutdown")?;
        state.inits -= 1;
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) {
        let state = enter("nvmlSystemGetDriverVersion")?;
        put_text(version, length, state.driver.as_deref().unwrap_or(DRIVER_VERSION))
    }

    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) {
        let _state = enter("nvmlSystemGetNVMLVersion")?;
        put_text(version, length, NVML_VERSION)
    }

    fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) {
        let _state = enter("nvmlSystemGetCudaDriverVersion")?;
        put(version, CUDA_VERSION)
    }

    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        let state = enter("nvmlDeviceGetCount_v2")?;
        put(count, state.present().len() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) {
        let find = |state: &state::State| state.present().get(index as usize).copied().ok_or(INVALID);
        let state = enter_with("nvmlDeviceGetHandleByIndex_v2", |state| Ok(vec![find(state)?]))?;
        put(device, state::handle(find(&state)?))
    }
}
