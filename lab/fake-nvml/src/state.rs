//! The simulated driver of this process: the machine, the faults, the event sets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings::*;

use crate::command::{Action, Command, Fault, Selector};
use crate::control;
use crate::machine::Machine;
use crate::memory;

/// The outcome of a call: a value, or NVML's return code.
pub type Answer<T = ()> = Result<T, nvmlReturn_t>;

pub static FAKE: LazyLock<Fake> = LazyLock::new(Fake::default);

#[derive(Default)]
pub struct Fake {
    state: Mutex<State>,
    /// Notified after each command, which may post an event or release a call, and when `hold` begins or ends.
    pub changed: Condvar,
    /// Notified when a function is called or blocked. It is separate from `changed`, on which blocked calls wait.
    called: Condvar,
}

#[derive(Default)]
pub struct State {
    pub machine: Machine,
    /// The number of nvmlInit calls without their nvmlShutdown.
    pub inits: u32,
    loaded: bool,
    lost: BTreeSet<usize>,
    /// The GPUs that fell off the bus while this process ran.
    fallen: BTreeSet<usize>,
    /// The GPUs that fell off the bus before this process started.
    fallen_before: BTreeSet<usize>,
    /// Set once the journal is read: later commands come from a running test.
    pub is_started: bool,
    loss_ends_waits: bool,
    rules: Vec<Rule>,
    /// The number of calls of each function.
    calls: BTreeMap<String, u64>,
    /// The function of each blocked call.
    blocked: Vec<String>,
    pub recovery: BTreeMap<usize, u32>,
    /// The row remapping by GPU: pending, failed.
    pub rows: BTreeMap<usize, (bool, bool)>,
    pub uncorrectable: BTreeMap<usize, u64>,
    /// The states that commands gave links.
    pub links: BTreeMap<(usize, u32), Option<u32>>,
    /// Set if the driver has no field with the state of a link.
    pub without_link_fields: bool,
    /// The fabric's state, status and health mask, by GPU.
    pub fabrics: BTreeMap<usize, (u32, u32, u32)>,
    pub driver: Option<String>,
    absent: BTreeSet<usize>,
    /// Set while `hold` blocks a call, and with it every other call.
    held: bool,
    pub sets: BTreeMap<usize, EventSet>,
    pub sets_made: usize,
}

struct Rule {
    /// The GPU; `None` for calls about any GPU, and for calls that concern no GPU.
    gpu: Option<usize>,
    function: String,
    fault: Fault,
}

#[derive(Default)]
pub struct EventSet {
    /// The registered event types of each GPU.
    pub registered: BTreeMap<usize, u64>,
    pub queue: VecDeque<Event>,
}

#[derive(Clone, Copy)]
pub struct Event {
    pub gpu: usize,
    pub kind: u64,
    pub data: u64,
    pub gpu_instance: Option<u32>,
    pub compute_instance: Option<u32>,
}

/// The handle of the GPU at a position. Nobody dereferences it.
pub fn handle(position: usize) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(0x1000 + position)
}

/// The handle of a MIG device, by the position of the GPU and the device's index, or of an instance, by its number.
pub fn mig_handle(position: usize, number: u32) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(0x10_0000 + position * 0x100 + number as usize)
}

/// The position and the number in a handle of [`mig_handle`]; `None` for the handle of a GPU.
pub fn mig_position(handle: nvmlDevice_t) -> Option<(usize, u32)> {
    let number = handle.addr().checked_sub(0x10_0000)?;
    Some((number / 0x100, u32::try_from(number % 0x100).ok()?))
}

/// Begins a call about a MIG device. The faults of the GPU apply to it too.
pub fn enter_mig(function: &str, device: nvmlDevice_t) -> Answer<(MutexGuard<'static, State>, usize, u32)> {
    let (gpu, index) = mig_position(device).ok_or(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)?;
    let state = enter_with(function, |_| Ok(vec![gpu]))?;
    Ok((state, gpu, index))
}

/// Runs a call's body. A panic becomes NVML_ERROR_UNKNOWN, because it must not reach C.
pub fn guard(body: impl FnOnce() -> Answer) -> nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => nvmlReturn_enum_NVML_ERROR_UNKNOWN,
    }
}

pub fn lock() -> MutexGuard<'static, State> {
    FAKE.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins a call that concerns no GPU.
pub fn enter(function: &str) -> Answer<MutexGuard<'static, State>> {
    enter_with(function, |_| Ok(Vec::new()))
}

/// Begins a call about a GPU.
pub fn enter_gpu(function: &str, device: nvmlDevice_t) -> Answer<(MutexGuard<'static, State>, usize)> {
    let gpu = position(device)?;
    let state = enter_with(function, |_| Ok(vec![gpu]))?;
    Ok((state, gpu))
}

/// The position in the handle of a GPU.
pub fn position(device: nvmlDevice_t) -> Answer<usize> {
    device.addr().checked_sub(0x1000).ok_or(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
}

/// Begins a call about the GPUs that `which` finds. Answers an error, blocks or aborts if a fault applies.
pub fn enter_with(function: &str, which: impl Fn(&State) -> Answer<Vec<usize>>) -> Answer<MutexGuard<'static, State>> {
    let mut state = lock();
    for (selector, layout) in control::layouts() {
        // The process that received the command has reported its errors.
        for gpu in state.each(&selector).unwrap_or_default() {
            let _ = state.carry_out(gpu, &layout);
        }
    }
    *state.calls.entry(function.to_owned()).or_default() += 1;
    FAKE.called.notify_all();
    let mut is_holder = false;
    loop {
        while state.held && !is_holder {
            state = FAKE.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.inits == 0 {
            return Err(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
        }
        let gpus = which(&state)?;
        if gpus.iter().any(|gpu| *gpu >= state.machine.gpus.len()) {
            return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
        }
        if gpus.iter().any(|gpu| state.is_lost(*gpu) || state.absent.contains(gpu)) {
            return Err(nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
        }
        if gpus.iter().any(|gpu| state.fallen_before.contains(gpu)) {
            return Err(nvmlReturn_enum_NVML_ERROR_UNKNOWN);
        }
        let fault = state.fault(function, &gpus);
        if fault == Some(Fault::Hold) || is_holder {
            is_holder = fault == Some(Fault::Hold);
            state.held = is_holder;
            FAKE.changed.notify_all();
        }
        match fault {
            None => return Ok(state),
            Some(Fault::Code(code)) => return Err(code),
            Some(Fault::Crash) => std::process::abort(),
            Some(Fault::Hang | Fault::Hold) => {
                state.blocked.push(function.to_owned());
                FAKE.called.notify_all();
                state = FAKE.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                let at = state.blocked.iter().position(|blocked| blocked == function);
                at.map(|at| state.blocked.swap_remove(at));
            }
        }
    }
}

impl State {
    /// The fault that applies to a call about these GPUs.
    fn fault(&self, function: &str, gpus: &[usize]) -> Option<Fault> {
        let applies = |rule: &&Rule| rule.gpu.is_none_or(|gpu| gpus.contains(&gpu)) && rule.function == function;
        self.rules.iter().rev().find(applies).map(|rule| rule.fault)
    }

    /// Returns true if a wait for events of a set fails because one of its GPUs is lost.
    pub fn loss_ends(&self, set: &EventSet) -> bool {
        self.loss_ends_waits && set.registered.keys().any(|gpu| self.is_lost(*gpu))
    }

    fn is_lost(&self, gpu: usize) -> bool {
        self.lost.contains(&gpu) || self.fallen.contains(&gpu)
    }

    /// The GPUs that NVML counts, in its order.
    pub fn present(&self) -> Vec<usize> {
        let mut present: Vec<usize> = (0..self.machine.gpus.len()).filter(|gpu| !self.absent.contains(gpu)).collect();
        present.sort_by_key(|gpu| self.machine.gpus[*gpu].index);
        present
    }

    fn resolve(&self, selector: &Selector) -> Result<usize, String> {
        self.machine.position(&selector.0).ok_or_else(|| format!("there is no GPU '{}'", selector.0))
    }

    /// The position that a selector names; `None` for `*`.
    fn resolve_or_all(&self, selector: &Selector) -> Result<Option<usize>, String> {
        if selector.0 == "*" { Ok(None) } else { self.resolve(selector).map(Some) }
    }

    fn each(&self, selector: &Selector) -> Result<Vec<usize>, String> {
        let all = || (0..self.machine.gpus.len()).collect();
        Ok(self.resolve_or_all(selector)?.map_or_else(all, |gpu| vec![gpu]))
    }

    fn carry_out(&mut self, gpu: usize, action: &Action) -> Result<(), String> {
        match action {
            Action::Xid(data, [gpu_instance, compute_instance], events) => {
                let (gpu_instance, compute_instance) = (*gpu_instance, *compute_instance);
                let kind = nvmlEventTypeXidCriticalError.into();
                for _ in 0..*events {
                    self.post(Event { gpu, kind, data: *data, gpu_instance, compute_instance })?;
                }
            }
            Action::Ecc => {
                let kind = nvmlEventTypeDoubleBitEccError.into();
                self.post(Event { gpu, kind, data: 0, gpu_instance: None, compute_instance: None })?;
            }
            Action::Lost(true) => drop(self.lost.insert(gpu)),
            Action::Lost(false) => drop(self.lost.remove(&gpu)),
            Action::Fallen if self.is_started => drop(self.fallen.insert(gpu)),
            Action::Fallen => drop(self.fallen_before.insert(gpu)),
            Action::Reset(true) if self.is_started => return Err("a process uses the GPU".to_owned()),
            Action::Reset(_) if self.is_started => {}
            Action::Reset(_) => {
                self.fallen_before.remove(&gpu);
                self.uncorrectable.remove(&gpu);
                self.rows.remove(&gpu);
                self.recovery.entry(gpu).and_modify(|recovery| *recovery = 0);
            }
            Action::Present(true) => drop(self.absent.remove(&gpu)),
            Action::Present(false) => drop(self.absent.insert(gpu)),
            Action::Recovery(recovery) => drop(self.recovery.insert(gpu, *recovery)),
            Action::Mig(mig) => self.machine.gpus[gpu].mig = Some(mig.clone()),
            Action::Rows(pending, failed) => drop(self.rows.insert(gpu, (*pending, *failed))),
            Action::Uncorrectable(errors) => drop(self.uncorrectable.insert(gpu, *errors)),
            Action::Link(link, state) => drop(self.links.insert((gpu, *link), *state)),
            Action::Links(state) => {
                for link in self.machine.links_of(gpu) {
                    self.links.insert(link, *state);
                }
            }
            Action::Fabric(state, status, mask) => drop(self.fabrics.insert(gpu, (*state, *status, *mask))),
        }
        Ok(())
    }

    fn post(&mut self, event: Event) -> Result<(), String> {
        let mut listeners = 0;
        for set in self.sets.values_mut() {
            if set.registered.get(&event.gpu).is_some_and(|kinds| kinds & event.kind != 0) {
                set.queue.push_back(event);
                listeners += 1;
            }
        }
        if listeners == 0 { Err("no event set has registered this event".to_owned()) } else { Ok(()) }
    }
}

/// Carries out a command.
pub fn apply(command: &Command) -> Result<(), String> {
    let mut guard = lock();
    let state = &mut *guard;
    match command {
        Command::Gpu(which, action) => {
            for gpu in state.each(which)? {
                state.carry_out(gpu, action)?;
            }
        }
        Command::Fault(which, function, fault) => {
            let gpu = state.resolve_or_all(which)?;
            match fault {
                Some(fault) => state.rules.push(Rule { gpu, function: function.clone(), fault: *fault }),
                None => state.rules.retain(|rule| rule.gpu != gpu || rule.function != *function),
            }
        }
        Command::LinkFields(exist) => state.without_link_fields = !exist,
        Command::Leak(mib) => memory::leak(*mib),
        Command::Runtime => memory::start_runtime(),
        Command::LossEndsWaits => state.loss_ends_waits = true,
        Command::CrashNow => std::process::abort(),
        Command::Driver(version) => state.driver = Some(version.clone()),
        Command::Calls(function, more) => {
            let calls = |state: &State| state.calls.get(function).copied().unwrap_or(0);
            let wanted = calls(state) + more;
            let waited = FAKE.called.wait_while(guard, |state| calls(state) < wanted);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        Command::Blocked(function) => {
            let waited = FAKE.called.wait_while(guard, |state| !state.blocked.contains(function));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }
    Ok(())
}

/// Answers nvmlInit. The first call reads the environment, the machine file and the journal.
pub fn init() -> Answer {
    #[expect(clippy::disallowed_methods, reason = "a library that is loaded by dlopen has no arguments")]
    let environment = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let mut state = lock();
    if !state.loaded {
        let loaded = environment("FAKE_NVML_MACHINE")
            .ok_or_else(|| "FAKE_NVML_MACHINE is not set".to_owned())
            .and_then(|path| std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}")))
            .and_then(|text| Machine::parse(&text));
        state.machine = loaded.map_err(|error| {
            eprintln!("fake-nvml: {error}");
            nvmlReturn_enum_NVML_ERROR_UNKNOWN
        })?;
        state.loaded = true;
        drop(state);
        for fault in environment("FAKE_NVML_FAIL").unwrap_or_default().split(',').filter(|fault| !fault.is_empty()) {
            let done = format!("fail {}", fault.replace(':', " ")).parse().and_then(|command| apply(&command));
            done.unwrap_or_else(|error| eprintln!("fake-nvml: FAKE_NVML_FAIL: {error}"));
        }
        if let Some(socket) = environment("FAKE_NVML_CONTROL") {
            let started = control::start(Path::new(&socket));
            started.unwrap_or_else(|error| eprintln!("fake-nvml: {socket}: {error}"));
        }
        state = lock();
    }
    while let Some(fault) = state.fault("nvmlInit_v2", &[]) {
        match fault {
            Fault::Code(code) => return Err(code),
            Fault::Crash => std::process::abort(),
            Fault::Hang | Fault::Hold => state = FAKE.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
    state.inits += 1;
    Ok(())
}
