//! The kubelet's Topology Manager policy, if this process can see it: in the command line of a running kubelet, in its
//! configuration file, or in the folder of files that add to it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The path of the kubelet's configuration with kubeadm and most distributions.
const CONFIG: &str = "/var/lib/kubelet/config.yaml";

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// The kubelet's name for it, such as `single-numa-node`.
    pub name: String,
    /// The path of a file, or `the kubelet's command line`.
    pub source: String,
}

/// The part of a KubeletConfiguration that counts here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    topology_manager_policy: Option<String>,
}

/// The policy of the kubelet whose host's files are below `root`; `None` if neither the kubelet nor its configuration
/// can be seen.
pub(super) fn policy(root: &Path) -> Option<Policy> {
    let words = command_line(root).unwrap_or_default();
    if let Some(name) = flag(&words, "topology-manager-policy") {
        return Some(Policy { name, source: "the kubelet's command line".to_owned() });
    }
    let file = flag(&words, "config").unwrap_or_else(|| CONFIG.to_owned());
    // The files of the folder add to the first, in the order of their names: the last one that names a policy counts.
    let mut files = vec![super::below(root, &file)];
    let folder = flag(&words, "config-dir").map(|folder| super::below(root, &folder));
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut more: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    more.retain(|path| path.extension() == Some(OsStr::new("conf")));
    more.sort();
    files.extend(more);
    let mut policy = None;
    for path in files {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let named = serde_saphyr::from_str::<Config>(&text).ok().and_then(|config| config.topology_manager_policy);
        if named.is_some() || policy.is_none() {
            let name = named.filter(|name| !name.is_empty()).unwrap_or_else(|| "none".to_owned());
            policy = Some(Policy { name, source: path.display().to_string() });
        }
    }
    policy
}

fn command_line(root: &Path) -> Option<Vec<String>> {
    let processes = std::fs::read_dir(root.join("proc")).ok()?.flatten().map(|entry| entry.path());
    let is_kubelet = |path: &PathBuf| std::fs::read(path.join("comm")).is_ok_and(|name| name == b"kubelet\n");
    let words = processes.filter(is_kubelet).find_map(|path| std::fs::read(path.join("cmdline")).ok())?;
    Some(words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

/// The value of a flag, as `--flag=value` or `--flag value`; the last one counts.
fn flag(words: &[String], name: &str) -> Option<String> {
    let mut rest = words.iter();
    let mut value = None;
    while let Some(word) = rest.next() {
        let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else { continue };
        match flag.split_once('=') {
            Some((flag, text)) if flag == name => value = Some(text.to_owned()),
            None if flag == name => value = rest.next().cloned(),
            _ => {}
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The policy of a host with these files, and its source.
    fn read(files: &[(&str, &str)]) -> Option<(String, String)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = root.path();
        policy(root).map(|Policy { name, source }| (name, source.replace(&root.display().to_string(), "ROOT")))
    }

    #[test]
    fn policy_is_read_from_flags_before_files() {
        let is = |name: &str, source: &str| Some((name.to_owned(), source.to_owned()));
        assert_eq!(read(&[]), None);
        let default =
            ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n");
        assert_eq!(read(&[default]), is("restricted", "ROOT/var/lib/kubelet/config.yaml"));
        let silent = ("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\n");
        assert_eq!(read(&[silent]), is("none", "ROOT/var/lib/kubelet/config.yaml"));

        let other = ("proc/7/comm", "systemd\n");
        let named = ("proc/42/comm", "kubelet\n");
        let flags =
            ("proc/42/cmdline", "/usr/bin/kubelet\0--topology-manager-policy\0best-effort\0--config=/etc/k.yaml\0");
        assert_eq!(read(&[default, other, named, flags]), is("best-effort", "the kubelet's command line"));
        let config = ("proc/42/cmdline", "kubelet\0--config=/etc/k.yaml\0--config-dir=/etc/k.d\0");
        let file = ("etc/k.yaml", "topologyManagerPolicy: single-numa-node\n");
        assert_eq!(read(&[default, named, config, file]), is("single-numa-node", "ROOT/etc/k.yaml"));
        let drop_ins = [("etc/k.d/20.conf", "a: 1\n"), ("etc/k.d/10.conf", "topologyManagerPolicy: restricted\n")];
        let ignored = ("etc/k.d/30.yaml", "topologyManagerPolicy: none\n");
        let all = [&[default, named, config, file, ignored], &drop_ins[..]].concat();
        assert_eq!(read(&all), is("restricted", "ROOT/etc/k.d/10.conf"));
    }
}
