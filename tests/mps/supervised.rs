//! One supervisor and what can become of its control daemon.

use std::fs;
use std::time::Duration;

use linkwise::mps::{Limits, Marker, Readiness, look};
use linkwise::state::{MpsShare, ResourceName};

use crate::node::{Node, kill, pid_in, runs, shared, until, waiting};

#[tokio::test]
async fn a_daemon_serves_once_its_limits_hold_and_ends_in_order() {
    let node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0, 1], 3));
    assert!(waiting(&gpu.readiness()).contains("does not serve"));
    gpu.serving().await;
    assert_eq!(gpu.readiness(), Readiness::Ready);
    assert_eq!(node.kept(&gpu.name, "threads"), "33.0");
    assert_eq!((node.kept(&gpu.name, "memory-0"), node.kept(&gpu.name, "memory-1")), ("13653".into(), "13653".into()));
    let pipe = node.layout().pipe(&gpu.name);
    let told = node.kept(&gpu.name, "environment");
    assert!(told.contains(&format!("CUDA_MPS_PIPE_DIRECTORY={}", pipe.display())), "{told}");
    assert!(told.contains("/nvidia.com/gpu/log") && told.contains("CUDA_DEVICE_ORDER=PCI_BUS_ID"), "{told}");
    assert!(!told.contains("CUDA_VISIBLE_DEVICES"), "{told}");
    let mut modes = node.noted("modes");
    modes.sort_unstable();
    assert_eq!(modes, ["-i GPU-0 -c EXCLUSIVE_PROCESS", "-i GPU-1 -c EXCLUSIVE_PROCESS"]);

    let (name, limits, pid) = (gpu.name.clone(), gpu.limits.clone(), node.pid(&gpu.name));
    assert_eq!(gpu.end().await, None);
    assert!(!runs(pid));
    assert!(node.noted("asked").contains(&"quit -t 1".to_owned()));
    assert!(waiting(&look(node.layout(), &name, &limits)).contains("does not serve"));
    assert_eq!(node.noted("modes").iter().filter(|mode| mode.ends_with("-c DEFAULT")).count(), 2);
    assert!(pipe.is_dir(), "containers that run have the folder mounted");
}

#[tokio::test]
async fn a_daemon_that_dies_is_withdrawn_and_started_again() {
    let node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    gpu.serving().await;
    let (died, server) = (node.pid(&gpu.name), pid_in(&node.layout().pipe(&gpu.name).join("state/server")));
    // What is started next is to be seen not to serve yet.
    node.misbehave("refuse-start");
    kill(died);
    assert_eq!(gpu.failure().await, "nvidia-cuda-mps-control ended: signal: 9 (SIGKILL)");
    assert!(waiting(&gpu.readiness()).contains("does not serve"));
    until(|| !runs(server)).await;
    while gpu.failure().await != "nvidia-cuda-mps-control ended: exit status: 3" {}
    node.behave("refuse-start");
    gpu.serving().await;
    assert_eq!(gpu.readiness(), Readiness::Ready);
    assert_ne!(node.pid(&gpu.name), died);
    assert_eq!(node.kept(&gpu.name, "memory-0"), "20480", "the limits are set anew");
    gpu.end().await;
}

#[tokio::test]
async fn a_daemon_that_hangs_is_withdrawn_and_replaced() {
    let mut node = Node::new();
    node.settings.pace.answer = Duration::from_millis(500);
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    gpu.serving().await;
    let hung = node.pid(&gpu.name);
    node.misbehave("hang");
    while !gpu.failure().await.contains("'get_default_active_thread_percentage': no answer") {}
    assert!(waiting(&gpu.readiness()).contains("does not serve"));
    until(|| !runs(hung)).await;
    node.behave("hang");
    gpu.serving().await;
    assert_eq!(gpu.readiness(), Readiness::Ready);
    gpu.end().await;
}

/// What keeps a daemon from serving, by name.
#[tokio::test]
async fn a_daemon_whose_limits_do_not_hold_never_serves() {
    for (how, why) in [
        ("refuse-memory", "'get_default_device_pinned_mem_limit 0' answered '0M', not 20480M: the limit does not hold"),
        (
            "fail-memory",
            "'set_default_device_pinned_mem_limit 0 20480M': nvidia-cuda-mps-control failed (exit status: 1): Invalid device 0",
        ),
        (
            "refuse-mode",
            "cannot set the compute mode of GPU-0 to EXCLUSIVE_PROCESS: nvidia-smi failed (exit status: 4): \
             Unable to set the compute mode: Insufficient Permissions",
        ),
    ] {
        let node = Node::new();
        node.misbehave(how);
        let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
        let failure = gpu.failure().await;
        assert!(failure.ends_with(why), "{how}: {failure}");
        assert!(waiting(&gpu.readiness()).contains("does not serve"));
        node.behave(how);
        gpu.serving().await;
        gpu.end().await;
    }
}

#[tokio::test]
async fn a_driver_without_mps_is_named() {
    let mut node = Node::new();
    node.settings.programs.control = node.bin().join("missing");
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    let failure = gpu.failure().await;
    assert!(failure.contains("cannot start") && failure.contains("missing: No such file"), "{failure}");
    gpu.end().await;
}

#[tokio::test]
async fn resources_have_daemons_of_their_own() {
    let node = Node::new();
    let some = |name, index, replicas| (name, MpsShare { whole_node: false, ..shared(name, [index], replicas).1 });
    let mut small = node.supervise(some("nvidia.com/gpu.small", 2, 10));
    let mut large = node.supervise(some("nvidia.com/gpu.large", 5, 2));
    small.serving().await;
    large.serving().await;
    assert_eq!(node.kept(&small.name, "memory-0"), "4096");
    assert_eq!(node.kept(&large.name, "memory-0"), "20480");
    assert!(node.kept(&large.name, "environment").contains("CUDA_VISIBLE_DEVICES=GPU-5"));
    let untouched = node.pid(&large.name);
    kill(node.pid(&small.name));
    small.failure().await;
    small.serving().await;
    assert_eq!((large.readiness(), node.pid(&large.name)), (Readiness::Ready, untouched));
    large.end().await;
    assert_eq!(small.readiness(), Readiness::Ready);
    small.end().await;
}

#[tokio::test]
async fn a_daemon_that_does_not_quit_is_killed() {
    let mut node = Node::new();
    node.settings.pace.quit = Duration::from_millis(200);
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    gpu.serving().await;
    node.misbehave("refuse-quit");
    let pid = node.pid(&gpu.name);
    assert_eq!(gpu.end().await, None);
    until(|| !runs(pid)).await;
}

#[tokio::test]
async fn what_cannot_be_put_back_is_told() {
    let node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    gpu.serving().await;
    node.misbehave("refuse-mode");
    let left = gpu.end().await.unwrap();
    assert!(left.starts_with("cannot set the compute mode of GPU-0 to DEFAULT"), "{left}");
}

/// The plugin's side, without a daemon.
#[tokio::test]
async fn a_marker_counts_while_its_process_stands_by_it() {
    let node = Node::new();
    let limits_of = |replicas| Limits::of(&shared("nvidia.com/gpu", [0], replicas).1);
    let (name, limits) = (ResourceName::gpu(), limits_of(2));
    let path = node.layout().marker(&name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let why = |wanted: &Limits| waiting(&look(node.layout(), &name, wanted)).to_owned();

    let marker = Marker::set(&path, &limits).unwrap();
    assert_eq!(look(node.layout(), &name, &limits), Readiness::Ready);
    assert!(why(&limits_of(4)).contains("other limits than the configuration asks for"));
    let left_behind = fs::read(&path).unwrap();
    drop(marker);
    assert!(why(&limits).contains("does not serve"));
    fs::write(&path, left_behind).unwrap();
    assert!(why(&limits).contains("is gone and left"));
    // A process that stands by nonsense.
    let file = fs::File::create(&path).unwrap();
    file.lock().unwrap();
    assert!(why(&limits).contains("cannot read"));
}
