//! The duration of something, in words. Used by `doctor` and `top`.

use std::time::SystemTime;

use linkwise_core::state::Timestamp;

/// The present time, as `run` counts it.
pub(super) fn now() -> Timestamp {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// The duration, as `3 h`; `None` if it began just now, or later by a clock that was set back.
pub(super) fn lasting(since: u64, now: Timestamp) -> Option<String> {
    match now.as_secs().saturating_sub(since) {
        0 => None,
        seconds @ 1..=119 => Some(format!("{seconds} s")),
        seconds @ 120..=7199 => Some(format!("{} min", seconds / 60)),
        seconds @ 7200..=172_799 => Some(format!("{} h", seconds / 3600)),
        seconds => Some(format!("{} days", seconds / 86_400)),
    }
}
