//! linkwise in the place of the NVIDIA plugin, and back, with pods running: the kubelet remembers ids and answers,
//! which must keep their meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use linkwise_kubelet_box::{Allocation, KubeletBox, Pod, Restart};

use crate::kubelet_box::plugin::Plugin;
use crate::run::node::{GPU, Setup, allocation, uuid, wait_registered};

const SHARED: &str = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n";

/// The NVIDIA plugin's socket for nvidia.com/gpu in the kubelet's folder.
pub const NVIDIA_SOCKET: &str = "nvidia-gpu.sock";

/// A registered plugin that the kubelet cannot tell from the NVIDIA plugin.
pub struct OtherPlugin {
    socket: PathBuf,
    plugin: Plugin,
}

impl OtherPlugin {
    /// Removes an old socket of this name, serves, and registers: in this order, as the NVIDIA plugin does.
    pub async fn start(folder: &Path, name: &str, ids: &[String]) -> Self {
        let socket = folder.join(name);
        let _ = std::fs::remove_file(&socket);
        let plugin = Plugin::serve_each(folder, name, ids);
        plugin.register().await.unwrap();
        Self { socket, plugin }
    }

    /// Ends as the NVIDIA plugin does: the server and its streams end, and the socket is removed.
    pub async fn end(self) {
        self.plugin.end().await;
        std::fs::remove_file(&self.socket).unwrap();
    }
}

/// The NVIDIA plugin's ids on dgx1-v100: UUIDs, or `UUID::N`.
fn ids(replicas: Option<u32>) -> Vec<String> {
    let of = |index| match replicas {
        None => vec![uuid(1, index)],
        Some(replicas) => (0..replicas).map(|slot| format!("{}::{slot}", uuid(1, index))).collect(),
    };
    (0..8).flat_map(of).collect()
}

/// Running pods, each with its allocation.
type Pods = BTreeMap<&'static str, Allocation>;

/// Asserts that every pod and restarted container keeps its devices, and that no device is held twice.
async fn assert_untouched(kubelet: &KubeletBox, pods: &Pods) {
    let state = kubelet.state();
    let held = &state.resources[GPU].allocated;
    let mut seen = BTreeSet::new();
    for (pod, allocation) in pods {
        assert_eq!(held[*pod]["main"].iter().collect::<Vec<_>>(), allocation.devices.iter().collect::<Vec<_>>());
        let are_own = allocation.devices.iter().all(|id| seen.insert(id.clone()));
        assert!(are_own, "{pod} has another pod's device: {pods:?}");
        assert_eq!(&kubelet.restart_container(pod, "main").unwrap()[GPU], allocation, "{pod}");
    }
    assert_eq!(held.len(), pods.len());
    assert_eq!(kubelet.violations(), []);
}

/// Replaces the NVIDIA plugin by linkwise and back, with devices of these ids.
async fn swap_and_back(setup: Setup, ids: Vec<String>) {
    let kubelet = setup.kubelet();
    let (folder, all) = (setup.at("k"), ids.len());
    let before = OtherPlugin::start(&folder, NVIDIA_SOCKET, &ids).await;
    wait_registered(&kubelet, 1, all).await;
    let mut pods = Pods::new();
    pods.insert("first", allocation(&kubelet, "first", GPU, 2).await);
    pods.insert("second", allocation(&kubelet, "second", GPU, 1).await);
    before.end().await;
    kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert_untouched(&kubelet, &pods).await;

    let node = setup.start().await;
    let listed = wait_registered(&kubelet, 2, all).await;
    assert_eq!(listed.healthy, ids.iter().cloned().collect(), "linkwise lists other ids");
    node.ready(200, "ready").await;
    assert_untouched(&kubelet, &pods).await;
    // linkwise gives the device that the NVIDIA plugin gave.
    assert!(kubelet.remove_pod("second"));
    let given = pods.remove("second").unwrap();
    let free = kubelet.state().resources[GPU].free().len();
    pods.insert("third", allocation(&kubelet, "third", GPU, u32::try_from(free).unwrap()).await);
    assert_untouched(&kubelet, &pods).await;
    assert!(pods["third"].devices.contains(&given.devices[0]));
    assert!(pods["third"].envs["NVIDIA_VISIBLE_DEVICES"].contains(&given.envs["NVIDIA_VISIBLE_DEVICES"]));
    // Every device is held: no further pod is admitted.
    assert!(kubelet.admit(&Pod::single("late", GPU, 1), None).await.is_err());
    // A restart of the kubelet between the two swaps changes nothing.
    kubelet.restart(Restart::Kubelet).await.unwrap();
    wait_registered(&kubelet, 3, all).await;
    assert_untouched(&kubelet, &pods).await;
    assert!(kubelet.remove_pod("first"));
    pods.remove("first");
    pods.insert("fourth", allocation(&kubelet, "fourth", GPU, 1).await);

    // Back to the NVIDIA plugin.
    let setup = node.end().await;
    kubelet.wait(|state| state.resources[GPU].open_streams == 0).await.unwrap();
    assert!(setup.sockets().is_empty());
    let after = OtherPlugin::start(&folder, NVIDIA_SOCKET, &ids).await;
    wait_registered(&kubelet, 4, all).await;
    assert_untouched(&kubelet, &pods).await;
    pods.insert("fifth", allocation(&kubelet, "fifth", GPU, 1).await);
    assert_untouched(&kubelet, &pods).await;
    after.end().await;
}

#[tokio::test]
async fn swap_with_nvidia_plugin_keeps_gpus() {
    swap_and_back(Setup::on("dgx1-v100"), ids(None)).await;
}

#[tokio::test]
async fn swap_with_nvidia_plugin_keeps_slots() {
    swap_and_back(Setup::on("dgx1-v100").config(SHARED), ids(Some(2))).await;
}
