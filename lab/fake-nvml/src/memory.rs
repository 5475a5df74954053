//! The memory faults of a library: it leaks, or it starts a language's runtime.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::Duration;

/// The time from one step of a leak to the next.
const STEP: Duration = Duration::from_millis(10);
/// The number of steps in a second.
const STEPS: usize = 100;
/// The most bytes that leak: the machine survives even if the process has no memory limit.
const MAX_BYTES: usize = 512 << 20;

/// The bytes that a runtime maps, as Go's does for its heap, and those that it uses.
const MAPPED: usize = 1 << 30;
const USED: usize = 8 << 20;
/// The number of its threads, and the stack of each: glibc's default, all of it mapped.
const THREADS: usize = 16;
const STACK: usize = 8 << 20;

/// The rate of the leak in MiB a second.
static RATE: AtomicUsize = AtomicUsize::new(0);
static LEAKS: Once = Once::new();
static KEPT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn keep(memory: Vec<u8>) {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
}

/// Makes this number of MiB leak each second from now on, in small steps, regardless of calls. Leaked memory is never
/// freed.
pub fn leak(mib: usize) {
    RATE.store(mib, Ordering::Relaxed);
    LEAKS.call_once(|| drop(thread::spawn(leak_on)));
}

fn leak_on() {
    let mut leaked = 0;
    loop {
        thread::park_timeout(STEP);
        let bytes = (RATE.load(Ordering::Relaxed) << 20) / STEPS;
        if bytes > 0 && leaked < MAX_BYTES {
            leaked += bytes;
            // The bytes are written to, so that they take memory and not only address space.
            keep(vec![1; bytes]);
        }
    }
}

/// Starts a runtime. If it gets no memory or no thread, it aborts the process, as a Go library does.
pub fn start_runtime() {
    let mut heap = Vec::new();
    if heap.try_reserve_exact(MAPPED).is_err() {
        eprintln!("fatal error: runtime: cannot allocate memory");
        std::process::abort();
    }
    heap.resize(USED, 1);
    keep(heap);
    for _ in 0..THREADS {
        let started = thread::Builder::new().stack_size(STACK).spawn(|| {
            loop {
                thread::park();
            }
        });
        if let Err(error) = started {
            eprintln!("runtime/cgo: pthread_create failed: {error}");
            std::process::abort();
        }
    }
}
