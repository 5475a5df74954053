//! Pods whose names are markup, or as long as names can be, in a real browser.

use std::time::Duration;

use linkwise_core::state::Event;
use linkwise_host::machines;
use linkwise_kubelet::device_plugin;
use linkwise_kubelet_box::{KubeletBox, Options, Pod};
use linkwise_node::node::{Node, NodeSettings};
use serde_json::{Value, json};

use super::browser::Browser;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(has_chromium), ignore = "no chromium here: make tools brings it")]
async fn hostile_and_long_names_are_shown_as_text() {
    let mut browser = Browser::start();
    let folder = tempfile::tempdir().unwrap();
    let pod_resources = folder.path().join("pod-resources/kubelet.sock");
    let mut options = Options::new(folder.path());
    options.pod_resources = Some(pod_resources.clone());
    let kubelet = KubeletBox::start(options).unwrap();
    let settings = device_plugin::Settings {
        pod_resources_socket: Some(pod_resources),
        longest_pause: Duration::from_secs(1),
        ..device_plugin::Settings::new(folder.path().join(Options::SOCKET))
    };
    let node = Node::start(NodeSettings::new(settings)).await.unwrap();
    let (shutdown, url) = (node.shutdown(), format!("http://{}/", node.metrics_address()));
    let observed = machines::load("dgx-h100").unwrap().observed;
    node.events().send(Event::Observed(Box::new(observed))).await.unwrap();
    let serving = tokio::spawn(node.serve());
    kubelet.wait(|state| state.resources["nvidia.com/gpu"].healthy.len() == 8).await.unwrap();
    let mut names = [
        "<script>alert(1)</script>".to_owned(),
        "\"><img src=x onerror=alert(1)>".to_owned(),
        "</title></svg></style><svg onload=alert(1)>".to_owned(),
        "x".repeat(253),
    ];
    for name in &names {
        kubelet.admit(&Pod::single(name, "nvidia.com/gpu", 2), None).await.unwrap();
    }
    // An alert would block the page, and the browser would not answer.
    names.sort();
    let shown = "[...document.querySelectorAll('#holders .pod b')].map((pod) => pod.textContent).sort()";
    tokio::task::block_in_place(|| {
        browser.open(&url, (400, 900));
        browser.wait(shown, &json!(names));
        assert_eq!(browser.value("document.querySelectorAll('script, img, [onload], [onerror]').length"), json!(1));
        for width in [400, 1400] {
            browser.resize(width, 900);
            browser.wait("innerWidth", &json!(width));
            assert_eq!(browser.value("document.documentElement.scrollWidth"), json!(width), "the page is too wide");
        }
        assert_eq!(browser.events("Log.entryAdded"), Vec::<Value>::new());
    });
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}
