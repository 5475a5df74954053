//! Decides when to check a folder again: on a change, and on a timer.
//!
//! Used by `registration` and `release`. A storm of changes neither starves their other events nor costs much.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::FolderWatch;
use crate::uds::FileId;

/// The least time between two checks in a storm of changes. Streams and deadlines get their turn meanwhile.
const MIN_GAP: Duration = Duration::from_millis(2);

/// The most changes in a row, each less than [`MIN_GAP`] after the previous one, that are not yet a storm. A kubelet
/// that starts makes a few, and a plugin that then checks its socket late would register twice.
const MAX_RUSH: u32 = 8;

/// Follows a folder: by inotify if it works, and by a timer of `poll`.
pub struct Changes {
    folder: Option<FileId>,
    watch: FolderWatch,
    poll: Duration,
    gap: Duration,
    /// The end of the gap after the last check; a change before it belongs to a rush.
    gap_end: Instant,
    /// The number of changes of the rush.
    rush: u32,
    due: Instant,
}

impl Changes {
    /// Follows a folder from now on.
    pub fn of(folder: &Path, poll: Duration, use_inotify: bool) -> Self {
        let watch = if use_inotify { FolderWatch::of(folder) } else { FolderWatch::inactive() };
        let now = Instant::now();
        Self { folder: FileId::of(folder), watch, poll, gap: MIN_GAP, gap_end: now, rush: 0, due: now + poll }
    }

    /// Returns true if the path still names the followed folder: inotify follows the folder, not the path.
    pub fn follows(&self, folder: &Path) -> bool {
        self.folder.is_some() && FileId::of(folder).map(FileId::place) == self.folder.map(FileId::place)
    }

    /// Returns true if inotify reports changes.
    pub fn has_inotify(&self) -> bool {
        self.watch.is_active()
    }

    /// Waits until something may have changed. Cancel-safe: the timer goes on.
    pub async fn next(&mut self) {
        let changed = async {
            if self.rush >= MAX_RUSH {
                tokio::time::sleep_until(self.gap_end).await;
            }
            self.watch.changed().await;
        };
        let _ = tokio::time::timeout_at(self.due, changed).await;
        let now = Instant::now();
        self.rush = if now < self.gap_end { self.rush.saturating_add(1) } else { 0 };
        (self.gap_end, self.due) = (now + self.gap, now + self.poll);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::watch;

    #[tokio::test]
    async fn storm_of_changes_starves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut changes = Changes::of(folder.path(), Duration::from_secs(3600), false);
        let (storm, changed) = watch::channel(0);
        (changes.watch, changes.gap) = (FolderWatch::of_counter(changed), Duration::from_secs(3600));
        for change in 0..=MAX_RUSH {
            storm.send_replace(change.into());
            changes.next().await;
        }
        // One more change comes before any other event had its turn, as in a loop that polls this future first.
        storm.send_replace(u64::MAX);
        tokio::select! {
            biased;
            () = changes.next() => panic!("nothing else gets a turn"),
            () = std::future::ready(()) => {}
        }
        // The change is not lost, and comes after the gap.
        changes.gap_end = Instant::now();
        changes.next().await;
    }

    #[tokio::test]
    async fn change_comes_by_inotify_or_by_timer() {
        let folder = tempfile::tempdir().unwrap();
        let mut changes = Changes::of(folder.path(), Duration::from_secs(3600), true);
        std::fs::write(folder.path().join("new"), "").unwrap();
        let limit = Duration::from_secs(20);
        tokio::time::timeout(limit, changes.next()).await.unwrap();
        let mut polled = Changes::of(&folder.path().join("missing"), Duration::from_millis(1), true);
        tokio::time::timeout(limit, polled.next()).await.unwrap();
        let mut polled = Changes::of(folder.path(), Duration::from_millis(1), false);
        tokio::time::timeout(limit, polled.next()).await.unwrap();
    }
}
