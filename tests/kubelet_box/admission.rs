//! Pods that are admitted, rejected, restarted and admitted again.

use std::collections::BTreeSet;

use linkwise_kubelet_box::{AdmissionError, CallError, DeviceSpec, Grant, Mount, Pod, Restart};
use tonic::{Code, Status};

use crate::kubelet_box::plugin::GPU;
use crate::kubelet_box::{SHORT_TIMEOUT, ids, node, unchanged};

fn set(list: &[String]) -> BTreeSet<String> {
    list.iter().cloned().collect()
}

fn grant(admitted: &linkwise_kubelet_box::Admitted) -> &Grant {
    admitted.grant("main", GPU).unwrap()
}

#[tokio::test]
async fn pod_gets_devices_and_allocate_answer() {
    let (_dir, kubelet, plugin) = node("a b c!", unchanged, |_| {}).await;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 2), None).await.unwrap();
    let grant = grant(&admitted);
    let answer = &grant.allocation;
    assert_eq!(answer.devices, ["a", "b"]);
    assert_eq!((answer.envs["NVIDIA_VISIBLE_DEVICES"].as_str(), answer.annotations["k"].as_str()), ("a,b", "v"));
    let (container_path, host_path) = ("/dev/x".to_owned(), "/dev/y".to_owned());
    assert_eq!(answer.device_specs, [DeviceSpec { container_path, host_path, permissions: "rw".into() }]);
    assert_eq!(answer.mounts, [Mount { container_path: "/m".into(), host_path: "/h".into(), read_only: true }]);
    assert_eq!(answer.cdi_names, ["nvidia.com/gpu=a", "nvidia.com/gpu=b"]);
    assert!(grant.asked.is_none() && !grant.reused, "{grant:?}");
    assert_eq!(kubelet.state().resources[GPU].allocated["pod"]["main"], ids("a b"));
    let calls = kubelet.state().resources[GPU].calls;
    assert_eq!((calls.list_and_watch, calls.preferred, calls.allocate), (1, 0, 1));
    assert_eq!(plugin.seen().allocate[0].container_requests.len(), 1);
}

#[tokio::test]
async fn too_large_request_is_rejected_with_numbers() {
    let (_dir, kubelet, plugin) = node("a b c!", unchanged, |_| {}).await;
    kubelet.admit(&Pod::single("one", GPU, 1), None).await.unwrap();
    let error = kubelet.admit(&Pod::single("two", GPU, 2), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::Insufficient { requested: 2, available: 1, .. }), "{error}");
    assert_eq!(error.to_string(), "pod two, container main, nvidia.com/gpu: requested 2, available 1");
    assert!(kubelet.remove_pod("one") && !kubelet.remove_pod("one"));
    kubelet.admit(&Pod::single("two", GPU, 2), None).await.unwrap();
    assert_eq!(plugin.seen().allocate.len(), 2);
}

#[tokio::test]
async fn unknown_and_unhealthy_resources_have_own_errors() {
    let (_dir, kubelet, _plugin) = node("a!", unchanged, |_| {}).await;
    let error = kubelet.admit(&Pod::single("pod", "nvidia.com/other", 1), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::Unregistered { .. }), "{error}");
    let error = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::NoHealthyDevices { .. }), "{error}");
}

#[tokio::test]
async fn pod_is_admitted_whole_or_not() {
    let (_dir, kubelet, plugin) = node("a b c", unchanged, |plugin| plugin.advise("a b")).await;
    let pod = Pod::new("pod").with_container("first", [(GPU, 1)]).with_container("second", [(GPU, 2)]);
    let admitted = kubelet.admit(&pod, None).await.unwrap();
    let [first, second] = ["first", "second"].map(|name| set(&admitted.grant(name, GPU).unwrap().allocation.devices));
    assert!(first.is_disjoint(&second) && first.len() == 1 && second.len() == 2);
    kubelet.remove_pod("pod");

    plugin.script(|script| script.allocate_fails = Some("c".into()));
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    assert_eq!(error.status().map(Status::code), Some(Code::FailedPrecondition), "{error}");
    assert_eq!(kubelet.state().resources[GPU].free(), ids("a b c"), "the first container's device must be free again");
}

#[tokio::test]
async fn preferred_allocation_is_used_where_offered() {
    let (_dir, kubelet, plugin) = node("a b c d", unchanged, |plugin| plugin.advise("b d")).await;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 2), None).await.unwrap();
    let asked = grant(&admitted).asked.as_ref().unwrap();
    assert_eq!((set(&asked.available), asked.must_include.len(), asked.size), (ids("a b c d"), 0, 2));
    assert_eq!((set(&asked.preferred), set(&grant(&admitted).allocation.devices)), (ids("b d"), ids("b d")));
    let sent = &plugin.seen().preferred[0].container_requests[0];
    assert_eq!((&sent.available_device_i_ds, sent.allocation_size), (&asked.available, 2));
    // The kubelet asks for advice even if the pod needs all devices that are left.
    kubelet.admit(&Pod::single("rest", GPU, 2), None).await.unwrap();
    assert_eq!(kubelet.state().resources[GPU].calls.preferred, 2);
}

#[tokio::test]
async fn only_first_response_and_offered_ids_count() {
    let (_dir, kubelet, plugin) = node("a b c d", unchanged, |plugin| plugin.advise("")).await;
    let lists = [["x", "c"], ["a", "b"]].map(|list| list.map(String::from).to_vec());
    plugin.script(|script| script.preferred = lists.to_vec());
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap();
    assert_eq!(grant(&admitted).allocation.devices, ["c"]);
    plugin.script(|script| script.preferred = vec![]);
    kubelet.admit(&Pod::single("other", GPU, 3), None).await.unwrap();
}

#[tokio::test]
async fn failed_preferred_allocation_rejects_pod() {
    let (_dir, kubelet, plugin) = node("a b", unchanged, |plugin| plugin.advise("")).await;
    plugin.script(|script| script.preferred_fails = Some(Status::internal("no idea")));
    let error = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::Preferred { .. }), "{error}");
    assert_eq!(error.status().unwrap().message(), "no idea");
    let state = kubelet.state();
    assert_eq!((state.resources[GPU].in_use().len(), state.resources[GPU].calls.allocate), (0, 0));
}

#[tokio::test]
async fn hung_or_empty_allocate_rejects_pod() {
    let (_dir, kubelet, plugin) = node("a", |options| options.call_timeout = SHORT_TIMEOUT, |_| {}).await;
    let pod = Pod::single("pod", GPU, 1);
    plugin.script(|script| script.allocate_hangs_from = Some(1));
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    let AdmissionError::Allocate { devices, source, .. } = &error else { panic!("{error}") };
    assert!(devices == &["a"] && matches!(source, CallError::Timeout("Allocate", SHORT_TIMEOUT)), "{source}");
    plugin.script(|script| (script.allocate_hangs_from, script.allocate_is_empty) = (None, true));
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::EmptyResponse { .. }), "{error}");
    plugin.script(|script| script.allocate_is_empty = false);
    kubelet.admit(&pod, None).await.unwrap();
}

#[tokio::test]
async fn container_restart_uses_cached_answer() {
    let (_dir, kubelet, plugin) = node("a b", unchanged, |_| {}).await;
    let admitted = kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap();
    plugin.list("a! b!");
    kubelet.wait(|s| s.resources[GPU].healthy.is_empty()).await.unwrap();
    let before = kubelet.state().resources[GPU].calls;
    let again = kubelet.restart_container("pod", "main").unwrap();
    assert_eq!((&again[GPU], kubelet.state().resources[GPU].calls), (&grant(&admitted).allocation, before));
    let error = kubelet.restart_container("pod", "other").unwrap_err();
    assert!(matches!(error, AdmissionError::NothingHeld(..)), "{error}");
}

#[tokio::test]
async fn returning_pod_keeps_healthy_devices() {
    let (_dir, kubelet, plugin) = node("a b", unchanged, |plugin| plugin.advise("b")).await;
    let pod = Pod::single("pod", GPU, 1);
    let first = kubelet.admit(&pod, None).await.unwrap();
    let calls = kubelet.state().resources[GPU].calls;
    let second = kubelet.admit(&pod, None).await.unwrap();
    assert!(grant(&second).reused && grant(&second).allocation == grant(&first).allocation);
    assert_eq!(kubelet.state().resources[GPU].calls, calls);
    plugin.list("a b!");
    kubelet.wait(|s| s.resources[GPU].unhealthy == ids("b")).await.unwrap();
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    let AdmissionError::HeldUnhealthy(_, devices) = &error else { panic!("{error}") };
    assert_eq!(devices, &["b"]);
}

#[tokio::test]
async fn changed_request_is_rejected() {
    let (_dir, kubelet, _plugin) = node("a b", unchanged, |_| {}).await;
    kubelet.admit(&Pod::single("pod", GPU, 1), None).await.unwrap();
    let error = kubelet.admit(&Pod::single("pod", GPU, 2), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::RequestChanged(_, 2, 1)), "{error}");
}

#[tokio::test]
async fn running_pod_survives_kubelet_restart() {
    let (_dir, kubelet, _plugin) = node("a b", unchanged, |_| {}).await;
    let pod = Pod::single("pod", GPU, 1);
    let first = kubelet.admit(&pod, None).await.unwrap();
    kubelet.restart(Restart::Kubelet).await.unwrap();
    let again = kubelet.admit(&pod, None).await.unwrap();
    assert!(grant(&again).reused && grant(&again).allocation == grant(&first).allocation);
    let error = kubelet.admit(&Pod::single("new", GPU, 1), None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::NoHealthyDevices { .. }), "{error}");
}

#[tokio::test]
async fn pod_is_rejected_after_reboot_without_plugin() {
    let (_dir, kubelet, _plugin) = node("a b", unchanged, |_| {}).await;
    let pod = Pod::single("pod", GPU, 1);
    kubelet.admit(&pod, None).await.unwrap();
    kubelet.restart(Restart::Node).await.unwrap();
    let error = kubelet.admit(&pod, None).await.unwrap_err();
    assert!(matches!(error, AdmissionError::NoHealthyDevices { .. }), "{error}");
}
