//! NVML that cannot be initialised, case by case: which failures make a node one without GPUs, on which it waits, and
//! which end it; and the labels that stay. docs/nvml.md has the same table.

use std::fs;
use std::process::Stdio;

use serde_json::Value;
use tokio::time::timeout;

use crate::run::memory::{TOOLS, ran};
use crate::run::node::{LIMIT, Setup, registered, until};

/// What becomes of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Becomes {
    /// linkwise ends with this cause.
    Ends,
    /// It is idle and ready, as on a node without GPUs.
    Idle,
    /// It is up and not ready, and tries again.
    Waits,
}

/// The PCI bus.
#[derive(Clone, Copy, Debug)]
enum Bus {
    Gpus,
    Empty,
    /// One of its files does not answer.
    Hangs,
}

/// What NVML does, and a part of the cause that is reported.
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

/// A machine on which NVML fails so.
fn failing(failure: &str, bus: Bus) -> Setup {
    let mut setup =
        Setup::on("dgx1-v100").arg("--nvml-memory-mib=24").arg("--nvml-pause-ms=10").arg("--bus-look-ms=50");
    setup = setup.arg(if failure.starts_with("leak") { "--nvml-start-ms=60000" } else { "--nvml-start-ms=1000" });
    match failure {
        "absent" => setup.library = "/no/such/libnvidia-ml.so.1".into(),
        // As container images have it that were made with NVIDIA's runtime: a file of no length.
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
        Bus::Hangs => {
            let device = setup.at("sys/bus/pci/devices/0000:06:00.0");
            fs::create_dir_all(&device).unwrap();
            // A file whose reader waits for ever.
            assert!(std::process::Command::new("mkfifo").arg(device.join("vendor")).status().unwrap().success());
        }
    }
    setup
}

/// Starts linkwise there, and holds that this becomes of it, with the cause.
async fn becomes(setup: Setup, cause: &str, expected: Becomes) {
    let mut node = setup.start().await;
    match expected {
        Becomes::Ends => {
            let (status, words) = node.process.ended().await;
            assert!(status.code() == Some(1) && words.concat().contains(cause), "{status}: {words:?}");
        }
        Becomes::Idle => {
            node.ready(200, cause).await;
            node.metric("linkwise_idle", 1).await;
        }
        Becomes::Waits => {
            node.ready(503, cause).await;
            node.metric("linkwise_idle", 0).await;
            mend(&node.setup);
            // It was tried again, and works once it can.
            if node.setup.library == fake_nvml::library_path() {
                registered(&node.setup.kubelet(), 1, 8).await;
            }
        }
    }
}

/// From now on the library works.
fn mend(setup: &Setup) {
    for mended in ["init 0", "uncrash nvmlInit_v2", "unhang nvmlInit_v2", "leak 0"] {
        setup.tell(mended);
    }
}

#[tokio::test]
async fn only_a_missing_driver_makes_a_node_without_gpus() {
    use Becomes::{Ends as E, Idle as I, Waits as W};
    for (failure, cause) in FAILURES {
        let expected = match failure {
            "absent" | "broken" | "init 9" => [E, I, W],
            failure if failure.starts_with("leak") => [W, W, W],
            _ => [E, W, W],
        };
        for (bus, expected) in [Bus::Gpus, Bus::Empty, Bus::Hangs].into_iter().zip(expected) {
            becomes(failing(failure, bus), cause, expected).await;
        }
    }
}

#[tokio::test]
async fn commands_that_end_name_the_crash_and_fail() {
    let setup = failing("crash nvmlInit_v2", Bus::Empty);
    for words in TOOLS {
        let (code, said) = ran(setup.tool(words)).await;
        assert_eq!(code, Some(1), "{words:?}: {said}");
        assert!(said.contains("the NVML library crashed in nvmlInit_v2"), "{words:?}: {said}");
        assert!(!said.contains("linkwise run idles here"), "{words:?}: {said}");
    }
}

const GOOD: &str = "nvidia.com/gpu.count=8\n";

/// gpu-feature-discovery on such a machine, with labels of an earlier start.
fn discovery(setup: Setup) -> Setup {
    let program = setup.at("gpu-feature-discovery");
    std::os::unix::fs::symlink(&setup.program, &program).unwrap();
    fs::create_dir(setup.at("features.d")).unwrap();
    fs::write(setup.at("features.d/gfd"), GOOD).unwrap();
    let file = setup.at("features.d/gfd");
    let mut setup = setup.arg("--use-node-feature-api=false").arg("--no-timestamp").arg("--output-file").arg(file);
    (setup.program, setup.subcommand) = (program, None);
    setup
}

#[tokio::test]
async fn labels_stay_while_a_library_that_is_there_fails() {
    for (failure, cause) in FAILURES {
        let absent = ["absent", "broken", "init 9"].contains(&failure);
        let setup = discovery(failing(failure, Bus::Empty));
        let file = setup.at("features.d/gfd");
        let process = setup.spawn();
        if absent {
            let none = async || {
                let text = fs::read_to_string(&file).unwrap();
                if text == "nvidia.com/vgpu.present=false\n" { Ok(()) } else { Err(text) }
            };
            until(none).await;
            continue;
        }
        let stays = |line: &Value| {
            let why = line["cause"].as_str().unwrap_or_default();
            line["message"].to_string().contains("the labels stay as they are") && why.contains(cause)
        };
        process.logged(stays).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), GOOD, "{failure}");
        mend(&setup);
        let made = async || {
            let text = fs::read_to_string(&file).unwrap();
            if text.contains("nvidia.com/gpu.product=") { Ok(()) } else { Err(text) }
        };
        until(made).await;
    }
}

#[tokio::test]
async fn one_off_labels_are_written_only_where_gpus_are_known() {
    for (failure, cause) in FAILURES {
        let absent = ["absent", "broken", "init 9"].contains(&failure);
        for option in [None, Some("false"), Some("true")] {
            for bus in [Bus::Gpus, Bus::Empty] {
                let mut setup = discovery(failing(failure, bus)).arg("--oneshot");
                if let Some(option) = option {
                    setup = setup.arg(format!("--fail-on-init-error={option}"));
                }
                let output = setup.command().stdout(Stdio::piped()).stderr(Stdio::piped()).output();
                let output = timeout(LIMIT, output).await.expect("it ends in time").unwrap();
                let words = String::from_utf8(output.stderr).unwrap();
                let text = fs::read_to_string(setup.at("features.d/gfd")).unwrap();
                let is_written = absent && matches!(bus, Bus::Empty) && option != Some("true");
                let expected = if is_written { "nvidia.com/vgpu.present=false\n" } else { GOOD };
                assert_eq!(text, expected, "{failure} {option:?} {bus:?}: {words}");
                assert_eq!(output.status.success(), is_written, "{failure} {option:?} {bus:?}: {words}");
                assert!(words.contains(cause), "{failure}: {words}");
            }
        }
    }
}
