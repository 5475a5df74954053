//! The configuration file, followed: tells when its text is another one.
//!
//! Called by `run`, which owns the task that waits here. A ConfigMap's files are links into a folder that Kubernetes swaps as
//! a whole; so the folder is followed, and what counts is the text.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::AsyncReadExt;

use super::settings::LONGEST_FILE;
use crate::inotify::FolderWatch;

/// How often the text is read where nobody tells: the file may be a link into a folder that is not followed.
const POLL: Duration = Duration::from_secs(10);

/// How long a new text has to stand still. An editor that empties the file before it writes would else have us serve the
/// defaults for a moment.
const SETTLE: Duration = Duration::from_millis(100);

/// A file and the text it last had; none where it could not be read.
pub struct FileWatch {
    path: PathBuf,
    text: Option<String>,
    folder: FolderWatch,
}

impl FileWatch {
    /// Follows a file from now on. inotify is an optimisation: where it is not to be had, polling remains.
    pub async fn of(path: &Path) -> Self {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = FolderWatch::of(folder);
        Self { path: path.to_owned(), text: text(path).await, folder }
    }

    /// Waits until the file has another text than before, or none any more, or one again.
    pub async fn changed(&mut self) {
        loop {
            let now = text(&self.path).await;
            if now != self.text {
                // Somebody may be writing: a text counts once it stands still.
                tokio::time::sleep(SETTLE).await;
                if now == text(&self.path).await {
                    self.text = now;
                    return;
                }
                continue;
            }
            let _ = tokio::time::timeout(POLL, self.folder.changed()).await;
        }
    }
}

/// The text, as far as it may be long. A file that does not answer holds up nobody but who waits for this.
async fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = tokio::fs::File::open(path).await.ok()?;
    file.take(LONGEST_FILE + 1).read_to_string(&mut text).await.ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[tokio::test]
    async fn a_config_map_that_is_swapped_is_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, text) in [("v1", "a: 1\n"), ("v2", "a: 2\n")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("config"), text).unwrap();
        }
        symlink("v1", at("..data")).unwrap();
        symlink("..data/config", at("config")).unwrap();
        let mut watch = FileWatch::of(&at("config")).await;
        symlink("v2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        watch.changed().await;
        assert_eq!(watch.text.as_deref(), Some("a: 2\n"));
        fs::remove_file(at("config")).unwrap();
        watch.changed().await;
        assert_eq!(watch.text, None);
    }

    #[test]
    fn a_file_that_does_not_answer_holds_up_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        fs::write(&path, "a: 1\n").unwrap();
        let (said, hear) = std::sync::mpsc::channel();
        let watched = path.clone();
        // On a thread of its own: one that is held up would hold up the test's end.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut watch = FileWatch::of(&watched).await;
                fs::remove_file(&watched).unwrap();
                // Opening it waits for somebody who writes.
                assert!(std::process::Command::new("mkfifo").arg(&watched).status().unwrap().success());
                tokio::select! {
                    biased;
                    () = watch.changed() => {}
                    () = tokio::time::sleep(SETTLE) => said.send(()).unwrap(),
                }
            });
            runtime.shutdown_background();
        });
        hear.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
