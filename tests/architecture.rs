//! Holds the layering: reads the text of `src/` and checks who names whom, and which words the
//! pure core may not say. The rules stand in ARCHITECTURE.md; a new top-level module needs a
//! row here and a line there. Also holds that each dependency has its reason.
//!
//! Test code (`#[cfg(test)]`) may use what it likes, `unsafe` excepted. The checker has its own
//! tests below: a text that breaks each rule, and one that only looks as if.

#![allow(clippy::expect_used, reason = "a test may panic")]

#[path = "architecture/lexer.rs"]
mod lexer;

use std::fs;
use std::path::{Path, PathBuf};

use lexer::{Name, names};

/// The pure core, innermost first.
const CORE: [&str; 3] = ["topology", "allocation", "inventory"];

/// The composition roots: they build everything and may name anything but wire types.
const ROOTS: [&str; 5] = ["runtime", "demo", "commands", "main", "lib"];

/// Each module and the modules of ours that it may name.
const LAYERS: [(&str, &[&str]); 15] = [
    ("topology", &[]),
    ("allocation", &["topology"]),
    ("inventory", &["topology", "allocation"]),
    ("kubelet", &["topology", "allocation", "inventory", "proto"]),
    ("kubelet_box", &["proto"]),
    ("proto", &[]),
    ("nvml", &CORE),
    ("hwloc", &CORE),
    ("config", &CORE),
    ("metrics", &CORE),
    ("admin", &CORE),
    ("cdi", &CORE),
    ("labels", &CORE),
    ("machines", &CORE),
    ("mps", &CORE),
];

/// What the core may not name: runs of path segments.
const IMPURE: [&[&str]; 21] = [
    &["async"],
    &["await"],
    &["tokio"],
    &["std", "fs"],
    &["std", "io"],
    &["std", "net"],
    &["std", "os"],
    &["std", "env"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "sync", "Mutex"],
    &["std", "sync", "RwLock"],
    &["Instant"],
    &["SystemTime"],
    &["HashMap"],
    &["HashSet"],
    &["f32"],
    &["f64"],
    &["tracing"],
    &["anyhow"],
    &["catch_unwind"],
];

/// What the core may not call as a macro: it prints, or it panics.
const LOUD_MACROS: [&str; 12] = [
    "print",
    "println",
    "eprint",
    "eprintln",
    "dbg",
    "panic",
    "todo",
    "unimplemented",
    "unreachable",
    "assert",
    "assert_eq",
    "assert_ne",
];

/// What the core may not call as a method: it panics.
const PANICKING_METHODS: [&str; 4] = ["unwrap", "expect", "unwrap_err", "expect_err"];

/// What reads argv or the environment.
const ENVIRONMENT: [&[&str]; 9] = [
    &["env", "var"],
    &["env", "var_os"],
    &["env", "vars"],
    &["env", "vars_os"],
    &["env", "args"],
    &["env", "args_os"],
    &["env", "set_var"],
    &["env", "remove_var"],
    &["clap"],
];

/// What starts a task or a thread of its own.
const SPAWNING: [&[&str]; 7] = [
    &["tokio", "spawn"],
    &["task", "spawn"],
    &["task", "spawn_blocking"],
    &["task", "spawn_local"],
    &["JoinSet"],
    &["TaskTracker"],
    &["thread", "spawn"],
];

/// The longest file, tests included.
const MOST_LINES: usize = 700;

/// The only file that may say `unsafe`.
const UNSAFE_FILE: &str = "nvml/raw.rs";

/// Checks one file of `src/`, `path` being relative to it; says what is wrong, a line each.
fn check(path: &str, text: &str) -> Vec<String> {
    let module = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
    let mut wrong = Vec::new();

    if !text.starts_with("//!") {
        wrong.push(format!("src/{path}: does not open with //! (what it owns, who calls it, what it must not do)"));
    }
    let lines = text.lines().count();
    if lines > MOST_LINES {
        wrong.push(format!("src/{path}: {lines} lines, above {MOST_LINES}: two things met in it"));
    }
    if known(module).is_none() {
        wrong.push(format!(
            "src/{path}: unknown top-level module '{module}': add it to ARCHITECTURE.md and to tests/architecture.rs"
        ));
        return wrong;
    }

    let all = names(text);
    for name in all.iter().filter(|name| name.has(&["unsafe"]) && path != UNSAFE_FILE) {
        wrong.push(format!("src/{path}:{}: unsafe outside src/{UNSAFE_FILE}", name.line));
    }
    if path.ends_with("tests.rs") || path.contains("/tests/") {
        return wrong;
    }
    for name in all.iter().filter(|name| !name.test) {
        let complaint = edge(path, module, name).or_else(|| word(module, name));
        wrong.extend(complaint.map(|complaint| format!("src/{path}:{}: {complaint}", name.line)));
    }
    wrong
}

/// The modules that `module` may name; `None` for a module nobody has heard of.
fn known(module: &str) -> Option<Vec<&'static str>> {
    if ROOTS.contains(&module) {
        // Wire types stop at the kubelet's two sides, whoever asks.
        let named = LAYERS.iter().map(|(name, _)| *name).filter(|name| *name != "proto");
        return Some(named.chain(ROOTS).collect());
    }
    LAYERS.iter().find(|(name, _)| *name == module).map(|(_, allowed)| allowed.to_vec())
}

/// A path of ours that leads to another module than allowed.
fn edge(path: &str, module: &str, name: &Name) -> Option<String> {
    let target = name.target(depth(path))?;
    if target == module {
        return None;
    }
    let allowed = known(module)?;
    if known(target).is_none() {
        // `super::x` may as well be an item of lib.rs or of an inner module; `crate::x` says it all.
        return name.is_rooted().then(|| format!("names crate::{target}, which is no top-level module"));
    }
    (!allowed.contains(&target)).then(|| format!("{module} names {target} ({}), which its layer may not", name.text()))
}

/// A word that `module` may not say.
fn word(module: &str, name: &Name) -> Option<String> {
    let said = |list: &[&[&str]]| list.iter().any(|run| name.has(run));
    if CORE.contains(&module) {
        let loud = name.is_macro && name.last().is_some_and(|last| LOUD_MACROS.contains(&last));
        let panicking = name.is_member && name.last().is_some_and(|last| PANICKING_METHODS.contains(&last));
        if said(&IMPURE) || loud || panicking {
            return Some(format!("the core may not say {}", name.text()));
        }
    }
    if module != "config" && said(&ENVIRONMENT) {
        return Some(format!("only config reads argv and the environment: {}", name.text()));
    }
    if !ROOTS.contains(&module) && module != "kubelet_box" && said(&SPAWNING) {
        return Some(format!("only the composition roots spawn: {}", name.text()));
    }
    None
}

/// How many `super::` lead from the file's module to the crate's root.
fn depth(path: &str) -> usize {
    let inner = path.trim_end_matches("/mod.rs");
    if ["lib.rs", "main.rs"].contains(&inner) { 0 } else { inner.split('/').count() }
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
fn the_layers_hold() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    found.sort_unstable();
    assert!(!found.is_empty());
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
fn every_dependency_has_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("Cargo.toml can be read");
    let reasons = fs::read_to_string(root.join("docs/dependencies.md")).expect("docs/dependencies.md can be read");
    let named: Vec<&str> = reasons
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split('|').next())
        .flat_map(|cell| cell.split(',').map(str::trim))
        .collect();
    let mut section = "";
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if let (true, Some((name, _))) = (section.ends_with("dependencies]"), line.split_once(" = ")) {
            assert!(named.contains(&name), "{name} of {section} has no row in docs/dependencies.md");
        }
    }
}

/// What the checker says about a file that holds just this after its opening line.
fn about(path: &str, text: &str) -> String {
    check(path, &format!("//! A module.\n{text}\n")).join("\n")
}

#[test]
fn outward_edges_are_seen_however_they_are_written() {
    for (path, text) in [
        ("topology/mod.rs", "use crate::allocation::Policy;"),
        ("topology/graph.rs", "use super::super::inventory;"),
        ("topology/mod.rs", "fn f() { super::nvml::probe() }"),
        ("allocation/mod.rs", "use crate::{topology::{Gpu, Rank}, inventory::Event};"),
        ("allocation/mod.rs", "fn f(x: &crate::machines::Machine) {}"),
        ("kubelet/server.rs", "use crate::metrics::Counters as _;"),
        ("metrics/mod.rs", "use crate::proto::v1beta1;"),
        ("runtime/mod.rs", "use crate::proto::v1beta1::Device;"),
        ("kubelet_box/mod.rs", "use crate::topology::GpuUuid;"),
        ("nvml/agent.rs", "pub(crate) use crate :: hwloc :: probe;"),
        ("machines.rs", "use crate::nvml;"),
    ] {
        assert!(about(path, text).contains("layer may not"), "{path}: {text}");
    }
    assert!(about("kubelet/mod.rs", "use crate::Oddity;").contains("no top-level module"));
}

#[test]
fn inward_edges_pass() {
    for (path, text) in [
        ("inventory/mod.rs", "use crate::{allocation, topology::Gpu}; use crate::inventory::health;"),
        ("kubelet/convert.rs", "use crate::proto::v1beta1 as wire; use super::server;"),
        ("kubelet_box/mod.rs", "use crate::proto::v1beta1::Device; fn f() { tokio::spawn(g()); }"),
        ("runtime/mod.rs", "use crate::{nvml, kubelet, demo}; fn f() { tokio::spawn(g()); let s = JoinSet::new(); }"),
        ("config/mod.rs", "use clap::Parser; fn f() { std::env::var(\"X\"); }"),
        (
            "topology/mod.rs",
            "// use crate::nvml;\n/* crate::nvml /* nested */ crate::kubelet */ const X: &str = \"crate::nvml\";",
        ),
        ("topology/mod.rs", "#[cfg(test)]\nmod tests { use crate::machines::load; fn f() { g().unwrap(); } }"),
        ("topology/mod.rs", "#[cfg(test)]\nmod tests;"),
        ("topology/tests.rs", "use crate::machines; fn f() { panic!(\"{}\", 0.5f64) }"),
    ] {
        assert_eq!(about(path, text), "", "{path}: {text}");
    }
}

#[test]
fn the_core_stays_pure() {
    for text in [
        "async fn f() {}",
        "use tokio::sync::watch;",
        "use std::{fmt, fs};",
        "use std::net::IpAddr;",
        "fn f() { std::env::temp_dir(); }",
        "use std::time::{Duration, Instant};",
        "fn f() -> std::time::SystemTime {}",
        "use std::collections::HashMap;",
        "fn f(x: std::collections::HashSet<u8>) {}",
        "fn f(x: f32) {}",
        "const X: f64 = 1.0;",
        "fn f() { tracing::info!(\"x\"); }",
        "fn f() { println!(\"x\"); }",
        "fn f() { x.unwrap(); }",
        "fn f() { x\n.expect(\"y\"); }",
        "fn f() { x.map(Option::unwrap); }",
        "fn f() { panic!(); }",
        "fn f() { todo!() }",
        "fn f() { assert!(x); }",
        "#[cfg(not(test))]\nmod inner { fn f() { panic!(); } }",
        "#[cfg(test)]\nmod tests { fn f() {} }\nfn g() { panic!(); }",
    ] {
        for path in ["topology/mod.rs", "allocation/value.rs", "inventory/health.rs"] {
            assert!(about(path, text).contains("the core may not say"), "{path}: {text}");
        }
        assert!(!about("metrics/mod.rs", text).contains("the core"), "{text}");
    }
    for text in [
        "use std::time::Duration;",
        "#[expect(dead_code)] fn f(expect: u8) { x.unwrap_or(expect); debug_assert!(x); }",
        "fn f<'a>(x: &'a str) -> char { let q = '\"'; let b = b'\\''; '\\u{41}' } // panic!()",
        "const X: &str = r#\"panic!() \" unwrap\"#; const Y: &[u8] = b\"x\\\"f64\";",
        "fn r#async() {}",
        "fn f() -> u64 { 1_000_u64 + 0xf64 }",
    ] {
        assert_eq!(about("topology/mod.rs", text), "", "{text}");
    }
}

#[test]
fn special_powers_have_one_address() {
    for text in
        ["fn f() { unsafe { g() } }", "unsafe extern \"C\" fn f() {}", "#[cfg(test)] mod tests { unsafe fn f() {} }"]
    {
        assert!(about("nvml/events.rs", text).contains("unsafe outside"), "{text}");
        assert_eq!(about("nvml/raw.rs", text), "", "{text}");
    }
    for text in ["use clap::Parser;", "fn f() { std::env::var(\"X\"); }", "use std::env; fn f() { env::args_os(); }"] {
        assert!(about("runtime/mod.rs", text).contains("only config"), "{text}");
    }
    for text in
        ["fn f() { tokio::spawn(g()); }", "use tokio::task::{self, JoinSet};", "fn f() { std::thread::spawn(g); }"]
    {
        assert!(about("admin/mod.rs", text).contains("only the composition roots spawn"), "{text}");
    }
}

#[test]
fn files_open_with_what_they_are_and_stay_short() {
    assert!(check("topology/mod.rs", "use std::fmt;\n").join("\n").contains("does not open with //!"));
    assert!(about("topology/mod.rs", &"\n".repeat(MOST_LINES)).contains("above 700"));
    let stranger = about("utils/mod.rs", "use crate::topology;");
    assert!(
        stranger.contains("unknown top-level module 'utils'") && stranger.contains("ARCHITECTURE.md"),
        "{stranger}"
    );
}
