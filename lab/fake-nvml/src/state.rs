//! The one simulated driver of this process: its machine, its faults, its event sets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use nvml_wrapper_sys::bindings::*;

use crate::command::{Act, Command, Fault, Selector};
use crate::control;
use crate::machine::Machine;
use crate::memory;

/// A call's outcome: a value, or NVML's return code.
pub type Answer<T = ()> = Result<T, nvmlReturn_t>;

pub static FAKE: LazyLock<Fake> = LazyLock::new(Fake::default);

#[derive(Default)]
pub struct Fake {
    state: Mutex<State>,
    /// Notified at each change: an event came, a rule came or went.
    pub changed: Condvar,
    /// Notified when a function was called or is blocked. It is separate from `changed`, on which calls themselves
    /// wait.
    called: Condvar,
}

#[derive(Default)]
pub struct State {
    pub machine: Machine,
    /// The number of nvmlInit calls that are not yet undone.
    pub inits: u32,
    loaded: bool,
    lost: BTreeSet<usize>,
    /// GPUs that fell off the bus while this process ran.
    fallen: BTreeSet<usize>,
    /// GPUs that had fallen off the bus before this process began.
    unknown: BTreeSet<usize>,
    /// Set once the journal was read.
    pub runs: bool,
    loss_ends_waits: bool,
    rules: Vec<Rule>,
    /// The number of calls of each function.
    calls: BTreeMap<String, u64>,
    /// The functions whose calls are blocked now, one entry a call.
    blocked: Vec<String>,
    pub recovery: BTreeMap<usize, u32>,
    /// The row remapping, by GPU: pending and failed.
    pub rows: BTreeMap<usize, (bool, bool)>,
    pub uncorrectable: BTreeMap<usize, u64>,
    /// The links whose state differs from the machine file.
    pub links: BTreeMap<(usize, u32), Option<u32>>,
    /// Set if the driver has no field with the state of a link.
    pub without_link_fields: bool,
    /// The fabric's state, status and health mask, by GPU.
    pub fabrics: BTreeMap<usize, (u32, u32, u32)>,
    pub driver: Option<String>,
    absent: BTreeSet<usize>,
    /// Set while a call holds the library's lock.
    held: bool,
    pub sets: BTreeMap<usize, EventSet>,
    pub sets_made: usize,
}

struct Rule {
    /// The GPU; `None` stands for every GPU, and for calls that are about none.
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

/// The handle of the GPU at a position; never dereferenced.
pub fn handle(position: usize) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(0x1000 + position)
}

/// The handle of a MIG device by its GPU's position and its index there, or of a GPU instance by its id.
pub fn mig_handle(position: usize, number: u32) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(0x10_0000 + position * 0x100 + number as usize)
}

/// The position and the number in such a handle; `None` for a GPU's handle.
pub fn mig_position(handle: nvmlDevice_t) -> Option<(usize, u32)> {
    let number = handle.addr().checked_sub(0x10_0000)?;
    Some((number / 0x100, u32::try_from(number % 0x100).ok()?))
}

/// Begins a call about a MIG device by its handle. The call also fails, hangs or is lost with its GPU.
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

/// Begins a call that is about no GPU.
pub fn enter(function: &str) -> Answer<MutexGuard<'static, State>> {
    enter_with(function, |_| Ok(Vec::new()))
}

/// Begins a call about a GPU by its handle.
pub fn enter_gpu(function: &str, device: nvmlDevice_t) -> Answer<(MutexGuard<'static, State>, usize)> {
    let gpu = position(device)?;
    let state = enter_with(function, |_| Ok(vec![gpu]))?;
    Ok((state, gpu))
}

/// The position in a handle.
pub fn position(device: nvmlDevice_t) -> Answer<usize> {
    device.addr().checked_sub(0x1000).ok_or(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
}

/// Begins a call about the GPUs that `which` finds: refuses, blocks or aborts if a rule says so.
pub fn enter_with(function: &str, which: impl Fn(&State) -> Answer<Vec<usize>>) -> Answer<MutexGuard<'static, State>> {
    let mut state = lock();
    for (which, layout) in control::layouts() {
        // What is wrong with one was said when it came.
        for gpu in state.each(&which).unwrap_or_default() {
            let _ = state.act(gpu, &layout);
        }
    }
    *state.calls.entry(function.to_owned()).or_default() += 1;
    FAKE.called.notify_all();
    let mut holds = false;
    loop {
        while state.held && !holds {
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
        if gpus.iter().any(|gpu| state.unknown.contains(gpu)) {
            return Err(nvmlReturn_enum_NVML_ERROR_UNKNOWN);
        }
        let fault = state.fault(function, &gpus);
        if fault == Some(Fault::Hold) || holds {
            holds = fault == Some(Fault::Hold);
            state.held = holds;
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
    /// The fault of a function for these GPUs.
    fn fault(&self, function: &str, gpus: &[usize]) -> Option<Fault> {
        let applies = |rule: &&Rule| rule.gpu.is_none_or(|gpu| gpus.contains(&gpu)) && rule.function == function;
        self.rules.iter().rev().find(applies).map(|rule| rule.fault)
    }

    /// Returns true if a wait on a set fails because one of its GPUs is lost.
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

    /// Resolves a selector; `*` is `None`.
    fn resolve_or_all(&self, selector: &Selector) -> Result<Option<usize>, String> {
        if selector.0 == "*" { Ok(None) } else { self.resolve(selector).map(Some) }
    }

    fn each(&self, selector: &Selector) -> Result<Vec<usize>, String> {
        let all = || (0..self.machine.gpus.len()).collect();
        Ok(self.resolve_or_all(selector)?.map_or_else(all, |gpu| vec![gpu]))
    }

    fn act(&mut self, gpu: usize, act: &Act) -> Result<(), String> {
        match act {
            Act::Xid(data, [gpu_instance, compute_instance], events) => {
                let (gpu_instance, compute_instance) = (*gpu_instance, *compute_instance);
                let kind = nvmlEventTypeXidCriticalError.into();
                for _ in 0..*events {
                    self.post(Event { gpu, kind, data: *data, gpu_instance, compute_instance })?;
                }
            }
            Act::Ecc => {
                let kind = nvmlEventTypeDoubleBitEccError.into();
                self.post(Event { gpu, kind, data: 0, gpu_instance: None, compute_instance: None })?;
            }
            Act::Lost(true) => drop(self.lost.insert(gpu)),
            Act::Lost(false) => drop(self.lost.remove(&gpu)),
            Act::Fallen if self.runs => drop(self.fallen.insert(gpu)),
            Act::Fallen => drop(self.unknown.insert(gpu)),
            Act::Reset(true) if self.runs => return Err("a process uses the GPU".to_owned()),
            Act::Reset(_) if self.runs => {}
            Act::Reset(_) => {
                self.unknown.remove(&gpu);
                self.uncorrectable.remove(&gpu);
                self.rows.remove(&gpu);
                self.recovery.entry(gpu).and_modify(|action| *action = 0);
            }
            Act::Present(true) => drop(self.absent.remove(&gpu)),
            Act::Present(false) => drop(self.absent.insert(gpu)),
            Act::Recovery(action) => drop(self.recovery.insert(gpu, *action)),
            Act::Mig(mig) => self.machine.gpus[gpu].mig = Some(mig.clone()),
            Act::Rows(pending, failed) => drop(self.rows.insert(gpu, (*pending, *failed))),
            Act::Uncorrectable(errors) => drop(self.uncorrectable.insert(gpu, *errors)),
            Act::Link(link, state) => drop(self.links.insert((gpu, *link), *state)),
            Act::Links(state) => {
                for link in self.machine.links_of(gpu) {
                    self.links.insert(link, *state);
                }
            }
            Act::Fabric(joining, status, mask) => drop(self.fabrics.insert(gpu, (*joining, *status, *mask))),
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
        if listeners == 0 { Err("no event set is registered for it".to_owned()) } else { Ok(()) }
    }
}

/// Carries out a command.
pub fn apply(command: &Command) -> Result<(), String> {
    let mut guard = lock();
    let state = &mut *guard;
    match command {
        Command::Gpu(which, act) => {
            for gpu in state.each(which)? {
                state.act(gpu, act)?;
            }
        }
        Command::Fault(which, function, fault) => {
            let gpu = state.resolve_or_all(which)?;
            match fault {
                Some(fault) => state.rules.push(Rule { gpu, function: function.clone(), fault: *fault }),
                None => state.rules.retain(|rule| rule.gpu != gpu || rule.function != *function),
            }
        }
        Command::LinkFields(there) => state.without_link_fields = !there,
        Command::Leak(mib) => memory::leak(*mib),
        Command::Runtime => memory::start_runtime(),
        Command::LossEndsWaits => state.loss_ends_waits = true,
        Command::CrashNow => std::process::abort(),
        Command::Driver(version) => state.driver = Some(version.clone()),
        Command::Calls(function, more) => {
            let calls = |state: &State| state.calls.get(function).copied().unwrap_or(0);
            let enough = calls(state) + more;
            let waited = FAKE.called.wait_while(guard, |state| calls(state) < enough);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        Command::Blocked(function) => {
            let waited = FAKE.called.wait_while(guard, |state| !state.blocked.contains(function));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }
    Ok(())
}

/// nvmlInit: the first call reads the environment, the machine file and the journal.
pub fn init() -> Answer {
    #[expect(clippy::disallowed_methods, reason = "a library that is dlopened has no argv")]
    let environment = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let mut state = lock();
    if !state.loaded {
        let loaded = environment("FAKE_NVML_MACHINE")
            .ok_or_else(|| "FAKE_NVML_MACHINE names no machine file".to_owned())
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
