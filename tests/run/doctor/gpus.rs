//! What the doctor says of the GPUs' health: by NVML's word now, by the linkwise that runs, by what the last one kept.

use linkwise::state::HealthRecord;

use super::*;
use crate::node::{GPU, Node, until, uuid};

/// What is said of one GPU: status, words and advice of each line.
fn said(report: &Value, gpu: &str) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let findings = report["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == "gpus");
    let own = findings.filter(|finding| text(&finding["what"]).contains(gpu));
    own.map(|finding| (text(&finding["status"]), text(&finding["what"]), text(&finding["advice"]))).collect()
}

/// One line is said of the GPU, of this status, with these words and this advice.
fn says(report: &Value, gpu: &str, status: &str, words: &str, advice: &str) {
    let lines = said(report, gpu);
    let [(found, what, what_to_do)] = lines.as_slice() else { panic!("{gpu}: {lines:?}") };
    assert!(found == status && what.contains(words) && what_to_do.contains(advice), "{gpu}: {lines:?}");
}

/// linkwise on a machine on which nothing is wrong, with polls that come often.
async fn running(admin: bool) -> (Node, KubeletBox) {
    let (setup, kubelet, ..) = well("dgx1-v100");
    // The driver has a word for what it wants done with this one.
    setup.tell("recovery 4 0");
    let socket = setup.admin_socket();
    let mut setup = setup.arg("--nvml-poll-ms=20");
    if admin {
        setup = setup.arg("--admin-socket").arg(socket);
    }
    let node = setup.start().await;
    registered(&kubelet, 1, 8).await;
    (node, kubelet)
}

#[tokio::test]
async fn a_gpu_that_nvml_says_is_ill_has_its_reason_and_its_way_out() {
    let (setup, _kubelet, ..) = well("dgx1-v100");
    setup.tell("recovery 1 1");
    setup.tell("rows 2 false true");
    setup.tell("fail 5 nvmlDeviceGetTemperature 999");
    // Waits for a reset, and is no reason.
    setup.tell("rows 6 true false");
    let report = look(&setup, &[]).await;
    says(&report, &uuid(1, 0), "ok", "Tesla V100", "");
    says(&report, &uuid(1, 1), "failed", "the driver asks for: GPU reset", "recovery action back at none");
    says(&report, &uuid(1, 2), "failed", "a row remapping failed", "another GPU in its place");
    says(&report, &uuid(1, 5), "failed", "nvmlDeviceGetTemperature failed", "the call passing");
    says(&report, &uuid(1, 6), "ok", "Tesla V100", "");
    found(&report, "gpus", "skipped", "no linkwise answers on");
    let text = run(setup.doctor()).await.1;
    assert!(text.contains("the driver asks for: GPU reset\n           -> "), "{text}");
}

#[tokio::test]
async fn a_gpu_that_is_late_for_its_fabric_is_waited_for_and_one_that_cannot_join_has_failed() {
    let fabric = ", nvlinks: [], fabric: {cluster: 11111111-2222-3333-4444-555555555555, clique: 0}";
    let gpus = [("GPU-a", "0000:01:00.0", fabric), ("GPU-b", "0000:02:00.0", fabric)];
    let (setup, _kubelet, ..) = around(Setup::with(&machine(&gpus)));
    setup.tell("fabric 0 3 999");
    setup.tell("fabric 1 2 0");
    let report = look(&setup, &[]).await;
    says(&report, "GPU-a", "failed", "not joined to the NVLink fabric: status 999", "joined to its fabric");
    says(&report, "GPU-b", "warning", "still joining the NVLink fabric", "the GPU joined to its fabric");
}

#[tokio::test]
async fn what_the_linkwise_that_runs_holds_against_a_gpu_is_told() {
    let (node, kubelet) = running(true).await;
    let setup = &node.setup;
    let report = look(setup, &[]).await;
    found(&report, "gpus", "ok", "linkwise answers on");
    says(&report, &uuid(1, 2), "ok", "Tesla V100", "");
    // The driver has a word for neither of them, and another process saw them.
    setup.tell("xid 2 79");
    setup.tell("link 3 0 down");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 2).await.unwrap();
    let report = look(setup, &[]).await;
    says(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    says(&report, &uuid(1, 3), "failed", "NVLinks down: 0", "the links active");
    // What NVML says now and linkwise holds too is one line.
    setup.tell("recovery 4 1");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 3).await.unwrap();
    let report = look(setup, &[]).await;
    says(&report, &uuid(1, 4), "failed", "the driver asks for: GPU reset", "recovery action");
    // An operator vouches for it: linkwise gives it out, and the doctor says so.
    let mut command = Command::new(&setup.program);
    command.args(["admin", "--socket"]).arg(setup.admin_socket()).args(["clear", &uuid(1, 4)]);
    assert_eq!(run(command).await.0, Some(0));
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 2).await.unwrap();
    says(&look(setup, &[]).await, &uuid(1, 4), "warning", "linkwise does not hold it against the GPU", "cleared it");
    // A driver that is not to be had changes nothing of what linkwise holds.
    setup.tell("init 999");
    let report = look(setup, &[]).await;
    found(&report, "gpus", "skipped", "NVML does not answer");
    says(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "nobody was disturbed");
}

#[tokio::test]
async fn what_the_last_linkwise_kept_counts_on_the_same_boot() {
    let (mut node, kubelet) = running(false).await;
    let file = node.setup.at("k/linkwise/linkwise_health.json");
    node.setup.tell("xid 2 79");
    kubelet.wait(|state| state.resources[GPU].unhealthy.len() == 1).await.unwrap();
    let read = || serde_json::from_str::<HealthRecord>(&fs::read_to_string(&file).unwrap_or_default()).ok();
    let kept = || read().filter(|record| record.gpus.values().any(|gpu| !gpu.reasons.is_empty()));
    let mut record = until(async || kept().ok_or("not kept yet")).await;
    let report = look(&node.setup, &[]).await;
    found(&report, "gpus", "ok", "linkwise_health.json: what is kept there");
    says(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    node.process.signal("TERM");
    assert!(node.process.ended().await.0.success());
    // A link that was active while linkwise ran.
    let setup = &node.setup;
    setup.tell("link 3 0 down");
    let report = look(setup, &[]).await;
    says(&report, &uuid(1, 2), "failed", "XID 79", "linkwise admin clear");
    says(&report, &uuid(1, 3), "failed", "NVLinks down: 0", "the links active");
    // Elsewhere nothing is kept; and of another boot nothing counts.
    says(&look(setup, &["--state-dir", "/no/such"]).await, &uuid(1, 2), "ok", "Tesla V100", "");
    record.identity.boot = Some("another".to_owned());
    fs::write(&file, serde_json::to_string(&record).unwrap()).unwrap();
    says(&look(setup, &[]).await, &uuid(1, 2), "ok", "Tesla V100", "");
    // A file that is none is left as it is.
    for (text, status, words) in [
        ("{", "warning", "linkwise_health.json: it is no health record"),
        ("{\"version\": 7}", "skipped", "of version 7"),
    ] {
        fs::write(&file, text).unwrap();
        found(&look(setup, &[]).await, "gpus", status, words);
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}

#[tokio::test]
async fn an_admin_socket_that_hangs_or_is_anothers_holds_up_nothing() {
    let (setup, _kubelet, ..) = well("dgx1-v100");
    fs::create_dir_all(setup.admin_socket().parent().unwrap()).unwrap();
    let hanging = UnixListener::bind(setup.admin_socket()).unwrap();
    let report = look(&setup, &["--timeout", "1"]).await;
    found(&report, "gpus", "warning", "no answer on");
    says(&report, &uuid(1, 2), "ok", "Tesla V100", "");
    let speaking = std::thread::spawn(move || {
        // The first is the one that gave up.
        for stream in hanging.incoming().take(2).map(Result::unwrap) {
            // All of it: who closes with something unread resets the connection.
            let mut lines = std::io::BufRead::lines(std::io::BufReader::new(&stream)).map_while(Result::ok);
            let _ = lines.find(String::is_empty);
            let _ = std::io::Write::write_all(&mut &stream, b"HTTP/1.1 200 OK\r\n\r\nhello\n");
        }
    });
    found(&look(&setup, &[]).await, "gpus", "warning", "is no state of linkwise");
    speaking.join().unwrap();
}

#[tokio::test]
async fn a_driver_that_is_let_go_of_is_told() {
    let (node, _kubelet) = running(true).await;
    let mut command = Command::new(&node.setup.program);
    command.args(["admin", "--socket"]).arg(node.setup.admin_socket()).arg("release");
    assert_eq!(run(command).await.0, Some(0));
    found(&look(&node.setup, &[]).await, "gpus", "warning", "has let go of the driver");
}
