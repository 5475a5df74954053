//! NVML's events, in the agent: registers each GPU, waits, reports to the parent.
//!
//! Called by `agent` on the main thread. A GPU that cannot be registered loses only its own events. A failed wait is
//! repeated after a pause; NVML's reference says that one lost GPU ends the wait for all. The polls report the number
//! of GPUs whose events do not arrive. If there are any, the parent starts another agent, which registers all GPUs.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use linkwise_core::backoff::Backoff;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::agent::Parent;
use super::call::{Answer, CallError, answer};
use super::calls::Calls;
use super::full_scan::{Gpu, REGISTER};
use super::protocol::{FromAgent, ToAgent};
use super::raw::{self, Event, EventSet};
use super::scan::CallFailure;
use linkwise_core::topology::GpuUuid;
use linkwise_system::lock;

/// The event types that linkwise registers for.
const WANTED: u64 = (sys::nvmlEventTypeXidCriticalError | sys::nvmlEventTypeDoubleBitEccError) as u64;
/// The duration of one wait; an event ends it at once.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// The least time from the start of a wait without an event to the next wait, and the pause after a first failed wait.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The pauses after failed waits.
const PAUSES: Backoff = Backoff::new(FIRST_PAUSE, WAIT_TIMEOUT);
/// The number of failed waits in a row after which the events of all GPUs count as missing.
const MAX_FAILURES: u32 = 3;

/// The longest usual delay of a poll. A longer delay shows that this process was suspended, or that a long scan came
/// before the poll. Then the current wait counts from now, and a wait that hangs is found a little later.
const MAX_LATENESS: Duration = Duration::from_secs(1);

/// The state of the thread that waits for events, shared with the other threads.
#[derive(Debug, Default)]
pub struct Waiting(Mutex<WaitState>);

#[derive(Debug, Default)]
struct WaitState {
    /// The start of the current wait.
    since: Option<Instant>,
    /// The failed calls of the registrations.
    unregistered: Vec<CallFailure>,
    /// The error of a wait that keeps failing.
    failing: Option<CallFailure>,
    /// A poll was requested and has not begun.
    is_poll_requested: bool,
}

impl Waiting {
    /// The duration of the current wait.
    pub fn duration(&self) -> Duration {
        lock(&self.0).since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// The failures that keep events away: of the driver, or of single GPUs.
    pub fn unheard(&self) -> Vec<CallFailure> {
        let state = lock(&self.0);
        state.unregistered.iter().chain(&state.failing).cloned().collect()
    }

    /// Records that a poll begins, with its delay. The poll serves all requests so far. After a delay
    /// above `MAX_LATENESS` the current wait counts from now.
    pub fn poll_begins(&self, delay: Duration) {
        let mut state = lock(&self.0);
        state.is_poll_requested = false;
        if delay > MAX_LATENESS && state.since.is_some() {
            state.since = Some(Instant::now());
        }
    }

    /// Requests a poll, unless a poll is requested already.
    fn request_poll(&self, requests: &mpsc::Sender<ToAgent>) {
        if !std::mem::replace(&mut lock(&self.0).is_poll_requested, true) {
            // The receiver ends only with the process.
            let _ = requests.send(ToAgent::Poll);
        }
    }

    fn set_waiting(&self, is_waiting: bool) {
        lock(&self.0).since = is_waiting.then(Instant::now);
    }
}

/// Registers every GPU that has events; `None` if no GPU is registered. The failures are recorded in `waiting`.
pub fn register<'nvml>(
    nvml: &'nvml Nvml,
    calls: &Calls,
    gpus: &[Gpu<'nvml>],
    waiting: &Waiting,
) -> Option<EventSet<'nvml>> {
    let record = |subject: String, error| lock(&waiting.0).unregistered.push(CallFailure::new(subject, error));
    let mut candidates: Vec<&Gpu<'nvml>> = gpus.iter().collect();
    // After UNKNOWN a set is undefined: the GPU is left out, and the others are registered in a new set.
    loop {
        let set = calls.raw("nvmlEventSetCreate", || EventSet::create(nvml));
        let set = set.unwrap_or_else(|error| {
            record("driver".to_owned(), error);
            None
        })?;
        let mut undefined = false;
        candidates.retain(|gpu| {
            if undefined {
                return true;
            }
            let failed = |error| record(gpu.pci.to_string(), error);
            let supported = || gpu.device.supported_event_types().map(|kinds| kinds.bits());
            let supported = gpu.calls.ask("nvmlDeviceGetSupportedEventTypes", supported).map_err(failed);
            let kinds = supported.ok().flatten().unwrap_or(WANTED) & WANTED;
            if kinds == 0 {
                return false;
            }
            let registered = gpu.calls.raw(REGISTER, || set.register(&gpu.device, kinds));
            undefined = matches!(&registered, Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN));
            registered.map_err(failed).is_ok_and(|registered| registered.is_some())
        });
        if !undefined {
            return (!candidates.is_empty()).then_some(set);
        }
    }
}

/// Waits for the events of the registered GPUs and reports them, while `may_continue` returns true before a wait.
/// Requests a poll after each event: the poll finds what the reported error left behind.
pub fn listen(
    set: &EventSet<'_>,
    gpus: &[Gpu<'_>],
    parent: &Parent,
    waiting: &Waiting,
    requests: &mpsc::Sender<ToAgent>,
    may_continue: impl Fn() -> bool,
) {
    let (mut backoff, mut failures) = (PAUSES, 0);
    while may_continue() {
        let began = Instant::now();
        waiting.set_waiting(true);
        let waited = set.wait(WAIT_TIMEOUT);
        waiting.set_waiting(false);
        let pause = match waited {
            Ok(event) => {
                failures = 0;
                backoff.reset();
                lock(&waiting.0).failing = None;
                if let Some(event) = &event {
                    parent.send(&message(event, gpus));
                    waiting.request_poll(requests);
                }
                pause_after(event.is_some(), began.elapsed())
            }
            Err(error) => {
                if failures == 0 {
                    parent.send(&failed(error.clone()));
                }
                failures += 1;
                if failures == MAX_FAILURES {
                    lock(&waiting.0).failing = Some(CallFailure::new("driver", error));
                    waiting.request_poll(requests);
                }
                backoff.failed()
            }
        };
        rest(pause);
    }
}

/// The pause after a successful wait: if the library returns at once, this thread must not spin.
fn pause_after(has_event: bool, lasted: Duration) -> Duration {
    if has_event { Duration::ZERO } else { FIRST_PAUSE.saturating_sub(lasted) }
}

/// Pauses this thread, which has no other work; another thread ends the process.
#[expect(clippy::disallowed_methods, reason = "the agent is synchronous and waits for no state here")]
fn rest(length: Duration) {
    thread::sleep(length);
}

fn failed(error: CallError) -> FromAgent {
    FromAgent::Failed(CallFailure::new("driver", error))
}

fn message(event: &Event<'_>, gpus: &[Gpu<'_>]) -> FromAgent {
    let gpu = match gpu_of(event, gpus) {
        Ok(Some(gpu)) => gpu,
        Ok(None) => return failed(unusable(event, "its GPU has no UUID")),
        Err(error) => return failed(unusable(event, error)),
    };
    if event.kind & u64::from(sys::nvmlEventTypeXidCriticalError) != 0 {
        let (gpu_instance, compute_instance) = (event.gpu_instance, event.compute_instance);
        FromAgent::Xid { gpu, code: event.data, gpu_instance, compute_instance }
    } else if event.kind & u64::from(sys::nvmlEventTypeDoubleBitEccError) != 0 {
        FromAgent::DoubleBitEcc { gpu }
    } else {
        failed(unusable(event, format_args!("{gpu} is not registered for this type")))
    }
}

fn unusable(event: &Event<'_>, cause: impl std::fmt::Display) -> CallError {
    let error = format!("cannot report an event of type {} with data {}: {cause}", event.kind, event.data);
    CallError::in_words("nvmlEventSetWait_v2", error)
}

/// The GPU of an event: by its handle, which needs no call, or else by its UUID.
fn gpu_of(event: &Event<'_>, gpus: &[Gpu<'_>]) -> Answer<GpuUuid> {
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
    fn suspension_does_not_count_as_a_wait() {
        let waiting = Waiting::default();
        waiting.poll_begins(2 * MAX_LATENESS);
        assert_eq!(waiting.duration(), Duration::ZERO, "nobody waits");
        let long = Duration::from_secs(5);
        lock(&waiting.0).since = Some(Instant::now().checked_sub(long).unwrap());
        waiting.poll_begins(MAX_LATENESS);
        assert!(waiting.duration() >= long);
        waiting.poll_begins(2 * MAX_LATENESS);
        assert!(waiting.duration() < long);
    }

    #[test]
    fn wait_that_returns_at_once_does_not_spin() {
        assert_eq!(pause_after(false, WAIT_TIMEOUT), Duration::ZERO);
        assert_eq!(pause_after(false, Duration::ZERO), FIRST_PAUSE);
        assert_eq!(pause_after(false, FIRST_PAUSE / 4), FIRST_PAUSE / 4 * 3);
        assert_eq!(pause_after(true, Duration::ZERO), Duration::ZERO, "another event may wait already");
    }
}
