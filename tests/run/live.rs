//! Changes while linkwise and a pod run: of the configuration, as Kubernetes and the NVIDIA plugin's config-manager
//! change it, of the MIG layout, of sharing. A device that a pod holds stays on the kubelet's list until the pod ends.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use linkwise_kubelet_box::{Allocation, KubeletBox, Pod};

use crate::run::mig::{four_gpus, mig_uuid, wait_listed};
use crate::run::node::{GPU, Setup, allocation, replace, wait_registered};

const SHARED: &str = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";
const WHOLE: &str = "version: v1\n";

/// A ConfigMap's volume: the file is a link into `..data`, which is a link to the folder of one version.
struct ConfigMap(PathBuf);

impl ConfigMap {
    fn new(folder: PathBuf, text: &str) -> Self {
        std::fs::create_dir(&folder).unwrap();
        symlink("..data/config.yaml", folder.join("config.yaml")).unwrap();
        let map = Self(folder);
        map.swap("..1", text);
        map
    }

    /// Replaces the version in one step, as the kubelet does, and removes the old one.
    fn swap(&self, version: &str, text: &str) {
        let before = std::fs::read_link(self.0.join("..data")).ok();
        std::fs::create_dir(self.0.join(version)).unwrap();
        std::fs::write(self.0.join(version).join("config.yaml"), text).unwrap();
        symlink(version, self.0.join("..data_tmp")).unwrap();
        std::fs::rename(self.0.join("..data_tmp"), self.0.join("..data")).unwrap();
        if let Some(before) = before {
            std::fs::remove_dir_all(self.0.join(before)).unwrap();
        }
    }
}

/// A machine with a ConfigMap of this text.
fn mapped(setup: Setup, text: &str) -> (Setup, ConfigMap) {
    let map = ConfigMap::new(setup.at("config"), text);
    let file = map.0.join("config.yaml");
    (setup.arg("--config-file").arg(file), map)
}

/// Waits until the kubelet lists exactly these devices as unhealthy, and this number of healthy ones.
async fn wait_list(kubelet: &KubeletBox, resource: &str, healthy: usize, unhealthy: &[String]) {
    let unhealthy: BTreeSet<String> = unhealthy.iter().cloned().collect();
    let wanted = |state: &linkwise_kubelet_box::State| {
        let resource = &state.resources[resource];
        resource.healthy.len() == healthy && resource.unhealthy == unhealthy
    };
    let seen = kubelet.wait(wanted).await;
    seen.unwrap_or_else(|error| panic!("{healthy} healthy, unhealthy {unhealthy:?}: {error}"));
}

/// Restarts the pod's container, and asserts that it keeps its devices.
async fn assert_keeps(kubelet: &KubeletBox, pod: &str, resource: &str, held: &Allocation) {
    assert_eq!(&kubelet.restart_container(pod, "main").unwrap()[resource], held);
}

fn visible(allocation: &Allocation) -> Vec<&str> {
    allocation.envs["NVIDIA_VISIBLE_DEVICES"].split(',').collect()
}

#[tokio::test]
async fn sharing_changes_while_pods_keep_their_devices() {
    let (setup, map) = mapped(Setup::on("dgx1-v100"), WHOLE);
    let (node, kubelet) = setup.serve(8).await;
    let whole = allocation(&kubelet, "whole", GPU, 2).await;
    map.swap("..2", SHARED);
    // All ids change. Ids that no pod holds leave the list; the pod's ids stay, unhealthy like the slots of its
    // GPUs.
    let slots_of_held: Vec<String> =
        whole.devices.iter().flat_map(|gpu| [format!("{gpu}::0"), format!("{gpu}::1")]).collect();
    wait_list(&kubelet, GPU, 12, &[whole.devices.clone(), slots_of_held].concat()).await;
    assert_keeps(&kubelet, "whole", GPU, &whole).await;
    let slots = allocation(&kubelet, "slots", GPU, 6).await;
    assert!(slots.devices.iter().all(|id| id.ends_with("::0")), "{slots:?}");
    assert!(kubelet.remove_pod("whole"));
    wait_list(&kubelet, GPU, 16, &[]).await;
    map.swap("..3", WHOLE);
    let shared: Vec<String> = visible(&slots).into_iter().map(str::to_owned).collect();
    wait_list(&kubelet, GPU, 2, &[slots.devices.clone(), shared].concat()).await;
    assert_keeps(&kubelet, "slots", GPU, &slots).await;
    assert!(kubelet.remove_pod("slots"));
    wait_list(&kubelet, GPU, 8, &[]).await;
    assert_eq!((kubelet.state().resources[GPU].registrations, kubelet.violations()), (1, vec![]));
    node.ready(200, "ready").await;
}

#[tokio::test]
async fn renamed_shared_resource_gets_its_own_plugin() {
    const RENAMED: &str = "nvidia.com/gpu.shared";
    let (setup, map) = mapped(Setup::on("dgx1-v100"), SHARED);
    let (node, kubelet) = setup.serve(16).await;
    let held = allocation(&kubelet, "pod", GPU, 1).await;
    map.swap("..2", &SHARED.replace("{timeSlicing: {", "{timeSlicing: {renameByDefault: true, "));
    wait_listed(&kubelet, RENAMED, 16).await;
    wait_list(&kubelet, GPU, 0, &held.devices).await;
    assert_keeps(&kubelet, "pod", GPU, &held).await;
    let error = kubelet.admit(&Pod::single("late", GPU, 1), None).await.unwrap_err();
    assert!(error.to_string().contains("no device is healthy"), "{error}");
    // The choice avoids the GPU with a held slot under the old name.
    let new = allocation(&kubelet, "new", RENAMED, 7).await;
    let used = held.devices[0].split("::").next().unwrap();
    assert!(visible(&new).len() == 7 && !visible(&new).contains(&used), "{new:?} {held:?}");
    assert!(kubelet.remove_pod("pod"));
    node.process.said("resource withdrawn: this node has no device of it any more").await;
    assert_eq!(kubelet.violations(), []);
}

/// A configuration file as the NVIDIA plugin's config-manager makes it: a link into a folder that is not watched.
fn linked(setup: Setup, text: &str) -> (Setup, PathBuf) {
    let (folder, elsewhere) = (setup.at("config"), setup.at("available-configs"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::create_dir(&elsewhere).unwrap();
    let file = elsewhere.join("default");
    std::fs::write(&file, text).unwrap();
    symlink(&file, folder.join("config.yaml")).unwrap();
    (setup.arg("--config-file").arg(folder.join("config.yaml")), file)
}

#[tokio::test]
async fn sighup_applies_a_change_without_notification() {
    let (setup, file) = linked(Setup::on("dgx1-v100"), WHOLE);
    let (node, kubelet) = setup.serve(8).await;
    let held = allocation(&kubelet, "pod", GPU, 1).await;
    replace(&file, SHARED);
    node.process.signal("HUP");
    let gpu = &held.devices[0];
    wait_list(&kubelet, GPU, 14, &[gpu.clone(), format!("{gpu}::0"), format!("{gpu}::1")]).await;
    let line = node.process.logged(|line| line["message"] == "configuration applied").await;
    assert_eq!((line["why"].as_str(), line["changed"].as_str()), (Some("SIGHUP"), Some("sharing")));
    assert_keeps(&kubelet, "pod", GPU, &held).await;
    assert_eq!((kubelet.state().resources[GPU].registrations, kubelet.violations()), (1, vec![]));
}

#[tokio::test]
async fn changed_mig_layout_keeps_the_pods_devices() {
    const SEVENTH: &str = "nvidia.com/mig-1g.10gb";
    let (node, kubelet) = four_gpus().arg("--nvml-poll-ms=50").env("MIG_STRATEGY", "mixed").serve(1).await;
    wait_listed(&kubelet, SEVENTH, 8).await;
    let held = allocation(&kubelet, "pod", SEVENTH, 2).await;
    assert_eq!(held.devices, [mig_uuid(0x10), mig_uuid(0x30)]);
    // An administrator takes GPU 1 out of MIG mode under the pod.
    node.setup.tell("mig 1 {enabled: false}");
    wait_list(&kubelet, SEVENTH, 1, &[mig_uuid(0x10)]).await;
    wait_registered(&kubelet, 1, 2).await;
    assert_keeps(&kubelet, "pod", SEVENTH, &held).await;
    let error = kubelet.admit(&Pod::single("late", SEVENTH, 1), None).await.unwrap_err();
    assert!(error.to_string().contains("requested 1, available 0"), "{error}");
    assert!(kubelet.remove_pod("pod"));
    wait_list(&kubelet, SEVENTH, 1, &[]).await;
    // A new profile on the GPU that was whole is a new resource.
    node.setup.tell(
        "mig 0 {enabled: true, devices: [{index: 0, uuid: MIG-00000077-0000-0000-0000-000000000000, gpu_instance: 0, \
         compute_instance: 0, gpu_slices: 7, compute_slices: 7, memory_mib: 80128, extension: none}]}",
    );
    wait_listed(&kubelet, "nvidia.com/mig-7g.80gb", 1).await;
    wait_registered(&kubelet, 1, 1).await;
    assert_eq!(allocation(&kubelet, "big", "nvidia.com/mig-7g.80gb", 1).await.devices, [mig_uuid(0x77)]);
    assert_eq!(kubelet.violations(), []);
}
