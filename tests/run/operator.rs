//! An operator's orders: release and resume the driver, clear and cordon GPUs, accept missing hardware.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};

use fake_nvml::Control;
use linkwise_kubelet_box::Pod;
use serde_json::Value;
use tokio::process::Command;

use crate::run::memory::ran;
use crate::run::node::{
    GPU, Node, Process, Setup, allocation, children, seen, signal, stranger, until, uuid, wait_registered,
    wait_unhealthy,
};

/// A machine whose linkwise has an admin socket.
fn setup() -> Setup {
    let setup = Setup::on("dgx1-v100");
    let socket = setup.admin_socket();
    setup.arg("--admin-socket").arg(socket)
}

async fn admin(node: &Node, order: &[&str]) -> Output {
    node.setup.admin(order).output().await.unwrap()
}

async fn ordered(node: &Node, order: &[&str]) -> String {
    let output = admin(node, order).await;
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

async fn state(node: &Node) -> Value {
    serde_json::from_str(&ordered(node, &["state"]).await).unwrap()
}

/// True if a process that runs has called nvmlInit.
fn driver_is_held(node: &Node) -> bool {
    Control::new(node.setup.at("control")).is_heard()
}

#[tokio::test]
async fn taken_metrics_port_is_retried_until_free() {
    // An address of its own: another test that asks for any port of 127.0.0.1 could get a port that is freed there.
    let taken = TcpListener::bind("127.1.2.4:0").unwrap();
    let mut setup = setup();
    setup.metrics_address = taken.local_addr().unwrap();
    let (node, kubelet) = setup.start_beside_kubelet().await;
    let line = node.process.said("metrics port taken").await;
    assert_eq!(line["address"], node.address.to_string());
    wait_registered(&kubelet, 1, 8).await;
    let part = async || {
        let state = state(&node).await;
        let part = &state["parts"]["metrics and probes"];
        if part["trouble"].is_string() { Ok(part["phase"].clone()) } else { Err(state) }
    };
    assert_eq!(until(part).await, "waiting for the metrics port");
    drop(taken);
    node.process.said("metrics port free").await;
    node.ready(200, "ready").await;
    assert!(state(&node).await["parts"]["metrics and probes"].is_null());
}

#[tokio::test]
async fn pods_are_admitted_while_driver_is_released() {
    let (node, kubelet) = setup().serve(8).await;
    assert!(driver_is_held(&node));
    let answer = ordered(&node, &["release"]).await;
    assert!(answer.contains("no process of linkwise on this node holds the driver"), "{answer}");
    assert!(!driver_is_held(&node), "the answer came before the agent's end");
    node.metric("linkwise_driver_released", 1).await;
    assert_eq!(state(&node).await["driver_released"], true);
    kubelet.admit(&Pod::single("meanwhile", GPU, 2), None).await.unwrap();
    node.ready(200, "ready; driver: released; an operator released it").await;
    // The grace period has not passed yet.
    node.metric("linkwise_nvml_away", 0).await;
    // A second order changes nothing, and no agent was started.
    ordered(&node, &["release"]).await;
    node.metric("linkwise_nvml_agent_starts_total", 1).await;
    assert_eq!(node.process.count("an operator releases the driver"), 1);
    ordered(&node, &["resume"]).await;
    node.metric("linkwise_nvml_agent_up", 1).await;
    node.metric("linkwise_nvml_agent_starts_total", 2).await;
    node.setup.tell("xid 3 79");
    wait_unhealthy(&kubelet, &[3]).await;
    assert_eq!(kubelet.state().resources[GPU].registrations, 1, "linkwise registered again");
}

/// gpu-feature-discovery beside a node.
fn discovery(node: &Node) -> Process {
    let mut command = node.setup.tool(&["labels", "--use-node-feature-api=false", "--log-format=json"]);
    command.args(["--nvml-poll-ms=50", "--output-file"]).arg(node.setup.at("gfd"));
    command.arg("--kubelet-socket").arg(&node.setup.kubelet_socket).stdout(Stdio::null());
    Process::of(command)
}

/// Waits until a process has logged these words this many times.
async fn said_times(process: &Process, times: usize, words: &str) {
    until(async || if process.count(words) >= times { Ok(()) } else { Err(words.to_owned()) }).await;
}

#[tokio::test]
async fn gpu_is_reset_between_release_and_resume() {
    let setup = setup().arg("--nvml-poll-ms=50").arg("--health-hold-ms=50");
    setup.tell("recovery * 0");
    let (node, kubelet) = setup.serve(8).await;
    let labels = discovery(&node);
    said_times(&labels, 1, "NVML available").await;
    node.setup.tell_all(&["recovery 3 1", "fall 3"]);
    wait_unhealthy(&kubelet, &[3]).await;
    assert!(node.setup.try_tell("reset 3").is_err(), "a GPU that our processes use was reset");
    let words = ordered(&node, &["release"]).await;
    assert!(words.contains("no process of linkwise on this node holds the driver"), "{words}");
    assert!(!driver_is_held(&node), "gpu-feature-discovery still holds the driver");
    // The release holds for processes that start later.
    let second = discovery(&node);
    said_times(&second, 1, "an operator releases the driver").await;
    let mut tool = node.setup.tool(&["topology"]);
    tool.env("KUBELET_SOCKET", &node.setup.kubelet_socket);
    let (code, words) = ran(tool).await;
    assert!(code == Some(1) && words.contains("an operator released the driver"), "{words}");
    kubelet.admit(&Pod::single("meanwhile", GPU, 2), None).await.unwrap();
    assert!(!driver_is_held(&node));
    node.setup.tell("reset 3");
    ordered(&node, &["resume"]).await;
    wait_registered(&kubelet, 1, 8).await;
    said_times(&labels, 2, "NVML available").await;
    said_times(&second, 1, "NVML available").await;
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn release_holds_over_a_restart() {
    let (mut node, kubelet) = setup().serve(8).await;
    ordered(&node, &["release"]).await;
    node.process.signal("KILL");
    node.process.ended().await;
    let node = node.setup.start().await;
    node.ready(503, "an operator released the driver before the GPUs were discovered").await;
    node.metric("linkwise_driver_released", 1).await;
    assert!(!driver_is_held(&node));
    ordered(&node, &["resume"]).await;
    wait_registered(&kubelet, 2, 8).await;
    node.ready(200, "ready").await;
}

#[tokio::test]
async fn release_names_processes_that_hold_the_driver() {
    let (node, _kubelet) = setup().serve(8).await;
    let labels = discovery(&node);
    said_times(&labels, 1, "NVML available").await;
    labels.signal("STOP");
    let refused = admin(&node, &["release"]).await;
    labels.signal("CONT");
    let words = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let holds = "still hold the driver after 10s: gpu-feature-discovery;";
    assert!(words.contains(holds) && words.contains("stands"), "{words}");
    ordered(&node, &["release"]).await;
    assert!(!driver_is_held(&node));
}

#[tokio::test]
async fn processes_initialise_nvml_one_after_the_other() {
    let (node, _kubelet) = setup().serve(8).await;
    node.setup.tell("hang nvmlInit_v2");
    let processes = || Control::new(node.setup.at("control")).processes();
    let first = discovery(&node);
    seen(async || processes(), |count| *count == 2).await;
    let second = discovery(&node);
    let waits = |agent: &u32| {
        let files = std::fs::read_dir(format!("/proc/{agent}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|file| file.ends_with("driver/initialising"))
    };
    let agents = || children(second.id());
    seen(async || agents(), |agents| agents.iter().any(waits)).await;
    assert_eq!(processes(), 2, "`second` calls nvmlInit while `first` is in it");
    node.setup.tell("unhang nvmlInit_v2");
    for process in [&first, &second] {
        said_times(process, 1, "NVML available").await;
    }
}

#[tokio::test]
async fn hung_or_stopped_agent_releases_the_driver() {
    for is_stopped in [false, true] {
        let (node, _kubelet) = setup().serve(8).await;
        if is_stopped {
            signal("STOP", node.agent(&[]).await);
        } else {
            node.setup.tell_all(&["hang nvmlDeviceGetTemperature", "hang nvmlEventSetWait_v2"]);
        }
        assert!(driver_is_held(&node));
        ordered(&node, &["release"]).await;
        assert!(!driver_is_held(&node), "the answer came before the agent's end");
    }
}

#[tokio::test]
async fn release_during_nvml_init_leaves_linkwise_up() {
    let setup = setup();
    setup.all_on_bus();
    setup.tell("hang nvmlInit_v2");
    let node = setup.start().await;
    until(async || if driver_is_held(&node) { Ok(()) } else { Err("no agent has called nvmlInit") }).await;
    ordered(&node, &["release"]).await;
    node.ready(503, "an operator released the driver before the GPUs were discovered").await;
    node.setup.tell("unhang nvmlInit_v2");
    let kubelet = node.setup.kubelet();
    ordered(&node, &["resume"]).await;
    wait_registered(&kubelet, 1, 8).await;
}

#[tokio::test]
async fn cleared_gpu_is_healthy_again() {
    let (node, kubelet) = setup().serve(8).await;
    node.setup.tell("xid 2 79");
    wait_unhealthy(&kubelet, &[2]).await;
    let gpu = state(&node).await["gpus"][2].clone();
    let reason = &gpu["reasons"][0];
    assert_eq!((&gpu["uuid"], &reason["reason"]), (&uuid(1, 2).into(), &"XID 79".into()));
    assert!(reason["since"].as_u64().unwrap() > 1_700_000_000 && gpu["healthy"] == false, "{gpu}");
    ordered(&node, &["clear", &uuid(1, 2)]).await;
    wait_unhealthy(&kubelet, &[]).await;
    let seen = state(&node).await;
    assert_eq!(seen["gpus"][2]["reasons"], Value::Array(Vec::new()));
    let resource = &seen["resources"][GPU];
    assert_eq!((&resource["phase"], &resource["healthy"]), (&"serving".into(), &8.into()), "{seen}");
    let refused = admin(&node, &["clear", "GPU-nobody"]).await;
    assert_eq!(refused.status.code(), Some(1));
    let words = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(words, "linkwise: no GPU GPU-nobody on this node\n");
}

#[tokio::test]
async fn cordoned_gpu_gets_no_new_pod_until_uncordon() {
    let (node, kubelet) = setup().serve(8).await;
    allocation(&kubelet, "before", GPU, 8).await;
    let gpu = uuid(1, 2);
    let answer = ordered(&node, &["cordon", &gpu, "--reason", "a \"hot\"\u{1b}[7m cable", "--by", "ada"]).await;
    assert_eq!(answer, format!("{gpu} is given to no new pod; pods keep it until they end\n"));
    wait_unhealthy(&kubelet, &[2]).await;
    // A second cordon of a GPU replaces the first.
    ordered(&node, &["cordon", &gpu, "--reason", "a hot cable", "--by", "ada", "--evict"]).await;
    let reported = async |node: &Node| {
        let gpu = state(node).await["gpus"][2].clone();
        (gpu["healthy"].clone(), gpu["availability"].clone(), gpu["reasons"][0]["reason"].clone())
    };
    let held = (true.into(), "held".into(), "cordoned by ada: a hot cable".into());
    seen(async || reported(&node).await, |gpu| *gpu == held).await;
    node.metric(&format!("linkwise_gpu_healthy{{uuid=\"{gpu}\"}}"), 1).await;
    let metrics = node.get("/metrics").await.body;
    assert!(metrics.contains(&format!("linkwise_gpu_cordoned_since_seconds{{uuid=\"{gpu}\"}}")), "{metrics}");
    assert!(!metrics.contains("linkwise_gpu_unhealthy_since_seconds{"), "{metrics}");
    let text = ordered(&node, &["state", "--format", "text"]).await;
    assert!(text.contains("cordoned") && text.contains("until: `linkwise admin uncordon`"), "{text}");
    let page = node.get("/").await.body;
    assert!(page.contains("cordoned by ada: a hot cable"), "{page}");

    kubelet.remove_pod("before");
    let node = node.end().await.start().await;
    wait_registered(&kubelet, 2, 7).await;
    wait_unhealthy(&kubelet, &[2]).await;
    node.metric("linkwise_gpus_by_availability{availability=\"cordoned\"}", 1).await;
    let page = node.get("/").await.body;
    let [count, summary] = ["<dt>Cordoned</dt><dd>1</dd>", "7 free, 1 cordoned, 0 unhealthy."];
    assert!(page.contains(count) && page.contains(summary), "{page}");
    ordered(&node, &["uncordon", &gpu]).await;
    wait_unhealthy(&kubelet, &[]).await;
    allocation(&kubelet, "after", GPU, 8).await;

    for (order, words) in [
        (vec!["uncordon", "GPU-nobody"], "no GPU GPU-nobody on this node"),
        (vec!["cordon", "GPU-nobody", "--reason", "x"], "no GPU GPU-nobody on this node"),
        (vec!["cordon", &gpu, "--reason", " "], "a cordon needs a reason"),
        (vec!["cordon", &gpu, "--reason", &"x".repeat(600)], "name and reason: at most 512 bytes"),
        (vec!["cordon", &gpu, "--reason", "x", "--by", &"x".repeat(20_000)], "length limit exceeded"),
    ] {
        let refused = admin(&node, &order).await;
        let answer = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(1) && answer.contains(words), "{answer}");
    }
    assert_eq!(kubelet.violations(), []);
}

#[tokio::test]
async fn missing_gpu_is_reported_until_back_or_accepted() {
    let gpu = uuid(1, 7);
    let what = format!("GPU 0000:8a:00.0 ({gpu}): missing (Tesla V100-SXM2-32GB)");
    let series = format!("{{uuid=\"{gpu}\",pci=\"0000:8a:00.0\",what=\"gpu\"}}");
    let (node, kubelet) = setup().arg("--expect-gpus").arg("8").serve(8).await;
    let shortfalls = async |node: &Node| state(node).await["shortfalls"].as_array().unwrap().clone();
    assert_eq!(shortfalls(&node).await, Vec::<Value>::new());
    let setup = node.end().await;
    setup.tell("remove 7");
    let node = setup.start().await;
    wait_registered(&kubelet, 2, 7).await;
    let lacking = shortfalls(&node).await;
    let lacks: Vec<&Value> = lacking.iter().map(|it| &it["what"]).collect();
    assert_eq!(lacks, [what.as_str(), "this node: 7 GPUs, 8 are expected"]);
    let metrics = node.get("/metrics").await.body;
    let since = format!("linkwise_hardware_lacking_since_seconds{series} {}\n", lacking[0]["since"]);
    assert!(metrics.contains(&since), "{metrics}");
    assert!(node.get("/").await.body.contains(&what));
    assert!(ordered(&node, &["state", "--format", "text"]).await.contains(&what));
    let doctor = node.setup.doctor().output().await.unwrap();
    assert!(String::from_utf8(doctor.stdout).unwrap().contains(&format!("lacking: {what}")));
    node.process.said("the node lacks hardware").await;

    // The shortfall ends when the GPU is back.
    node.setup.tell("add 7");
    seen(async || shortfalls(&node).await, Vec::is_empty).await;
    node.setup.tell("remove 7");
    seen(async || shortfalls(&node).await, |lacking| lacking.len() == 2).await;
    let accepted = ordered(&node, &["accept"]).await;
    assert_eq!(accepted, format!("accepted: {what}; this node: 7 GPUs, 8 are expected\n"));
    seen(async || shortfalls(&node).await, Vec::is_empty).await;
    let node = node.end().await.start().await;
    wait_registered(&kubelet, 3, 7).await;
    assert_eq!(shortfalls(&node).await, Vec::<Value>::new());
    assert_eq!(ordered(&node, &["accept"]).await, "this node lacks no hardware\n");
}

#[tokio::test]
async fn other_program_on_the_admin_socket_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let speaking = stranger(listener, 1, b"SSH 200 hello\r\n\r\nwelcome\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_linkwise"));
    let output = command.args(["admin", "--socket"]).arg(&socket).arg("state").output().await.unwrap();
    speaking.join().unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(words, format!("linkwise: another program answers on {}\n", socket.display()));
    assert_eq!((output.status.code(), output.stdout), (Some(1), Vec::new()));
}

#[tokio::test]
async fn metrics_port_takes_no_orders_and_socket_is_private() {
    let (mut node, _kubelet) = setup().serve(8).await;
    let socket = node.setup.admin_socket();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for path in ["/state", "/driver/release", "/driver/resume"] {
        assert_eq!(node.get(path).await.status, 404);
    }
    node.process.end().await;
    assert!(!socket.exists());
    let refused = admin(&node, &["state"]).await;
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.starts_with("linkwise: cannot ask linkwise on ") && words.lines().count() == 1, "{words}");
}
