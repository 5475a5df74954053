//! The mechanisms that adapters share, such as Unix sockets, files written whole, inotify, gRPC servers and the log.
//!
//! Nothing here knows a GPU, the kubelet or the API server.

pub mod clock;
pub mod files;
pub mod grpc;
pub mod inotify;
pub mod log;
pub mod metrics;
pub mod output;
pub mod progress;
pub mod right;
pub mod signals;
pub mod uds;

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use tokio::sync::watch;

/// Runs a future on a runtime of one thread, which must never block: files are read and written on other threads, and
/// log lines are written by the log's thread.
pub fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the async runtime")?;
    let result = runtime.block_on(future);
    // Dropping the runtime would wait for threads that hang in the kernel.
    runtime.shutdown_background();
    result
}

/// Puts a value into a channel, whose readers wake only if it differs from the last one.
pub fn send_if_new<T: PartialEq>(channel: &watch::Sender<T>, value: T) {
    channel.send_if_modified(|last| std::mem::replace(last, value) != *last);
}

/// Waits for a change that comes through a channel. If the channel is closed, waits for ever.
pub async fn or_never<T, E>(change: impl Future<Output = Result<T, E>>) {
    if change.await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Locks a mutex, even after a panic of a thread that held the lock: our mutexes are locked only to put in or take out
/// a whole value, so a panic leaves nothing half done.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the things that a channel counts, until it is dropped.
#[derive(Debug)]
pub struct Counted(watch::Sender<usize>);

impl Counted {
    /// Adds one to the count.
    pub fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count = count.saturating_add(1));
        Self(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}
