//! A wall clock that jumps under the whole process. A preloaded library (`clock.c`) answers the calls for the time,
//! because the kernel's clock must not be moved.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use linkwise_kubelet_box::Restart;
use serde_json::Value;

use crate::run::health::{record_file, wait_kept};
use crate::run::node::{GPU, Node, Setup, replace, until, uuid, wait_registered, wait_unhealthy};

/// Seconds of twenty years.
const TWENTY_YEARS: i64 = 20 * 31_556_952;

fn offset(setup: &Setup) -> PathBuf {
    setup.at("wall-clock")
}

/// A machine whose wall clock the test can move. Needs a C compiler, as Rust's linker does.
fn movable(setup: Setup) -> Setup {
    let library = setup.at("clock.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/clock.c");
    let made = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(made.unwrap().success());
    let file = offset(&setup);
    setup.env("LD_PRELOAD", library.to_str().unwrap()).env("WALL_CLOCK", file.to_str().unwrap())
}

/// Sets the wall clock's distance from the true time, in seconds.
fn jump(setup: &Setup, seconds: i64) {
    replace(&offset(setup), &seconds.to_string());
}

/// True time, in seconds since the Unix epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

/// Sends an XID that was not logged before, and returns the year of its log line by the process's wall clock.
async fn year_of(node: &Node, xid: u64) -> i64 {
    node.setup.tell(&format!("xid 5 {xid}"));
    let line = node.process.logged(|line| line["xid"] == xid).await;
    assert_eq!(line["gpu"], uuid(1, 5).as_str());
    line["timestamp"].as_str().unwrap().rsplitn(5, '-').last().unwrap().parse().unwrap()
}

/// The time at which a GPU became unhealthy, by the metrics.
async fn since(node: &Node, gpu: u32, reason: &str) -> u64 {
    let series = format!("linkwise_gpu_unhealthy_since_seconds{{uuid=\"{}\",reason=\"{reason}\"}} ", uuid(1, gpu));
    let ask = async || {
        let text = node.get("/metrics").await.body;
        text.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok()).ok_or(text)
    };
    until(ask).await
}

#[tokio::test]
async fn wall_clock_jump_changes_no_state() {
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=50").arg("--health-hold-ms=3600000");
    let began = now();
    let (node, kubelet) = movable(setup).serve(8).await;
    node.setup.tell("fail 2 nvmlDeviceGetTemperature 999");
    wait_unhealthy(&kubelet, &[2]).await;
    // The GPU answers again, and three polls of all GPUs show it: the hold time of an hour has begun.
    node.setup.tell_all(&["unfail 2 nvmlDeviceGetTemperature", "calls nvmlDeviceGetTemperature 24"]);
    let this_year = year_of(&node, 13).await;
    for (xid, jumped) in [(31, TWENTY_YEARS), (43, -TWENTY_YEARS), (32, -2 * TWENTY_YEARS)] {
        jump(&node.setup, jumped);
        // The process sees the jump.
        let years = year_of(&node, xid).await - this_year;
        assert!((years - jumped / (TWENTY_YEARS / 20)).abs() <= 1, "{years} years");
        node.setup.tell("calls nvmlDeviceGetTemperature 24");
        assert_eq!(kubelet.state().resources[GPU].unhealthy, [uuid(1, 2)].into());
        node.ready(200, "ready").await;
    }
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    node.setup.tell("xid 4 79");
    wait_unhealthy(&kubelet, &[2, 4]).await;
    for (gpu, reason) in [(2, "call_failed"), (4, "xid")] {
        let since = since(&node, gpu, reason).await;
        assert!((began..=now()).contains(&since), "GPU {gpu} since {since}, the test since {began}");
    }
    kubelet.restart(Restart::Kubelet).await.unwrap();
    wait_registered(&kubelet, 2, 6).await;
    node.ready(200, "ready").await;
}

#[tokio::test]
async fn hold_ends_despite_wall_clock_jumps() {
    let setup = Setup::on("dgx1-v100").arg("--nvml-poll-ms=50").arg("--health-hold-ms=200");
    let (node, kubelet) = movable(setup).serve(8).await;
    for (gpu, jumped) in [(2, -TWENTY_YEARS), (3, -2 * TWENTY_YEARS), (6, TWENTY_YEARS)] {
        node.setup.tell(&format!("fail {gpu} nvmlDeviceGetTemperature 999"));
        wait_unhealthy(&kubelet, &[gpu]).await;
        node.setup.tell(&format!("unfail {gpu} nvmlDeviceGetTemperature"));
        jump(&node.setup, jumped);
        wait_unhealthy(&kubelet, &[]).await;
    }
}

#[tokio::test]
async fn record_is_read_under_an_earlier_wall_clock() {
    let (node, kubelet) = movable(Setup::on("dgx1-v100")).serve(8).await;
    node.setup.tell("xid 2 79");
    wait_kept(&node.setup, &uuid(1, 2)).await;
    let began = since(&node, 2, "xid").await;
    let setup = node.end().await;
    // As on a board whose clock lost its battery. Linux sets no clock before 1970 (clock_settime(2)).
    let an_hour = 3600;
    jump(&setup, an_hour - i64::try_from(now()).unwrap());
    let node = setup.start().await;
    wait_registered(&kubelet, 2, 7).await;
    assert_eq!(since(&node, 2, "xid").await, began);
    node.setup.tell("xid 3 79");
    wait_kept(&node.setup, &uuid(1, 3)).await;
    let early = since(&node, 3, "xid").await;
    assert!((3600..7200).contains(&early), "the time does not follow the clock at the start: {early}");
    let setup = node.end().await;
    jump(&setup, TWENTY_YEARS);
    let node = setup.start().await;
    wait_registered(&kubelet, 3, 6).await;
    assert_eq!((since(&node, 2, "xid").await, since(&node, 3, "xid").await), (began, early));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(record_file(&node.setup)).unwrap()).unwrap();
    assert_eq!(record["gpus"][uuid(1, 2)]["reasons"][0]["since"], began);
}
