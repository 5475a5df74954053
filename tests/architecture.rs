//! Holds what a crate boundary cannot say: which adapters may not name each other, who may read the environment, spawn
//! or be `unsafe`, how long a file may be, and that each dependency has its reason. ARCHITECTURE.md has the picture.
//!
//! It reads the text of `src/` line by line, comments and tests (from `#[cfg(test)]` on) left out. Paths of ours are
//! written `crate::module::..`, one root to a `use`; the first rule holds that, so that the rest can look for words.

#![allow(clippy::expect_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

/// Adapters: each knows the core and what is named here.
const ADAPTERS: [(&str, &[&str]); 12] = [
    ("admin", &[]),
    ("cdi", &[]),
    ("config", &[]),
    ("dra", &[]),
    ("hwloc", &[]),
    ("kubelet", &[]),
    ("labels", &[]),
    ("machines", &[]),
    ("metrics", &[]),
    ("mps", &[]),
    ("nvml", &[]),
    ("takeover", &[]),
];

/// The composition roots: they build everything and may name anything but wire types.
const ROOTS: [&str; 5] = ["commands", "demo", "lib", "main", "runtime"];

/// The core, which every module may name.
const CORE: [&str; 12] = [
    "allocation",
    "backoff",
    "claims",
    "errors",
    "names",
    "once",
    "publish",
    "quantity",
    "quote",
    "state",
    "topology",
    "words",
];

/// Mechanisms that adapters share. They know nothing of ours but the core, and may be named by every module.
const SHARED: [&str; 6] = ["files", "grpc", "inotify", "picture", "registration", "uds"];

/// Words that only some files may say: the word, and how their paths begin.
const RESERVED: [(&str, &[&str]); 13] = [
    ("unsafe ", &["nvml/raw.rs"]),
    ("linkwise_kubelet_api", &["dra/", "kubelet/"]),
    ("env::var", &["config/"]),
    ("env::args", &["config/"]),
    ("clap::", &["config/"]),
    ("tokio::spawn", &ROOTS),
    // A blocking task around one use of the disk, awaited by its caller.
    ("task::spawn", &["commands", "demo", "files", "lib", "main", "runtime"]),
    ("thread::spawn", &ROOTS),
    ("JoinSet", &ROOTS),
    ("TaskTracker", &ROOTS),
    // Threads of the child, which has no runtime.
    ("thread::Builder", &["nvml/agent.rs", "runtime/", "commands/", "demo/"]),
    ("unbounded_channel", &[]),
    ("process::exit", &[]),
];

/// The longest file, tests included.
const MOST_LINES: usize = 700;

/// What is wrong with one file of `src/`, `path` being relative to it; a line each.
fn check(path: &str, text: &str) -> Vec<String> {
    let module = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
    let allowed = match ADAPTERS.iter().find(|(name, _)| *name == module) {
        Some((_, others)) => Some(*others),
        None if SHARED.contains(&module) => Some([].as_slice()),
        None if ROOTS.contains(&module) => None,
        None => return vec![format!("src/{path}: module '{module}' is in no row of tests/architecture.rs")],
    };
    let mut wrong = Vec::new();
    if !text.starts_with("//!") {
        wrong.push(format!("src/{path}: does not open with //! (what it owns, who calls it, what it must not do)"));
    }
    if text.lines().count() > MOST_LINES {
        wrong.push(format!("src/{path}: above {MOST_LINES} lines: two things met in it"));
    }
    let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
    let code = text.lines().take_while(|line| line.trim() != "#[cfg(test)]" && !is_test);
    for (number, line) in code.enumerate().map(|(index, line)| (index + 1, line.split("//").next().unwrap_or(line))) {
        let mut complain = |what: String| wrong.push(format!("src/{path}:{number}: {what}"));
        if line.contains("use crate::{") {
            complain("write one `use crate::module::..` for each module".to_owned());
        }
        for other in line.split("crate::").skip(1) {
            let named: &str = other.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or(other);
            let shared = CORE.contains(&named) || SHARED.contains(&named);
            let inner = named == module || shared || named.is_empty();
            if !inner && allowed.is_some_and(|others| !others.contains(&named)) {
                complain(format!("{module} may not name crate::{named}"));
            }
        }
        for (word, places) in RESERVED {
            if line.contains(word) && !places.iter().any(|place| path.starts_with(place)) {
                complain(format!("'{}' is said in {places:?} only", word.trim()));
            }
        }
    }
    wrong
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("src/ can be read") {
        let path = entry.expect("src/ can be listed").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn layers_hold() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    found.sort_unstable();
    assert!(found.len() > 100, "{} files", found.len());
    let wrong: Vec<String> = found
        .iter()
        .flat_map(|file| {
            let path = file.strip_prefix(&src).expect("below src/").to_str().expect("a plain name");
            check(path, &fs::read_to_string(file).expect("source is text"))
        })
        .collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn cluster_program_keeps_to_its_rules() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/cluster/src");
    let mut found = Vec::new();
    files(&src, &mut found);
    for file in found {
        let (path, text) = (file.strip_prefix(&src).expect("below src/"), fs::read_to_string(&file).expect("text"));
        assert!(text.starts_with("//!") && text.lines().count() <= MOST_LINES, "{}", path.display());
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for word in ["unsafe ", "env::var", "env::args", "clap::", "tokio::spawn", "thread::spawn", "process::exit"] {
            assert!(!code.contains(word), "{}: '{word}'", path.display());
        }
        // The one composition root with tasks; requests are made by `server` alone.
        assert!(!code.contains("JoinSet") || path.starts_with("config_manager"), "{}", path.display());
        assert!(!code.contains("legacy::Client") || path.ends_with("server.rs"), "{}", path.display());
    }
}

#[test]
fn each_rule_refuses_what_breaks_it() {
    for (path, text, complaint) in [
        ("kubelet/life.rs", "use crate::metrics::Metrics;", "may not name crate::metrics"),
        ("nvml/agent.rs", "fn f() -> crate::hwloc::Tree {}", "may not name crate::hwloc"),
        ("cdi/mod.rs", "use crate::{topology, state};", "one `use crate::module"),
        ("runtime/mod.rs", "use linkwise_kubelet_api::v1beta1;", "linkwise_kubelet_api"),
        ("nvml/events.rs", "fn f() { unsafe { g() } }", "'unsafe'"),
        ("runtime/mod.rs", "let x = std::env::var(\"X\");", "env::var"),
        ("admin/mod.rs", "tokio::spawn(g());", "tokio::spawn"),
        ("mps/daemon.rs", "let s = JoinSet::new();", "JoinSet"),
        ("uds.rs", "use crate::kubelet::Settings;", "may not name crate::kubelet"),
        ("utils/mod.rs", "", "in no row"),
        ("cdi/mod.rs", &"\n".repeat(MOST_LINES), "above 700 lines"),
    ] {
        let wrong = check(path, &format!("//! A module.\n{text}\n")).join("\n");
        assert!(wrong.contains(complaint), "{path}: {text}: {wrong}");
    }
    assert!(check("cdi/mod.rs", "use std::fmt;\n").join("\n").contains("does not open with //!"));
    for (path, text) in [
        ("kubelet/life.rs", "use crate::uds::Peer; use crate::errors::chain;"),
        ("kubelet/convert.rs", "use linkwise_kubelet_api::v1beta1 as wire; use crate::topology::Gpu;"),
        ("runtime/mod.rs", "use crate::nvml::child::Agent; fn f() { tokio::spawn(g()); }"),
        ("admin/mod.rs", "// tokio::spawn(g());\n#[cfg(test)]\nmod tests { fn f() { tokio::spawn(g()); } }"),
    ] {
        assert_eq!(check(path, &format!("//! A module.\n{text}\n")), Vec::<String>::new(), "{path}: {text}");
    }
}

#[test]
fn every_dependency_has_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let reasons = fs::read_to_string(root.join("docs/dependencies.md")).expect("docs/dependencies.md can be read");
    let named: Vec<&str> = reasons
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split('|').next())
        .flat_map(|cell| cell.split(',').map(str::trim))
        .collect();
    for manifest in [
        "Cargo.toml",
        "crates/api-server-box/Cargo.toml",
        "crates/cluster/Cargo.toml",
        "crates/core/Cargo.toml",
        "crates/kubelet-api/Cargo.toml",
        "crates/kubelet-box/Cargo.toml",
        "crates/scheduler-box/Cargo.toml",
    ] {
        let text = fs::read_to_string(root.join(manifest)).expect("a manifest can be read");
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            } else if let (true, Some((name, _))) = (section.ends_with("dependencies]"), line.split_once(" = ")) {
                let name = name.trim_end_matches(".workspace");
                let ours = name.starts_with("linkwise") || name == "fake-nvml";
                assert!(ours || named.contains(&name), "{name} of {section} has no row in docs/dependencies.md");
            }
        }
    }
}

#[test]
fn documented_tests_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("tests/README.md")).expect("tests/README.md can be read");
    let (_, faults) = readme.split_once("## Faults and their tests").expect("tests/README.md lists faults");
    let mut sources = Vec::new();
    ["src", "tests", "crates"].iter().for_each(|folder| files(&root.join(folder), &mut sources));
    let code: Vec<String> = sources.iter().map(|source| fs::read_to_string(source).expect("source is text")).collect();
    // `module::test` or `test`, between backticks; shorter words are not tests.
    let names = faults.split('`').skip(1).step_by(2).map(|text| text.rsplit("::").next().unwrap_or(text));
    let names: Vec<&str> = names
        .filter(|name| name.len() >= 12 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        .collect();
    assert!(names.len() > 50, "{} names", names.len());
    let missing: Vec<&&str> =
        names.iter().filter(|name| !code.iter().any(|text| text.contains(&format!("fn {name}(")))).collect();
    assert!(missing.is_empty(), "tests/README.md names tests that do not exist: {missing:?}");
}
