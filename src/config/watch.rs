//! [`FileWatch`]: follows the configuration file and returns its text whenever the text has changed.
//!
//! Called by `src/run`, whose tasks wait here. A ConfigMap's files are links into a folder that Kubernetes replaces as
//! a whole; so the file's folder is watched, and the texts are compared.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::settings::{ConfigError, read};
use linkwise_system::files;
use linkwise_system::inotify::FolderWatch;

/// The time from one reading of the file to the next without a notification. It is bounded because the file may be a
/// link into a folder that is not watched.
const POLL: Duration = Duration::from_secs(10);

/// The time for which a new text has to stay the same. Without it, an editor that truncates the file before it writes
/// would switch linkwise to the defaults for a moment.
const SETTLE: Duration = Duration::from_millis(100);

/// A file and the text that was returned last.
pub struct FileWatch {
    /// The file and its folder; `None`: an empty text that never changes.
    file: Option<(PathBuf, FolderWatch)>,
    /// The text; `None` before the first reading, and if the file could not be read.
    text: Option<String>,
}

impl FileWatch {
    /// Watches a file from now on. inotify is an optimisation: if it is unavailable, polling remains.
    pub fn of(path: Option<&Path>) -> Self {
        let file = path.map(|path| (path.to_owned(), FolderWatch::of(files::folder(path))));
        Self { file, text: None }
    }

    /// Reads the file at once.
    pub async fn read(&mut self) -> Result<String, ConfigError> {
        let Some((path, _)) = &self.file else { return Ok(String::new()) };
        let text = text(path).await;
        self.keep_text(text)
    }

    /// Waits until the file has another text than the one returned last, or becomes unreadable. Returns the new text.
    pub async fn changed(&mut self) -> Result<String, ConfigError> {
        loop {
            let Some((path, folder)) = &mut self.file else { return std::future::pending().await };
            let latest = text(path).await;
            if latest.as_ref().ok() != self.text.as_ref() {
                tokio::time::sleep(SETTLE).await;
                if latest.as_ref().ok() == text(path).await.as_ref().ok() {
                    return self.keep_text(latest);
                }
                continue;
            }
            let _ = tokio::time::timeout(POLL, folder.changed()).await;
        }
    }

    fn keep_text(&mut self, text: Result<String, ConfigError>) -> Result<String, ConfigError> {
        self.text = text.as_ref().ok().cloned();
        text
    }
}

/// Reads the file. While the file system hangs, only the caller waits.
async fn text(path: &Path) -> Result<String, ConfigError> {
    let (file, path) = (path.to_owned(), path.to_owned());
    let text = spawn_blocking(move || read(&file)).await;
    text.unwrap_or_else(|panic| Err(ConfigError::Unreadable(path, io::Error::other(panic))))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[tokio::test]
    async fn replaced_config_map_is_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, text) in [("v1", "a: 1\n"), ("v2", "a: 2\n")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("config"), text).unwrap();
        }
        symlink("v1", at("..data")).unwrap();
        symlink("..data/config", at("config")).unwrap();
        let mut watch = FileWatch::of(Some(&at("config")));
        assert_eq!(watch.read().await.unwrap(), "a: 1\n");
        symlink("v2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert_eq!(watch.changed().await.unwrap(), "a: 2\n");
        fs::remove_file(at("config")).unwrap();
        assert!(watch.changed().await.is_err());
    }

    #[tokio::test]
    async fn text_that_is_too_long_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        fs::write(&path, "#".repeat(1 << 20)).unwrap();
        let mut watch = FileWatch::of(Some(&path));
        assert!(watch.read().await.is_ok());
        fs::write(&path, "#".repeat((1 << 20) + 1)).unwrap();
        let ConfigError::Unreadable(_, source) = watch.changed().await.unwrap_err() else { panic!() };
        assert_eq!(source.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn hanging_file_blocks_only_its_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        // Opening a pipe waits for a writer.
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (done, has_run) = std::sync::mpsc::channel();
        // This runs on a thread of its own: a runtime that hangs would hang the test.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut watch = FileWatch::of(Some(&path));
                tokio::select! {
                    biased;
                    _ = watch.changed() => {}
                    () = tokio::time::sleep(SETTLE) => done.send(()).unwrap(),
                }
            });
            runtime.shutdown_background();
        });
        has_run.recv_timeout(Duration::from_secs(20)).unwrap();
    }
}
