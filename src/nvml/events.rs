//! NVML's events, in the child: registering each GPU, waiting, telling the parent.
//!
//! Called by `agent` on the child's main thread. A GPU that cannot register costs its own events
//! only, and is tried again; a wait that fails is tried again with a pause, never in a spin, and where it keeps failing by a
//! new set without the GPUs that are lost: one that is, by NVML's reference, ends the wait for all.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings as sys;

use super::agent::{AgentError, Parent};
use super::call::{Answer, CallError, answer};
use super::calls::Calls;
use super::poll::reading;
use super::probe::{Findings, Gpu};
use super::protocol::{FromAgent, ToAgent};
use super::raw::{self, Event, EventSet};
use crate::topology::{GpuUuid, PciAddress, ProbeFailure};

/// The events that count here.
const WANTED: u64 = (sys::nvmlEventTypeXidCriticalError | sys::nvmlEventTypeDoubleBitEccError) as u64;
/// How long one wait lasts; an event ends it at once.
pub const WAIT: Duration = Duration::from_secs(5);
/// The pause after a first failed wait; it doubles up to [`WAIT`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// So many failed waits in a row, and a new set is tried.
const FAILURES: u32 = 3;
/// The longest pause between two tries to hear GPUs that are not heard, in rounds; the first is one round, and it doubles.
const LONGEST: u32 = 8;

/// What the thread that waits for events does, for the other threads to see.
#[derive(Debug)]
pub struct Waiting {
    start: Instant,
    /// Since when it is with NVML: milliseconds after the start, and one; 0 while it is not.
    since: AtomicU64,
    /// The GPUs that it does not hear though they have events, by what failed.
    unheard: Mutex<Vec<ProbeFailure>>,
    /// It has asked for a round, and there was none yet.
    asked: AtomicBool,
}

impl Waiting {
    /// Nobody waits yet.
    pub fn new() -> Self {
        let (since, unheard) = (AtomicU64::new(0), Mutex::new(Vec::new()));
        Self { start: Instant::now(), since, unheard, asked: AtomicBool::new(false) }
    }

    /// For how long the present wait has lasted.
    pub fn lasts(&self) -> Duration {
        match self.since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.start.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }

    /// What failed for the GPUs that are not heard.
    pub fn unheard(&self) -> Vec<ProbeFailure> {
        self.unheard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A round begins: what came until now is followed by it.
    pub fn round_begins(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Asks for a round, unless one that was asked for is still to come.
    fn ask_for_a_round(&self, ask: &mpsc::Sender<ToAgent>) {
        if !self.asked.swap(true, Ordering::Relaxed) {
            // The receiver ends with the process only.
            let _ = ask.send(ToAgent::Poll);
        }
    }

    fn set(&self, waits: bool) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.since.store(if waits { now + 1 } else { 0 }, Ordering::Relaxed);
    }
}

/// A set, and the GPUs whose events come by it.
struct Heard<'nvml> {
    set: EventSet<'nvml>,
    gpus: BTreeSet<PciAddress>,
}

/// Registers every GPU that can be; `None` where none has events. `calls` are those of a GPU, or of none.
fn register<'nvml>(
    nvml: &'nvml Nvml,
    mut candidates: Vec<&Gpu<'nvml>>,
    calls: impl Fn(Option<&Gpu<'nvml>>) -> Calls,
    failures: &mut Vec<ProbeFailure>,
) -> Option<Heard<'nvml>> {
    // A set is undefined after UNKNOWN: each such error costs one GPU and begins a new set.
    loop {
        let set = calls(None).raw("nvmlEventSetCreate", || EventSet::create(nvml));
        let set = Findings::new("driver", failures).fact(set)?;
        let mut undefined = false;
        candidates.retain(|gpu| {
            if undefined {
                return true;
            }
            let calls = calls(Some(gpu));
            let mut findings = Findings::new(gpu.pci.to_string(), failures);
            let supported = || gpu.device.supported_event_types().map(|kinds| kinds.bits());
            let kinds = match findings.fact(calls.ask("nvmlDeviceGetSupportedEventTypes", supported)) {
                Some(supported) => supported & WANTED,
                None => WANTED,
            };
            if kinds == 0 {
                return false;
            }
            let registered = calls.raw("nvmlDeviceRegisterEvents", || set.register(&gpu.device, kinds));
            undefined = matches!(&registered, Err(error) if error.is(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN));
            findings.fact(registered).is_some()
        });
        if !undefined {
            let gpus: BTreeSet<PciAddress> = candidates.iter().map(|gpu| gpu.pci).collect();
            return (!gpus.is_empty()).then_some(Heard { set, gpus });
        }
    }
}

/// Waits for the events of the GPUs that there were at the start.
pub struct Listener<'nvml> {
    nvml: &'nvml Nvml,
    heard: Option<Heard<'nvml>>,
    /// From one round to the next.
    interval: Duration,
    /// When those that are not heard are tried again, and the pause before that.
    again: Option<(Instant, Duration)>,
}

impl<'nvml> Listener<'nvml> {
    /// Registers the GPUs, and tells the parent of the calls for it.
    pub fn new(nvml: &'nvml Nvml, calls: &Calls, gpus: &[Gpu<'nvml>], interval: Duration, waiting: &Waiting) -> Self {
        let mut failures = Vec::new();
        let told = |gpu: Option<&Gpu<'nvml>>| gpu.map_or(calls, |gpu| &gpu.calls).clone();
        let heard = register(nvml, gpus.iter().collect(), told, &mut failures);
        let mut listener = Self { nvml, heard, interval, again: None };
        listener.note(failures, waiting);
        listener
    }

    /// Whether there are GPUs whose events it hears.
    pub fn hears(&self) -> bool {
        self.heard.is_some()
    }

    /// Waits for events and tells them, until the parent is gone or `go_on` says no; `go_on` is asked
    /// whenever a wait or a pause has ended. After each event a round is asked for: of several XIDs NVML tells the last one only.
    ///
    /// # Errors
    ///
    /// The parent cannot be told.
    pub fn run(
        mut self,
        gpus: &[Gpu<'nvml>],
        parent: &Parent,
        waiting: &Waiting,
        ask: &mpsc::Sender<ToAgent>,
        go_on: impl Fn() -> bool,
    ) -> Result<(), AgentError> {
        let (mut pauses, mut failures) = (Pauses::default(), 0);
        while go_on() {
            let left = self.again.map(|(at, _)| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.renew(false, gpus, parent, waiting)?;
                continue;
            }
            let limit = left.map_or(WAIT, |left| left.min(WAIT));
            let Some(heard) = &self.heard else {
                if left.is_none() {
                    // No GPU here has events.
                    return Ok(());
                }
                rest(limit);
                continue;
            };
            let began = Instant::now();
            waiting.set(true);
            let waited = heard.set.wait(limit);
            waiting.set(false);
            let pause = match waited {
                Ok(event) => {
                    failures = 0;
                    if let Some(event) = &event {
                        parent.send(&message(event, gpus))?;
                        waiting.ask_for_a_round(ask);
                    }
                    pauses.waited(event.is_some(), began.elapsed())
                }
                Err(error) => {
                    if pauses.works() {
                        parent.send(&failed(&error))?;
                    }
                    failures += 1;
                    if failures % FAILURES == 0 && self.renew(true, gpus, parent, waiting)? {
                        (pauses, failures) = (Pauses::default(), 0);
                        continue;
                    }
                    pauses.failed()
                }
            };
            rest(pause);
        }
        Ok(())
    }

    /// Takes a new set of the GPUs that are not lost, where one of them was not heard before, or where the one that there is has
    /// `failed`. Whether it did. Its calls are not told to the parent: they would hide what the other thread does.
    fn renew(
        &mut self,
        failed: bool,
        gpus: &[Gpu<'nvml>],
        parent: &Parent,
        waiting: &Waiting,
    ) -> Result<bool, AgentError> {
        let untold = Calls::untold();
        let mut failures = Vec::new();
        waiting.set(true);
        let mut candidates: Vec<&Gpu<'nvml>> = gpus.iter().collect();
        candidates.retain(|gpu| match reading(gpu, &untold) {
            Err(error) if error.is_gpu_lost() => {
                Findings::new(gpu.pci.to_string(), &mut failures).fail(&error);
                false
            }
            _ => true,
        });
        let new = register(self.nvml, candidates, |_| untold.clone(), &mut failures);
        let first = new.as_ref().map(|new| new.set.wait(Duration::ZERO));
        waiting.set(false);
        // A set that fails like the one before is none.
        let mut taken = false;
        if let (Some(new), Some(Ok(first))) = (new, first) {
            let before = self.heard.as_ref().map(|heard| &heard.gpus);
            taken = failed || before.is_none_or(|before| !new.gpus.is_subset(before));
            if taken {
                let before = self.heard.replace(new);
                // What it had heard; what comes by both is told twice.
                let until = Instant::now() + WAIT;
                while let Some(Ok(Some(event))) = before.as_ref().map(|before| before.set.wait(Duration::ZERO))
                    && Instant::now() < until
                {
                    parent.send(&message(&event, gpus))?;
                }
            }
            // One that is not taken is dropped, with what the present one hears too.
            if let (true, Some(event)) = (taken, first) {
                parent.send(&message(&event, gpus))?;
            }
        }
        let known = waiting.unheard();
        self.note(failures, waiting);
        for failure in waiting.unheard().iter().filter(|failure| !known.contains(failure)) {
            let (call, error) = (failure.call.clone(), format!("{}: {}", failure.subject, failure.error));
            parent.send(&FromAgent::Failed { call, error })?;
        }
        Ok(taken)
    }

    /// Takes note of who is not heard, and of when to try again.
    fn note(&mut self, mut failures: Vec<ProbeFailure>, waiting: &Waiting) {
        let heard = |subject: &str| {
            self.heard.as_ref().is_some_and(|heard| heard.gpus.iter().any(|pci| pci.to_string() == subject))
        };
        failures.retain(|failure| !heard(&failure.subject));
        let pause = self.again.map_or(self.interval, |(_, last)| (last * 2).min(self.interval * LONGEST));
        self.again = (!failures.is_empty()).then(|| (Instant::now() + pause, pause));
        *waiting.unheard.lock().unwrap_or_else(PoisonError::into_inner) = failures;
    }
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
