//! The kit for the first GPU (`lab/gpu-kit`): packed from what was built for tests, run against our own NVML library.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use fake_nvml::Control;
use tempfile::TempDir;

/// The kit, or the reason why it cannot be packed here.
fn packed(folder: &TempDir) -> Result<PathBuf, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the kit is for x86-64 only, so far".to_owned());
    }
    let built = Path::new(env!("CARGO_BIN_EXE_linkwise")).parent().unwrap();
    if !built.join("linkwise-lab").exists() {
        return Err("linkwise-lab is not built: cargo test --workspace builds it".to_owned());
    }
    let kit = folder.path().join("kit");
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/gpu-kit/pack.sh");
    // Programs that are not optimised are larger.
    let output = Command::new(pack).arg(built).arg(&kit).env("GPU_KIT_MOST_MIB", "500").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Ok(kit)
}

fn run(kit: &Path, report: &Path, variables: &[(&str, &Path)]) -> (Output, String) {
    let mut command = Command::new(kit.join("run.sh"));
    command.arg(report).env_remove("LINKWISE_NVML_LIBRARY").env("LINKWISE_KIT_IDLE", "0");
    command.envs(variables.iter().copied());
    let output = command.output().unwrap();
    let summary = fs::read_to_string(report.join("summary.txt")).unwrap_or_default();
    (output, summary)
}

#[test]
fn kit_reports_calls_admission_and_a_fault() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let kit = match packed(&folder) {
        Ok(kit) => kit,
        Err(why) => {
            #[allow(clippy::print_stderr, reason = "a test that is skipped says so")]
            {
                eprintln!("skipped: {why}");
            }
            return;
        }
    };
    // The fault waits until the driver has reported its XID, as a CUDA program that synchronises does.
    let fault = format!("#!/bin/sh\ntouch {0}/asked\nwhile [ ! -e {0}/done ]; do sleep 0.02; done\n", at("").display());
    fs::write(at("fault"), fault).unwrap();
    fs::set_permissions(at("fault"), fs::Permissions::from_mode(0o755)).unwrap();
    let (asked, done, control) = (at("asked"), at("done"), Control::new(at("control")));
    let driver = thread::spawn(move || {
        while !asked.exists() {
            thread::park_timeout(Duration::from_millis(10));
        }
        control.send("xid 0 31").unwrap();
        fs::write(done, "").unwrap();
    });
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/host/src/machines/dgx-h100.yaml");
    let (control, fault, library) = (at("control"), at("fault"), fake_nvml::library_path());
    let variables = [
        ("LINKWISE_NVML_LIBRARY", library.as_path()),
        ("FAKE_NVML_MACHINE", machine.as_path()),
        ("FAKE_NVML_CONTROL", control.as_path()),
        ("LINKWISE_KIT_FAULT", fault.as_path()),
    ];
    let (output, summary) = run(&kit, &at("report"), &variables);
    assert!(output.status.success(), "{summary}\n{output:?}");
    driver.join().unwrap();
    for line in ["ok: registered, 8 healthy", "ok: after it 8 of 8 GPUs are healthy", "all steps passed"] {
        assert!(summary.contains(line), "{line}: {summary}");
    }
    let xid = summary.lines().find(|line| line.ends_with("its XID is logged")).unwrap();
    assert!(xid.starts_with("ok: "), "{summary}");
    let calls = fs::read_to_string(at("report/nvml-calls.tsv")).unwrap();
    let init = calls.lines().next().unwrap();
    assert!(init.starts_with("nvmlInit_v2\t-\t0\t"), "{init}");
    assert!(calls.lines().any(|line| line.starts_with("nvmlDeviceGetName\t7\t0\t")), "{calls}");
    let machine = fs::read_to_string(at("report/machine.yaml")).unwrap();
    assert!(machine.contains("NVIDIA H100 80GB HBM3") && !machine.contains("GPU-00000002-0000-4000-8000-000000000000"));
    let answer = fs::read_to_string(at("report/allocate.txt")).unwrap();
    assert!(answer.contains("/dev/nvidia") && answer.contains("NVIDIA_VISIBLE_DEVICES"), "{answer}");
}

#[test]
fn machine_without_a_driver_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let kit = Path::new(env!("CARGO_MANIFEST_DIR")).join("lab/gpu-kit");
    let (output, summary) = run(&kit, &folder.path().join("report"), &[]);
    let has_driver = !summary.contains("no GPU");
    assert!(
        output.status.success()
            && (has_driver || summary == "no GPU: there is no libnvidia-ml.so.1, and nothing was done\n")
    );
}
