//! `linkwise completions` and `linkwise man`, read by the shells and by `man`. A test whose program is missing is
//! ignored, except bash's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::cli::text;
use crate::dra::published::golden::assert_all_refused;

fn linkwise(args: &[&str]) -> String {
    text(&mut super::linkwise(args))
}

/// The subcommands that `--help` lists, without `help`.
fn listed(args: &[&str]) -> Vec<String> {
    let help = linkwise(args);
    let Some((_, commands)) = help.split_once("Commands:\n") else { return Vec::new() };
    let lines = commands.lines().take_while(|line| !line.is_empty());
    let named = lines.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
    named.filter(|name| *name != "help").map(str::to_owned).collect()
}

fn run_program(program: &str, args: &[&str]) -> Output {
    let ran = Command::new(program).args(args).env("LC_ALL", "C.UTF-8").env("MANWIDTH", "80").output();
    ran.unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn completions(shell: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("completions");
    fs::write(&file, linkwise(&["completions", shell])).unwrap();
    (folder, file)
}

#[test]
fn every_command_has_page_and_completions() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man/man1");
    linkwise(&["man", pages.to_str().unwrap()]);
    let texts = ["bash", "zsh", "fish"].map(|shell| linkwise(&["completions", shell]));
    let commands = listed(&["--help"]);
    assert!(commands.len() > 12 && commands.contains(&"top".to_owned()), "{commands:?}");
    let mut expected = vec!["linkwise.1".to_owned()];
    for command in &commands {
        expected.push(format!("linkwise-{command}.1"));
        let below = listed(&[command, "--help"]);
        expected.extend(below.iter().map(|below| format!("linkwise-{command}-{below}.1")));
        assert!(texts.iter().all(|text| text.contains(command.as_str())), "{command}");
    }
    assert!(expected.contains(&"linkwise-admin-state.1".to_owned()), "{expected:?}");
    let mut written: Vec<String> =
        fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    written.sort_unstable();
    expected.sort_unstable();
    assert_eq!(written, expected);
    // The agent's command is hidden, because only linkwise starts it.
    assert!(texts.iter().all(|text| !text.contains("nvml-agent") && !text.contains("agent-program")));
    let page = fs::read_to_string(pages.join("linkwise-top.1")).unwrap();
    for words in [".TH linkwise-top 1", "\\-\\-interval", "LINKWISE_ADMIN_SOCKET", "\\-\\-once"] {
        assert!(page.contains(words), "no '{words}' in\n{page}");
    }
}

#[test]
fn folder_that_cannot_be_made_is_named() {
    assert_all_refused(&["man"], &[(&["/dev/null/man"], "cannot make /dev/null/man")]);
}

/// Bash's completions of the last word.
fn in_bash(words: &[&str]) -> Vec<String> {
    let (_folder, file) = completions("bash");
    let (last, before) = (words.last().unwrap(), words.get(words.len() - 2).unwrap());
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        "source '{}' && complete -p linkwise >/dev/null && COMP_WORDS=({}) COMP_CWORD={} && \
         _linkwise linkwise '{last}' '{before}' && printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        file.display(),
        quoted.join(" "),
        words.len() - 1,
    );
    let output = run_program("bash", &["--norc", "-u", "-c", &script]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_machines() {
    for (words, expected) in [
        (&["linkwise", "topo"][..], &["topology"][..]),
        (&["linkwise", "admin", "re"], &["release", "resume"]),
        (&["linkwise", "top", "--onc"], &["--once"]),
        (&["linkwise", "allocate", "--format", ""], &["text", "json"]),
        (&["linkwise", "snapshot", "--node", "dgx-a"], &["dgx-a100"]),
        (&["linkwise", "topology", "--node", "power"], &["power9-v100"]),
    ] {
        let mut offered = in_bash(words);
        offered.sort_unstable();
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(offered, expected, "{words:?}");
    }
}

#[test]
#[cfg_attr(not(has_zsh), ignore = "no zsh here")]
fn zsh_loads_completions() {
    let (_folder, file) = completions("zsh");
    let script = format!("autoload -Uz compinit; compinit -D -u; source '{}'; print $_comps[linkwise]", file.display());
    let output = run_program("zsh", &["-f", "-c", &script]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "_linkwise\n");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains(":NAME|FILE:{_alternative \"machines:machine:(") && text.contains("\"files:file:_files\"}"));
}

#[test]
#[cfg_attr(not(has_fish), ignore = "no fish here")]
fn fish_completes_machines_and_files() {
    let (folder, file) = completions("fish");
    fs::write(folder.path().join("dgx-of-mine.yaml"), "").unwrap();
    for (line, expected) in [
        ("linkwise topo", vec!["topology"]),
        ("linkwise snapshot --node dgx-h", vec!["dgx-h100"]),
        ("linkwise snapshot --node dgx-o", vec!["dgx-of-mine.yaml"]),
    ] {
        let script = format!("cd '{}'; source '{}'; complete -C '{line}'", folder.path().display(), file.display());
        let output = run_program("fish", &["--no-config", "-c", &script]);
        assert!(output.status.success(), "{output:?}");
        let offered = String::from_utf8(output.stdout).unwrap();
        let offered: Vec<&str> = offered.lines().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(offered, expected, "{line}");
    }
}

fn pages() -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    linkwise(&["man", folder.path().to_str().unwrap()]);
    let pages = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    (folder, pages)
}

fn run_on_page(program: &str, args: &[&str], page: &Path) -> String {
    let page = page.to_str().unwrap();
    let output = run_program(program, &[args, &[page]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && output.stderr.is_empty(), "{page}: {output:?}");
    text
}

#[test]
#[cfg_attr(not(has_man), ignore = "no man here")]
fn man_renders_pages_without_warnings() {
    for page in pages().1 {
        let text = run_on_page("man", &["--warnings", "-E", "UTF-8", "-l"], &page);
        assert!(text.contains("NAME") && text.contains("linkwise"), "{}: {text}", page.display());
    }
}

#[test]
#[cfg_attr(not(has_mandoc), ignore = "no mandoc here")]
fn mandoc_finds_no_error_in_pages() {
    for page in pages().1 {
        run_on_page("mandoc", &["-T", "lint", "-W", "error"], &page);
    }
}
