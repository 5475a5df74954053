//! Tests of the writer of the node's condition: it writes each change, removes startup taints once a boot, and does not
//! disturb the kubelet, which writes the same node.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_nvml::Control;
use linkwise_api_server_box::{Answer, Fault};
use linkwise_cluster::{NodeConditionSettings, NodeConditionWriter, Pace, clear_condition};
use linkwise_core::publish::Condition;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, node_key, until};
use crate::dra::cluster::node::Node;

const KIND: &str = "linkwise.dev/GPUsReady";

/// A writer on node `n`, which has two taints.
struct Writing {
    cluster: Cluster,
    wanted: watch::Sender<Option<Arc<Condition>>>,
    /// The node and boot of each removal of taints. The next process gets the last of them.
    marks: Arc<Mutex<Vec<String>>>,
    running: Option<Running>,
}

impl Writing {
    async fn new() -> Self {
        let (cluster, wanted) = (Cluster::of_node().await, watch::Sender::new(None));
        let mut writing = Self { cluster, wanted, marks: Arc::default(), running: None };
        writing.taint(&["startup", "other"]);
        writing.start("1");
        writing
    }

    /// Starts a writer; `boot` is the id of the node's present boot.
    fn start(&mut self, boot: &str) {
        let marks = Arc::clone(&self.marks);
        let settings = NodeConditionSettings {
            node: "n".to_owned(),
            kind: KIND.to_owned(),
            startup_taints: vec!["startup".to_owned()],
            boot: boot.to_owned(),
            untainted: marks.lock().unwrap().last().cloned(),
        };
        let pace = Pace { reassert: Duration::from_millis(20), ..PACE };
        let keep = move |mark: &str| marks.lock().unwrap().push(mark.to_owned());
        let writer = NodeConditionWriter::new(self.cluster.client(pace), settings, keep);
        let wanted = self.wanted.subscribe();
        self.running = Some(Running::of(|shutdown| writer.run(wanted, shutdown)));
    }

    async fn restart(&mut self, boot: &str) {
        self.running.take().unwrap().end().await;
        self.start(boot);
    }

    fn taint(&self, keys: &[&str]) {
        let taints: Vec<Value> = keys.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
        self.cluster.server.edit("kubelet", &node_key("n"), |node| node["spec"] = json!({"taints": taints}));
    }

    /// Writes the resources into the node's status, as the kubelet does.
    fn write_resources(&self) {
        let write = |node: &mut Value| node["status"]["allocatable"] = json!({"nvidia.com/gpu": "8"});
        self.cluster.server.edit("kubelet", &node_key("n"), write);
    }

    fn want(&self, status: &'static str, message: &str) {
        let resources = [("nvidia.com/gpu".to_owned(), 8)].into();
        let condition = Condition { status, reason: "Reason", message: message.to_owned(), resources };
        self.wanted.send_replace(Some(Arc::new(condition)));
    }

    /// Waits until the condition has this message and the node has only these taints.
    async fn wait_condition(&self, message: &str, taints: &[&str]) {
        until(|| own(&self.cluster)["message"] == message && self.taints() == taints).await;
    }

    fn taints(&self) -> Vec<String> {
        let node = self.cluster.server.object(&node_key("n")).unwrap_or_default();
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        taints.iter().map(|taint| taint["key"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits for three more reads of the node, after which the writer has written all that it wants to write.
    async fn wait_reads(&self) {
        let before = self.cluster.count("GET", "/nodes/n");
        until(|| self.cluster.count("GET", "/nodes/n") >= before + 3).await;
    }
}

/// Our condition of the node.
fn own(cluster: &Cluster) -> Value {
    let node = cluster.server.object(&node_key("n")).unwrap_or_default();
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == KIND).unwrap_or_default()
}

#[tokio::test]
async fn condition_follows_changes_and_taints_go_once_a_boot() {
    let mut writing = Writing::new().await;
    let ready = json!({"type": "Ready", "status": "True"});
    let node = node_key("n");
    writing.cluster.server.edit("kubelet", &node, |node| node["status"] = json!({"conditions": [ready]}));
    writing.want("True", "8 GPUs");
    writing.wait_condition("the node's status has 0 of 8 nvidia.com/gpu", &["startup", "other"]).await;
    writing.write_resources();
    writing.want("False", "starting");
    writing.wait_condition("starting", &["startup", "other"]).await;
    let since = own(&writing.cluster)["lastTransitionTime"].clone();
    writing.want("False", "still starting");
    writing.wait_condition("still starting", &["startup", "other"]).await;
    assert_eq!(own(&writing.cluster)["lastTransitionTime"], since);
    writing.want("True", "8 GPUs");
    writing.wait_condition("8 GPUs", &["other"]).await;
    writing.wait_reads().await;
    // Four conditions and the taint took five requests; reading the node again writes nothing.
    assert_eq!(writing.cluster.count("PATCH", "/nodes/n"), 5);
    let conditions = writing.cluster.server.object(&node).unwrap()["status"]["conditions"].clone();
    assert_eq!((&conditions[0], conditions.as_array().unwrap().len()), (&ready, 2));

    // A startup taint that is put back stays until the next boot, even if the next process starts.
    writing.taint(&["startup"]);
    writing.restart("1").await;
    writing.wait_reads().await;
    assert_eq!(writing.taints(), ["startup"]);
    writing.restart("2").await;
    writing.wait_condition("8 GPUs", &[]).await;
    // A node that is deleted and registers again counts as a new one.
    writing.cluster.server.remove(&node);
    writing.cluster.label_node("n", json!({}));
    writing.taint(&["startup", "other"]);
    writing.write_resources();
    writing.wait_condition("8 GPUs", &["other"]).await;
}

#[tokio::test]
async fn condition_outlasts_faults_of_the_api_server() {
    let writing = Writing::new().await;
    writing.write_resources();
    let refused = |code, times| Fault::of("PATCH", "/nodes/n", times, Answer::Refusal(code, "no", None));
    for (fault, message) in [(refused(403, 3), "forbidden"), (refused(409, 2), "conflict"), (refused(503, 3), "away")] {
        writing.cluster.server.fail(fault);
        writing.want("True", message);
        writing.wait_condition(message, &["other"]).await;
    }
    assert_eq!(writing.cluster.metrics.requests("nodes", "patch", "forbidden"), 3);
    // An administrator removes the condition.
    writing.cluster.server.edit("admin", &node_key("n"), |node| node["status"]["conditions"] = json!([]));
    writing.wait_condition("away", &["other"]).await;
    writing.running.unwrap().end().await;
    writing.cluster.label_node("m", json!({}));
    assert_eq!(clear_condition(writing.cluster.client(PACE), KIND).await.unwrap(), 1);
    assert_eq!(own(&writing.cluster), Value::Null);
}

#[tokio::test]
async fn condition_follows_the_hardware_that_is_served() {
    let node = Node::start().await;
    let taint = json!({"taints": [{"key": "a.b/starts", "effect": "NoSchedule"}]});
    node.cluster.server.edit("kubelet", &node_key("n"), |node| node["spec"] = taint);
    let mut program = node.program();
    program.env("FAKE_NVML_CONTROL", node.at("control"));
    program.args(["--node-condition=true", "--startup-taints=a.b/starts", "--expect-machine=dgx1-v100"]);
    let _process = program.spawn().unwrap();
    let served = |status: &str, reason: &str| {
        let own = own(&node.cluster);
        own["status"] == status && own["reason"] == reason
    };
    until(|| served("True", "GPUsServed")).await;
    assert_eq!(node.devices().len(), 8, "the condition was True before the slices were stored");
    until(|| node.cluster.server.object(&node_key("n")).unwrap()["spec"]["taints"] == json!([])).await;
    let control = Control::new(node.at("control"));
    control.send("remove 3").unwrap();
    until(|| served("False", "HardwareLacking")).await;
    assert!(own(&node.cluster)["message"].as_str().unwrap().contains("GPU 0000:0b:00.0"), "{}", own(&node.cluster));
    control.send("add 3").unwrap();
    until(|| served("True", "GPUsServed")).await;
}
