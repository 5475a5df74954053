//! What an NVML call came to: an answer, no answer, or an error that names the call and the code.
//!
//! Used by all of `nvml`'s child side. It makes no calls.

use std::fmt;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

/// A call's outcome; `None` where the library or the GPU does not offer the call.
pub type Answer<T> = Result<Option<T>, CallError>;

/// An NVML call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct CallError {
    /// The C function.
    pub call: &'static str,
    /// What came back.
    pub reason: Reason,
}

/// Why a call gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// NVML's return code.
    Code(u32),
    /// What came back could not be read.
    Text(String),
}

impl CallError {
    /// Whether the GPU has fallen off the bus.
    pub fn is_gpu_lost(&self) -> bool {
        self.is(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST)
    }

    /// Whether the driver itself is not there any more, or is another one than the library's: nothing that this process
    /// asks will be answered again.
    pub fn is_driver_gone(&self) -> bool {
        let gone = [
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        ];
        gone.iter().any(|code| self.is(*code))
    }

    /// Whether NVML gave this return code.
    pub fn is(&self, code: u32) -> bool {
        self.reason == Reason::Code(code)
    }

    /// Something came back that cannot be what the call promises.
    pub(super) fn unreadable(call: &'static str, what: impl fmt::Display) -> Self {
        Self { call, reason: Reason::Text(what.to_string()) }
    }
}

impl fmt::Display for Reason {
    /// NVML's name of the code with its number, such as `NVML_ERROR_GPU_IS_LOST (15)`.
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
        ) => Err(CallError::unreadable(call, error)),
        Err(error) => returned(call, error.into(), || None),
    }
}

/// The outcome of a raw call by its return code; `value` reads what it wrote.
pub fn returned<T>(call: &'static str, code: u32, value: impl FnOnce() -> Option<T>) -> Answer<T> {
    match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => Ok(value()),
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED | sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => Ok(None),
        code => Err(CallError { call, reason: Reason::Code(code) }),
    }
}

/// INVALID_ARGUMENT is how NVML says that a GPU has no link of this number, a link no remote, a driver no such field.
pub fn offered<T>(answer: Answer<T>) -> Answer<T> {
    match answer {
        Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT) => Ok(None),
        other => other,
    }
}

/// The name of an `nvmlReturn_t` without its prefix `NVML_`, from nvml.h of NVML 13.
fn code_name(code: u32) -> Option<&'static str> {
    Some(match code {
        0 => "SUCCESS",
        1 => "ERROR_UNINITIALIZED",
        2 => "ERROR_INVALID_ARGUMENT",
        3 => "ERROR_NOT_SUPPORTED",
        4 => "ERROR_NO_PERMISSION",
        5 => "ERROR_ALREADY_INITIALIZED",
        6 => "ERROR_NOT_FOUND",
        7 => "ERROR_INSUFFICIENT_SIZE",
        8 => "ERROR_INSUFFICIENT_POWER",
        9 => "ERROR_DRIVER_NOT_LOADED",
        10 => "ERROR_TIMEOUT",
        11 => "ERROR_IRQ_ISSUE",
        12 => "ERROR_LIBRARY_NOT_FOUND",
        13 => "ERROR_FUNCTION_NOT_FOUND",
        14 => "ERROR_CORRUPTED_INFOROM",
        15 => "ERROR_GPU_IS_LOST",
        16 => "ERROR_RESET_REQUIRED",
        17 => "ERROR_OPERATING_SYSTEM",
        18 => "ERROR_LIB_RM_VERSION_MISMATCH",
        19 => "ERROR_IN_USE",
        20 => "ERROR_MEMORY",
        21 => "ERROR_NO_DATA",
        22 => "ERROR_VGPU_ECC_NOT_SUPPORTED",
        23 => "ERROR_INSUFFICIENT_RESOURCES",
        24 => "ERROR_FREQ_NOT_SUPPORTED",
        25 => "ERROR_ARGUMENT_VERSION_MISMATCH",
        26 => "ERROR_DEPRECATED",
        27 => "ERROR_NOT_READY",
        28 => "ERROR_GPU_NOT_FOUND",
        29 => "ERROR_INVALID_STATE",
        30 => "ERROR_RESET_TYPE_NOT_SUPPORTED",
        999 => "ERROR_UNKNOWN",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_call_and_the_code() {
        let failed = |error| answer::<()>("nvmlDeviceGetName", Err(error)).unwrap_err().to_string();
        assert_eq!(failed(NvmlError::GpuLost), "nvmlDeviceGetName: NVML_ERROR_GPU_IS_LOST (15)");
        assert_eq!(
            failed(NvmlError::UnexpectedVariant(25)),
            "nvmlDeviceGetName: NVML_ERROR_ARGUMENT_VERSION_MISMATCH (25)"
        );
        assert_eq!(failed(NvmlError::UnexpectedVariant(77)), "nvmlDeviceGetName: NVML return code 77");
    }

    #[test]
    fn what_is_not_offered_is_no_answer_and_no_error() {
        assert_eq!(answer::<()>("f", Err(NvmlError::NotSupported)), Ok(None));
        assert_eq!(answer::<()>("f", Err(NvmlError::FailedToLoadSymbol("f".into()))), Ok(None));
        assert_eq!(answer("f", Ok(1)), Ok(Some(1)));
    }
}
