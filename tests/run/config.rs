//! The configuration file under a running plugin: what a change applies, and what is rejected.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use linkwise_kubelet_box::{KubeletBox, Pod};

use crate::run::node::{GPU, Node, Setup, registered, uuid};

const VALID: &str = "linkwise_config_valid";

/// Replaces a file in one step.
pub fn write(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, file).unwrap();
}

/// A machine with a configuration file of this text, not yet started.
fn with_file(text: &str) -> (Setup, PathBuf) {
    let setup = Setup::on("dgx1-v100");
    let folder = setup.at("config");
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("config.yaml");
    write(&file, text);
    (setup.arg("--config-file").arg(&file), file)
}

async fn serve(text: &str) -> (Node, KubeletBox, PathBuf) {
    let (setup, file) = with_file(text);
    let (node, kubelet) = setup.serve(8).await;
    (node, kubelet, file)
}

/// Waits until every GPU claims NUMA nodes, or none does.
async fn hinted(kubelet: &KubeletBox, hinted: bool) {
    let claims = |nodes: &BTreeSet<i64>| nodes.is_empty() != hinted;
    kubelet
        .wait(|state| state.resources[GPU].numa.len() == 8 && state.resources[GPU].numa.values().all(claims))
        .await
        .unwrap();
}

#[tokio::test]
async fn changed_file_applies_while_pods_keep_their_gpus() {
    let (node, kubelet, file) = serve("version: v1\n").await;
    hinted(&kubelet, true).await;
    kubelet.admit(&Pod::single("before", GPU, 2), None).await.unwrap();
    let held = kubelet.state().resources[GPU].in_use();
    write(&file, "version: v1\nlinkwise:\n  numaHints: off\n");
    hinted(&kubelet, false).await;
    let line = node.process.logged(|line| line["message"] == "configuration applied").await;
    assert_eq!(
        (line["changed"].as_str(), line["why"].as_str()),
        (Some("linkwise.numaHints"), Some("the file changed"))
    );
    let state = &kubelet.state().resources[GPU];
    assert_eq!((state.registrations, state.in_use(), kubelet.violations().len()), (1, held, 0));
    node.metric(VALID, 1).await;
}

#[tokio::test]
async fn rejected_file_leaves_the_previous_one() {
    let (node, kubelet, file) = serve("linkwise: {numaHints: off}\n").await;
    hinted(&kubelet, false).await;
    write(&file, "linkwise: {numaHints: socket}\n");
    node.metric(VALID, 0).await;
    let line = node.process.logged(|line| line["level"] == "ERROR" && line["key"] == "linkwise.numaHints").await;
    assert_eq!(line["line"], 1);
    node.process.said("configuration rejected, keeping the previous one").await;
    // It serves as before. A missing file is rejected too.
    kubelet.admit(&Pod::single("meanwhile", GPU, 1), None).await.unwrap();
    hinted(&kubelet, false).await;
    std::fs::remove_file(&file).unwrap();
    node.process.said("cannot read the configuration file").await;
    write(&file, "linkwise: {numaHints: node}\n");
    hinted(&kubelet, true).await;
    node.metric(VALID, 1).await;
}

#[tokio::test]
async fn sighup_reloads_the_file() {
    let (node, _kubelet, _file) = serve("version: v1\n").await;
    node.process.signal("HUP");
    let line = node.process.said("configuration reloaded, unchanged").await;
    assert_eq!(line["why"], "SIGHUP");
    node.metric(VALID, 1).await;
}

#[tokio::test]
async fn sighup_without_a_file_is_harmless() {
    let (node, kubelet) = Setup::on("dgx1-v100").serve(8).await;
    node.process.signal("HUP");
    node.process.said("configuration reloaded, unchanged").await;
    kubelet.admit(&Pod::single("after", GPU, 1), None).await.unwrap();
}

#[tokio::test]
async fn unknown_key_is_a_warning_and_the_file_applies() {
    let (node, kubelet, _file) = serve("flags:\n  migStratgey: none\nlinkwise: {numaHints: off}\n").await;
    hinted(&kubelet, false).await;
    let line = node.process.logged(|line| line["key"] == "flags.migStratgey").await;
    assert_eq!((line["level"].as_str(), line["line"].as_u64()), (Some("WARN"), Some(2)));
    assert!(line["problem"].as_str().unwrap().contains("did you mean 'migStrategy'?"), "{line}");
}

#[tokio::test]
async fn ignored_names_are_logged_with_the_key_that_enables_them() {
    let text = "resources:\n  gpus:\n  - {pattern: '*', name: v100}\n";
    let (node, _kubelet, _file) = serve(text).await;
    let line = node.process.logged(|line| line["key"] == "resources").await;
    assert!(line["problem"].as_str().unwrap().contains("linkwise: {naming: true}"), "{line}");
}

#[tokio::test]
async fn setting_without_effect_is_one_log_line() {
    let variables = [
        ("CDI_FEATURE_FLAGS", "disable-nvsandboxutils", "no effect: they are options of NVIDIA's generator"),
        ("CDI_DISABLE_HOOKS", "chmod,update-ldcache", "other hooks are in no CDI spec of linkwise"),
    ];
    for (variable, value, said) in variables {
        let (node, _kubelet) = Setup::on("dgx1-v100").env(variable, value).serve(8).await;
        let line = node.process.logged(|line| line["key"] == variable).await;
        assert!(line["problem"].as_str().unwrap().contains(said), "{line}");
        let lines = node.process.lines();
        assert_eq!(lines.iter().filter(|line| line.contains("\"message\":\"configuration")).count(), 1, "{lines:#?}");
    }
    // The value that linkwise works by anyway is not logged.
    let (node, _kubelet) = Setup::on("dgx1-v100").env("DEVICE_DISCOVERY_STRATEGY", "nvml").serve(8).await;
    assert!(!node.process.lines().iter().any(|line| line.contains("iscovery")), "{:#?}", node.process.lines());
}

#[tokio::test]
async fn invalid_configuration_ends_the_start() {
    let (setup, file) = with_file("flags:\n  failOnInitError: maybe\n  migStrategy: some\n");
    let mut process = setup.spawn();
    let (status, words) = process.ended().await;
    assert_eq!(status.code(), Some(1));
    let file = file.display();
    assert_eq!(
        words,
        [format!(
            "linkwise: {file}: line 2: flags.failOnInitError: expected true or false, found 'maybe' \
         (and 1 more: see 'linkwise config check {file}')"
        )]
    );

    let (status, words) = Setup::on("dgx1-v100").env("DEVICE_DISCOVERY_STRATEGY", "tegra").spawn().ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(words[0].contains("DEVICE_DISCOVERY_STRATEGY: linkwise finds GPUs by NVML"), "{words:?}");

    let (status, words) = Setup::on("dgx1-v100").env("DEVICE_LIST_STRATEGY", "cdi").spawn().ended().await;
    assert_eq!(status.code(), Some(1));
    let expected =
        "linkwise: DEVICE_LIST_STRATEGY: expected envvar, volume-mounts, cdi-annotations or cdi-cri, found 'cdi'";
    assert_eq!(words, [expected]);
}

#[tokio::test]
async fn nvidia_plugins_command_serves_by_its_variables_and_file() {
    let (mut setup, _file) = with_file("version: v1\nflags:\n  plugin:\n    passDeviceSpecs: true\n");
    let link = setup.at("nvidia-device-plugin");
    std::os::unix::fs::symlink(&setup.program, &link).unwrap();
    (setup.program, setup.subcommand) = (link, None);
    let (_node, kubelet) = setup.env("FAIL_ON_INIT_ERROR", "true").serve(8).await;
    registered(&kubelet, 1, 8).await;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 8), None).await.unwrap();
    let grant = &admitted.grant("main", GPU).unwrap().allocation;
    assert!(grant.devices.contains(&uuid(1, 0)), "{grant:?}");
    let nodes: Vec<_> = grant.device_specs.iter().map(|node| node.host_path.as_str()).collect();
    assert!(nodes.contains(&"/dev/nvidia7"), "{nodes:?}");
}

#[tokio::test]
async fn file_overrides_the_class_of_an_xid() {
    let text = "linkwise:\n  health:\n    xids: {31: reset-gpu, 79: application}\n";
    let (node, kubelet, _file) = serve(text).await;
    // The built-in table has it the other way round.
    node.setup.tell("xid 1 79");
    node.setup.tell("xid 2 31");
    kubelet.wait(|state| state.resources[GPU].unhealthy == BTreeSet::from([uuid(1, 2)])).await.unwrap();
}
