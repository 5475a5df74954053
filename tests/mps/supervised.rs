//! Tests of `supervise`: limits and faults of its control daemon, and the compute modes that it sets and restores.

use std::fs;
use std::time::Duration;

use linkwise_core::state::{MpsShare, ResourceName};
use linkwise_core::topology::GpuUuid;
use linkwise_host::mps::{DaemonEvent, Limits, Marker, readiness, set_back, set_exclusive};
use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};

use crate::cluster::support::until;
use crate::mps::node::{Node, chain, runs, shared, why_not_ready};
use crate::run::node::signal;

#[tokio::test]
async fn daemon_serves_once_limits_hold_and_ends_in_order() {
    let node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0, 1], 3));
    assert!(why_not_ready(gpu.readiness()).contains("does not serve"));
    gpu.wait_serving().await;
    assert_eq!(gpu.readiness(), Ok(()));
    assert_eq!(node.kept(&gpu.name, "threads"), "33.0");
    assert_eq!((node.kept(&gpu.name, "memory-0"), node.kept(&gpu.name, "memory-1")), ("13653".into(), "13653".into()));
    let pipe = node.layout().pipe(&gpu.name);
    let environment = node.kept(&gpu.name, "environment");
    assert!(environment.contains(&format!("CUDA_MPS_PIPE_DIRECTORY={}", pipe.display())), "{environment}");
    for part in ["/nvidia.com/gpu/log", "CUDA_DEVICE_ORDER=PCI_BUS_ID"] {
        assert!(environment.contains(part), "{environment}");
    }
    assert!(!environment.contains("CUDA_VISIBLE_DEVICES"), "{environment}");
    assert_eq!(node.modes("EXCLUSIVE_PROCESS"), ["GPU-0", "GPU-1"]);

    let (name, limits, pid) = (gpu.name.clone(), gpu.limits.clone(), node.pid(&gpu.name));
    assert_eq!(gpu.end().await, None);
    assert!(!runs(pid));
    assert!(node.noted("asked").contains(&"quit -t 1".to_owned()));
    assert!(why_not_ready(readiness(node.layout(), &name, &limits)).contains("does not serve"));
    assert_eq!(node.modes("DEFAULT"), ["GPU-0", "GPU-1"]);
    assert!(pipe.is_dir(), "the folder must stay for containers that have it mounted");
}

#[tokio::test]
async fn hung_daemon_does_not_serve_and_is_replaced() {
    let mut node = Node::new();
    node.settings.pace.answer = Duration::from_millis(500);
    let mut gpu = node.start_serving().await;
    let hung = node.pid(&gpu.name);
    node.misbehave("hang");
    while !gpu.failure().await.contains("'get_default_active_thread_percentage': no answer") {}
    assert!(why_not_ready(gpu.readiness()).contains("does not serve"));
    until(|| !runs(hung)).await;
    node.behave("hang");
    gpu.wait_serving().await;
    assert_eq!(gpu.readiness(), Ok(()));
    gpu.end().await;
}

#[tokio::test]
async fn limit_changed_by_a_client_is_set_again() {
    let node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0, 1], 2));
    gpu.wait_serving().await;
    let state = node.layout().pipe(&gpu.name).join("state");
    // Rename a whole file into place, because `supervise` may query the daemon at any time.
    let change = |what: &str, to: &str| {
        fs::write(state.join("new"), to).unwrap();
        fs::rename(state.join("new"), state.join(what)).unwrap();
    };
    for (what, set, other) in [("threads", "50.0", "100.0"), ("memory-0", "20480", "40960"), ("memory-1", "20480", "1")]
    {
        change(what, other);
        until(|| node.kept(&gpu.name, what) == set).await;
        assert_eq!(gpu.readiness(), Ok(()), "{what}");
    }
    // If a limit cannot be set again, the daemon fails.
    node.misbehave("refuse-memory");
    change("memory-1", "1");
    let failure = gpu.failure().await;
    let reason = "'get_default_device_pinned_mem_limit 1' answered '1M', not 20480M: the limit does not hold";
    assert!(failure.ends_with(reason), "{failure}");
    node.behave("refuse-memory");
    gpu.wait_serving().await;
    gpu.end().await;
}

#[tokio::test]
async fn daemon_without_limits_or_mode_does_not_serve() {
    for (how, why) in [
        ("refuse-memory", "'get_default_device_pinned_mem_limit 0' answered '0M', not 20480M: the limit does not hold"),
        (
            "fail-memory",
            "'set_default_device_pinned_mem_limit 0 20480M': nvidia-cuda-mps-control failed (exit status: 1): \
             Invalid device 0",
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
        assert!(why_not_ready(gpu.readiness()).contains("does not serve"));
        node.behave(how);
        gpu.wait_serving().await;
        gpu.end().await;
    }
}

#[tokio::test]
async fn missing_mps_program_is_named() {
    let mut node = Node::new();
    node.settings.programs.control = node.bin().join("missing");
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    let failure = gpu.failure().await;
    assert!(failure.contains("cannot run missing: No such file"), "{failure}");
    gpu.end().await;
}

#[tokio::test]
async fn each_resource_has_its_own_daemon() {
    let node = Node::new();
    let some = |name, index, replicas| (name, MpsShare { whole_node: false, ..shared(name, [index], replicas).1 });
    let mut small = node.supervise(some("nvidia.com/gpu.small", 2, 10));
    let mut large = node.supervise(some("nvidia.com/gpu.large", 5, 2));
    small.wait_serving().await;
    large.wait_serving().await;
    assert_eq!(node.kept(&small.name, "memory-0"), "4096");
    assert_eq!(node.kept(&large.name, "memory-0"), "20480");
    assert!(node.kept(&large.name, "environment").contains("CUDA_VISIBLE_DEVICES=GPU-5"));
    let untouched = node.pid(&large.name);
    signal("KILL", node.pid(&small.name));
    small.failure().await;
    small.wait_serving().await;
    assert_eq!((large.readiness(), node.pid(&large.name)), (Ok(()), untouched));
    large.end().await;
    assert_eq!(small.readiness(), Ok(()));
    small.end().await;
}

#[tokio::test]
async fn daemon_that_does_not_quit_is_killed() {
    let mut node = Node::new();
    node.settings.pace.quit = Duration::from_millis(200);
    let gpu = node.start_serving().await;
    node.misbehave("refuse-quit");
    let pid = node.pid(&gpu.name);
    assert_eq!(gpu.end().await, None);
    until(|| !runs(pid)).await;
}

#[tokio::test]
async fn failed_start_restores_compute_mode_at_shutdown() {
    for how in ["refuse-memory", "refuse-start", "hang"] {
        let node = Node::new();
        node.misbehave(how);
        let mut gpu = node.supervise(shared("nvidia.com/gpu", [0, 1], 2));
        if how == "hang" {
            // The control daemon runs but does not answer.
            let pid = node.layout().pipe(&gpu.name).join("nvidia-cuda-mps-control.pid");
            until(|| pid.exists()).await;
        } else {
            gpu.failure().await;
        }
        assert_eq!(node.exclusive(), ["GPU-0", "GPU-1"], "{how}: the GPUs must stay exclusive");
        // The shutdown comes in the pause before the next start, or during a start.
        assert_eq!(gpu.end().await, None);
        assert_eq!(node.modes("DEFAULT"), ["GPU-0", "GPU-1"], "{how}");
        assert_eq!(node.exclusive(), [""; 0], "{how}");
    }
}

#[tokio::test]
async fn no_compute_mode_is_set_before_all_are_recorded() {
    let node = Node::new();
    fs::create_dir_all(node.layout().exclusive().join("GPU-1")).unwrap();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0, 1], 2));
    let failure = gpu.failure().await;
    assert!(failure.starts_with("cannot write ") && failure.contains("GPU-1"), "{failure}");
    assert_eq!(node.modes("EXCLUSIVE_PROCESS"), [""; 0], "no mode may be set without a record");
    gpu.end().await;
    assert_eq!(node.modes("DEFAULT"), ["GPU-0", "GPU-1"]);
}

#[tokio::test]
async fn unrestored_compute_mode_stays_on_record() {
    let node = Node::new();
    let gpu = node.start_serving().await;
    node.misbehave("refuse-mode");
    let error = gpu.end().await.unwrap();
    assert!(error.starts_with("cannot set the compute mode of GPU-0 to DEFAULT"), "{error}");
    assert_eq!(node.exclusive(), ["GPU-0"]);
    node.behave("refuse-mode");
    set_back(&node.settings, |_| true).await.unwrap();
    assert_eq!(node.exclusive(), [""; 0]);
}

#[tokio::test]
async fn only_recorded_gpus_that_are_due_are_set_back() {
    let node = Node::new();
    set_back(&node.settings, |_| true).await.unwrap();
    assert_eq!(node.noted("modes"), [""; 0], "no GPU is on record");
    let [a, b]: [GpuUuid; 2] = ["GPU-a", "GPU-b"].map(|uuid| uuid.parse().unwrap());
    set_exclusive(&node.settings, &[&a, &b]).await.unwrap();
    set_back(&node.settings, |gpu| *gpu == a).await.unwrap();
    assert_eq!((node.modes("DEFAULT"), node.exclusive()), (vec!["GPU-a".to_owned()], vec!["GPU-b".to_owned()]));
}

/// Tests the plugin's side alone; no daemon runs.
#[tokio::test]
async fn marker_counts_while_its_writer_lives() {
    let node = Node::new();
    let limits_of = |replicas| Limits::of(&shared("nvidia.com/gpu", [0], replicas).1);
    let (name, limits) = (ResourceName::gpu(), limits_of(2));
    let path = node.layout().marker(&name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let why = |wanted: &Limits| why_not_ready(readiness(node.layout(), &name, wanted));

    let marker = Marker::set(&path, &limits).unwrap();
    assert_eq!(readiness(node.layout(), &name, &limits), Ok(()));
    assert!(why(&limits_of(4)).contains("other limits than the configuration asks for"));
    let left_behind = fs::read(&path).unwrap();
    drop(marker);
    assert!(why(&limits).contains("does not serve"));
    fs::write(&path, left_behind).unwrap();
    assert!(why(&limits).contains("is gone and left"));
    // A live process wrote an invalid file.
    let file = fs::File::create(&path).unwrap();
    file.lock().unwrap();
    assert!(why(&limits).contains("cannot read"));
}

#[tokio::test]
async fn pipe_directory_is_labelled_for_containers() {
    const NAME: &std::ffi::CStr = c"security.selinux";
    let label = |path: &std::path::Path| {
        let mut label = [0; 128];
        lgetxattr(path, NAME, &mut label).map(|length| String::from_utf8_lossy(&label[..length]).into_owned())
    };
    let mut node = Node::new();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    assert!(matches!(gpu.next().await, DaemonEvent::Serving));
    let pipe = node.layout().pipe(&gpu.name);
    assert!(label(&pipe).is_err(), "a label, although SELinux is disabled");
    gpu.end().await;
    // Files of an earlier daemon are labelled too.
    let left = pipe.join("left");
    fs::write(&left, "").unwrap();
    let may = lsetxattr(&left, NAME, b"x:x:x:s0\0", XattrFlags::empty());
    node.settings.selinuxfs = node.layout().root().to_owned();
    let mut gpu = node.supervise(shared("nvidia.com/gpu", [0], 2));
    if let Err(refused) = may {
        println!("security labels cannot be set here ({refused}): only the error is checked");
        let event = gpu.next().await;
        let DaemonEvent::NotLabelled(why) = &event else { panic!("{event:?}") };
        assert!(chain(why).starts_with("cannot label "), "{event:?}");
        gpu.wait_serving().await;
        return;
    }
    assert!(matches!(gpu.next().await, DaemonEvent::Serving));
    for path in [&pipe, &left] {
        assert_eq!(label(path).unwrap(), "system_u:object_r:container_file_t:s0\0", "{}", path.display());
    }
}
