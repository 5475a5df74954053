//! NVML's C functions. Each function runs in `guard`, checks its arguments, and answers from the state of the driver.

mod device;
mod events;
mod links;
mod mig;
mod system;

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings::*;

use crate::machine::Pci;
use crate::state::Answer;

const INVALID: nvmlReturn_t = nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const UNSUPPORTED: nvmlReturn_t = nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;

/// Defines C functions. The control socket's commands use the same names. `[device => state, at]` is the handle of a
/// GPU: the function begins with the state of the driver and the position of that GPU.
macro_rules! exports {
    ($(fn $name:ident(
        $([$device:ident => $state:pat, $at:pat],)? $($arg:ident: $type:ty),* $(,)?
    ) $body:block)*) => {$(
        /// Follows NVML's reference.
        ///
        /// # Safety
        ///
        /// Pointers are null or valid, and buffers are as long as the caller says.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name(
            $($device: nvml_wrapper_sys::bindings::nvmlDevice_t,)? $($arg: $type),*
        ) -> nvml_wrapper_sys::bindings::nvmlReturn_t {
            crate::state::guard(|| {
                $(let ($state, $at) = crate::state::enter_gpu(stringify!($name), $device)?;)?
                $body
            })
        }
    )*};
}
use exports;

/// Defines C functions that write one fact of a GPU. A fact that the machine file lacks is NOT_SUPPORTED.
macro_rules! facts {
    ($($name:ident($type:ty) = |$gpu:ident| $fact:expr;)*) => {
        exports! {$(
            fn $name([device => state, at], fact: *mut $type) {
                let $gpu = state.machine.gpus.get(at).ok_or(super::INVALID)?;
                super::put(fact, $fact.ok_or(super::UNSUPPORTED)?)
            }
        )*}
    };
}
use facts;

/// Writes through a pointer of the caller; null is INVALID_ARGUMENT.
fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, and the caller promises that it is valid for a write of T.
    unsafe { out.write(value) };
    Ok(())
}

/// The version with which a structure begins, if it is one of `known`: the size and the number of each version.
fn version<T>(out: *mut T, known: &[(usize, c_uint)]) -> Answer<c_uint> {
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, and the caller promises a structure that begins with its version.
    let version = unsafe { out.cast::<c_uint>().read() };
    let is_known = known.iter().any(|(size, number)| version == *size as c_uint | number << 24);
    is_known.then_some(version).ok_or(nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
}

/// Writes a C string into a buffer of `length` bytes.
fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> Answer {
    let bytes = text.as_bytes();
    if buffer.is_null() {
        return Err(INVALID);
    }
    if bytes.len() >= length as usize {
        return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    }
    // SAFETY: the buffer has `length` bytes, as the caller promises, and text and NUL fit.
    unsafe {
        buffer.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len());
        buffer.add(bytes.len()).write(0);
    }
    Ok(())
}

/// A PCI address in NVML's structure. `None` becomes `FFFFFFFF:FF:FF.0`, which NVML gives for an unknown remote end.
fn pci_info(pci: Option<Pci>) -> nvmlPciInfo_t {
    // SAFETY: plain integers and character arrays, for which zeros are valid.
    let mut info: nvmlPciInfo_t = unsafe { std::mem::zeroed() };
    let (domain, bus, device, function) = match pci {
        Some(pci) => (pci.domain, pci.bus, pci.device, pci.function),
        None => (u32::MAX, 0xff, 0xff, 0),
    };
    (info.domain, info.bus, info.device) = (domain, bus, device);
    let long = format!("{domain:08X}:{bus:02X}:{device:02X}.{function:X}");
    let short = format!("{:04X}:{bus:02X}:{device:02X}.{function:X}", domain & 0xffff);
    for (to, from) in info.busId.iter_mut().zip(long.bytes()) {
        *to = from as c_char;
    }
    for (to, from) in info.busIdLegacy.iter_mut().zip(short.bytes()) {
        *to = from as c_char;
    }
    info
}
