//! Files that are written whole or not at all, and small files that are read with a bound.
//!
//! Used for files such as CDI specs, checkpoints, the health record and MPS markers. The functions block: callers in
//! async code use a blocking task, such as that of [`blocking()`]. This module logs nothing.

use std::fs::{self, DirBuilder, DirEntry, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use tempfile::{Builder, NamedTempFile};

/// The first part of a draft's name.
pub const DRAFT: &str = ".linkwise-";

/// Makes a temporary file in the folder of `path`, removed unless it is moved to `path`. Its name begins with a
/// dot, so that no reader of the folder takes it for a finished file. `mode` is subject to the umask.
pub fn draft(path: &Path, mode: u32) -> io::Result<NamedTempFile> {
    Builder::new().prefix(DRAFT).permissions(Permissions::from_mode(mode)).tempfile_in(folder(path))
}

/// Moves a draft to `path`, and replaces the file there. On return its content and its name are on the disk. On an
/// error `path` is unchanged, unless only syncing the folder failed.
pub fn place(draft: NamedTempFile, path: &Path) -> io::Result<File> {
    draft.as_file().sync_all()?;
    let file = draft.persist(path)?;
    File::open(folder(path))?.sync_all()?;
    Ok(file)
}

/// Writes `bytes` to `path`, and replaces the file there.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = draft(path, mode)?;
    file.write_all(bytes)?;
    place(file, path).map(drop)
}

/// Writes `bytes` to `path`, and replaces the file there, without waiting for the disk. A process that is killed leaves
/// the old file or the new one. A machine that crashes may leave either, or a part of the new one.
pub fn write_for_this_boot(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = draft(path, mode)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// Writes `bytes` to `path`. Fails with `AlreadyExists` if there is a file.
pub fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut file = draft(path, mode)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist_noclobber(path)?;
    File::open(folder(path))?.sync_all()
}

/// Writes `bytes` to `path` unless the file has them already; makes the folder if it is missing. Returns true if it
/// wrote.
pub fn write_if_changed(path: &Path, bytes: &[u8], mode: u32) -> io::Result<bool> {
    if fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(false);
    }
    fs::create_dir_all(folder(path))?;
    write(path, bytes, mode)?;
    Ok(true)
}

/// Makes a link at `path`, and replaces the file there, in one step. On an error `path` is unchanged.
pub fn link(target: &Path, path: &Path) -> io::Result<()> {
    let make = |draft: &Path| std::os::unix::fs::symlink(target, draft);
    let draft = Builder::new().prefix(DRAFT).make_in(folder(path), make)?;
    Ok(draft.into_temp_path().persist(path)?)
}

/// The least age of a draft that no process writes any more.
const ABANDONED: Duration = Duration::from_secs(60);

/// Makes a folder if it is missing, and checks that files can be made in it. Drafts of processes that were killed while
/// they wrote are removed.
pub fn prepare_folder(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_old = |entry: &DirEntry| Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? >= ABANDONED);
        if entry.file_name().as_encoded_bytes().starts_with(DRAFT.as_bytes()) && is_old(&entry) == Some(true) {
            // A draft that stays does no harm: no reader takes it for a finished file.
            let _ = fs::remove_file(entry.path());
        }
    }
    draft(&folder.join("x"), 0o600).map(drop)
}

/// Makes a folder for this user alone if it is missing. Fails with `NotFound` if the folder above is missing.
pub fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Reads a file of at most `limit` bytes. Fails with `FileTooLarge` for a longer file.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_all(File::open(path)?, limit)
}

/// Reads all of a file or a stream, as [`read`] does.
pub fn read_all(from: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = from.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(length).is_ok_and(|length| length <= limit) {
        return Ok(bytes);
    }
    Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {limit} bytes")))
}

/// Removes a file; on return it is gone from the disk. Returns true if there was one. Without a file, a read-only
/// folder or a missing folder is not an error. On an error the file may still exist.
pub fn remove(path: &Path) -> io::Result<bool> {
    let was_there = remove_for_this_boot(path)?;
    if was_there {
        File::open(folder(path))?.sync_all()?;
    }
    Ok(was_there)
}

/// [`remove`], without waiting for the disk: a machine that crashes may have the file again.
pub fn remove_for_this_boot(path: &Path) -> io::Result<bool> {
    if let Err(error) = fs::remove_file(path) {
        let there = fs::symlink_metadata(path).map_err(|error| error.kind());
        let is_missing = matches!(there, Err(io::ErrorKind::NotFound | io::ErrorKind::NotADirectory));
        return if is_missing { Ok(false) } else { Err(error) };
    }
    Ok(true)
}

/// Runs blocking work in a task of its own, and waits for it. If the caller stops waiting, the work is done all the
/// same. Fails too if `work` panicked.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Runs blocking work as [`blocking`] does. `held` is dropped when the work is done, even if the caller has stopped
/// waiting.
pub async fn blocking_with<H: Send + 'static, T: Send + 'static>(
    held: H,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    blocking(move || {
        let _held = held;
        work()
    })
    .await
}

/// The folder of a path; a bare file name is in the current folder.
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn file_is_replaced_whole_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, b"one", 0o644).unwrap();
        write_for_this_boot(&path, b"two", 0o600).unwrap();
        assert_eq!((fs::read(&path).unwrap(), names(folder.path())), (b"two".to_vec(), vec!["file".to_owned()]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn abandoned_drafts_go_and_fresh_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [".linkwise-old", ".linkwise-new", "old"] {
            fs::write(at(name), "x").unwrap();
        }
        let long_ago = std::time::SystemTime::now() - ABANDONED;
        for name in [".linkwise-old", "old"] {
            File::options().write(true).open(at(name)).unwrap().set_modified(long_ago).unwrap();
        }
        prepare_folder(folder.path()).unwrap();
        assert_eq!(names(folder.path()), [".linkwise-new", "old"]);
    }

    #[test]
    fn failed_write_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, b"x", 0o600).is_err(), "a folder was replaced");
        assert_eq!(names(folder.path()), ["file"]);
        let path = folder.path().join("other");
        fs::write(&path, "one").unwrap();
        assert_eq!(write_new(&path, b"two", 0o600).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((fs::read(&path).unwrap(), names(folder.path()).len()), (b"one".to_vec(), 2));
    }

    #[test]
    fn unchanged_file_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/on/the/way");
        assert!(write_if_changed(&path, b"x", 0o644).unwrap());
        assert!(!write_if_changed(&path, b"x", 0o644).unwrap());
        assert!(write_if_changed(&path, b"y", 0o644).unwrap());
    }

    #[test]
    fn missing_file_is_removed_without_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        // The file is missing, its folder is a file, or its folder cannot be written to.
        let missing = [folder.path().join("other"), path.join("in a file"), "/proc/self/linkwise".into()];
        assert_eq!(missing.map(|path| remove(&path).unwrap()), [false; 3]);
        assert!(remove(folder.path()).is_err(), "a folder was removed");
        assert!(remove(Path::new("/proc/self/status")).is_err() && remove(&path).unwrap() && !path.exists());
    }

    #[test]
    fn read_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert_eq!(read(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
