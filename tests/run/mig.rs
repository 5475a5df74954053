//! MIG through the whole process: from NVML and the kernel's capabilities to Allocate and the CDI spec.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::run::list_strategies::{cdi_setup, spec_file, wait_spec_with};
use crate::run::node::{GPU, Node, Setup, allocation};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;
use linkwise_kubelet_box::KubeletBox;

/// GPU 0 whole, GPU 1 in seven, GPU 2 in a 3g and two halves of a 4g, GPU 3 in two 1g (one with media) and a 2g.
pub const MIXED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/fake-nvml/machines/four-gpus-mig.yaml");

/// Writes the kernel's list of a machine's MIG capabilities, below a /proc of the test's own.
fn minors(proc: &Path, machine: &NodeObservation) {
    let mut list = "config 1\nmonitor 2\n".to_owned();
    for gpu in &machine.gpus {
        for device in gpu.mig.iter().flat_map(|mig| &mig.devices) {
            let instance = format!("gpu{}/gi{}", gpu.minor.unwrap(), device.gpu_instance);
            let capabilities = device.capabilities.unwrap();
            writeln!(list, "{instance}/access {}", capabilities.gpu_instance).unwrap();
            writeln!(list, "{instance}/ci{}/access {}", device.compute_instance, capabilities.compute_instance)
                .unwrap();
        }
    }
    let folder = proc.join("driver/nvidia-caps");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("mig-minors"), list).unwrap();
}

/// The machine of [`MIXED`].
pub fn four_gpus() -> Setup {
    Setup::with(&fs::read_to_string(MIXED).unwrap())
}

/// Adds the kernel's list of MIG capabilities to a machine of the test's own.
pub fn with_minors(setup: Setup) -> Setup {
    let (proc, machine) = (setup.at("proc"), setup.at("machine.yaml"));
    minors(&proc, &machines::load(machine.to_str().unwrap()).unwrap().observed);
    setup.arg("--procfs").arg(proc)
}

/// The machine of [`MIXED`] with the kernel's list.
pub fn mixed() -> Setup {
    with_minors(four_gpus())
}

/// [`mixed`] with a driver root, a folder for CDI specs, and the strategy `mixed`.
fn setup() -> Setup {
    cdi_setup(mixed()).arg("--mig-strategy=mixed")
}

/// The names of the spec's devices: index and UUID of each GPU, `parent:index` and UUID of each MIG device, and `all`.
fn names(gpus: &[u32], migs: &[(u32, u32, u32)]) -> Vec<String> {
    let gpu = |index: &u32| [index.to_string(), gpu(*index)];
    let mig = |(parent, index, number): &(u32, u32, u32)| [format!("{parent}:{index}"), mig_uuid(*number)];
    gpus.iter().flat_map(gpu).chain(migs.iter().flat_map(mig)).chain(["all".to_owned()]).collect()
}

pub fn gpu(index: u32) -> String {
    format!("GPU-00000000-0000-0000-0000-{index:012}")
}

pub fn mig_uuid(number: u32) -> String {
    format!("MIG-{number:08x}-0000-0000-0000-000000000000")
}

async fn wait_spec(node: &Node, gpus: &[u32], migs: &[(u32, u32, u32)]) {
    let names = names(gpus, migs);
    wait_spec_with(node, &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
}

/// All MIG devices of the machine: parent, index, and the number in the UUID.
fn all() -> Vec<(u32, u32, u32)> {
    let indices: [(u32, &[u32]); 3] = [(1, &[0, 1, 2, 3, 4, 5, 6]), (2, &[0, 1, 2]), (3, &[0, 1, 4])];
    let of = |(gpu, indices): (u32, &'static [u32])| indices.iter().map(move |index| (gpu, *index, 16 * gpu + index));
    indices.into_iter().flat_map(of).collect()
}

/// Waits until the kubelet lists this many healthy devices of a resource.
pub async fn wait_listed(kubelet: &KubeletBox, resource: &str, healthy: usize) {
    let wanted = |state: &linkwise_kubelet_box::State| {
        let resource = &state.resources[resource];
        resource.connected && resource.healthy.len() == healthy
    };
    let seen = kubelet.wait(wanted).await;
    seen.unwrap_or_else(|error| panic!("{healthy} of {resource}: {error}"));
}

#[tokio::test]
async fn cdi_spec_has_each_mig_device_with_its_nodes() {
    let setup = setup().arg("--device-list-strategy=cdi-cri");
    let (node, kubelet) = setup.serve(1).await;
    wait_listed(&kubelet, "nvidia.com/mig-1g.10gb", 8).await;
    wait_spec(&node, &[0, 1, 2, 3], &all()).await;
    let text = fs::read_to_string(spec_file(&node.setup)).unwrap();
    let spec: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut golden = format!("{} {}\n", spec["kind"], spec["cdiVersion"]);
    for device in spec["devices"].as_array().unwrap() {
        let nodes = device["containerEdits"]["deviceNodes"].as_array().unwrap();
        let node = |node: &serde_json::Value| format!("\n  {} at {}", node["hostPath"], node["path"]);
        golden.push_str(&format!("{}:{}\n", device["name"], nodes.iter().map(node).collect::<String>()));
    }
    insta::assert_snapshot!(golden.replace('"', ""));
}

#[tokio::test]
async fn mig_device_without_capabilities_is_refused_by_name() {
    let setup = setup().arg("--device-list-strategy=cdi-cri");
    let list = setup.at("proc/driver/nvidia-caps/mig-minors");
    let text = fs::read_to_string(&list).unwrap().replace("gpu3/gi3/access 435\n", "");
    fs::write(&list, text).unwrap();
    let (node, kubelet) = setup.serve(1).await;
    wait_listed(&kubelet, "nvidia.com/mig-2g.20gb", 1).await;
    wait_spec(&node, &[0, 1, 2, 3], &all()[..12]).await;
    node.process.said(&format!("no capabilities of {}", mig_uuid(0x34))).await;
    let pod = linkwise_kubelet_box::Pod::single("pod", "nvidia.com/mig-2g.20gb", 1);
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    assert!(format!("{error:?}").contains(&mig_uuid(0x34)), "{error:?}");
}

#[tokio::test]
async fn spec_follows_mig_layout_and_drops_old_devices() {
    let setup = setup().arg("--device-list-strategy=cdi-cri").arg("--nvml-poll-ms=50");
    let (node, kubelet) = setup.serve(1).await;
    wait_listed(&kubelet, "nvidia.com/mig-3g.40gb", 1).await;
    let held = allocation(&kubelet, "pod", "nvidia.com/mig-3g.40gb", 1).await;
    assert_eq!(held.devices, [mig_uuid(0x20)]);
    // Another device gets the same instance numbers, and with them the same device nodes.
    node.setup.tell(
        "mig 2 {enabled: true, devices: [{index: 0, uuid: MIG-00000099-0000-0000-0000-000000000000, gpu_instance: 1, \
         compute_instance: 0, gpu_slices: 3, compute_slices: 3, memory_mib: 40192, extension: none}]}",
    );
    let mut now = all();
    now.splice(7..10, [(2, 0, 0x99)]);
    wait_spec(&node, &[0, 1, 2, 3], &now).await;
    wait_listed(&kubelet, "nvidia.com/mig-3g.40gb", 1).await;
    // The device that the pod lost stays on the list.
    kubelet.wait(|state| state.resources["nvidia.com/mig-3g.40gb"].unhealthy.contains(&mig_uuid(0x20))).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].registrations, 1);
    assert_eq!(kubelet.violations(), []);
}
