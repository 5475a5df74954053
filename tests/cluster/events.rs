//! Tests of the writer of events: a pod gets one event, even if the API server refuses, is slow or is away for a while.

use std::sync::Arc;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault, ResourceType};
use linkwise_cluster::{EventWriter, Pace};
use linkwise_core::publish::PodEvent;
use linkwise_kubelet_box::dra::DraOptions;
use linkwise_kubelet_box::{Place, Pod};
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, until, within};
use crate::dra::cluster::node::Node;

/// A writer on node `n`.
struct Writing {
    cluster: Cluster,
    due: watch::Sender<Arc<Vec<PodEvent>>>,
    running: Running,
}

fn start(cluster: Cluster, pace: Pace) -> Writing {
    let (due, listed) = watch::channel(Arc::default());
    let writer = EventWriter::new(cluster.client(pace), "n".to_owned());
    let running = Running::of(|shutdown| writer.run(listed, shutdown));
    Writing { cluster, due, running }
}

async fn writing() -> Writing {
    start(Cluster::start().await, PACE)
}

fn event(pod: &str) -> PodEvent {
    let (namespace, pod) = pod.split_once('/').unwrap();
    let (namespace, pod, uid) = (namespace.to_owned(), pod.to_owned(), Some(format!("uid-of-{pod}")));
    PodEvent { namespace, pod, uid, claim: None, reason: PodEvent::SLOW_GPUS, note: "far from the best".to_owned() }
}

/// An event about a pod whose UID is known only through a claim of the same name.
fn by_claim(pod: &str) -> PodEvent {
    PodEvent { uid: None, claim: Some(pod.to_owned()), ..event(pod) }
}

impl Writing {
    /// Stores a claim that is reserved for a pod.
    fn reserve(&self, claim: &str, pod: &str) {
        let (namespace, name) = claim.split_once('/').unwrap();
        let key = ResourceType::RESOURCE_CLAIMS.key(Some(namespace), name);
        let users = json!([{"resource": "pods", "name": "another", "uid": "x"},
                           {"resource": "pods", "name": pod, "uid": "uid-by-claim"}]);
        let spec = json!({"devices": {"requests": []}});
        self.cluster.server.put("kube-scheduler", &key, json!({"spec": spec, "status": {"reservedFor": users}}));
    }

    /// Publishes the pods for which events are due.
    fn publish_due(&self, pods: &[&str]) {
        self.due.send_replace(Arc::new(pods.iter().map(|name| event(name)).collect()));
    }

    fn events(&self) -> Vec<Value> {
        self.cluster.server.objects(&ResourceType::EVENTS)
    }

    /// Waits until exactly these pods have events.
    async fn wait_events_of(&self, pods: &[&str]) {
        let wanted = |events: &[Value]| pods_with_events(events) == pods;
        within(self.cluster.server.wait_for_objects(&ResourceType::EVENTS, wanted)).await;
    }

    fn outcomes(&self, outcome: &'static str) -> u64 {
        self.cluster.metrics.requests("events", "create", outcome)
    }
}

/// The pods that have events, sorted.
fn pods_with_events(events: &[Value]) -> Vec<String> {
    let mut pods: Vec<String> = events.iter().map(regarded_pod).collect();
    pods.sort();
    pods
}

/// The pod that an event regards.
fn regarded_pod(event: &Value) -> String {
    let text = |field: &str| event["regarding"][field].as_str().unwrap().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

#[tokio::test]
async fn pod_gets_one_event_by_its_uid() {
    let writing = writing().await;
    writing.publish_due(&["a/train-0"]);
    writing.wait_events_of(&["a/train-0"]).await;
    let uid = json!("uid-of-train-0");
    let [event] = writing.events().try_into().unwrap();
    assert_eq!(event["metadata"]["name"], format!("train-0.{}", uid.as_str().unwrap()));
    assert_eq!((&event["metadata"]["namespace"], &event["regarding"]["uid"]), (&json!("a"), &uid));
    assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("SlowGPUPlacement")));
    assert_eq!((&event["note"], &event["reportingInstance"]), (&json!("far from the best"), &json!("n")));
    // The first pod is listed again and gets no second event; the second pod's event shows that the list was read.
    writing.publish_due(&["a/train-0", "a/train-1"]);
    writing.wait_events_of(&["a/train-0", "a/train-1"]).await;
    assert_eq!(writing.cluster.count("POST", "/events"), 2);
    // The next process finds the first pod's event, and writes no second.
    let Writing { cluster, running, .. } = writing;
    running.end().await;
    let writing = start(cluster, PACE);
    writing.publish_due(&["a/train-0"]);
    until(|| writing.outcomes("conflict") == 1).await;
    assert_eq!(writing.events().len(), 2);
    writing.running.end().await;
}

#[tokio::test]
async fn pod_gets_its_uid_from_its_claim() {
    let writing = writing().await;
    writing.reserve("a/train-0", "train-0");
    // The others get no event: their claim is reserved for another pod, is gone, or has a name that no object can have.
    writing.reserve("a/train-1", "later");
    let others = ["a/train-1", "a/train-2", "a/../secrets/x"].map(by_claim);
    writing.due.send_replace(Arc::new(others.into_iter().chain([by_claim("a/train-0")]).collect()));
    writing.wait_events_of(&["a/train-0"]).await;
    assert_eq!(writing.events()[0]["regarding"]["uid"], "uid-by-claim");
    let asked = |of: &str| writing.cluster.count("GET", of);
    assert_eq!((asked("/resourceclaims/train-2"), asked("secrets"), asked("/pods")), (1, 0, 0));
    // Without the right to read claims a pod of unknown UID gets no event, and delays no other.
    writing.cluster.server.forbid(&[("get", "resourceclaims")]);
    writing.due.send_replace(Arc::new(vec![by_claim("b/p"), event("b/q")]));
    writing.wait_events_of(&["a/train-0", "b/q"]).await;
}

#[tokio::test]
async fn missing_right_delays_events_until_it_is_given() {
    let writing = writing().await;
    writing.cluster.server.forbid(&[("create", "events")]);
    writing.publish_due(&["a/p"]);
    until(|| writing.outcomes("forbidden") > 2).await;
    assert!(writing.events().is_empty());
    writing.cluster.server.forbid(&[]);
    writing.wait_events_of(&["a/p"]).await;
    writing.running.end().await;
}

#[tokio::test]
async fn refused_namespace_delays_no_other() {
    let writing = writing().await;
    let message = "unable to create new content in namespace ending because it is being terminated";
    let refusal = Answer::Refusal(403, message, None);
    writing.cluster.server.fail(Fault::of("POST", "/namespaces/ending/", usize::MAX, refusal));
    writing.publish_due(&["ending/p", "ending/q", "a/p", "z/p"]);
    writing.wait_events_of(&["a/p", "z/p"]).await;
}

#[tokio::test]
async fn events_still_due_are_written_when_server_is_back() {
    let writing = writing().await;
    writing.cluster.server.go_away().await;
    writing.publish_due(&["a/ends", "a/stays"]);
    until(|| writing.outcomes("unreachable") > 1).await;
    writing.publish_due(&["a/stays"]);
    // After two more failures the attempt with the previous list is over.
    let failed = writing.outcomes("unreachable");
    until(|| writing.outcomes("unreachable") > failed + 1).await;
    writing.cluster.server.come_back().await;
    writing.wait_events_of(&["a/stays"]).await;
    writing.running.end().await;
}

#[tokio::test]
async fn slow_server_loses_no_event() {
    let writing = start(Cluster::start().await, Pace { request: Duration::from_millis(100), ..PACE });
    writing.cluster.server.fail(Fault::of("POST", "/events", 1, Answer::Silence));
    // The server carries out this request without an answer, so that the next attempt finds the event.
    writing.cluster.server.fail(Fault::of("POST", "/events", 1, Answer::Lost));
    writing.publish_due(&["a/p"]);
    until(|| writing.outcomes("conflict") == 1).await;
    assert_eq!((writing.outcomes("timeout"), pods_with_events(&writing.events())), (2, vec!["a/p".to_owned()]));
    writing.running.end().await;
}

#[tokio::test]
async fn node_writes_at_most_ten_events_in_a_row() {
    let writing = writing().await;
    let names: Vec<String> = (10..25).map(|number| format!("a/p{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    writing.publish_due(&names);
    writing.wait_events_of(&names[..10]).await;
    // While another writer tries ten events, the first has time to exceed its ten.
    let Writing { cluster, running, due } = writing;
    let other = start(cluster, PACE);
    other.publish_due(&names[..10]);
    until(|| other.outcomes("conflict") == 10).await;
    running.end().await;
    drop(due);
    other.running.end().await;
    assert_eq!(other.cluster.count("POST", "/events"), 20);
}

const GPU: &str = "nvidia.com/gpu";

/// Writes the kubelet's checkpoint of these pods and their GPUs, given by their indices on a DGX-1.
fn checkpoint(node: &Node, pods: &[(&str, &[u8])]) {
    let entry = |(pod, gpus): &(&str, &[u8])| {
        let ids: Vec<String> = gpus.iter().map(|gpu| id(*gpu)).collect();
        json!({"PodUID": format!("uid-of-{pod}"), "ContainerName": "main", "ResourceName": GPU,
               "DeviceIDs": {"0": ids}, "AllocResp": ""})
    };
    let entries: Vec<Value> = pods.iter().map(entry).collect();
    let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}).to_string();
    std::fs::write(node.at("k/kubelet_internal_checkpoint"), text).unwrap();
}

fn id(gpu: u8) -> String {
    format!("GPU-00000001-0000-4000-8000-00000000000{gpu}")
}

/// Makes the kubelet list a pod that holds these GPUs.
fn hold(node: &Node, name: &str, gpus: &[u8]) {
    let place = Place { pod: name.to_owned(), container: "main".to_owned(), resource: GPU.to_owned() };
    node.kubelet.hold(place, gpus.iter().map(|gpu| id(*gpu)));
}

/// A node whose GPUs go through the device plugin. The test writes the kubelet's checkpoint.
async fn node() -> Node {
    let node = Node::start_with(|options| options.writes_checkpoint = false, DraOptions::new("").reconcile).await;
    node.configure("none");
    node
}

fn run(node: &Node) -> Child {
    node.program().env("LINKWISE_EVENTS", "true").spawn().unwrap()
}

/// Waits for the first event of a node, which has to be the only one.
async fn first_event(node: &Node) -> Value {
    within(node.cluster.server.wait_for_objects(&ResourceType::EVENTS, |events| !events.is_empty())).await;
    let [event] = node.cluster.server.objects(&ResourceType::EVENTS).try_into().unwrap();
    event
}

#[tokio::test]
async fn pod_without_nvlink_gets_an_event_with_bandwidths() {
    let node = node().await;
    // One pair with two NVLinks, and one with none.
    hold(&node, "good", &[0, 3]);
    hold(&node, "poor", &[1, 6]);
    checkpoint(&node, &[("good", &[0, 3]), ("poor", &[1, 6])]);
    let _running = run(&node);
    let event = first_event(&node).await;
    assert_eq!((regarded_pod(&event).as_str(), &event["reportingInstance"]), ("default/poor", &json!("n")));
    assert_eq!(event["regarding"]["uid"], "uid-of-poor");
    let note = event["note"].as_str().unwrap();
    let expected = "The 2 GPUs of container main reach 10.0 GB/s together, and 2 GPUs of this node can reach 40.0.";
    assert!(note.starts_with(expected), "{note}");
    assert_eq!(node.cluster.count("GET", "/pods"), 0, "a pod was read");
    assert_eq!(node.healthy(GPU).len(), 8);
}

#[tokio::test]
async fn event_says_why_better_gpus_were_not_given() {
    let node = node().await;
    // Other pods hold all GPUs but 1 and 6, which have no NVLink between them.
    for gpu in [0, 2, 3, 4, 5, 7] {
        hold(&node, &format!("other-{gpu}"), &[gpu]);
    }
    let _running = run(&node);
    until(|| node.healthy(GPU).len() == 8).await;
    node.kubelet.admit(&Pod::single("late", GPU, 2), None).await.unwrap();
    checkpoint(&node, &[("late", &[1, 6])]);
    let event = first_event(&node).await;
    let note = event["note"].as_str().unwrap();
    assert_eq!(regarded_pod(&event), "default/late");
    assert!(note.contains(" Fragmented: other pods have the better ones"), "{note}");
}
