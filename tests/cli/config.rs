//! `linkwise config`: every example of the NVIDIA plugin's README has its described effect, and every error in a file
//! is reported with line and key.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::{linkwise, text};
use crate::dra::published::golden::assert_golden;

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs")
}

fn shown(file: &str, args: &[&str]) -> Value {
    let mut command = linkwise(&[&["config", "show", "--format", "json", "--config-file", file], args].concat());
    serde_json::from_str(&text(command.current_dir(configs()))).unwrap()
}

/// The settings of a file that differ from the defaults, by key.
fn values(file: &str) -> Value {
    let defaults: Value = serde_json::from_str(&text(&mut linkwise(&["config", "show", "--format", "json"]))).unwrap();
    let shown = shown(file, &[]);
    assert_eq!(shown["findings"], json!([]), "{file}");
    let settings = shown["settings"].as_object().unwrap().iter();
    let changed = settings.filter(|(key, shown)| shown["value"] != defaults["settings"][*key]["value"]);
    let changed = changed.filter(|(key, _)| *key != "configFile");
    changed.map(|(key, shown)| (key.clone(), shown["value"].clone())).collect::<serde_json::Map<_, _>>().into()
}

fn files(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(configs().join(folder)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(!names.is_empty());
    names
}

#[test]
fn nvidias_examples_have_their_effect() {
    let mut text = String::new();
    for file in files("nvidia") {
        let path = format!("nvidia/{file}");
        text += &format!("{file}: {:#}\n", values(&path));
        let checked = self::text(linkwise(&["config", "check", &path]).current_dir(configs()));
        assert_eq!(checked, format!("{path}: valid\n"));
    }
    assert_golden("config-nvidia", &text);
}

#[test]
fn show_prints_values_and_origins() {
    for file in files("linkwise") {
        let path = format!("linkwise/{file}");
        let mut command = linkwise(&["config", "show", "--config-file", &path]);
        assert_golden(&format!("config-show-{file}"), &text(command.current_dir(configs())));
    }
    let args =
        ["config", "show", "--config-file=nvidia/mixed.yaml", "--device-id-strategy=index", "--imex-channel-ids=0"];
    let mut command = linkwise(&args);
    command.env("MIG_STRATEGY", "single").env("PASS_DEVICE_SPECS", "true").current_dir(configs());
    assert_golden("config-show-who", &text(&mut command));
    assert_golden("config-show-defaults", &text(&mut linkwise(&["config", "show"])));
}

#[test]
fn everything_file_has_every_key() {
    let shown = shown("linkwise/everything.yaml", &[]);
    for (key, shown) in shown["settings"].as_object().unwrap() {
        let from = if key == "configFile" { "flag" } else { "file" };
        assert_eq!(shown["origin"]["from"], from, "{key}");
    }
}

#[test]
fn check_reports_all_problems() {
    for file in files("bad") {
        let output = linkwise(&["config", "check", &file]).current_dir(configs().join("bad")).output().unwrap();
        let (report, error) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        let notes = report.lines().filter(|line| line.contains(": note: ")).count();
        match report.lines().count() - notes {
            _ if file == "ignored.yaml" => assert!(report.ends_with("ignored.yaml: valid\n"), "{report}"),
            0 => panic!("{file} passes"),
            1 => assert_eq!(error, format!("linkwise: {file}: 1 problem\n")),
            more => assert_eq!(error, format!("linkwise: {file}: {more} problems\n")),
        }
        assert_eq!(output.status.code(), Some(if file == "ignored.yaml" { 0 } else { 1 }), "{file}");
        assert_golden(&format!("config-check-{file}"), &report);
    }
}

#[test]
fn unreadable_file_is_named() {
    for args in [["config", "check", "/no/such/file"], ["config", "show", "--config-file=/no/such/file"]] {
        let output = linkwise(&args).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("linkwise: cannot read the configuration file /no/such/file: "), "{error}");
    }
}

#[test]
fn nvidia_plugins_name_means_run() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("nvidia-device-plugin");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_linkwise"), &link).unwrap();
    let help = |program: &Path, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().replace("nvidia-device-plugin", "linkwise")
    };
    let run = help(Path::new(env!("CARGO_BIN_EXE_linkwise")), &["run", "--help"]);
    assert!(run.contains("--mig-strategy"), "{run}");
    assert_eq!(help(&link, &["--help"]), run);
}
