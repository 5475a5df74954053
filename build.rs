//! Sets a cfg for each program, file or right that tests need and this machine has. A test that lacks one is ignored,
//! with the reason.
//!
//! `make tools` installs the programs and touches this file, so that cargo runs it again. The image is built without
//! this file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The cfg that tests check, and the files in `target/tools` or on the PATH, any of which sets it.
const PROGRAMS: [(&str, &[&str]); 14] = [
    ("has_actionlint", &["actionlint"]),
    ("has_docker_registry", &["docker-registry"]),
    ("has_fish", &["fish"]),
    ("has_git", &["git"]),
    ("has_grafana_types", &["grafana"]),
    ("has_helm", &["helm"]),
    ("has_jq", &["jq"]),
    ("has_kubectl", &["kubectl", "kustomize"]),
    ("has_man", &["man"]),
    ("has_mandoc", &["mandoc"]),
    ("has_prometheus", &["prometheus"]),
    ("has_promtool", &["promtool"]),
    ("has_shellcheck", &["shellcheck"]),
    ("has_zsh", &["zsh"]),
];

#[expect(clippy::disallowed_methods, reason = "a build script has no configuration")]
fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    Path::new("target/tools").join(name).exists()
        || std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// Returns true if the tests may mount file systems, in namespaces of their own.
fn may_mount(options: &[&str]) -> bool {
    let tried = Command::new("unshare").args(options).args(["--mount", "true"]).stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let programs = PROGRAMS.iter().map(|(cfg, names)| (*cfg, names.iter().any(|name| is_installed(name))));
    // The tests of a release need a clone, because a release is made from a commit.
    let rest = [
        ("has_clone", Path::new(".git").exists()),
        ("is_root", std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)),
        ("has_recorded", Path::new("../shared/topologies/raw").exists()),
        ("may_mount", may_mount(&[])),
        ("may_mount_as_user", may_mount(&["--user", "--map-root-user"])),
    ];
    for (cfg, is_found) in programs.chain(rest) {
        println!("cargo::rustc-check-cfg=cfg({cfg})");
        if is_found {
            println!("cargo::rustc-cfg={cfg}");
        }
    }
}
