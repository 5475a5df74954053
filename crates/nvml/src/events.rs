//! NVML's events, in the agent: registers each GPU, waits, reports to the parent.
//!
//! Called by `agent` on the main thread. A GPU that cannot be registered loses only its own events, and is tried again.
//! A wait that fails is repeated after a pause. If it keeps failing, the thread takes a new set without the lost GPUs:
//! NVML's reference says that one lost GPU ends the wait for all.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use linkwise_core::backoff::Backoff;
use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::agent::Parent;
use super::call::{Answer, CallError, Fault, answer};
use super::calls::Calls;
use super::poll::reading;
use super::probe::{Gpu, REGISTER};
use super::protocol::{FromAgent, ToAgent};
use super::raw::{self, Event, EventSet};
use super::scan::CallFailure;
use linkwise_core::topology::{GpuUuid, PciAddress};

/// The event types that linkwise registers for.
const WANTED: u64 = (sys::nvmlEventTypeXidCriticalError | sys::nvmlEventTypeDoubleBitEccError) as u64;
/// The duration of one wait; an event ends it at once.
pub const WAIT: Duration = Duration::from_secs(5);
/// The least time from one wait to the next, and the pause after a first failed wait.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The pauses after failed waits.
const PAUSES: Backoff = Backoff::new(FIRST_PAUSE, WAIT);
/// The number of failed waits in a row after which a new set is tried.
const FAILURES: u32 = 3;
/// The longest pause between two attempts to register a GPU whose registration failed, in polls. The first pause is one
/// poll, and it doubles.
const LONGEST: u32 = 8;

/// A poll that begins later than this shows that the process was suspended, or that a long scan came before it. A
/// hanging thread is then found a little later.
const LATE: Duration = Duration::from_secs(1);

/// The state of the thread that waits for events, shared with the other threads.
#[derive(Debug, Default)]
pub struct Waiting(Mutex<WaitState>);

#[derive(Debug, Default)]
struct WaitState {
    /// Set if any GPU was registered when the waiting began.
    hears: bool,
    since: Option<Instant>,
    unheard: Vec<CallFailure>,
    /// A poll was requested and has not begun.
    asked: bool,
}

impl Waiting {
    /// Returns true if any GPU was registered when the waiting began.
    pub fn hears(&self) -> bool {
        self.state().hears
    }

    /// The duration of the current wait.
    pub fn lasts(&self) -> Duration {
        self.state().since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub fn unheard(&self) -> Vec<CallFailure> {
        self.state().unheard.clone()
    }

    /// Records the begin of a poll, which follows all events so far, and its delay. A long delay shows that this
    /// process was suspended: then the current wait counts from now.
    pub fn round_begins(&self, late: Duration) {
        let mut state = self.state();
        state.asked = false;
        if late > LATE && state.since.is_some() {
            state.since = Some(Instant::now());
        }
    }

    /// Requests a poll, unless a requested one has not begun.
    fn ask_for_a_round(&self, ask: &mpsc::Sender<ToAgent>) {
        if !std::mem::replace(&mut self.state().asked, true) {
            // The receiver ends only with the process.
            let _ = ask.send(ToAgent::Poll);
        }
    }

    fn set(&self, waits: bool) {
        self.state().since = waits.then(Instant::now);
    }

    /// Locks the state. The lock is held for one assignment at a time: a panic leaves nothing half done.
    fn state(&self) -> MutexGuard<'_, WaitState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A set, and the GPUs that are registered with it.
struct Heard<'nvml> {
    set: EventSet<'nvml>,
    gpus: BTreeSet<PciAddress>,
}

/// Registers every GPU that has events; `None` if none has. `calls` gives the reporter of a GPU's calls, or of other
/// calls.
fn register<'nvml>(
    nvml: &'nvml Nvml,
    mut candidates: Vec<&Gpu<'nvml>>,
    calls: impl Fn(Option<&Gpu<'nvml>>) -> Calls,
    failures: &mut Vec<CallFailure>,
) -> Option<Heard<'nvml>> {
    // A set is undefined after UNKNOWN: each such error costs one GPU and requires a new set.
    loop {
        let set = calls(None).raw("nvmlEventSetCreate", || EventSet::create(nvml));
        let set = set.unwrap_or_else(|error| {
            failures.push(CallFailure::new("driver", error));
            None
        })?;
        let mut undefined = false;
        candidates.retain(|gpu| {
            if undefined {
                return true;
            }
            let calls = calls(Some(gpu));
            let mut failed = |error| failures.push(CallFailure::new(gpu.pci.to_string(), error));
            let supported = || gpu.device.supported_event_types().map(|kinds| kinds.bits());
            let supported = calls.ask("nvmlDeviceGetSupportedEventTypes", supported).map_err(&mut failed);
            let kinds = supported.ok().flatten().unwrap_or(WANTED) & WANTED;
            if kinds == 0 {
                return false;
            }
            let registered = calls.raw(REGISTER, || set.register(&gpu.device, kinds));
            undefined = matches!(&registered, Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN));
            registered.map_err(failed).is_ok_and(|registered| registered.is_some())
        });
        if !undefined {
            let gpus: BTreeSet<PciAddress> = candidates.iter().map(|gpu| gpu.pci).collect();
            return (!gpus.is_empty()).then_some(Heard { set, gpus });
        }
    }
}

/// Waits for the events of the GPUs that existed at the start.
pub struct Listener {
    nvml: &'static Nvml,
    gpus: Arc<Vec<Gpu<'static>>>,
    parent: Arc<Parent>,
    waiting: Arc<Waiting>,
    heard: Option<Heard<'static>>,
    /// The moment at which GPUs whose registration failed are tried again.
    again: Option<Instant>,
    /// The pauses between these attempts.
    backoff: Backoff,
}

impl Listener {
    /// Registers the GPUs. After a failure the first retry comes after `interval`.
    pub fn new(
        nvml: &'static Nvml,
        calls: &Calls,
        gpus: Arc<Vec<Gpu<'static>>>,
        interval: Duration,
        (parent, waiting): (Arc<Parent>, Arc<Waiting>),
    ) -> Self {
        let mut failures = Vec::new();
        let reported = |gpu: Option<&Gpu<'static>>| gpu.map_or(calls, |gpu| &gpu.calls).clone();
        let heard = register(nvml, gpus.iter().collect(), reported, &mut failures);
        let backoff = Backoff::new(interval, interval.saturating_mul(LONGEST));
        let mut listener = Self { nvml, gpus, parent, waiting, heard, again: None, backoff };
        listener.note(failures);
        listener
    }

    /// Waits for events and reports them, until `go_on` is false; `go_on` is called after each wait and each pause.
    /// After each event a poll is requested: it finds what the XID left behind.
    pub fn run(mut self, ask: &mpsc::Sender<ToAgent>, go_on: impl Fn() -> bool) {
        self.waiting.state().hears = self.heard.is_some();
        let (mut backoff, mut failures) = (PAUSES, 0);
        while go_on() {
            let left = self.again.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.renew(false);
                continue;
            }
            let limit = left.map_or(WAIT, |left| left.min(WAIT));
            let Some(heard) = &self.heard else {
                if left.is_none() {
                    // No GPU here has events.
                    return;
                }
                rest(limit);
                continue;
            };
            let began = Instant::now();
            self.waiting.set(true);
            let waited = heard.set.wait(limit);
            self.waiting.set(false);
            let pause = match waited {
                Ok(event) => {
                    failures = 0;
                    backoff.reset();
                    if let Some(event) = &event {
                        self.report(event);
                        self.waiting.ask_for_a_round(ask);
                    }
                    pause_after(event.is_some(), began.elapsed())
                }
                Err(error) => {
                    if !backoff.is_failing() {
                        self.parent.send(&failed(error));
                    }
                    failures += 1;
                    if failures % FAILURES == 0 && self.renew(true) {
                        (backoff, failures) = (PAUSES, 0);
                        continue;
                    }
                    backoff.failed()
                }
            };
            rest(pause);
        }
    }

    fn report(&self, event: &Event<'_>) {
        self.parent.send(&message(event, &self.gpus));
    }

    /// Makes a new set of the GPUs that are not lost. The new set replaces the present one if it has a GPU that was not
    /// registered before, or if the present set has `failed`. Returns true if it does. The calls are not reported:
    /// their reports would hide those of the other thread.
    fn renew(&mut self, failed: bool) -> bool {
        let unreported = Calls::unreported();
        let mut failures = Vec::new();
        self.waiting.set(true);
        let mut candidates: Vec<&Gpu<'static>> = self.gpus.iter().collect();
        candidates.retain(|gpu| match reading(gpu, &unreported) {
            Err(error) if error.fault() == Fault::GpuLost => {
                failures.push(CallFailure::new(gpu.pci.to_string(), error));
                false
            }
            _ => true,
        });
        let new = register(self.nvml, candidates, |_| unreported.clone(), &mut failures);
        // A new set that fails like the one before is of no use.
        let first = new.as_ref().and_then(|new| new.set.wait(Duration::ZERO).ok());
        self.waiting.set(false);
        let is_new = |new: &Heard<'_>| self.heard.as_ref().is_none_or(|heard| !new.gpus.is_subset(&heard.gpus));
        let taken = new.zip(first).filter(|(new, _)| failed || is_new(new));
        let is_taken = taken.is_some();
        // A new set that is not taken is dropped. The present set has its events too.
        if let Some((new, first)) = taken {
            // Reads the events that the old set has; an event that came by both sets is reported twice.
            let (before, until) = (self.heard.replace(new), Instant::now() + WAIT);
            while let Some(Ok(Some(event))) = before.as_ref().map(|before| before.set.wait(Duration::ZERO))
                && Instant::now() < until
            {
                self.report(&event);
            }
            first.iter().for_each(|event| self.report(event));
        }
        let known = self.waiting.unheard();
        self.note(failures);
        for failure in self.waiting.unheard().into_iter().filter(|failure| !known.contains(failure)) {
            self.parent.send(&FromAgent::Failed(failure));
        }
        is_taken
    }

    /// Stores the failed registrations, and the moment of the next attempt.
    fn note(&mut self, mut failures: Vec<CallFailure>) {
        let heard = |subject: &str| {
            self.heard.as_ref().is_some_and(|heard| heard.gpus.iter().any(|pci| pci.to_string() == subject))
        };
        failures.retain(|failure| !heard(&failure.subject));
        self.again = (!failures.is_empty()).then(|| Instant::now() + self.backoff.failed());
        if failures.is_empty() {
            self.backoff.reset();
        }
        self.waiting.state().unheard = failures;
    }
}

/// The pause after a successful wait: if the library returns at once, this thread must not spin.
fn pause_after(event: bool, lasted: Duration) -> Duration {
    if event { Duration::ZERO } else { FIRST_PAUSE.saturating_sub(lasted) }
}

/// Pauses this thread, which has no other work; another thread ends the process.
#[expect(clippy::disallowed_methods, reason = "the child is synchronous and waits for no state here")]
fn rest(length: Duration) {
    thread::sleep(length);
}

fn failed(error: CallError) -> FromAgent {
    FromAgent::Failed(CallFailure::new("driver", error))
}

fn message(event: &Event<'_>, gpus: &[Gpu<'_>]) -> FromAgent {
    let gpu = match name(event, gpus) {
        Ok(Some(gpu)) => gpu,
        Ok(None) => return failed(unnamed(event, "no UUID")),
        Err(error) => return failed(unnamed(event, error)),
    };
    if event.kind & u64::from(sys::nvmlEventTypeXidCriticalError) != 0 {
        let (gpu_instance, compute_instance) = (event.gpu_instance, event.compute_instance);
        FromAgent::Xid { gpu, code: event.data, gpu_instance, compute_instance }
    } else if event.kind & u64::from(sys::nvmlEventTypeDoubleBitEccError) != 0 {
        FromAgent::DoubleBitEcc { gpu }
    } else {
        failed(unnamed(event, format_args!("{gpu}, which did not ask for it")))
    }
}

fn unnamed(event: &Event<'_>, of: impl std::fmt::Display) -> CallError {
    let words = format!("an event of type {}, data {}, of a GPU with {of}", event.kind, event.data);
    CallError::unreadable("nvmlEventSetWait_v2", words)
}

/// The GPU of an event: by its handle, which needs no call, or else by its UUID.
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
    fn suspension_does_not_count_as_a_wait() {
        let waiting = Waiting::default();
        waiting.round_begins(2 * LATE);
        assert_eq!(waiting.lasts(), Duration::ZERO, "nobody waits");
        let long = Duration::from_secs(5);
        waiting.state().since = Some(Instant::now().checked_sub(long).unwrap());
        waiting.round_begins(LATE);
        assert!(waiting.lasts() >= long);
        waiting.round_begins(2 * LATE);
        assert!(waiting.lasts() < long);
    }

    #[test]
    fn wait_that_returns_at_once_does_not_spin() {
        assert_eq!(pause_after(false, WAIT), Duration::ZERO);
        assert_eq!(pause_after(false, Duration::ZERO), FIRST_PAUSE);
        assert_eq!(pause_after(false, FIRST_PAUSE / 4), FIRST_PAUSE / 4 * 3);
        assert_eq!(pause_after(true, Duration::ZERO), Duration::ZERO, "another event may wait already");
    }
}
