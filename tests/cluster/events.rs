//! The writer of events: what a pod is told, once, and what an API server that refuses or is away makes of it.

use std::sync::Arc;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault, Key, ResourceType};
use linkwise_cluster::{EventWriter, Pace};
use linkwise_core::publish::PodEvent;
use linkwise_kubelet_box::{Place, Pod};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::dra_node::Node;
use crate::cluster::support::{Cluster, PACE, Running, until, within};

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
    let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
    PodEvent { namespace, pod, reason: PodEvent::SLOW_GPUS, note: "far from the best".to_owned() }
}

fn pod(name: &str) -> Key {
    let (namespace, name) = name.split_once('/').unwrap();
    ResourceType::PODS.key(Some(namespace), name)
}

impl Writing {
    /// Puts a pod on a node.
    fn runs(&self, name: &str, node: &str) {
        self.cluster.server.put("kubelet", &pod(name), json!({"spec": {"nodeName": node}}));
    }

    /// Says for which pods events are due.
    fn due(&self, pods: &[&str]) {
        self.due.send_replace(Arc::new(pods.iter().map(|name| event(name)).collect()));
    }

    fn events(&self) -> Vec<Value> {
        self.cluster.server.objects(&ResourceType::EVENTS)
    }

    /// The pods that have events, in order.
    fn told(&self) -> Vec<String> {
        let mut told: Vec<String> = self.events().iter().map(about).collect();
        told.sort();
        told
    }

    /// Waits until exactly these pods have events.
    async fn tells(&self, pods: &[&str]) {
        let types = ResourceType::EVENTS;
        let all = |events: &[Value]| {
            let mut told: Vec<String> = events.iter().map(about).collect();
            told.sort();
            told == pods
        };
        within(self.cluster.server.wait_for_objects(&types, all)).await;
    }

    fn outcomes(&self, outcome: &'static str) -> u64 {
        self.cluster.metrics.requests("events", "create", outcome)
    }
}

/// The pod that an event is about.
fn about(event: &Value) -> String {
    let text = |field: &str| event["regarding"][field].as_str().unwrap().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

#[tokio::test]
async fn pod_gets_one_event_by_its_uid() {
    let writing = writing().await;
    writing.runs("a/train-0", "n");
    writing.due(&["a/train-0"]);
    writing.tells(&["a/train-0"]).await;
    let uid = writing.cluster.server.object(&pod("a/train-0")).unwrap()["metadata"]["uid"].clone();
    let [event] = writing.events().try_into().unwrap();
    assert_eq!(event["metadata"]["name"], format!("train-0.{}", uid.as_str().unwrap()));
    assert_eq!((&event["metadata"]["namespace"], &event["regarding"]["uid"]), (&json!("a"), &uid));
    assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("SlowGPUPlacement")));
    assert_eq!((&event["note"], &event["reportingInstance"]), (&json!("far from the best"), &json!("n")));
    // The same list again, and a second pod to see that it was looked at.
    writing.runs("a/train-1", "n");
    writing.due(&["a/train-0", "a/train-1"]);
    writing.tells(&["a/train-0", "a/train-1"]).await;
    assert_eq!(writing.cluster.count("POST", "/events"), 2);
    // So does the next process: the first one's event is found to be there.
    let Writing { cluster, running, .. } = writing;
    running.end().await;
    let writing = start(cluster, PACE);
    writing.due(&["a/train-0"]);
    until(|| writing.outcomes("conflict") == 1).await;
    assert_eq!(writing.events().len(), 2);
    writing.running.end().await;
}

#[tokio::test]
async fn pods_that_are_gone_or_elsewhere_get_none() {
    let writing = writing().await;
    writing.runs("a/elsewhere", "m");
    writing.runs("a/here", "n");
    writing.due(&["a/elsewhere", "a/gone", "a/../secrets/x", "a/here"]);
    writing.tells(&["a/here"]).await;
    assert_eq!(writing.cluster.count("POST", "/events"), 1);
    assert_eq!(writing.cluster.count("", "secrets"), 0);
    assert_eq!(writing.cluster.count("GET", "/pods/gone"), 1, "what is not there is not asked for again");
    writing.running.end().await;
}

#[tokio::test]
async fn missing_right_is_waited_for() {
    for right in [("create", "events"), ("get", "pods")] {
        let writing = writing().await;
        writing.cluster.server.forbid(&[right]);
        writing.runs("a/p", "n");
        writing.due(&["a/p"]);
        let (verb, object) = right;
        until(|| writing.cluster.metrics.requests(object, verb, "forbidden") > 2).await;
        assert_eq!(writing.told(), [""; 0]);
        writing.cluster.server.forbid(&[]);
        writing.tells(&["a/p"]).await;
        writing.running.end().await;
    }
}

#[tokio::test]
async fn refused_namespace_holds_up_no_other() {
    let writing = writing().await;
    let why = "unable to create new content in namespace ends because it is being terminated";
    let refusal = Answer::Refusal(403, why, None);
    writing.cluster.server.fail(Fault::of("POST", "/namespaces/ends/", usize::MAX, refusal));
    for name in ["a/p", "ends/p", "ends/q", "z/p"] {
        writing.runs(name, "n");
    }
    writing.due(&["ends/p", "ends/q", "a/p", "z/p"]);
    writing.tells(&["a/p", "z/p"]).await;
    writing.running.end().await;
}

#[tokio::test]
async fn server_that_was_away_gets_what_still_holds() {
    let mut writing = writing().await;
    writing.runs("a/ends", "n");
    writing.runs("a/stays", "n");
    writing.cluster.server.go_away().await;
    writing.due(&["a/ends", "a/stays"]);
    until(|| writing.cluster.metrics.requests("pods", "get", "unreachable") > 1).await;
    writing.due(&["a/stays"]);
    // Whatever was being tried before is over.
    let failed = writing.cluster.metrics.requests("pods", "get", "unreachable");
    until(|| writing.cluster.metrics.requests("pods", "get", "unreachable") > failed + 1).await;
    writing.cluster.server.come_back().await;
    writing.tells(&["a/stays"]).await;
    writing.running.end().await;
}

#[tokio::test]
async fn slow_server_costs_a_deadline_and_no_event() {
    let writing = start(Cluster::start().await, Pace { request: Duration::from_millis(100), ..PACE });
    writing.cluster.server.fail(Fault::of("POST", "/events", 1, Answer::Silence));
    // This one is carried out: the second attempt finds the event.
    writing.cluster.server.fail(Fault::of("POST", "/events", 1, Answer::Lost));
    writing.runs("a/p", "n");
    writing.due(&["a/p"]);
    until(|| writing.outcomes("conflict") == 1).await;
    assert_eq!((writing.outcomes("timeout"), writing.told()), (2, vec!["a/p".to_owned()]));
    writing.running.end().await;
}

#[tokio::test]
async fn node_writes_ten_events_in_a_row() {
    let writing = writing().await;
    let names: Vec<String> = (10..25).map(|number| format!("a/p{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in &names {
        writing.runs(name, "n");
    }
    writing.due(&names);
    writing.tells(&names[..10]).await;
    // Another writer's ten would leave time for more, were they allowed.
    let Writing { cluster, running, due } = writing;
    let other = start(cluster, PACE);
    other.due(&names[..10]);
    until(|| other.outcomes("conflict") == 10).await;
    running.end().await;
    drop(due);
    other.running.end().await;
    assert_eq!(other.cluster.count("POST", "/events"), 20);
}

const GPU: &str = "nvidia.com/gpu";

/// The API server has a pod of the node.
fn is_known(node: &Node, name: &str) {
    node.cluster.server.put("kubelet", &pod(&format!("default/{name}")), json!({"spec": {"nodeName": "n"}}));
}

/// A pod that holds these GPUs of a DGX-1, by their numbers.
fn holds(node: &Node, name: &str, gpus: &[u8]) {
    let place = Place { pod: name.to_owned(), container: "main".to_owned(), resource: GPU.to_owned() };
    node.kubelet.hold(place, gpus.iter().map(|gpu| format!("GPU-00000001-0000-4000-8000-00000000000{gpu}")));
    is_known(node, name);
}

#[tokio::test]
async fn node_tells_the_pod_whose_gpus_have_no_nvlink() {
    let node = Node::start().await;
    node.configure("none");
    // One pair with two NVLinks, and one with none.
    holds(&node, "good", &[0, 3]);
    holds(&node, "poor", &[1, 6]);
    let mut running = node.program().env("LINKWISE_EVENTS", "true").spawn().unwrap();
    let events = ResourceType::EVENTS;
    within(node.cluster.server.wait_for_objects(&events, |events| !events.is_empty())).await;
    let [event] = node.cluster.server.objects(&events).try_into().unwrap();
    assert_eq!((about(&event).as_str(), &event["reportingInstance"]), ("default/poor", &json!("n")));
    let note = event["note"].as_str().unwrap();
    let measured = "The 2 GPUs of container main reach 10.0 GB/s together, and 2 GPUs of this node can reach 40.0.";
    assert!(note.starts_with(measured), "{note}");
    assert_eq!(node.cluster.count("GET", "/pods/"), 1, "nothing is asked about pods that have what they could have");
    assert_eq!(node.healthy(GPU).len(), 8);
    running.kill().await.unwrap();
}

#[tokio::test]
async fn node_tells_why_the_better_gpus_were_not_given() {
    let node = Node::start().await;
    node.configure("none");
    // All that has an NVLink to what is left.
    for gpu in [0, 2, 3, 4, 5, 7] {
        holds(&node, &format!("other-{gpu}"), &[gpu]);
    }
    is_known(&node, "late");
    let mut running = node.program().env("LINKWISE_EVENTS", "true").spawn().unwrap();
    until(|| node.healthy(GPU).len() == 8).await;
    node.kubelet.admit(&Pod::single("late", GPU, 2), None).await.unwrap();
    let events = ResourceType::EVENTS;
    within(node.cluster.server.wait_for_objects(&events, |events| !events.is_empty())).await;
    let [event] = node.cluster.server.objects(&events).try_into().unwrap();
    let note = event["note"].as_str().unwrap();
    assert!(about(&event) == "default/late" && note.contains(" Fragmented: other pods have the better ones"), "{note}");
    running.kill().await.unwrap();
}
