//! The answers to Allocate under each device-list strategy, and CDI specs that follow the machine.

use std::fs;
use std::path::PathBuf;

use linkwise_kubelet_box::Allocation;

use crate::cdi::root::Root;
use crate::cdi::schema;
use crate::run::node::{GPU, Node, Setup, allocation, fifo, machine, seen, wait_registered, writer};
use crate::run::refusals::refused;

const TWO: [(&str, &str, &str); 2] = [("GPU-a", "0000:01:00.0", ""), ("GPU-b", "0000:41:00.0", "")];

/// A machine of these GPUs, with a driver root and a folder for CDI specs.
fn setup(gpus: &[(&str, &str, &str)]) -> Setup {
    cdi_setup(Setup::with(&machine(gpus)))
}

/// Adds a driver root and a folder for CDI specs to a machine.
pub fn cdi_setup(setup: Setup) -> Setup {
    let (root, specs) = (setup.at("driver"), setup.at("cdi"));
    Root::full(&root);
    let setup = setup.arg("--driver-root-ctr-path").arg(root).arg("--cdi-dir").arg(specs);
    setup.args(["--nvidia-driver-root=/run/driver", "--nvml-pause-ms=10"])
}

pub fn spec_file(setup: &Setup) -> PathBuf {
    setup.at("cdi").join("k8s.device-plugin.nvidia.com-gpu.json")
}

/// Waits until the CDI spec has exactly these devices, and checks it against the schema.
pub async fn wait_spec_with(node: &Node, wanted: &[&str]) {
    let has_wanted = |text: &String| {
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("\"name\": \""));
        names.map(|name| name.trim_end_matches("\",")).eq(wanted.iter().copied())
    };
    let text = seen(async || fs::read_to_string(spec_file(&node.setup)).unwrap_or_default(), has_wanted).await;
    assert_eq!(schema::check(&text), [""; 0], "{text}");
}

/// An answer to Allocate, one line for each thing that a container gets.
pub fn lines(allocation: &Allocation) -> Vec<String> {
    let envs = allocation.envs.iter().map(|(name, value)| format!("env {name}={value}"));
    let mounts = allocation.mounts.iter();
    let mounts = mounts.map(|mount| format!("mount {} at {}", mount.host_path, mount.container_path));
    let annotations = allocation.annotations.iter().map(|(key, value)| format!("annotation {key}: {value}"));
    let names = allocation.cdi_names.iter().map(|name| format!("cdi {name}"));
    let nodes = allocation.device_specs.iter();
    let nodes = nodes.map(|spec| format!("node {} at {} {}", spec.host_path, spec.container_path, spec.permissions));
    envs.chain(mounts).chain(annotations).chain(names).chain(nodes).collect()
}

#[tokio::test]
async fn strategies_alone_and_combined_answer_allocate() {
    let ways = [
        "",
        "--device-list-strategy=envvar --device-id-strategy=index",
        "--device-list-strategy=volume-mounts",
        "--device-list-strategy=cdi-annotations",
        "--device-list-strategy=cdi-annotations --cdi-annotation-prefix=nvidia.cdi.k8s.io/ \
         --device-id-strategy=index",
        // With CDI alone nothing else is passed, even if it is asked for.
        "--device-list-strategy=cdi-cri --pass-device-specs",
        "--device-list-strategy=cdi-cri,cdi-annotations --device-id-strategy=index",
        "--device-list-strategy=envvar,cdi-cri --pass-device-specs",
        // Both strategies set NVIDIA_VISIBLE_DEVICES, which has to name the mounts' folder.
        "--device-list-strategy=envvar,volume-mounts --device-id-strategy=index",
        // Options that a chart leaves empty.
        "--pass-device-specs --dev-root= --nvidia-cdi-hook-path= --driver-root-ctr-path=/nowhere",
    ];
    let mut text = String::new();
    for args in ways {
        // These arguments name a driver root that does not exist.
        let has_no_root = args.contains("--driver-root-ctr-path");
        let setup =
            if has_no_root { Setup::with(&machine(&TWO)).arg("--nvidia-driver-root=/run/driver") } else { setup(&TWO) };
        let (node, kubelet) = setup.args(args.split_whitespace()).serve(2).await;
        let mut got = lines(&allocation(&kubelet, "pod", GPU, 2).await);
        if has_no_root {
            // Control nodes would be those of the machine that runs the test.
            got.retain(|line| !["nvidiactl", "nvidia-uvm", "nvidia-modeset"].iter().any(|node| line.contains(node)));
        }
        text += &format!("{}\n  {}\n", format!("run {args}").trim_end(), got.join("\n  "));
        let with_cdi = got.iter().any(|line| line.contains("k8s.device-plugin.nvidia.com/gpu="));
        assert_eq!(spec_file(&node.setup).exists(), with_cdi, "{args}");
        assert_eq!(kubelet.violations(), []);
    }
    insta::assert_snapshot!(text);
}

#[tokio::test]
async fn strategies_from_the_environment_apply() {
    let setup = setup(&TWO).env("DEVICE_LIST_STRATEGY", "cdi-cri,envvar").env("DEVICE_ID_STRATEGY", "index");
    // A variable that a flag reads, and a misspelt one.
    let (node, kubelet) = setup.env("LINKWISE_POD_UID", "u").env("LINKWISE_STATE_DI", "s").serve(2).await;
    let got = lines(&allocation(&kubelet, "pod", GPU, 1).await);
    assert_eq!(got, ["env NVIDIA_VISIBLE_DEVICES=0", "cdi k8s.device-plugin.nvidia.com/gpu=0"]);
    let ignored: Vec<String> =
        node.process.lines().into_iter().filter(|line| line.contains("variable ignored")).collect();
    assert!(ignored.len() == 1 && ignored[0].contains("LINKWISE_STATE_DI\""), "{ignored:?}");
}

#[tokio::test]
async fn cdi_spec_follows_the_machine() {
    let (node, kubelet) = setup(&TWO).arg("--device-list-strategy=cdi-cri").serve(2).await;
    let text = fs::read_to_string(spec_file(&node.setup)).unwrap();
    assert!(text.contains("/run/driver/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.15"), "{text}");
    wait_spec_with(&node, &["0", "GPU-a", "1", "GPU-b", "all"]).await;
    node.process.said("libraries are mounted under the names of their links").await;
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"ok\"}", 1).await;
    // A third GPU comes with a new agent; then the first GPU leaves.
    let change = |gpus: &[(&str, &str, &str)]| {
        fs::write(node.setup.at("machine.yaml"), machine(gpus)).unwrap();
        node.setup.tell("crash");
    };
    let first = node.agent(&[]).await;
    change(&[TWO[0], TWO[1], ("GPU-c", "0000:81:00.0", "")]);
    wait_spec_with(&node, &["0", "GPU-a", "1", "GPU-b", "2", "GPU-c", "all"]).await;
    wait_registered(&kubelet, 1, 3).await;
    node.agent(&[first]).await;
    change(&[TWO[1], ("GPU-c", "0000:81:00.0", "")]);
    // GPU-a stays under its UUID, because its containers may be restarted. Its index is now GPU-b's.
    wait_spec_with(&node, &["GPU-a", "0", "GPU-b", "1", "GPU-c", "all"]).await;
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"ok\"}", 3).await;
}

#[tokio::test]
async fn no_plugin_registers_before_its_cdi_spec_exists() {
    let setup = setup(&TWO).arg("--device-list-strategy=cdi-cri");
    // A reader of this pipe waits for a writer, as on a slow disk.
    let slow = spec_file(&setup);
    fifo(&slow);
    let (node, kubelet) = setup.start_beside_kubelet().await;
    node.metric("linkwise_gpus", 2).await;
    node.ready(503, "nvidia.com/gpu: waiting for CDI specs").await;
    // Meanwhile a plugin that does not wait would register.
    for code in 0..20 {
        node.setup.tell(&format!("xid 0 {}", 200 + code));
        node.metric(&format!("linkwise_xid_errors_total{{uuid=\"GPU-a\",xid=\"{}\"}}", 200 + code), 1).await;
    }
    assert_eq!(node.process.count("\"phase\":\"registering\""), 0);
    drop(writer(&slow).await);
    wait_registered(&kubelet, 1, 1).await;
    wait_spec_with(&node, &["0", "GPU-a", "1", "GPU-b", "all"]).await;
}

#[tokio::test]
async fn unwritable_cdi_folder_fails_the_start() {
    let setup = Setup::with(&machine(&TWO));
    fs::write(setup.at("file"), "").unwrap();
    let folder = setup.at("file").join("cdi");
    let setup = setup.arg("--device-list-strategy=cdi-cri").arg("--cdi-dir").arg(&folder);
    let words = refused(setup.spawn()).await;
    assert!(words.contains(&format!("cannot write CDI specs to the folder {}", folder.display())), "{words}");
}

#[tokio::test]
async fn cdi_folder_lost_later_is_logged_once() {
    let (node, kubelet) = setup(&TWO).arg("--device-list-strategy=cdi-cri").serve(2).await;
    let folder = node.setup.at("cdi");
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    // Each change of the node's state makes linkwise check the spec.
    node.setup.tell("xid 0 79");
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"failed\"}", 1).await;
    node.setup.tell("xid 1 79");
    node.metric("linkwise_cdi_spec_writes_total{outcome=\"failed\"}", 2).await;
    wait_registered(&kubelet, 1, 0).await;
    assert_eq!(node.process.count("keeping the previous ones"), 1);
    // The next check makes folder and spec again.
    fs::remove_file(&folder).unwrap();
    wait_spec_with(&node, &["0", "GPU-a", "1", "GPU-b", "all"]).await;
}

#[tokio::test]
async fn later_device_nodes_are_passed_too() {
    let setup = setup(&TWO).arg("--pass-device-specs");
    let uvm = setup.at("driver/dev/nvidia-uvm");
    fs::remove_file(&uvm).unwrap();
    let (node, kubelet) = setup.serve(2).await;
    let has = |lines: &Vec<String>| lines.iter().any(|line| line.contains("/dev/nvidia-uvm at"));
    assert!(!has(&lines(&allocation(&kubelet, "before", GPU, 1).await)));
    assert!(kubelet.remove_pod("before"));
    std::os::unix::fs::symlink("/dev/null", &uvm).unwrap();
    node.setup.tell("xid 1 79");
    let given = async || {
        let given = lines(&allocation(&kubelet, "after", GPU, 1).await);
        assert!(kubelet.remove_pod("after"));
        given
    };
    seen(given, has).await;
}

#[tokio::test]
async fn exposed_nics_are_those_near_the_gpus() {
    // hwloc reads this host: the first GPU and an RDMA NIC below one switch, the second GPU alone on the other package.
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/host/src/machines/hwloc_xml/testdata/v2.xml");
    let setup = Setup::with(&machine(&[("GPU-a", "0000:03:00.0", ""), ("GPU-b", "0000:81:00.0", "")]));
    let setup = setup.host(host).env("LINKWISE_EXPOSE_NICS", "true");
    for (node, device) in [("uverbs3", "mlx5_0"), ("uverbs4", "mlx5_1")] {
        let folder = setup.at("sys/class/infiniband_verbs").join(node);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("ibdev"), format!("{device}\n")).unwrap();
    }
    fs::create_dir_all(setup.at("sys/class/misc/rdma_cm")).unwrap();
    let (_node, kubelet) = setup.serve(2).await;
    let mut pods =
        vec![lines(&allocation(&kubelet, "one", GPU, 1).await), lines(&allocation(&kubelet, "two", GPU, 1).await)];
    pods.sort();
    let near: &[&str] = &[
        "env LINKWISE_NICS=mlx5_0",
        "env NVIDIA_VISIBLE_DEVICES=GPU-a",
        "node /dev/infiniband/uverbs3 at /dev/infiniband/uverbs3 rw",
        "node /dev/infiniband/rdma_cm at /dev/infiniband/rdma_cm rw",
    ];
    let mut expected = vec![near, &["env LINKWISE_NICS=", "env NVIDIA_VISIBLE_DEVICES=GPU-b"]];
    expected.sort();
    assert_eq!(pods, expected);
}
