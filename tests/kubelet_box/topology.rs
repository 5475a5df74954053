//! The Topology Manager in the box: the devices that it offers a plugin, and the pods that it refuses.

use std::collections::BTreeSet;

use linkwise_kubelet_box::{
    AdmissionError, Admitted, KubeletBox, Options, Pod, Policy, Scope, TopologyHint, TopologyManager,
};
use tempfile::TempDir;

use crate::kubelet_box::plugin::{GPU, Plugin};
use crate::kubelet_box::{ids, node};

/// A machine with two NUMA nodes of two devices each.
async fn two_nodes(policy: Policy, scope: Scope) -> (TempDir, KubeletBox, Plugin) {
    let manager = TopologyManager { policy, scope, numa_nodes: vec![0, 1] };
    let settings = |options: &mut Options| options.topology_manager = manager;
    node("a:0 b:0 c:1 d:1", settings, |plugin| plugin.advise("b d")).await
}

fn devices(admitted: &Admitted, container: &str) -> BTreeSet<String> {
    admitted.grant(container, GPU).unwrap().allocation.devices.iter().cloned().collect()
}

fn refusal(error: AdmissionError) -> String {
    assert!(matches!(error, AdmissionError::TopologyAffinity { .. }), "{error}");
    error.to_string()
}

#[tokio::test]
async fn best_effort_and_single_node_offer_one_numa_node() {
    for (policy, offered) in [(Policy::None, "a b c d"), (Policy::BestEffort, "a b"), (Policy::SingleNumaNode, "a b")] {
        let (_dir, kubelet, _plugin) = two_nodes(policy, Scope::Container).await;
        let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap();
        let asked = admitted.grant("main", GPU).unwrap().asked.as_ref().unwrap();
        assert_eq!(asked.available.iter().cloned().collect::<BTreeSet<_>>(), ids(offered), "{policy}");
        let hint = admitted.containers["main"].hint;
        assert_eq!(hint, (policy != Policy::None).then(|| TopologyHint::on([0])), "{policy}");
    }
}

#[tokio::test]
async fn scope_pod_keeps_containers_together() {
    let pod = Pod::new("pod").with_container("one", [(GPU, 1)]).with_container("two", [(GPU, 2)]);
    let (_dir, kubelet, _plugin) = two_nodes(Policy::Restricted, Scope::Container).await;
    let admitted = kubelet.admit(&pod, None).await.unwrap();
    assert_eq!((devices(&admitted, "one"), devices(&admitted, "two")), (ids("b"), ids("c d")));

    let (_dir, kubelet, _plugin) = two_nodes(Policy::SingleNumaNode, Scope::Pod).await;
    let message = refusal(kubelet.admit(&pod, None).await.unwrap_err());
    assert!(message.starts_with("pod pod: ") && message.contains("3 nvidia.com/gpu need 2 NUMA nodes"), "{message}");
    let pair = Pod::new("pair").with_container("one", [(GPU, 1)]).with_container("two", [(GPU, 1)]);
    let admitted = kubelet.admit(&pair, None).await.unwrap();
    assert_eq!(&devices(&admitted, "one") | &devices(&admitted, "two"), ids("a b"));
    assert_eq!(admitted.containers["one"].hint, admitted.containers["two"].hint);
}
