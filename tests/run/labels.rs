//! The labels file, written by `gpu-feature-discovery`, which needs no kubelet, and by `linkwise run`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::run::mig::four_gpus;
use crate::run::node::{GPU, Setup, allocation, replace, seen};

const BARE: &str = "version: 1\nname: bare\nobserved: {gpus: []}\n";

/// A machine whose gpu-feature-discovery writes to [`file`].
pub fn discovery(setup: Setup) -> Setup {
    let program = setup.at("gpu-feature-discovery");
    symlink(&setup.program, &program).unwrap();
    let to = file(&setup);
    let mut setup = setup.arg("--use-node-feature-api=false").arg("--output-file").arg(to).env("NODE_NAME", "gpu-1");
    (setup.program, setup.subcommand) = (program, None);
    setup
}

pub fn file(setup: &Setup) -> PathBuf {
    setup.at("features.d/gfd")
}

/// The labels in the file; none if there is no file.
fn read(file: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let label = |line: &str| {
        let (key, value) = line.split_once('=').unwrap();
        (key.to_owned(), value.to_owned())
    };
    text.lines().map(label).collect()
}

/// Waits until a label in the file has this value, and returns all labels.
pub async fn wait_label(file: &Path, key: &str, value: &str) -> BTreeMap<String, String> {
    seen(async || read(file), |labels| labels.get(key).is_some_and(|it| it == value)).await
}

#[tokio::test]
async fn labels_file_follows_the_mig_layout() {
    let setup = discovery(four_gpus()).arg("--mig-strategy=mixed").arg("--nvml-poll-ms=50");
    let path = file(&setup);
    let _process = setup.spawn();
    let labels = wait_label(&path, "nvidia.com/mig-1g.10gb.count", "8").await;
    let expected = "nvidia.com/gpu.count=4 nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB nvidia.com/gpu.replicas=1 \
                    nvidia.com/mig.strategy=mixed nvidia.com/mig-1g.10gb.multiprocessors=14 \
                    nvidia.com/mig-1g.10gb.me.engines.jpeg=1 nvidia.com/mig-2c.4g.40gb.slices.ci=2 \
                    linkwise.dev/gpu.models=1";
    for (key, value) in expected.split_whitespace().map(|label| label.split_once('=').unwrap()) {
        assert_eq!(labels.get(key).map(String::as_str), Some(value), "{key}");
    }
    assert!(labels.contains_key("nvidia.com/gfd.timestamp"));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.lines().is_sorted() && text.ends_with('\n'));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    setup.tell("mig 1 {enabled: false}");
    let labels = wait_label(&path, "nvidia.com/mig-1g.10gb.count", "1").await;
    assert_eq!(labels["nvidia.com/gpu.count"], "4");
    setup.tell("mig 3 {enabled: false}");
    seen(async || read(&path), |labels| !labels.keys().any(|key| key.contains("mig-1g"))).await;
    let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["gfd"], "NFD would read other files in the folder too");
}

#[tokio::test]
async fn labels_file_stays_while_nvml_is_unavailable() {
    let setup = discovery(Setup::on("dgx-h100")).arg("--nvml-pause-ms=10").arg("--nvml-grace-ms=10");
    let path = file(&setup);
    let process = setup.spawn();
    wait_label(&path, "nvidia.com/gpu.count", "8").await;
    let before = fs::read(&path).unwrap();
    setup.tell_all(&["init 9", "crash"]);
    process.said("NVML unavailable for longer than the grace period").await;
    assert_eq!(fs::read(&path).unwrap(), before);
    // NVML is back with one GPU less, and the labels follow.
    setup.tell_all(&["remove 7", "init 0"]);
    wait_label(&path, "nvidia.com/gpu.count", "7").await;
}

#[tokio::test]
async fn labels_file_is_there_throughout_a_restart() {
    let setup = discovery(Setup::on("dgx-h100"));
    let path = file(&setup);
    let mut process = setup.spawn();
    wait_label(&path, "nvidia.com/mps.capable", "false").await;
    let ended = Arc::new(AtomicBool::new(false));
    let watch = std::thread::spawn({
        let (path, ended) = (path.clone(), Arc::clone(&ended));
        move || {
            let mut absent = 0;
            while !ended.load(Ordering::Relaxed) {
                absent += usize::from(!fs::read_to_string(&path).is_ok_and(|text| text.contains("gpu.count=8\n")));
            }
            absent
        }
    });
    process.signal("TERM");
    let (status, _) = process.ended().await;
    assert!(status.success(), "{status}");
    let setup = setup.arg("--mig-strategy=single");
    let _process = setup.spawn();
    wait_label(&path, "nvidia.com/mig.strategy", "single").await;
    ended.store(true, Ordering::Relaxed);
    assert_eq!(watch.join().unwrap(), 0, "reads that found no file, or an incomplete one");
}

#[tokio::test]
async fn labels_follow_configuration_file_and_sighup() {
    let setup = discovery(Setup::on("dgx-h100").config("version: v1\n"));
    let (path, config) = (file(&setup), setup.config_file());
    let process = setup.spawn();
    wait_label(&path, "nvidia.com/gpu.replicas", "1").await;
    replace(&config, "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n");
    let labels = wait_label(&path, "nvidia.com/gpu.replicas", "3").await;
    assert_eq!(labels["nvidia.com/gpu.product"], "NVIDIA-H100-80GB-HBM3-SHARED");
    replace(&config, "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: -3}]}}\n");
    process.said("configuration rejected, keeping the previous one").await;
    process.signal("HUP");
    process.logged(|line| line["why"] == "SIGHUP" && line["level"] == "ERROR").await;
    // The next valid file applies, also with a signal.
    replace(&config, "version: v1\n");
    process.signal("HUP");
    wait_label(&path, "nvidia.com/gpu.replicas", "1").await;
}

/// Runs gpu-feature-discovery to its end, and returns its success and standard output.
async fn printed(setup: &Setup) -> (bool, String) {
    let output = setup.command().stdout(Stdio::piped()).stderr(Stdio::piped()).output().await.unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

#[tokio::test]
async fn oneshot_prints_labels_once() {
    let setup = discovery(Setup::on("dgx-h100")).arg("--oneshot").arg("--no-timestamp").arg("--output-file=");
    let (ok, text) = printed(&setup).await;
    assert!(ok && text.contains("\nnvidia.com/gpu.count=8\n") && !text.contains("timestamp"), "{text}");
    assert!(!file(&setup).exists());
    // If NVML fails on a node with GPUs, no labels are printed.
    setup.all_on_bus();
    setup.tell("init 9");
    assert_eq!(printed(&setup).await, (false, String::new()));
}

#[tokio::test]
async fn node_without_gpus_gets_only_the_vgpu_label() {
    for command in ["init 0", "init 9"] {
        let setup = discovery(Setup::with(BARE)).arg("--no-timestamp").arg("--fail-on-init-error=false");
        fs::create_dir_all(setup.at("sys/bus/pci/devices")).unwrap();
        setup.tell(command);
        let path = file(&setup);
        let process = setup.spawn();
        assert_eq!(wait_label(&path, "nvidia.com/vgpu.present", "false").await.len(), 1);
        drop(process);
        let once = setup.arg("--oneshot").arg("--output-file=");
        assert_eq!(printed(&once).await, (true, "nvidia.com/vgpu.present=false\n".to_owned()));
    }
}

#[tokio::test]
async fn pods_are_admitted_without_the_labels_folder() {
    let setup = Setup::on("dgx-h100").arg("--write-labels-file").env("NODE_NAME", "gpu-1");
    let features = setup.at("features.d");
    fs::write(&features, "a file where a folder should be").unwrap();
    let path = features.join("gfd");
    let (node, kubelet) = setup.arg("--output-file").arg(&path).serve(8).await;
    let line = node.process.said("cannot write labels, keeping the previous ones").await;
    assert_eq!(line["file"], path.to_str().unwrap());
    node.metrics(|text| text.contains("\nlinkwise_label_writes_total{outcome=\"failed\"}")).await;
    allocation(&kubelet, "pod", GPU, 1).await;
    fs::remove_file(&features).unwrap();
    let labels = wait_label(&path, "nvidia.com/gpu.count", "8").await;
    assert_eq!(labels["linkwise.dev/gpu.link"], "nvswitch");
    node.metric("linkwise_label_writes_total{outcome=\"ok\"}", 1).await;
    node.metric("linkwise_labels", u64::try_from(labels.len()).unwrap()).await;
}
