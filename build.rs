//! Tells the tests which programs this machine has. A test without its program is ignored, with the reason.
//!
//! `make tools` brings the programs and touches this file, so that cargo looks for them again. The program itself is built
//! without this file: it is not among the Dockerfile's sources.

use std::path::Path;
use std::process::{Command, Stdio};

/// What tests ask for, and the names of files in `target/tools` or on the PATH that are enough for it.
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
fn is_there(name: &str) -> bool {
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
    let programs = PROGRAMS.iter().map(|(cfg, names)| (*cfg, names.iter().any(|name| is_there(name))));
    // A release is made of a clone.
    let rest = [
        ("has_clone", Path::new(".git").exists()),
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
