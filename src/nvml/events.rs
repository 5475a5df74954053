//! NVML's events, in the child: registering each GPU, waiting, telling the parent.
//!
//! Called by `agent` on the child's main thread. A GPU that cannot register costs its own events
//! only; a wait that keeps failing is tried again with a pause, never in a spin.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::agent::{AgentError, Parent};
use super::call::{Answer, CallError, answer};
use super::calls::Calls;
use super::probe::{Findings, Gpu};
use super::protocol::FromAgent;
use super::raw::{self, Event, EventSet};
use crate::topology::{GpuUuid, ProbeFailure};

/// The events that count here.
const WANTED: u64 = (sys::nvmlEventTypeXidCriticalError | sys::nvmlEventTypeDoubleBitEccError) as u64;
/// How long one wait lasts; an event ends it at once.
pub const WAIT: Duration = Duration::from_secs(5);
/// The pause after a first failed wait; it doubles up to [`WAIT`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Since when a thread waits for events, for the other threads to see.
#[derive(Debug)]
pub struct Waiting {
    start: Instant,
    /// Milliseconds after the start, and one; 0 while nobody waits.
    since: AtomicU64,
}

impl Waiting {
    /// Nobody waits yet.
    pub fn new() -> Self {
        Self { start: Instant::now(), since: AtomicU64::new(0) }
    }

    /// For how long the present wait has lasted.
    pub fn lasts(&self) -> Duration {
        match self.since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.start.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }

    fn set(&self, waits: bool) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.since.store(if waits { now + 1 } else { 0 }, Ordering::Relaxed);
    }
}

/// Registers every GPU that can be; `None` where none has events.
pub fn register<'nvml>(
    nvml: &'nvml Nvml,
    calls: &Calls,
    gpus: &[Gpu<'nvml>],
    failures: &mut Vec<ProbeFailure>,
) -> Option<EventSet<'nvml>> {
    let mut candidates: Vec<&Gpu<'nvml>> = gpus.iter().collect();
    // A set is undefined after UNKNOWN: each such error costs one GPU and begins a new set.
    loop {
        let set = Findings::new("driver", failures).fact(calls.raw("nvmlEventSetCreate", || EventSet::create(nvml)))?;
        let mut undefined = false;
        candidates.retain(|gpu| {
            if undefined {
                return true;
            }
            let mut findings = Findings::new(gpu.pci.to_string(), failures);
            let supported = || gpu.device.supported_event_types().map(|kinds| kinds.bits());
            let kinds = match findings.fact(gpu.calls.ask("nvmlDeviceGetSupportedEventTypes", supported)) {
                Some(supported) => supported & WANTED,
                None => WANTED,
            };
            if kinds == 0 {
                return false;
            }
            let registered = gpu.calls.raw("nvmlDeviceRegisterEvents", || set.register(&gpu.device, kinds));
            undefined = matches!(&registered, Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN));
            findings.fact(registered).is_some()
        });
        if !undefined {
            return (!candidates.is_empty()).then_some(set);
        }
    }
}

/// Waits for events and tells them, until the parent is gone or `go_on` says no; `go_on` is asked
/// whenever a wait or a pause has ended.
pub fn tell<'nvml>(
    set: &EventSet<'nvml>,
    gpus: &[Gpu<'nvml>],
    parent: &Parent,
    waiting: &Waiting,
    go_on: impl Fn() -> bool,
) -> Result<(), AgentError> {
    let mut pauses = Pauses::default();
    while go_on() {
        let began = Instant::now();
        waiting.set(true);
        let waited = set.wait(WAIT);
        waiting.set(false);
        rest(match waited {
            Ok(event) => {
                if let Some(event) = &event {
                    parent.send(&message(event, gpus))?;
                }
                pauses.waited(event.is_some(), began.elapsed())
            }
            Err(error) => {
                if pauses.works() {
                    parent.send(&failed(&error))?;
                }
                pauses.failed()
            }
        });
    }
    Ok(())
}

/// The pauses between waits. Pure.
#[derive(Debug, Default)]
struct Pauses {
    /// After the last wait, where it failed.
    failing: Option<Duration>,
}

impl Pauses {
    /// Whether the last wait did not fail: a failure now is news.
    fn works(&self) -> bool {
        self.failing.is_none()
    }

    /// The pause after a wait that `lasted` so long and brought an event, or none: a library that does not wait must not make us spin.
    fn waited(&mut self, event: bool, lasted: Duration) -> Duration {
        self.failing = None;
        if event { Duration::ZERO } else { FIRST_PAUSE.saturating_sub(lasted) }
    }

    /// The pause after a wait that failed.
    fn failed(&mut self) -> Duration {
        *self.failing.insert(self.failing.map_or(FIRST_PAUSE, |last| (last * 2).min(WAIT)))
    }
}

/// Pauses this thread, which has nothing else to do; the process ends from another one.
#[expect(clippy::disallowed_methods, reason = "the child is synchronous and waits for no state here")]
fn rest(length: Duration) {
    thread::sleep(length);
}

fn failed(error: &CallError) -> FromAgent {
    FromAgent::Failed { call: error.call.to_owned(), error: error.reason.to_string() }
}

fn message(event: &Event<'_>, gpus: &[Gpu<'_>]) -> FromAgent {
    let gpu = match name(event, gpus) {
        Ok(Some(gpu)) => gpu,
        Ok(None) => return failed(&unnamed(event, "no UUID")),
        Err(error) => return failed(&unnamed(event, error)),
    };
    if event.kind & u64::from(sys::nvmlEventTypeXidCriticalError) != 0 {
        let (gpu_instance, compute_instance) = (event.gpu_instance, event.compute_instance);
        FromAgent::Xid { gpu, code: event.data, gpu_instance, compute_instance }
    } else if event.kind & u64::from(sys::nvmlEventTypeDoubleBitEccError) != 0 {
        FromAgent::DoubleBitEcc { gpu }
    } else {
        failed(&unnamed(event, format_args!("{gpu}, which did not ask for it")))
    }
}

fn unnamed(event: &Event<'_>, of: impl std::fmt::Display) -> CallError {
    let words = format!("an event of type {}, data {}, of a GPU with {of}", event.kind, event.data);
    CallError::unreadable("nvmlEventSetWait_v2", words)
}

/// The GPU of an event: by handle, which needs no call, or else by its UUID.
fn name(event: &Event<'_>, gpus: &[Gpu<'_>]) -> Answer<GpuUuid> {
    if let Some(gpu) = gpus.iter().find(|gpu| raw::same(&gpu.device, &event.device)) {
        return Ok(Some(gpu.uuid.clone()));
    }
    let uuid = answer("nvmlDeviceGetUUID", event.device.uuid())?;
    Ok(uuid.and_then(|uuid| uuid.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_does_not_wait_or_fails_makes_nobody_spin_and_is_told_of_once() {
        let mut pauses = Pauses::default();
        assert_eq!(pauses.waited(false, WAIT), Duration::ZERO);
        assert_eq!(pauses.waited(false, Duration::ZERO), FIRST_PAUSE);
        assert_eq!(pauses.waited(false, FIRST_PAUSE / 4), FIRST_PAUSE / 4 * 3);
        assert_eq!(pauses.waited(true, Duration::ZERO), Duration::ZERO, "another event may wait already");
        for event in [true, false] {
            let mut told = 0;
            let failed: Vec<u128> = (0..8)
                .map(|_| {
                    told += u32::from(pauses.works());
                    pauses.failed().as_millis()
                })
                .collect();
            assert_eq!((told, failed), (1, vec![100, 200, 400, 800, 1600, 3200, 5000, 5000]));
            pauses.waited(event, Duration::ZERO);
        }
    }
}
