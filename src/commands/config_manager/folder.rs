//! The configurations' folder, and the link to the selected one.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use linkwise_system::files;

/// The target of the link for an empty configuration.
const EMPTY: &str = "/dev/null";

/// The configurations of a folder by name. Kubernetes mounts a ConfigMap as links into `..data`; names that begin with
/// two dots are its own.
pub(super) fn names(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && !name.starts_with("..")
            && fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_file())
        {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Links `destination` to a configuration of the folder, or to an empty one, in one step. Returns true if the link's
/// target changed. Kubernetes edits the target in place, so the readers of the link see edits as well. On an error the
/// existing link stays.
pub(super) fn link(folder: &Path, name: Option<&str>, destination: &Path) -> io::Result<bool> {
    let target = name.map_or_else(|| PathBuf::from(EMPTY), |name| folder.join(name));
    if fs::read_link(destination).is_ok_and(|there| there == target) {
        return Ok(false);
    }
    files::link(&target, destination)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn names_are_the_keys_of_a_mounted_config_map() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("..v1")).unwrap();
        fs::write(at("..v1").join("a"), "").unwrap();
        symlink("..v1", at("..data")).unwrap();
        symlink("..data/a", at("a")).unwrap();
        symlink("..data/gone", at("gone")).unwrap();
        fs::write(at("b"), "").unwrap();
        fs::create_dir(at("folder")).unwrap();
        assert_eq!(names(folder.path()).unwrap(), ["a", "b"].map(str::to_owned).into());
        assert!(names(&at("none")).is_err());
    }

    #[test]
    fn link_replaces_what_is_there_and_reports_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("config.yaml");
        fs::write(&destination, "a file of somebody").unwrap();
        let source = Path::new("/s");
        assert!(link(source, Some("a"), &destination).unwrap());
        assert!(!link(source, Some("a"), &destination).unwrap());
        assert_eq!(fs::read_link(&destination).unwrap(), Path::new("/s/a"));
        assert!(link(source, None, &destination).unwrap());
        assert_eq!(fs::read(&destination).unwrap(), b"");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary link stays");
    }

    #[test]
    fn folder_at_the_destination_is_an_error_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("config.yaml");
        fs::create_dir(&destination).unwrap();
        assert!(link(Path::new("/s"), Some("a"), &destination).is_err());
        assert!(destination.is_dir());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
