//! Tests that our image can replace NVIDIA's in the manifests of NVIDIA's chart: it has each command, and each program
//! takes the variables that the chart sets. (`tests/run/chart.rs` runs the plugin with them.)

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::chart::helm::repository;

/// The programs of NVIDIA's chart 0.20, each with every variable that a value can set, except those that only the
/// NVIDIA container runtime reads.
const PROGRAMS: [(&str, &str); 4] = [
    (
        "nvidia-device-plugin",
        "MPS_ROOT MIG_STRATEGY FAIL_ON_INIT_ERROR PASS_DEVICE_SPECS DEVICE_LIST_STRATEGY DEVICE_ID_STRATEGY \
         NVIDIA_DRIVER_ROOT NVIDIA_DEV_ROOT NVIDIA_CDI_HOOK_PATH CDI_FEATURE_FLAGS GDRCOPY_ENABLED \
         GDS_ENABLED MOFED_ENABLED CONFIG_FILE DEVICE_DISCOVERY_STRATEGY",
    ),
    // NVIDIA's chart sets NODE_NAME here too, which neither NVIDIA's program nor ours uses.
    ("mps-control-daemon", "MIG_STRATEGY CONFIG_FILE"),
    (
        "gpu-feature-discovery",
        "NODE_NAME NAMESPACE POD_NAME MIG_STRATEGY FAIL_ON_INIT_ERROR GFD_NO_TIMESTAMP GFD_SLEEP_INTERVAL \
         CONFIG_FILE DEVICE_DISCOVERY_STRATEGY",
    ),
    (
        "config-manager",
        "ONESHOT KUBECONFIG NODE_NAME NODE_LABEL CONFIG_FILE_SRCDIR CONFIG_FILE_DST DEFAULT_CONFIG \
         FALLBACK_STRATEGIES SEND_SIGNAL SIGNAL PROCESS_TO_SIGNAL",
    ),
];

/// The help of our binary under this name, on one line.
pub fn help(name: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join(name);
    symlink(env!("CARGO_BIN_EXE_linkwise"), &link).unwrap();
    let help = Command::new(link).arg("--help").output().unwrap();
    assert!(help.status.success(), "{name}: {}", String::from_utf8_lossy(&help.stderr));
    // The help breaks its lines to the width of a terminal.
    String::from_utf8(help.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns true if a program's help has this variable, be it as an alternative: `[also: OTHER]`.
pub fn reads(help: &str, variable: &str) -> bool {
    ["=", "]", ","].iter().any(|end| help.contains(&format!(" {variable}{end}")))
}

#[test]
fn programs_take_the_variables_of_nvidias_chart() {
    for (program, variables) in PROGRAMS {
        let help = help(program);
        let unread: Vec<_> = variables.split_whitespace().filter(|variable| !reads(&help, variable)).collect();
        assert!(unread.is_empty(), "{program} does not read {unread:?}");
    }
}

#[test]
fn image_has_each_command_of_nvidias() {
    let image = fs::read_to_string(repository("Dockerfile")).unwrap();
    let links: Vec<&str> = image.lines().filter(|line| line.contains("ln -s linkwise")).collect();
    for (program, _) in PROGRAMS {
        assert!(links.iter().any(|line| line.contains(program)), "no {program} in the image: {links:?}");
    }
}
