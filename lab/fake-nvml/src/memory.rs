//! Faults of memory: the library leaks, or starts the runtime of a language.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::Duration;

/// The interval between two steps of a leak, and the number of steps in a second.
const STEP_INTERVAL: Duration = Duration::from_millis(10);
const STEPS_PER_SECOND: usize = 100;
/// The most bytes that leak, so that the machine survives if the process has no memory limit.
const MAX_BYTES: usize = 512 << 20;

/// The bytes that a runtime maps for its heap, as Go does, and the bytes that it uses.
const MAPPED_BYTES: usize = 1 << 30;
const USED_BYTES: usize = 8 << 20;
/// The number of a runtime's threads, and the stack of each, which is glibc's default.
const THREADS: usize = 16;
const STACK_BYTES: usize = 8 << 20;

static MIB_PER_SECOND: AtomicUsize = AtomicUsize::new(0);
static LEAK: Once = Once::new();
static LEAKED: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn keep(memory: Vec<u8>) {
    LEAKED.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
}

/// Leaks this number of MiB each second from now on, in small steps.
pub fn leak(mib: usize) {
    MIB_PER_SECOND.store(mib, Ordering::Relaxed);
    LEAK.call_once(|| drop(thread::spawn(leak_steadily)));
}

fn leak_steadily() {
    let mut leaked = 0;
    loop {
        thread::park_timeout(STEP_INTERVAL);
        let bytes = (MIB_PER_SECOND.load(Ordering::Relaxed) << 20) / STEPS_PER_SECOND;
        if bytes > 0 && leaked < MAX_BYTES {
            leaked += bytes;
            // Written bytes take memory; unwritten ones would only take address space.
            keep(vec![1; bytes]);
        }
    }
}

/// Starts a runtime. Aborts the process if memory or a thread is refused, as a Go library does.
pub fn start_runtime() {
    let mut heap = Vec::new();
    if heap.try_reserve_exact(MAPPED_BYTES).is_err() {
        eprintln!("fatal error: runtime: cannot allocate memory");
        std::process::abort();
    }
    heap.resize(USED_BYTES, 1);
    keep(heap);
    for _ in 0..THREADS {
        let started = thread::Builder::new().stack_size(STACK_BYTES).spawn(|| {
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
