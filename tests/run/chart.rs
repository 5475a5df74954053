//! Our binary in the place of the NVIDIA plugin's: its name, and the variables and flags that its Helm chart sets.

use std::os::unix::fs::symlink;

use crate::run::list_strategies::{cdi_setup, lines};
use crate::run::mig::{mixed, wait_listed};
use crate::run::node::{GPU, Setup, allocation};

/// The binary installed under the NVIDIA plugin's name, without a subcommand.
fn installed(mut setup: Setup) -> Setup {
    let bin = setup.at("bin");
    std::fs::create_dir(&bin).unwrap();
    let link = bin.join("nvidia-device-plugin");
    symlink(&setup.program, &link).unwrap();
    (setup.program, setup.subcommand) = (link, None);
    setup
}

const HALF: &str = "nvidia.com/mig-3g.40gb";

/// The first lines of the answer for one MIG device, with all strategies that the tests below set.
const EXPECTED: [&str; 6] = [
    "env NVIDIA_VISIBLE_DEVICES=2:0",
    "cdi k8s.device-plugin.nvidia.com/gpu=2:0",
    "node /run/driver/dev/nvidia2 at /dev/nvidia2 rw",
    "node /run/driver/dev/nvidia-caps/nvidia-cap282 at /dev/nvidia-caps/nvidia-cap282 rw",
    "node /run/driver/dev/nvidia-caps/nvidia-cap283 at /dev/nvidia-caps/nvidia-cap283 rw",
    "node /run/driver/dev/nvidiactl at /dev/nvidiactl rw",
];

async fn check(setup: Setup) {
    let (node, kubelet) = setup.serve(1).await;
    wait_listed(&kubelet, HALF, 1).await;
    let got = lines(&allocation(&kubelet, "pod", HALF, 1).await);
    assert_eq!(got[..6], EXPECTED);
    assert_eq!(kubelet.state().resources[GPU].healthy.len(), 1);
    // No setting is warned about.
    assert_eq!(node.process.count("\"message\":\"configuration"), 0, "{:#?}", node.process.lines());
}

/// Sets the variables of daemonset-device-plugin.yml in the charts 0.17 to 0.20, with every value set and no argument.
/// The last three are for the container runtime.
#[tokio::test]
async fn chart_variables_are_accepted() {
    let mut setup = installed(cdi_setup(mixed())).variables(
        "MPS_ROOT=/run/nvidia/mps MIG_STRATEGY=mixed FAIL_ON_INIT_ERROR=true PASS_DEVICE_SPECS=true \
         DEVICE_LIST_STRATEGY=envvar,cdi-cri DEVICE_ID_STRATEGY=index NVIDIA_DRIVER_ROOT=/run/driver NVIDIA_DEV_ROOT= \
         NVIDIA_CDI_HOOK_PATH=/usr/bin/nvidia-cdi-hook CDI_FEATURE_FLAGS= GDRCOPY_ENABLED=false GDS_ENABLED=false \
         MOFED_ENABLED=false DEVICE_DISCOVERY_STRATEGY=auto NVIDIA_MIG_MONITOR_DEVICES=all \
         NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    );
    let file = setup.at("config.yaml");
    std::fs::write(&file, "version: v1\nflags:\n  migStrategy: none\n").unwrap();
    setup.by_variables = true;
    // The chart mounts these at fixed paths; here they are in the test's folder.
    let places = [
        ("CONFIG_FILE", file),
        ("DRIVER_ROOT_CTR_PATH", setup.at("driver")),
        ("LINKWISE_CDI_DIR", setup.at("cdi")),
        ("LINKWISE_PROCFS", setup.at("proc")),
    ];
    check(places.iter().fold(setup, |setup, (variable, path)| setup.env(variable, path.to_str().unwrap()))).await;
}

#[tokio::test]
async fn nvidia_flags_are_accepted() {
    let flags = "--mig-strategy=mixed --fail-on-init-error=true --mps-root=/run/nvidia/mps \
         --nvidia-dev-root=/run/driver --pass-device-specs=true --device-list-strategy=envvar \
         --device-list-strategy=cdi-cri --device-id-strategy=index --gdrcopy-enabled=false --gds-enabled=false \
         --mofed-enabled=false --cdi-annotation-prefix=cdi.k8s.io/ \
         --nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook --device-discovery-strategy=nvml";
    check(installed(cdi_setup(mixed())).args(flags.split_whitespace())).await;
}
