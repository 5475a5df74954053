//! `linkwise config-manager`, and `linkwise run` with DRA or events: this program becomes `linkwise-cluster`, the one with a client of the API server.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

/// The binary in a folder of its own, as in an image.
fn installed() -> (tempfile::TempDir, std::path::PathBuf) {
    let built = Path::new(env!("CARGO_BIN_EXE_linkwise"));
    // Beside the built one: a hard link does not leave a file system.
    let folder = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
    let program = folder.path().join("linkwise");
    fs::hard_link(built, &program).unwrap();
    (folder, program)
}

#[test]
fn config_manager_becomes_the_program_beside_linkwise() {
    let (folder, program) = installed();
    let other = folder.path().join("linkwise-cluster");
    fs::write(&other, "#!/bin/sh\necho \"$@\" by \"$LINKWISE_AGENT_PROGRAM\"\n").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    let link = folder.path().join("config-manager");
    symlink("linkwise", &link).unwrap();
    let real = program.canonicalize().unwrap();
    for (program, args) in [(&program, &["config-manager", "--oneshot"][..]), (&link, &["--oneshot"])] {
        let output = Command::new(program).args(args).output().unwrap();
        // An agent is started from the smaller of the two programs.
        let expected = format!("config-manager --oneshot by {}\n", real.display());
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
    }
}

#[test]
fn missing_program_for_the_api_server_is_named() {
    let (folder, program) = installed();
    let output = Command::new(program).arg("config-manager").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let named = folder.path().canonicalize().unwrap().join("linkwise-cluster");
    assert!(!output.status.success());
    assert!(error.contains(&format!("cannot start {}", named.display())) && error.contains("API server"), "{error}");
}

/// A `linkwise-cluster` beside the program that prints its arguments.
fn cluster_program(folder: &tempfile::TempDir) {
    let other = folder.path().join("linkwise-cluster");
    fs::write(&other, "#!/bin/sh\necho \"$1\"\n").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn simulated_cluster_is_the_cluster_programs() {
    let (folder, program) = installed();
    cluster_program(&folder);
    let simulate = |args: &[&str]| Command::new(&program).arg("simulate").args(args).output().unwrap();
    let output = simulate(&["--nodes", "3"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "simulate\n", "{output:?}");
    // One machine needs no model of a scheduler.
    let output = simulate(&["--node", "dgx-h100", "--trace", "/dev/null"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no header"), "{output:?}");
}

/// `linkwise run` on a host without GPUs, with an API server's address and a configuration file.
fn run(program: &Path, folder: &tempfile::TempDir) -> Command {
    let at = |name: &str| folder.path().join(name);
    for folder in ["sys", "account"] {
        let _ = fs::create_dir(at(folder));
    }
    fs::write(at("account/token"), "t").unwrap();
    let mut command = Command::new(program);
    command.arg("run").env_clear().env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("KUBERNETES_SERVICE_PORT", "1");
    command.env("LINKWISE_SYSFS", at("sys")).env("KUBELET_SOCKET", at("kubelet.sock")).env("NODE_NAME", "n");
    command.env("LINKWISE_METRICS_ADDRESS", "127.0.0.1:0").env("CONFIG_FILE", at("config.yaml"));
    command.env("LINKWISE_STATE_DIR", at("state")).env("LINKWISE_NVML_LIBRARY", at("no-library"));
    command.env("LINKWISE_SERVICE_ACCOUNT_DIR", at("account")).env("LINKWISE_CDI_DIR", at("cdi"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const NO_DRA: &str = "version: v1\n";
const EVENTS: &str = "version: v1\nlinkwise: {events: {write: true}}\n";
const DRA: &str = "version: v1\nlinkwise: {dra: {gpus: all}}\n";

#[test]
fn run_with_dra_becomes_the_cluster_program() {
    let (folder, program) = installed();
    cluster_program(&folder);
    fs::write(folder.path().join("config.yaml"), DRA).unwrap();
    let output = run(&program, &folder).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run\n", "{output:?}");
    // What the last process left with DRA has to be taken back.
    fs::write(folder.path().join("config.yaml"), NO_DRA).unwrap();
    fs::create_dir_all(folder.path().join("state/claims")).unwrap();
    fs::write(folder.path().join("state/claims/uid.json"), "{}").unwrap();
    let output = run(&program, &folder).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run\n", "{output:?}");
}

#[test]
fn run_with_events_becomes_the_cluster_program() {
    let (folder, program) = installed();
    cluster_program(&folder);
    fs::write(folder.path().join("config.yaml"), EVENTS).unwrap();
    let output = run(&program, &folder).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "run\n", "{output:?}");
    // Without an API server GPUs are served all the same.
    let mut process = run(&program, &folder).env_remove("KUBERNETES_SERVICE_HOST").spawn().unwrap();
    let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut wait_for = |words: &str| log.by_ref().map(Result::unwrap).any(|line| line.contains(words));
    assert!(wait_for("events need the API server: none are written") && wait_for("linkwise is up"));
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn change_to_dra_ends_in_order_and_becomes_it() {
    let (folder, program) = installed();
    cluster_program(&folder);
    let file = folder.path().join("config.yaml");
    fs::write(&file, NO_DRA).unwrap();
    let mut process = run(&program, &folder).spawn().unwrap();
    let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut wait_for = |words: &str| {
        let found = log.by_ref().map(Result::unwrap).find(|line| line.contains(words));
        found.unwrap_or_else(|| panic!("no line with '{words}'"))
    };
    wait_for("linkwise is up");
    fs::write(&file, DRA).unwrap();
    wait_for("starting again as linkwise-cluster");
    let mut printed = String::new();
    process.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "run\n");
    assert!(process.wait().unwrap().success());
}

#[test]
fn change_to_dra_without_an_api_server_leaves_gpus_with_the_plugin() {
    let (folder, program) = installed();
    let file = folder.path().join("config.yaml");
    fs::write(&file, NO_DRA).unwrap();
    let mut process = run(&program, &folder).env_remove("KUBERNETES_SERVICE_HOST").spawn().unwrap();
    let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut wait_for = |words: &str| log.by_ref().map(Result::unwrap).any(|line| line.contains(words));
    assert!(wait_for("linkwise is up"));
    fs::write(&file, DRA).unwrap();
    assert!(wait_for("GPUs cannot go through DRA, they stay with the device plugin"));
    assert!(process.try_wait().unwrap().is_none());
    process.kill().unwrap();
    process.wait().unwrap();
}
