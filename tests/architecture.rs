//! Checks rules that the compiler does not: which crate may use which, which files may read the environment, spawn
//! tasks or be `unsafe`, how long files, functions and pages may be, how docs begin, that dependencies have reasons and
//! documented tests exist, and that `make test` runs the tests of each member.
//!
//! The checks read the sources line by line. Those of words and functions skip comments and tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::chart::helm::repository;

/// The members of the workspace, each with the members that it may use: those below it.
const EDGES: [(&str, &[&str]); 14] = [
    ("crates/core", &[]),
    ("crates/system", &["core"]),
    ("crates/host", &["core", "system"]),
    ("crates/nvml", &["core", "host", "system"]),
    ("crates/kubelet-api", &[]),
    ("crates/kubelet", &["core", "kubelet-api", "nvml", "system"]),
    ("crates/cluster", &["core", "system"]),
    ("crates/node", &["core", "host", "kubelet", "nvml", "system"]),
    (".", &["cluster", "core", "host", "kubelet", "node", "nvml", "system"]),
    ("lab/kubelet-box", &["kubelet-api"]),
    ("lab/api-server-box", &["scheduler-box"]),
    ("lab/scheduler-box", &[]),
    ("lab/fake-nvml", &[]),
    (
        "lab",
        &["", "api-server-box", "cluster", "core", "host", "kubelet", "kubelet-box", "node", "scheduler-box", "system"],
    ),
];

/// Words that only some files may use: the word, and the beginnings of those files' paths.
const RESERVED: [(&str, &[&str]); 12] = [
    ("unsafe ", &["crates/nvml/src/raw.rs", "lab/fake-nvml/"]),
    ("linkwise_kubelet_api", &["crates/kubelet/src/", "lab/kubelet-box/"]),
    ("env::var", &["src/config/", "crates/kubelet-api/build.rs", "lab/build.rs", "lab/fake-nvml/", "lab/kubelet-box/"]),
    ("env::args", &["src/config/"]),
    ("clap::", &["src/config/", "lab/src/"]),
    ("tokio::spawn", &["src/run/", "lab/"]),
    ("thread::spawn", &["src/run/", "lab/"]),
    ("thread::Builder", &["crates/nvml/src/agent.rs", "crates/system/src/", "lab/"]),
    (
        "JoinSet",
        &["crates/node/src/node", "crates/nvml/src/supervisor/", "src/commands/config_manager/", "src/run/", "lab/"],
    ),
    ("unbounded_channel", &["lab/"]),
    ("process::exit", &[]),
    ("legacy::Client", &["crates/cluster/src/server.rs"]),
];

/// The longest file, with the tests in it.
const MAX_FILE_LINES: usize = 700;

/// The longest function, tests excluded.
const MAX_FUNCTION_LINES: usize = 80;

/// The most characters of a line.
const MAX_COLUMNS: usize = 120;

/// The folders of the members.
const CODE: [&str; 3] = ["src", "crates", "lab"];

/// All folders with sources.
const FOLDERS: [&str; 7] = ["src", "crates", "lab", "tests", "benches", "fuzz/src", "fuzz/fuzz_targets"];

/// Words with which a doc must not begin: it begins with a noun or a verb.
const OPENERS: [&str; 17] = [
    "What", "Whether", "How", "Where", "When", "Which", "Who", "Why", "From", "Of", "By", "For", "In", "On", "To",
    "With", "Wherever",
];

/// The most words of docs/, README.md and ARCHITECTURE.md together.
const MAX_WORDS: usize = 36_000;

/// The code of a file, with line numbers: without comments and tests.
fn code<'a>(path: &str, text: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
    let lines = text.lines().take_while(move |line| line.trim() != "#[cfg(test)]" && !is_test);
    lines.enumerate().map(|(index, line)| (index + 1, line.split("//").next().unwrap_or(line)))
}

/// Complaints about one file, `path` being relative to the repository; a line each.
fn check(path: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    if !text.starts_with("//!") && !path.ends_with("build.rs") {
        wrong.push(format!("{path}: does not open with //! (what it owns, who calls it, what it must not do)"));
    }
    if text.lines().count() > MAX_FILE_LINES {
        wrong.push(format!("{path}: above {MAX_FILE_LINES} lines: two things met in it"));
    }
    for (number, line) in code(path, text) {
        for (word, places) in RESERVED {
            if line.contains(word) && !places.iter().any(|place| path.starts_with(place)) {
                wrong.push(format!("{path}:{number}: '{}' is allowed in {places:?} only", word.trim()));
            }
        }
    }
    wrong.extend(long_functions(path, text));
    wrong
}

/// Functions above [`MAX_FUNCTION_LINES`] lines. rustfmt closes a function at the indentation at which it begins.
fn long_functions(path: &str, text: &str) -> Vec<String> {
    let (mut wrong, mut begun) = (Vec::new(), Vec::<(usize, usize, String)>::new());
    for (number, line) in code(path, text) {
        let indent = line.len() - line.trim_start().len();
        let words = line.trim_start();
        let is_function = words.starts_with("fn ") || words.contains(" fn ") && words.starts_with(['p', 'a', 'c', 'u']);
        if is_function {
            begun.push((number, indent, words.to_owned()));
        }
        if words.trim_end() == "}"
            && let Some(at) = begun.iter().rposition(|(_, begins, _)| *begins == indent)
        {
            let (from, _, name) = begun.remove(at);
            if number - from + 1 > MAX_FUNCTION_LINES {
                wrong.push(format!("{path}:{from}: {} lines: {name}", number - from + 1));
            }
        }
    }
    wrong
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the sources can be read") {
        let path = entry.expect("the sources can be listed").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Every source file below these folders: its path in the repository, and its text.
pub fn sources(folders: &[&str]) -> Vec<(String, String)> {
    let (root, mut found) = (repository(""), Vec::new());
    folders.iter().for_each(|folder| files(&root.join(folder), &mut found));
    found.sort_unstable();
    let read = |file: &PathBuf| {
        let path = file.strip_prefix(&root).expect("below the root").to_str().expect("a plain name").to_owned();
        (path, fs::read_to_string(file).expect("source is text"))
    };
    found.iter().map(read).collect()
}

#[test]
fn rules_hold_in_each_file() {
    let sources = sources(&CODE);
    assert!(sources.len() > 300, "{} files", sources.len());
    let own = sources.iter().filter(|(path, _)| !path.contains("/tests/") && !path.contains("/benches/"));
    let wrong: Vec<String> = own.flat_map(|(path, text)| check(path, text)).collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn rules_refuse_what_breaks_them() {
    let long = format!("fn f() {{\n{}}}", "    g();\n".repeat(MAX_FUNCTION_LINES));
    for (path, text, complaint) in [
        ("src/run/mod.rs", "use linkwise_kubelet_api::v1beta1;", "linkwise_kubelet_api"),
        ("crates/nvml/src/events.rs", "fn f() { unsafe { g() } }", "'unsafe'"),
        ("src/run/mod.rs", "let x = std::env::var(\"X\");", "env::var"),
        ("crates/node/src/admin/mod.rs", "tokio::spawn(g());", "tokio::spawn"),
        ("crates/host/src/mps/daemon.rs", "let s = JoinSet::new();", "JoinSet"),
        ("crates/node/src/node.rs", &long, "lines: fn f"),
        ("crates/host/src/cdi/mod.rs", &"\n".repeat(MAX_FILE_LINES), "above 700 lines"),
    ] {
        let wrong = check(path, &format!("//! A module.\n{text}\n")).join("\n");
        assert!(wrong.contains(complaint), "{path}: {wrong}");
    }
    assert!(check("crates/host/src/cdi/mod.rs", "use std::fmt;\n").join("\n").contains("does not open with //!"));
    let skipped = "// tokio::spawn(g());\n#[cfg(test)]\nmod tests { fn f() { tokio::spawn(g()); } }";
    for (path, text) in [
        ("crates/kubelet/src/device_plugin/convert.rs", "use linkwise_kubelet_api::v1beta1 as wire;"),
        ("src/run/mod.rs", "fn f() { tokio::spawn(g()); }"),
        ("crates/node/src/admin/mod.rs", skipped),
    ] {
        assert_eq!(check(path, &format!("//! A module.\n{text}\n")), Vec::<String>::new(), "{path}: {text}");
    }
}

/// The members that a manifest names in `[dependencies]`, without `linkwise-`.
fn edges(manifest: &str) -> BTreeSet<String> {
    let (mut section, mut found) = ("", BTreeSet::new());
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[dependencies]" && line.contains("path = ") {
            let name = line.split([' ', '=']).next().unwrap_or(line);
            found.insert(name.trim_start_matches("linkwise").trim_start_matches('-').to_owned());
        }
    }
    found
}

#[test]
fn crates_use_only_what_stands_below_them() {
    let manifest = |member: &str| fs::read_to_string(repository(member).join("Cargo.toml")).expect("a manifest");
    for (member, allowed) in EDGES {
        let found = edges(&manifest(member));
        let beyond: Vec<&String> = found.iter().filter(|name| !allowed.contains(&name.as_str())).collect();
        assert!(beyond.is_empty(), "{member} uses {beyond:?}");
    }
    let listed: BTreeSet<&str> = EDGES.iter().map(|(member, _)| *member).collect();
    for folder in ["crates", "lab"] {
        for entry in fs::read_dir(repository(folder)).expect("a folder of members").flatten() {
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            let is_member = entry.path().join("Cargo.toml").exists();
            assert!(!is_member || listed.contains(name.as_str()), "{name} has no row in tests/architecture.rs");
        }
    }
    assert_eq!(edges("[dependencies]\nlinkwise-core = { path = \"x\" }\nserde = \"1\"\n"), ["core".to_owned()].into());
}

/// Complaints about the lines of a file: a doc of an item that begins with one of [`OPENERS`], or a line that is too
/// long.
fn unreadable(path: &str, text: &str) -> Vec<String> {
    let (mut wrong, mut before) = (Vec::new(), "");
    for (number, full) in (1..).zip(text.lines()) {
        let line = full.trim();
        if let (Some(doc), false) = (line.strip_prefix("/// "), before.starts_with("///")) {
            let word = doc.trim_start_matches(['[', '`', '*']).split(|c: char| !c.is_alphanumeric()).next();
            if word.is_some_and(|word| OPENERS.contains(&word)) {
                wrong.push(format!("{path}:{number}: {line}"));
            }
        }
        if full.chars().count() > MAX_COLUMNS {
            wrong.push(format!("{path}:{number}: {} columns", full.chars().count()));
        }
        before = line;
    }
    wrong
}

#[test]
fn docs_begin_with_a_noun_or_a_verb_and_lines_are_short() {
    let sources = sources(&FOLDERS);
    assert!(sources.len() > 600, "{} files", sources.len());
    let wrong: Vec<String> = sources.iter().flat_map(|(path, text)| unreadable(path, text)).collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    assert_eq!(unreadable("x.rs", "/// Where it is.\n/// What it is.\nfn f() {}\n/// A place.\n").len(), 1);
    assert_eq!(unreadable("x.rs", "/// [`Where`] it is.\n").len(), 1);
    assert_eq!(unreadable("x.rs", &"é".repeat(MAX_COLUMNS + 1)).len(), 1);
}

#[test]
fn pages_are_short_enough_to_be_read() {
    let pages = fs::read_dir(repository("docs")).expect("docs/ can be read").flatten().map(|entry| entry.path());
    let pages = pages.filter(|page| page.extension().is_some_and(|extension| extension == "md"));
    let read = |page: PathBuf| fs::read_to_string(page).expect("a page is text").split_whitespace().count();
    let words: usize = pages.chain(["README.md", "ARCHITECTURE.md"].map(repository)).map(read).sum();
    assert!(words <= MAX_WORDS, "{words} words");
}

#[test]
fn every_binary_of_tests_is_run() {
    let makefile = fs::read_to_string(repository("Makefile")).expect("the Makefile can be read");
    let mut lines = makefile.lines();
    let list = lines.find(|line| line.starts_with("OTHER_TESTS := --lib --bins ")).expect("make test has a list");
    let named: BTreeSet<&str> = list.split([' ', ',', ')']).collect();
    let mut binaries = 0;
    for member in EDGES.iter().filter(|(member, _)| *member != ".").map(|(member, _)| repository(member)) {
        for binary in fs::read_dir(member.join("tests")).into_iter().flatten().flatten() {
            let binary = binary.file_name();
            let binary = binary.to_str().expect("a name is text").trim_end_matches(".rs");
            assert!(named.contains(binary), "make test runs no binary of tests called {binary}");
            binaries += 1;
        }
    }
    assert!(binaries >= 5, "{binaries} binaries");
}

#[test]
fn every_dependency_has_a_reason() {
    let reasons = fs::read_to_string(repository("docs/dependencies.md")).expect("docs/dependencies.md can be read");
    let cells = reasons.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next());
    let named: Vec<&str> = cells.flat_map(|cell| cell.split(',').map(str::trim)).collect();
    for (member, _) in EDGES {
        let text = fs::read_to_string(repository(member).join("Cargo.toml")).expect("a manifest can be read");
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
    let readme = fs::read_to_string(repository("tests/README.md")).expect("tests/README.md can be read");
    let (_, faults) = readme.split_once("## Faults and their tests").expect("tests/README.md lists faults");
    let sources = sources(&["src", "tests", "crates", "lab"]);
    // `module::test` or `test`, between backticks; text below 12 bytes does not name a test.
    let names = faults.split('`').skip(1).step_by(2).map(|text| text.rsplit("::").next().unwrap_or(text));
    let is_name = |name: &&str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let names: Vec<&str> = names.filter(|name| name.len() >= 12).filter(is_name).collect();
    assert!(names.len() > 50, "{} names", names.len());
    let exists = |name: &str| sources.iter().any(|(_, text)| text.contains(&format!("fn {name}(")));
    let missing: Vec<&&str> = names.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "tests/README.md names tests that do not exist: {missing:?}");
}
