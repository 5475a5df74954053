//! Chooses a node's configuration by the node's label, the default or a fallback, and makes the destination a link to
//! it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Result, bail, ensure};

use crate::config::Fallback;
use linkwise_core::quote::quoted;
use linkwise_system::files;

/// The name of the configuration that the fallback `named` chooses.
const NAMED: &str = "default";

/// Chooses a configuration, `None` being an empty one, and gives the reason for the log. An empty label counts as no
/// label.
pub(super) fn choose(
    label: Option<&str>,
    names: &BTreeSet<String>,
    default: Option<&str>,
    fallbacks: &[Fallback],
) -> Result<(Option<String>, &'static str)> {
    ensure!(!names.is_empty(), "the folder has no configuration");
    let existing = || names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", ");
    let chosen = |name: &str, why| Ok((Some(name.to_owned()), why));
    if let Some(name) = label.filter(|name| !name.is_empty()) {
        ensure!(names.contains(name), "the node's label names {}, but the folder has {}", quoted(name), existing());
        return chosen(name, "the node's label");
    }
    if let Some(name) = default {
        let option = "--default-config (DEFAULT_CONFIG)";
        ensure!(names.contains(name), "{option} names {}, but the folder has {}", quoted(name), existing());
        return chosen(name, "the default");
    }
    for fallback in fallbacks {
        match (fallback, names.first()) {
            (Fallback::Named, _) if names.contains(NAMED) => return chosen(NAMED, "the fallback 'named'"),
            (Fallback::Single, Some(only)) if names.len() == 1 => return chosen(only, "the fallback 'single'"),
            (Fallback::Empty, _) => return Ok((None, "the fallback 'empty'")),
            _ => {}
        }
    }
    bail!("the node has no such label, no default is set, and no fallback applies; the folder has {}", existing())
}

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
/// target changed. An edit of the ConfigMap keeps the target's path, so the readers of the link see it too. On an error
/// the existing link stays.
pub(super) fn link(folder: &Path, name: Option<&str>, destination: &Path) -> io::Result<bool> {
    let target = name.map_or_else(|| PathBuf::from(EMPTY), |name| folder.join(name));
    if fs::read_link(destination).is_ok_and(|current| current == target) {
        return Ok(false);
    }
    files::link(&target, destination)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn chosen(label: Option<&str>, names: &str, default: &str, fallbacks: &[Fallback]) -> Result<String, String> {
        let names = names.split(' ').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        choose(label, &names, Some(default).filter(|name| !name.is_empty()), fallbacks)
            .map(|(name, _)| name.unwrap_or_else(|| "(empty)".to_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn label_beats_default_beats_fallbacks() {
        use Fallback::{Empty, Named, Single};
        for (label, names, default, fallbacks, expected) in [
            (Some("b"), "a b default", "a", &[Named][..], "b"),
            (Some(""), "a b default", "a", &[Named], "a"),
            (None, "a b default", "a", &[Named], "a"),
            (None, "a b default", "", &[Named, Single], "default"),
            (None, "a", "", &[Named, Single], "a"),
            (None, "a b", "", &[Named, Single, Empty], "(empty)"),
            (None, "a default", "", &[Empty, Named], "(empty)"),
        ] {
            assert_eq!(
                chosen(label, names, default, fallbacks).as_deref(),
                Ok(expected),
                "{label:?} {names} {default}"
            );
        }
    }

    #[test]
    fn missing_configuration_is_named_with_existing_ones() {
        use Fallback::{Named, Single};
        for (label, names, default, fallbacks, problem) in [
            (Some("x"), "a b", "a", &[][..], "the node's label names 'x', but the folder has 'a', 'b'"),
            (None, "a b", "x", &[], "--default-config (DEFAULT_CONFIG) names 'x', but the folder has 'a', 'b'"),
            (None, "a b", "", &[Named, Single], "no fallback applies; the folder has 'a', 'b'"),
            (Some("a"), "", "", &[], "the folder has no configuration"),
        ] {
            let error = chosen(label, names, default, fallbacks).unwrap_err();
            assert!(error.ends_with(problem), "{error}");
        }
    }

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
    fn link_replaces_a_file_and_reports_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let destination = folder.path().join("config.yaml");
        fs::write(&destination, "a file of another program").unwrap();
        let source = Path::new("/s");
        assert!(link(source, Some("a"), &destination).unwrap());
        assert!(!link(source, Some("a"), &destination).unwrap());
        assert_eq!(fs::read_link(&destination).unwrap(), Path::new("/s/a"));
        assert!(link(source, None, &destination).unwrap());
        assert_eq!(fs::read(&destination).unwrap(), b"");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a temporary link stays");
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
