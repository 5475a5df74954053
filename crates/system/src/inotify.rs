//! Changes of a folder, reported by inotify.
//!
//! Used for the folders of the kubelet, the gate and configurations. inotify is an optimisation: watches may be
//! exhausted and some file systems have none, so every caller polls as well. Owns one inotify instance for each folder,
//! and its thread.

mod changes;

use std::path::Path;

use crate::or_never;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::watch;

pub use changes::Changes;

/// Follows one folder until it is dropped.
pub struct FolderWatch {
    changes: watch::Receiver<u64>,
    watcher: Option<RecommendedWatcher>,
}

impl FolderWatch {
    /// Follows a folder from now on. If inotify cannot follow it, the watch is inactive.
    pub fn of(folder: &Path) -> Self {
        let (sender, changes) = watch::channel(0);
        let report = move |event: notify::Result<notify::Event>| {
            // Reading is not a change; our own reads would wake us again.
            if !event.is_ok_and(|event| event.kind.is_access()) {
                sender.send_modify(|count: &mut u64| *count = count.wrapping_add(1));
            }
        };
        let watcher = notify::recommended_watcher(report).and_then(|mut watcher| {
            watcher.watch(folder, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        Self { changes, watcher: watcher.ok() }
    }

    /// A watch that never reports anything.
    pub fn inactive() -> Self {
        Self { changes: watch::channel(0).1, watcher: None }
    }

    /// A watch that reports the changes that a test counts.
    #[cfg(test)]
    pub fn of_counter(changes: watch::Receiver<u64>) -> Self {
        Self { changes, watcher: None }
    }

    /// Returns true if inotify reports changes.
    pub fn is_active(&self) -> bool {
        self.watcher.is_some()
    }

    /// Waits for a change since the last call; for ever if the watch is inactive. Cancel-safe.
    pub async fn changed(&mut self) {
        or_never(self.changes.changed()).await;
    }
}
