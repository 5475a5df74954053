//! The configurations of the NVIDIA plugin's README (`tests/configs/nvidia`, except MPS) and one of ours, each in a
//! whole process: the resources, their devices, and what a container gets. Compare the snapshots with that README.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use linkwise_kubelet_box::{KubeletBox, Pod};

use crate::run::list_strategies::{cdi_setup, lines};
use crate::run::mig::{mixed, wait_listed, with_minors};
use crate::run::node::{GPU, Node, Setup};

/// Starts linkwise, waits for these numbers of healthy devices by resource, and checks that there is no other resource.
async fn start_offering(setup: Setup, wanted: &[(&str, usize)]) -> (Node, KubeletBox) {
    let (node, kubelet) = setup.start_beside_kubelet().await;
    for (resource, healthy) in wanted {
        wait_listed(&kubelet, resource, *healthy).await;
    }
    let wanted: BTreeSet<&str> = wanted.iter().map(|(resource, _)| *resource).collect();
    let is_wanted = |text: &str| {
        let series = text.lines().filter_map(|line| line.strip_prefix("linkwise_kubelet_connected{resource=\""));
        series.map(|labels| labels.split_once('"').unwrap().0).collect::<BTreeSet<_>>() == wanted
    };
    node.metrics(is_wanted).await;
    (node, kubelet)
}

/// The kubelet's list: each resource with its healthy devices, the slots of one device on one line.
fn listing(kubelet: &KubeletBox) -> String {
    let mut text = String::new();
    for (name, resource) in kubelet.state().resources.iter() {
        writeln!(text, "{name}: {} healthy, {} not", resource.healthy.len(), resource.unhealthy.len()).unwrap();
        let mut slots: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for id in &resource.healthy {
            let (device, slot) = id.split_once("::").unwrap_or((id, ""));
            slots.entry(device).or_default().extend(slot.parse::<u32>());
        }
        for (device, mut slots) in slots {
            slots.sort_unstable();
            let slots: Vec<String> = slots.iter().map(u32::to_string).collect();
            let slots = if slots.is_empty() { String::new() } else { format!(" :: {}", slots.join(" ")) };
            writeln!(text, "  {device}{slots}").unwrap();
        }
    }
    text
}

/// The devices that pods of one container get, or the cause of their refusal.
async fn pods(kubelet: &KubeletBox, asks: &[(&str, u32)]) -> String {
    let mut text = String::new();
    for (number, (resource, count)) in asks.iter().enumerate() {
        writeln!(text, "a container with {resource}: {count}").unwrap();
        match kubelet.admit(&Pod::single(format!("pod-{number}"), *resource, *count), None).await {
            Ok(admitted) => {
                let allocation = &admitted.grant("main", resource).unwrap().allocation;
                writeln!(text, "  devices {}", allocation.devices.join(" ")).unwrap();
                for line in lines(allocation) {
                    // Control nodes depend on the machine that runs the test.
                    if !["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset"].iter().any(|it| line.contains(it))
                    {
                        writeln!(text, "  {line}").unwrap();
                    }
                }
            }
            Err(error) => {
                let mut error: Option<&dyn std::error::Error> = Some(&error);
                while let Some(link) = error {
                    writeln!(text, "  {link}").unwrap();
                    error = link.source();
                }
            }
        }
    }
    text
}

/// The list of a started linkwise, and its answers to pods.
async fn story(setup: Setup, wanted: &[(&str, usize)], asks: &[(&str, u32)]) -> String {
    let (_node, kubelet) = start_offering(setup, wanted).await;
    let text = listing(&kubelet) + &pods(&kubelet, asks).await;
    assert_eq!(kubelet.violations(), []);
    text
}

/// Adds a configuration file of tests/configs.
fn config(setup: Setup, name: &str) -> Setup {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name);
    assert!(path.exists(), "{}", path.display());
    setup.arg("--config-file").arg(path)
}

/// A machine of A100s. A layout has the slices and MiB of a GPU's MIG devices; an empty one is a whole GPU.
fn a100s(memory: u64, layouts: &[&[(u32, u64)]]) -> String {
    let mut text = "version: 1\nname: test\nobserved:\n  gpus:\n".to_owned();
    for (gpu, devices) in layouts.iter().enumerate() {
        let device = |(index, (slices, memory)): (usize, &(u32, u64))| {
            let (instance, cap) = (index + 1, 1000 * gpu + 10 * index);
            format!(
                "{{index: {index}, uuid: MIG-0000000{gpu}-0000-4000-8000-00000000000{index}, gpu_instance: {instance}, \
                 compute_instance: 0, gpu_slices: {slices}, compute_slices: {slices}, memory_mib: {memory}, \
                 extension: none, capabilities: {{gpu_instance: {}, compute_instance: {}}}}}",
                cap + 1,
                cap + 2,
            )
        };
        let is_enabled = !devices.is_empty();
        let devices = devices.iter().enumerate().map(device).collect::<Vec<_>>().join(", ");
        writeln!(
            text,
            "    - {{index: {gpu}, uuid: GPU-0000000{gpu}-0000-4000-8000-000000000000, pci: '0000:{gpu}0:00.0', \
             minor: {gpu}, model: NVIDIA A100, compute_capability: '8.0', memory_mib: {memory}, \
             pcie: {{mts: 16000, width: 16}}, mig: {{enabled: {is_enabled}, devices: [{devices}]}}}}"
        )
        .unwrap();
    }
    text
}

#[tokio::test]
async fn explicit_defaults_act_as_no_settings() {
    let asks = [(GPU, 2), (GPU, 7)];
    let silent = story(Setup::on("dgx1-v100"), &[(GPU, 8)], &asks).await;
    insta::assert_snapshot!(silent);
    let explicit = story(config(Setup::on("dgx1-v100"), "nvidia/flags.yaml"), &[(GPU, 8)], &asks).await;
    assert_eq!(explicit, silent);
    // The README's flags and variables, at their defaults.
    let flags = "--mig-strategy=none --fail-on-init-error=true --nvidia-driver-root=/ --pass-device-specs=false \
         --device-list-strategy=envvar --device-id-strategy=uuid";
    let flags = Setup::on("dgx1-v100").args(flags.split_whitespace());
    assert_eq!(story(flags, &[(GPU, 8)], &asks).await, silent);
    let variables = Setup::on("dgx1-v100").variables(
        "MIG_STRATEGY=none FAIL_ON_INIT_ERROR=true NVIDIA_DRIVER_ROOT=/ PASS_DEVICE_SPECS=false \
         DEVICE_LIST_STRATEGY=envvar DEVICE_ID_STRATEGY=uuid",
    );
    assert_eq!(story(variables, &[(GPU, 8)], &asks).await, silent);
}

#[tokio::test]
async fn flag_wins_over_variable_and_variable_over_file() {
    let setup = config(mixed(), "nvidia/mixed.yaml").env("MIG_STRATEGY", "none").arg("--device-id-strategy=index");
    let setup = setup.env("DEVICE_ID_STRATEGY", "uuid").env("PASS_DEVICE_SPECS", "true");
    insta::assert_snapshot!(story(setup, &[(GPU, 4)], &[(GPU, 2)]).await);
}

#[tokio::test]
async fn mig_strategy_none() {
    let setup = config(mixed(), "nvidia/flags.yaml");
    insta::assert_snapshot!(story(setup, &[(GPU, 4)], &[(GPU, 4)]).await);
}

#[tokio::test]
async fn mig_strategy_single() {
    let sevenths: &[(u32, u64)] = &[(1, 9728); 7];
    let setup = with_minors(Setup::with(&a100s(81920, &[sevenths, sevenths]))).env("MIG_STRATEGY", "single");
    insta::assert_snapshot!(story(setup.arg("--pass-device-specs"), &[(GPU, 14)], &[(GPU, 1), (GPU, 2)]).await);
}

/// The resources of `mixed()` under the MIG strategy `mixed`.
const MIXED_OFFER: [(&str, usize); 6] = [
    (GPU, 1),
    ("nvidia.com/mig-1g.10gb", 8),
    ("nvidia.com/mig-1g.10gb.me", 1),
    ("nvidia.com/mig-2g.20gb", 1),
    ("nvidia.com/mig-3g.40gb", 1),
    // With such devices the NVIDIA plugin ends.
    ("nvidia.com/mig-2c.4g.40gb", 2),
];

#[tokio::test]
async fn mig_strategy_mixed() {
    let setup = config(mixed(), "nvidia/mixed.yaml").env("PASS_DEVICE_SPECS", "true");
    let asks = [
        (GPU, 1),
        ("nvidia.com/mig-1g.10gb", 2),
        ("nvidia.com/mig-1g.10gb.me", 1),
        ("nvidia.com/mig-3g.40gb", 1),
        ("nvidia.com/mig-2c.4g.40gb", 2),
    ];
    insta::assert_snapshot!(story(setup, &MIXED_OFFER, &asks).await);
}

#[tokio::test]
async fn time_slicing() {
    let setup = config(Setup::on("dgx1-v100"), "nvidia/time-slicing.yaml");
    insta::assert_snapshot!(story(setup, &[(GPU, 80)], &[(GPU, 1), (GPU, 2)]).await);
}

#[tokio::test]
async fn time_slicing_renamed_by_default() {
    let shared = "nvidia.com/gpu.shared";
    let setup = config(Setup::on("dgx1-v100"), "nvidia/time-slicing-renamed.yaml").arg("--pass-device-specs");
    insta::assert_snapshot!(story(setup, &[(shared, 80)], &[(shared, 1), (shared, 1)]).await);
}

#[tokio::test]
async fn time_slicing_failing_requests_greater_than_one() {
    let setup = config(Setup::on("dgx1-v100"), "nvidia/time-slicing-single.yaml");
    insta::assert_snapshot!(story(setup, &[(GPU, 80)], &[(GPU, 2), (GPU, 1)]).await);
}

#[tokio::test]
async fn time_slicing_of_mig_devices() {
    let layouts: [&[(u32, u64)]; 5] =
        [&[], &[(1, 4864); 7], &[(2, 9984), (2, 9984), (2, 9984), (1, 4864)], &[(3, 20096); 2], &[(7, 40192)]];
    let setup = config(with_minors(Setup::with(&a100s(40536, &layouts))), "nvidia/time-slicing-mig.yaml");
    let wanted = [
        (GPU, 4),
        ("nvidia.com/mig-1g.5gb", 16),
        ("nvidia.com/mig-2g.10gb", 6),
        ("nvidia.com/mig-3g.20gb", 6),
        ("nvidia.com/mig-7g.40gb", 7),
    ];
    let asks = [("nvidia.com/mig-7g.40gb", 2), ("nvidia.com/mig-3g.20gb", 1), ("nvidia.com/mig-1g.5gb", 3), (GPU, 1)];
    insta::assert_snapshot!(story(setup, &wanted, &asks).await);
}

#[tokio::test]
async fn naming_shares_some_gpus_under_another_name() {
    let setup = config(Setup::on("dgx1-v100"), "linkwise/some-shared.yaml");
    let slice = "nvidia.com/gpu.slice";
    let text = story(setup, &[(GPU, 6), (slice, 8)], &[(GPU, 6), (slice, 1), (slice, 2)]).await;
    insta::assert_snapshot!(text);
}

#[tokio::test]
async fn imex_channels() {
    let channel = |setup: Setup| {
        let folder = setup.at("driver/dev/nvidia-caps-imex-channels");
        std::fs::create_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.join("channel0")).unwrap();
        setup
    };
    let mut text = String::new();
    for (name, has_channel) in [("none", true), ("optional", false), ("optional", true), ("required", true)] {
        let setup = config(cdi_setup(Setup::on("dgx1-v100")), &format!("nvidia/imex-{name}.yaml"))
            .arg("--device-list-strategy=envvar,cdi-cri");
        let setup = if has_channel { channel(setup) } else { setup };
        let (_node, kubelet) = start_offering(setup, &[(GPU, 8)]).await;
        let (state, given) = (if has_channel { "there" } else { "missing" }, pods(&kubelet, &[(GPU, 1)]).await);
        write!(text, "{name}, channel {state}:\n{given}").unwrap();
    }
    insta::assert_snapshot!(text);
    let (status, errors) = config(cdi_setup(Setup::on("dgx1-v100")), "nvidia/imex-required.yaml").spawn().ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(errors.join("\n").contains("IMEX channel 0 does not exist"), "{errors:?}");
}
