//! NVML that cannot be initialised, case by case: on which failures linkwise idles as on a node without GPUs, waits, or
//! ends; and which labels stay. docs/nvml.md has the table.

use std::fs;
use std::process::Stdio;

use serde_json::Value;
use tokio::time::timeout;

use crate::run::labels::{discovery, file, wait_label};
use crate::run::memory::assert_every_command_fails;
use crate::run::node::{LIMIT, Setup, wait_registered};
use crate::run::refusals::refused;

/// The outcome of a failed initialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// linkwise ends with this cause.
    Ends,
    /// linkwise is idle and ready, as on a node without GPUs.
    Idle,
    /// linkwise is up and not ready, and tries again.
    Waits,
}

#[derive(Clone, Copy, Debug)]
enum Bus {
    Gpus,
    Empty,
    /// One of its files hangs its reader.
    Hangs,
}

/// The behaviour of NVML, and a part of the cause that is reported.
const FAILURES: [(&str, &str); 9] = [
    ("absent", "cannot load"),
    ("broken", "cannot load"),
    ("init 9", "NVML_ERROR_DRIVER_NOT_LOADED (9)"),
    ("init 4", "NVML_ERROR_NO_PERMISSION (4)"),
    ("init 18", "NVML_ERROR_LIB_RM_VERSION_MISMATCH (18)"),
    ("init 999", "NVML_ERROR_UNKNOWN (999)"),
    ("crash nvmlInit_v2", "the NVML library crashed in nvmlInit_v2"),
    ("hang nvmlInit_v2", "nvmlInit_v2 did not return within 1s"),
    ("leak 60", "more than 24 MiB (--nvml-memory-mib"),
];

/// A machine on which NVML fails in this way.
fn failing(failure: &str, bus: Bus) -> Setup {
    let mut setup = Setup::on("dgx1-v100").args(["--nvml-memory-mib=24", "--nvml-pause-ms=10", "--bus-look-ms=50"]);
    setup = setup.arg(if failure.starts_with("leak") { "--nvml-start-ms=60000" } else { "--nvml-start-ms=1000" });
    match failure {
        // A root without a driver.
        "absent" => setup.library = setup.at("sys"),
        // An empty file, as in container images that were built with NVIDIA's runtime.
        "broken" => {
            setup.library = setup.at("libnvidia-ml.so.1");
            fs::write(&setup.library, "").unwrap();
        }
        failure => {
            setup.tell(failure);
            if failure.starts_with("leak") {
                setup.tell("hang nvmlInit_v2");
            }
        }
    }
    match bus {
        Bus::Gpus => setup.all_on_bus(),
        Bus::Empty => fs::create_dir_all(setup.at("sys/bus/pci/devices")).unwrap(),
        Bus::Hangs => setup.hung_on_bus(),
    }
    setup
}

/// Starts linkwise on a machine with this failure, with an option, and asserts the outcome and its cause.
async fn assert_outcome((failure, cause): (&str, &str), bus: Bus, must_work: Option<bool>, expected: Outcome) {
    let option = must_work.map(|value| format!("--fail-on-init-error={value}"));
    let node = failing(failure, bus).args(option).start().await;
    match expected {
        Outcome::Ends => {
            let line = refused(node.process).await;
            let because = match must_work {
                None => "8 NVIDIA GPU(s) on the PCI bus (0000:06:00.0 ...), but NVML cannot be initialised: ",
                Some(_) => "NVML cannot be initialised: ",
            };
            assert!(line.starts_with("linkwise: ") && line.contains(because) && line.contains(cause), "{line}");
            assert_eq!(line.contains("runtimeClassName: nvidia"), cause == "cannot load", "{line}");
            assert_eq!(line.contains("/sys: usr/lib64, usr/lib/x86_64-linux-gnu, "), failure == "absent", "{line}");
        }
        Outcome::Idle => {
            let answer = node.ready(200, cause).await;
            assert!(answer.body.contains("no NVIDIA GPU on the PCI bus"), "{answer:?}");
            assert_eq!(node.get("/livez").await.status, 200);
            node.metric("linkwise_idle", 1).await;
            node.process.logged(|line| line["reason"].as_str().is_some_and(|reason| reason.contains(cause))).await;
        }
        Outcome::Waits => {
            let answer = node.ready(503, cause).await;
            let is_hung = answer.body.contains("the PCI bus does not answer");
            assert_eq!(is_hung, matches!(bus, Bus::Hangs), "{answer:?}");
            node.metric("linkwise_idle", 0).await;
            mend(&node.setup);
            // linkwise tries again, and serves once NVML works.
            if node.setup.library == fake_nvml::library_path() {
                let kubelet = node.setup.kubelet();
                wait_registered(&kubelet, 1, 8).await;
                node.ready(200, "").await;
            }
        }
    }
}

/// Ends the faults of the fake NVML.
fn mend(setup: &Setup) {
    for mended in ["init 0", "uncrash nvmlInit_v2", "unhang nvmlInit_v2", "leak 0"] {
        setup.tell(mended);
    }
}

#[tokio::test]
async fn linkwise_idles_only_without_driver_and_gpus() {
    use Outcome::{Ends as E, Idle as I, Waits as W};
    const BUSES: [Bus; 3] = [Bus::Gpus, Bus::Empty, Bus::Hangs];
    for failure in FAILURES {
        let (behaviour, _) = failure;
        let expected = match behaviour {
            "absent" | "broken" | "init 9" => [E, I, W],
            leak if leak.starts_with("leak") => [W, W, W],
            _ => [E, W, W],
        };
        for (bus, expected) in BUSES.into_iter().zip(expected) {
            assert_outcome(failure, bus, None, expected).await;
        }
    }
    // `crates/nvml/src/supervisor/machine/tests/cases.rs` has all failures with these options.
    for (must_work, expected) in [(true, [E, E, E]), (false, [W, I, W])] {
        for (bus, expected) in BUSES.into_iter().zip(expected) {
            assert_outcome(FAILURES[2], bus, Some(must_work), expected).await;
        }
    }
    assert_outcome(FAILURES[0], Bus::Gpus, Some(true), E).await;
}

#[tokio::test]
async fn every_command_names_the_crash_and_fails() {
    let setup = failing("crash nvmlInit_v2", Bus::Empty);
    assert_every_command_fails(&setup, "the NVML library crashed in nvmlInit_v2").await;
}

const EARLIER_LABELS: &str = "nvidia.com/gpu.count=8\n";

/// gpu-feature-discovery on this machine, with the labels of an earlier start.
fn with_labels(setup: Setup) -> Setup {
    fs::create_dir(setup.at("features.d")).unwrap();
    fs::write(file(&setup), EARLIER_LABELS).unwrap();
    discovery(setup).arg("--no-timestamp")
}

#[tokio::test]
async fn labels_stay_while_an_installed_library_fails() {
    for (failure, cause) in FAILURES {
        let is_driver_missing = ["absent", "broken", "init 9"].contains(&failure);
        let setup = with_labels(failing(failure, Bus::Empty));
        let file = file(&setup);
        let process = setup.spawn();
        if is_driver_missing {
            assert_eq!(wait_label(&file, "nvidia.com/vgpu.present", "false").await.len(), 1);
            continue;
        }
        let stays = |line: &Value| {
            let why = line["cause"].as_str().unwrap_or_default();
            line["message"].to_string().contains("keeping the previous labels") && why.contains(cause)
        };
        process.logged(stays).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), EARLIER_LABELS, "{failure}");
        mend(&setup);
        wait_label(&file, "nvidia.com/gpu.product", "Tesla-V100-SXM2-32GB").await;
    }
}

#[tokio::test]
async fn oneshot_replaces_labels_only_without_gpus() {
    for (failure, cause) in FAILURES {
        let is_driver_missing = ["absent", "broken", "init 9"].contains(&failure);
        for option in [None, Some("false"), Some("true")] {
            for bus in [Bus::Gpus, Bus::Empty] {
                let setup = with_labels(failing(failure, bus)).arg("--oneshot");
                let setup = setup.args(option.map(|option| format!("--fail-on-init-error={option}")));
                let output = setup.command().stdout(Stdio::piped()).stderr(Stdio::piped()).output();
                let output = timeout(LIMIT, output).await.expect("the command did not end in time").unwrap();
                let words = String::from_utf8(output.stderr).unwrap();
                let text = fs::read_to_string(file(&setup)).unwrap();
                let is_written = is_driver_missing && matches!(bus, Bus::Empty) && option != Some("true");
                let expected = if is_written { "nvidia.com/vgpu.present=false\n" } else { EARLIER_LABELS };
                assert_eq!(text, expected, "{failure} {option:?} {bus:?}: {words}");
                assert_eq!(output.status.success(), is_written, "{failure} {option:?} {bus:?}: {words}");
                assert!(words.contains(cause), "{failure}: {words}");
            }
        }
    }
}
