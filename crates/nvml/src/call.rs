//! The outcome of an NVML call: a value, "not offered", or an error that names the call and the code.
//!
//! A plain value that travels from the agent to its parent as it is. Used by all of `nvml` and by the doctor. It makes
//! no calls.

use std::borrow::Cow;
use std::fmt;

use super::gate::RELEASED;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;
use serde::{Deserialize, Serialize};

/// A call's outcome: `Ok(Some)` is known, `Ok(None)` is not offered by the library or the GPU, `Err` failed.
pub type Answer<T> = Result<Option<T>, CallError>;

/// The name under which loading the library is reported.
pub const LOAD: &str = "dlopen";

/// An NVML call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[error("{call}: {reason}")]
pub struct CallError {
    /// The C function, or [`LOAD`].
    pub call: Cow<'static, str>,
    /// NVML's return code, or the error in words.
    pub reason: Reason,
}

/// The meaning of a failed call for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The library cannot be loaded.
    Library,
    /// The kernel module is not loaded, or cannot be reached.
    DriverNotLoaded,
    /// The library and the kernel module are of different releases.
    VersionMismatch,
    /// NVML is not initialised in this process (any more).
    Uninitialized,
    /// The process may not open the device nodes, or lacks the right for the call.
    NoPermission,
    /// The GPU has fallen off the bus.
    GpuLost,
    /// The GPU has to be reset.
    ResetRequired,
    /// An operator has released the driver, and the agent made no call.
    Released,
    /// Anything else.
    Other,
}

impl Fault {
    /// Returns true for the answers of a host without a driver: no library loads, or the library finds no driver
    /// loaded.
    pub fn is_no_driver(self) -> bool {
        matches!(self, Self::Library | Self::DriverNotLoaded)
    }
}

/// The reason why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// NVML's return code.
    Code(u32),
    /// The error in words, such as that no library loads, or that an answer is unreadable.
    Text(String),
}

impl CallError {
    /// The meaning of the error.
    pub fn fault(&self) -> Fault {
        let code = match &self.reason {
            Reason::Text(_) if self.call == LOAD => return Fault::Library,
            Reason::Text(_) if self.call == RELEASED => return Fault::Released,
            Reason::Text(_) => return Fault::Other,
            Reason::Code(code) => *code,
        };
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => Fault::Uninitialized,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => Fault::DriverNotLoaded,
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => Fault::VersionMismatch,
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Fault::NoPermission,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => Fault::GpuLost,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Fault::ResetRequired,
            _ => Fault::Other,
        }
    }

    /// Returns true if only a new process can get answers: NVML is not initialised here, the driver is gone, or its
    /// release differs from the library's.
    pub fn needs_new_process(&self) -> bool {
        [Fault::Uninitialized, Fault::DriverNotLoaded, Fault::VersionMismatch].contains(&self.fault())
    }

    /// Returns true if NVML returned this code.
    pub fn is(&self, code: u32) -> bool {
        self.reason == Reason::Code(code)
    }

    /// A call that NVML answered with an error code.
    pub fn returned(call: &'static str, code: u32) -> Self {
        Self { call: Cow::Borrowed(call), reason: Reason::Code(code) }
    }

    /// A failure for which NVML has no code, described in words.
    pub fn in_words(call: &'static str, what: impl fmt::Display) -> Self {
        Self { call: Cow::Borrowed(call), reason: Reason::Text(what.to_string()) }
    }
}

impl fmt::Display for Reason {
    /// Writes NVML's name of the code with its number, such as `NVML_ERROR_GPU_IS_LOST (15)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => match code_name(*code) {
                Some(name) => write!(f, "NVML_{name} ({code})"),
                None => write!(f, "NVML return code {code}"),
            },
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// The outcome of one of nvml-wrapper's calls.
pub fn answer<T>(call: &'static str, result: Result<T, NvmlError>) -> Answer<T> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::FailedToLoadSymbol(_)) => Ok(None),
        Err(
            error @ (NvmlError::Utf8Error(_)
            | NvmlError::NulError(_)
            | NvmlError::LibloadingError(_)
            | NvmlError::StringTooLong { .. }
            | NvmlError::IncorrectBits(_)
            | NvmlError::SetReleaseFailed
            | NvmlError::GetPciInfoFailed
            | NvmlError::PciInfoToCFailed),
        ) => Err(CallError::in_words(call, error)),
        Err(error) => returned(call, error.into(), || None),
    }
}

/// The outcome of a raw call by its return code; `value` reads its output.
pub fn returned<T>(call: &'static str, code: u32, value: impl FnOnce() -> Option<T>) -> Answer<T> {
    match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => Ok(value()),
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED | sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => Ok(None),
        code => Err(CallError::returned(call, code)),
    }
}

/// Turns INVALID_ARGUMENT into "not offered": NVML returns it for a link that the GPU does not have, for the remote end
/// of a link that has none, and for a field that the driver does not know.
pub fn offered<T>(answer: Answer<T>) -> Answer<T> {
    match answer {
        Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => Ok(None),
        other => other,
    }
}

/// The names of `nvmlReturn_t` from 0 on, without their prefix `NVML_`, from nvml.h of NVML 13.
const CODE_NAMES: &str = "SUCCESS ERROR_UNINITIALIZED ERROR_INVALID_ARGUMENT ERROR_NOT_SUPPORTED ERROR_NO_PERMISSION \
    ERROR_ALREADY_INITIALIZED ERROR_NOT_FOUND ERROR_INSUFFICIENT_SIZE ERROR_INSUFFICIENT_POWER ERROR_DRIVER_NOT_LOADED \
    ERROR_TIMEOUT ERROR_IRQ_ISSUE ERROR_LIBRARY_NOT_FOUND ERROR_FUNCTION_NOT_FOUND ERROR_CORRUPTED_INFOROM \
    ERROR_GPU_IS_LOST ERROR_RESET_REQUIRED ERROR_OPERATING_SYSTEM ERROR_LIB_RM_VERSION_MISMATCH ERROR_IN_USE \
    ERROR_MEMORY ERROR_NO_DATA ERROR_VGPU_ECC_NOT_SUPPORTED ERROR_INSUFFICIENT_RESOURCES ERROR_FREQ_NOT_SUPPORTED \
    ERROR_ARGUMENT_VERSION_MISMATCH ERROR_DEPRECATED ERROR_NOT_READY ERROR_GPU_NOT_FOUND ERROR_INVALID_STATE \
    ERROR_RESET_TYPE_NOT_SUPPORTED";

fn code_name(code: u32) -> Option<&'static str> {
    match code {
        sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN => Some("ERROR_UNKNOWN"),
        code => CODE_NAMES.split(' ').nth(usize::try_from(code).ok()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_call_and_the_code() {
        let failed = |error| answer::<()>("nvmlDeviceGetName", Err(error)).unwrap_err().to_string();
        assert_eq!(failed(NvmlError::GpuLost), "nvmlDeviceGetName: NVML_ERROR_GPU_IS_LOST (15)");
        assert_eq!(
            failed(NvmlError::UnexpectedVariant(25)),
            "nvmlDeviceGetName: NVML_ERROR_ARGUMENT_VERSION_MISMATCH (25)"
        );
        assert_eq!(failed(NvmlError::Unknown), "nvmlDeviceGetName: NVML_ERROR_UNKNOWN (999)");
        assert_eq!(
            failed(NvmlError::UnexpectedVariant(30)),
            "nvmlDeviceGetName: NVML_ERROR_RESET_TYPE_NOT_SUPPORTED (30)"
        );
        assert_eq!(failed(NvmlError::UnexpectedVariant(77)), "nvmlDeviceGetName: NVML return code 77");
    }

    #[test]
    fn unoffered_call_gives_neither_value_nor_error() {
        assert_eq!(answer::<()>("f", Err(NvmlError::NotSupported)), Ok(None));
        assert_eq!(answer::<()>("f", Err(NvmlError::FailedToLoadSymbol("f".into()))), Ok(None));
        assert_eq!(answer("f", Ok(1)), Ok(Some(1)));
    }
}
