//! The configuration file under a running plugin: what a change applies, and what is rejected.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use linkwise_kubelet_box::{KubeletBox, Pod};

use crate::run::node::{GPU, Node, Setup, allocation, replace, wait_unhealthy};

const VALID: &str = "linkwise_config_valid";

async fn serve(text: &str) -> (Node, KubeletBox, PathBuf) {
    let (node, kubelet) = Setup::on("dgx1-v100").config(text).serve(8).await;
    let file = node.setup.config_file();
    (node, kubelet, file)
}

/// Waits until every GPU has a NUMA hint, or none has.
pub async fn wait_hinted(kubelet: &KubeletBox, hinted: bool) {
    let wanted = |numa: &BTreeMap<String, BTreeSet<i64>>| {
        numa.len() == 8 && numa.values().all(|nodes| nodes.is_empty() != hinted)
    };
    kubelet.wait(|state| wanted(&state.resources[GPU].numa)).await.unwrap();
}

#[tokio::test]
async fn changed_file_applies_while_pods_keep_their_gpus() {
    let (node, kubelet, file) = serve("version: v1\n").await;
    wait_hinted(&kubelet, true).await;
    kubelet.admit(&Pod::single("before", GPU, 2), None).await.unwrap();
    let held = kubelet.state().resources[GPU].in_use();
    replace(&file, "version: v1\nlinkwise:\n  numaHints: off\n");
    wait_hinted(&kubelet, false).await;
    let line = node.process.logged(|line| line["message"] == "configuration applied").await;
    assert_eq!((&line["changed"], &line["why"]), (&"linkwise.numaHints".into(), &"the file changed".into()));
    let state = &kubelet.state().resources[GPU];
    assert_eq!((state.registrations, state.in_use(), kubelet.violations().len()), (1, held, 0));
    node.metric(VALID, 1).await;
}

#[tokio::test]
async fn rejected_file_leaves_the_previous_one() {
    let (node, kubelet, file) = serve("linkwise: {numaHints: off}\n").await;
    wait_hinted(&kubelet, false).await;
    replace(&file, "linkwise: {numaHints: socket}\n");
    node.metric(VALID, 0).await;
    let line = node.process.logged(|line| line["level"] == "ERROR" && line["key"] == "linkwise.numaHints").await;
    assert_eq!(line["line"], 1);
    node.process.said("configuration rejected, keeping the previous one").await;
    // Pods are admitted as before, and a restarted container keeps its devices. A missing file is rejected too.
    let held = allocation(&kubelet, "meanwhile", GPU, 1).await;
    wait_hinted(&kubelet, false).await;
    assert_eq!(kubelet.restart_container("meanwhile", "main").unwrap()[GPU], held);
    std::fs::remove_file(&file).unwrap();
    node.process.said("cannot read the configuration file").await;
    replace(&file, "linkwise: {numaHints: node}\n");
    wait_hinted(&kubelet, true).await;
    node.metric(VALID, 1).await;
}

#[tokio::test]
async fn sighup_reloads_the_file_if_there_is_one() {
    for setup in [Setup::on("dgx1-v100").config("version: v1\n"), Setup::on("dgx1-v100")] {
        let (node, kubelet) = setup.serve(8).await;
        node.process.signal("HUP");
        let line = node.process.said("configuration reloaded, unchanged").await;
        assert_eq!(line["why"], "SIGHUP");
        allocation(&kubelet, "after", GPU, 1).await;
    }
}

#[tokio::test]
async fn key_without_effect_warns_and_file_applies() {
    for (text, key, problem) in [
        ("flags:\n  migStratgey: none\n", "flags.migStratgey", "did you mean 'migStrategy'?"),
        ("resources:\n  gpus:\n  - {pattern: '*', name: v100}\n", "resources", "linkwise: {naming: true}"),
    ] {
        let (node, kubelet, _file) = serve(&format!("{text}linkwise: {{numaHints: off}}\n")).await;
        wait_hinted(&kubelet, false).await;
        let line = node.process.logged(|line| line["key"] == key).await;
        assert!(line["level"] == "WARN" && line["problem"].as_str().unwrap().contains(problem), "{line}");
        assert!(key == "resources" || line["line"] == 2, "{line}");
    }
}

#[tokio::test]
async fn setting_without_effect_is_one_log_line() {
    let variables = [
        ("CDI_FEATURE_FLAGS", "disable-nvsandboxutils", "no effect: they are options of NVIDIA's generator"),
        ("CDI_DISABLE_HOOKS", "chmod,update-ldcache", "other hooks are in no CDI spec of linkwise"),
    ];
    for (variable, value, problem) in variables {
        let (node, _kubelet) = Setup::on("dgx1-v100").env(variable, value).serve(8).await;
        let line = node.process.logged(|line| line["key"] == variable).await;
        assert!(line["problem"].as_str().unwrap().contains(problem), "{line}");
        assert_eq!(node.process.count("\"message\":\"configuration"), 1, "{:#?}", node.process.lines());
    }
    // A value that asks for linkwise's only behaviour is not logged.
    let (node, _kubelet) = Setup::on("dgx1-v100").env("DEVICE_DISCOVERY_STRATEGY", "nvml").serve(8).await;
    assert_eq!(node.process.count("iscovery"), 0, "{:#?}", node.process.lines());
}

#[tokio::test]
async fn invalid_configuration_ends_the_start() {
    let setup = Setup::on("dgx1-v100").config("flags:\n  failOnInitError: maybe\n  migStrategy: some\n");
    let (status, lines) = setup.spawn().ended().await;
    assert_eq!(status.code(), Some(1));
    let file = setup.config_file();
    let file = file.display();
    let expected = format!(
        "linkwise: {file}: line 2: flags.failOnInitError: expected true or false, found 'maybe' \
         (and 1 more: see 'linkwise config check {file}')"
    );
    assert_eq!(lines, [expected]);
}

#[tokio::test]
async fn file_overrides_the_class_of_an_xid() {
    let text = "linkwise:\n  health:\n    xids: {31: reset-gpu, 79: application}\n";
    let (node, kubelet, _file) = serve(text).await;
    // The built-in table says the opposite.
    node.setup.tell_all(&["xid 1 79", "xid 2 31"]);
    wait_unhealthy(&kubelet, &[2]).await;
}
