//! Tests of the writer of the NodeFeature object: its writes, objects of other managers, and faults of the API server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault, Key, ResourceType};
use linkwise_cluster::{NodeFeatureSettings, NodeFeatureWriter, Pace};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, until, within};

type Labels = BTreeMap<String, String>;

/// GPU Feature Discovery's field manager.
const GFD: &str = "gpu-feature-discovery";

struct Writing {
    labels: watch::Sender<Option<Arc<Labels>>>,
    running: Running,
}

/// A cluster without the object, and a writer.
async fn start_cluster(pace: Pace) -> (Cluster, Writing) {
    let cluster = Cluster::start().await;
    let writing = start(&cluster, pace, None);
    (cluster, writing)
}

fn start(cluster: &Cluster, pace: Pace, pod: Option<&str>) -> Writing {
    start_sharing(cluster, pace, pod, Arc::default())
}

/// Starts a writer; the writers of a process share `replaced`, true once one replaced GPU Feature Discovery's object.
fn start_sharing(cluster: &Cluster, pace: Pace, pod: Option<&str>, replaced: Arc<AtomicBool>) -> Writing {
    let (labels, follow) = watch::channel(None);
    let (node, namespace) = ("n".to_owned(), "gpu".to_owned());
    let settings = NodeFeatureSettings { node, namespace, pod: pod.map(str::to_owned), replaced };
    let writer = NodeFeatureWriter::new(cluster.client(pace), settings);
    Writing { labels, running: Running::of(|shutdown| writer.run(follow, shutdown)) }
}

impl Writing {
    /// Publishes the labels that the writer has to write.
    fn want(&self, labels: &[(&str, &str)]) {
        let labels: Labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.labels.send_replace(Some(Arc::new(labels)));
    }

    /// Publishes labels, and waits until the object has exactly these.
    async fn write(&self, cluster: &Cluster, labels: &[(&str, &str)]) {
        self.want(labels);
        wait_labels(cluster, labels).await;
    }
}

fn key() -> Key {
    ResourceType::NODE_FEATURES.key(Some("gpu"), "nvidia-features-for-n")
}

/// Waits until the object's labels are exactly these.
async fn wait_labels(cluster: &Cluster, labels: &[(&str, &str)]) {
    let labels: Value = labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    let has = |object: Option<&Value>| object.is_some_and(|it| it["spec"]["labels"] == labels);
    within(cluster.server.wait_for_object(&key(), has)).await;
}

/// Waits until the writer has read the object three more times.
async fn wait_reads(cluster: &Cluster) {
    let before = cluster.count("GET", "nodefeatures");
    until(|| cluster.count("GET", "nodefeatures") > before + 2).await;
}

fn managers(cluster: &Cluster) -> Vec<String> {
    let object = cluster.server.object(&key()).unwrap();
    let entries = object["metadata"]["managedFields"].as_array().unwrap();
    entries.iter().map(|entry| entry["manager"].as_str().unwrap().to_owned()).collect()
}

/// The object as GPU Feature Discovery makes it, with a label that linkwise does not write.
fn of_gfd() -> Value {
    json!({
        "metadata": {
            "labels": {"nfd.node.kubernetes.io/node-name": "n"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "gfd-x", "uid": "1"}],
        },
        "spec": {
            "features": {"flags": {}, "attributes": {}, "instances": {}},
            "labels": {"nvidia.com/gpu.count": "8", "nvidia.com/mig-1g.10gb.count": "7"},
        },
    })
}

#[tokio::test]
async fn object_follows_the_labels() {
    let (cluster, writing) = start_cluster(PACE).await;
    writing.write(&cluster, &[("a", "1"), ("b", "")]).await;
    let object = cluster.server.object(&key()).unwrap();
    let expected = json!({"nfd.node.kubernetes.io/node-name": "n", "app.kubernetes.io/managed-by": "linkwise"});
    assert_eq!(object["metadata"]["labels"], expected);
    assert_eq!(object["spec"]["features"], json!({"flags": {}, "attributes": {}, "instances": {}}));
    assert_eq!(object["metadata"]["ownerReferences"], Value::Null);
    assert_eq!(managers(&cluster), ["linkwise"]);
    writing.write(&cluster, &[("a", "2")]).await;
    writing.running.end().await;
    assert!(cluster.server.object(&key()).is_some(), "the object went with the writer");
}

#[tokio::test]
async fn same_labels_cause_no_write_even_after_a_restart() {
    let cluster = Cluster::start().await;
    for _ in 0..2 {
        let writing = start(&cluster, Pace { reassert: Duration::from_millis(20), ..PACE }, None);
        writing.want(&[("a", "1")]);
        wait_reads(&cluster).await;
        writing.running.end().await;
    }
    assert_eq!(cluster.count("PATCH", "nodefeatures"), 1);
}

#[tokio::test]
async fn removed_or_edited_object_is_repaired() {
    let (cluster, writing) = start_cluster(Pace { reassert: Duration::from_millis(20), ..PACE }).await;
    writing.write(&cluster, &[("a", "1")]).await;
    cluster.server.remove(&key());
    wait_labels(&cluster, &[("a", "1")]).await;
    cluster.server.edit("kubectl-edit", &key(), |object| object["spec"]["labels"]["a"] = json!("9"));
    wait_labels(&cluster, &[("a", "1")]).await;
}

#[tokio::test]
async fn whole_object_of_gfd_is_replaced_once() {
    let cluster = Cluster::start().await;
    cluster.server.put(GFD, &key(), of_gfd());
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("nvidia.com/gpu.count", "8")]).await;
    let object = cluster.server.object(&key()).unwrap();
    assert_eq!(object["metadata"]["ownerReferences"], Value::Null, "a pod still owns the object");
    assert_eq!(managers(&cluster), ["linkwise"]);
    writing.write(&cluster, &[("nvidia.com/gpu.count", "7")]).await;
    assert_eq!(cluster.count("DELETE", "nodefeatures"), 1);
    // GPU Feature Discovery still runs and writes again. The writer does not fight such a second writer.
    cluster.server.put(GFD, &key(), of_gfd());
    writing.want(&[("nvidia.com/gpu.count", "6")]);
    wait_reads(&cluster).await;
    assert_eq!(cluster.server.object(&key()).unwrap()["spec"]["labels"], of_gfd()["spec"]["labels"]);
    assert_eq!(cluster.count("DELETE", "nodefeatures"), 1);
}

#[tokio::test]
async fn object_of_gfd_is_replaced_once_by_a_process() {
    let cluster = Cluster::start().await;
    let replaced = Arc::new(AtomicBool::new(false));
    for _ in 0..2 {
        // Each new configuration starts a new writer.
        cluster.server.put(GFD, &key(), of_gfd());
        let first = !replaced.load(Relaxed);
        let writing = start_sharing(&cluster, PACE, None, Arc::clone(&replaced));
        writing.want(&[("a", "1")]);
        if first {
            wait_labels(&cluster, &[("a", "1")]).await;
        } else {
            wait_reads(&cluster).await;
        }
        writing.running.end().await;
    }
    assert_eq!(cluster.count("DELETE", "nodefeatures"), 1);
}

#[tokio::test]
async fn object_changed_before_its_deletion_is_read_again() {
    let cluster = Cluster::start().await;
    cluster.server.put(GFD, &key(), of_gfd());
    cluster.server.fail(Fault::of("DELETE", "nodefeatures", 1, Answer::Refusal(409, "a precondition fails", None)));
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("a", "1")]).await;
    assert_eq!(cluster.metrics.requests("nodefeatures", "delete", "conflict"), 1);
}

#[tokio::test]
async fn foreign_object_is_left_alone_until_it_is_removed() {
    let cluster = Cluster::start().await;
    let theirs = json!({"spec": {"labels": {"theirs": "1"}}});
    cluster.server.put("kubectl", &key(), theirs.clone());
    let writing = start(&cluster, PACE, None);
    writing.want(&[("a", "1")]);
    wait_reads(&cluster).await;
    writing.want(&[("a", "2")]);
    wait_reads(&cluster).await;
    assert_eq!(cluster.server.object(&key()).unwrap()["spec"], theirs["spec"]);
    cluster.server.remove(&key());
    wait_labels(&cluster, &[("a", "2")]).await;
    writing.running.end().await;
}

#[tokio::test]
async fn rights_of_nvidias_role_are_enough() {
    let cluster = Cluster::start().await;
    // NVIDIA's role allows get, list, watch, create and update.
    for method in ["PATCH", "DELETE"] {
        let forbidden = Answer::Refusal(403, "nodefeatures is forbidden", None);
        cluster.server.fail(Fault::of(method, "nodefeatures", usize::MAX, forbidden));
    }
    cluster.server.put(GFD, &key(), of_gfd());
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("nvidia.com/gpu.count", "8")]).await;
    assert_eq!(cluster.server.object(&key()).unwrap()["metadata"]["ownerReferences"], Value::Null);
    // GPU Feature Discovery stays the manager of fields that the update left, but does not count as a second writer.
    writing.write(&cluster, &[("nvidia.com/gpu.count", "7")]).await;
    cluster.server.remove(&key());
    writing.write(&cluster, &[("a", "1")]).await;
    assert_eq!((cluster.count("DELETE", ""), cluster.count("PATCH", "")), (1, 0), "a refused verb was sent again");
    writing.running.end().await;
    cluster.server.remove(&key());
    let writing = start(&cluster, PACE, None);
    for label in ["1", "2"] {
        writing.write(&cluster, &[("b", label)]).await;
    }
    assert_eq!(cluster.count("PATCH", ""), 1);
}

#[tokio::test]
async fn stale_labels_go_once_patches_are_allowed() {
    let cluster = Cluster::start().await;
    let forbidden = || Answer::Refusal(403, "nodefeatures is forbidden", None);
    cluster.server.fail(Fault::of("PATCH", "nodefeatures", 1, forbidden()));
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("a", "1"), ("b", "1")]).await;
    writing.running.end().await;
    assert_eq!((cluster.count("POST", ""), cluster.count("PATCH", "")), (1, 1), "not created by POST");
    // The fields of a creation do not belong to server-side apply, so an apply alone would leave `b`.
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("a", "2")]).await;
}

#[tokio::test]
async fn one_refused_patch_is_tried_again() {
    let cluster = Cluster::start().await;
    let forbidden = || Answer::Refusal(403, "nodefeatures is forbidden", None);
    // The role allows patch and not create; a webhook refuses the first patch.
    cluster.server.fail(Fault::of("PATCH", "nodefeatures", 1, forbidden()));
    cluster.server.fail(Fault::of("POST", "nodefeatures", usize::MAX, forbidden()));
    let writing = start(&cluster, PACE, None);
    writing.write(&cluster, &[("a", "1")]).await;
}

#[tokio::test]
async fn daemon_set_of_the_pod_owns_the_object() {
    let cluster = Cluster::start().await;
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "linkwise", "uid": "d", "controller": true});
    let mut in_pod = owner.clone();
    in_pod["blockOwnerDeletion"] = json!(true);
    let pod = json!({"metadata": {"ownerReferences": [in_pod]}});
    cluster.server.put("kubelet", &ResourceType::PODS.key(Some("gpu"), "p"), pod);
    let writing = start(&cluster, PACE, Some("p"));
    writing.write(&cluster, &[("a", "1")]).await;
    assert_eq!(cluster.server.object(&key()).unwrap()["metadata"]["ownerReferences"], json!([owner]));
    writing.running.end().await;
    // After a restart the writer finds the object as wanted.
    let writing = start(&cluster, PACE, Some("p"));
    writing.want(&[("a", "1")]);
    let before = cluster.count("GET", "nodefeatures");
    until(|| cluster.count("GET", "nodefeatures") > before).await;
    writing.running.end().await;
    assert_eq!(cluster.count("PATCH", ""), 1);
}

#[tokio::test]
async fn unreadable_pod_costs_only_the_owner_reference() {
    let cluster = Cluster::start().await;
    cluster.server.fail(Fault::of("GET", "pods/p", 1, Answer::Refusal(500, "internal error", None)));
    cluster.server.fail(Fault::of("GET", "pods/p", 1, Answer::Refusal(403, "pods is forbidden", None)));
    let writing = start(&cluster, PACE, Some("p"));
    writing.write(&cluster, &[("a", "1")]).await;
    assert_eq!(cluster.count("GET", "pods/p"), 2);
}

#[tokio::test]
async fn each_fault_of_a_write_is_survived() {
    for (answer, outcome) in [
        (Answer::Refusal(404, "the server could not find the requested resource", None), "not_found"),
        (Answer::Refusal(409, "conflict", None), "conflict"),
        (Answer::Refusal(429, "too many requests", Some(0)), "throttled"),
        (Answer::Refusal(500, "internal error", None), "server_error"),
        (Answer::Refusal(504, "timeout", None), "server_error"),
        (Answer::Text("nonsense".to_owned()), "malformed"),
        (Answer::Silence, "timeout"),
    ] {
        let cluster = Cluster::start().await;
        cluster.server.fail(Fault::of("PATCH", "nodefeatures", 2, answer));
        let writing = start(&cluster, Pace { request: Duration::from_secs(2), ..PACE }, None);
        writing.write(&cluster, &[("a", "1")]).await;
        assert_eq!(cluster.metrics.requests("nodefeatures", "apply", outcome), 2, "{outcome}");
        writing.running.end().await;
    }
}

#[tokio::test]
async fn last_labels_are_written_after_the_server_was_away() {
    let (cluster, writing) = start_cluster(PACE).await;
    writing.write(&cluster, &[("a", "1")]).await;
    cluster.server.go_away().await;
    for label in ["2", "3"] {
        writing.want(&[("a", label)]);
        let before = cluster.metrics.requests("nodefeatures", "get", "unreachable");
        until(|| cluster.metrics.requests("nodefeatures", "get", "unreachable") > before + 2).await;
    }
    cluster.server.come_back().await;
    wait_labels(&cluster, &[("a", "3")]).await;
    assert_eq!(cluster.count("PATCH", ""), 2, "labels that were replaced during the outage were written");
    writing.running.end().await;
}

#[tokio::test]
async fn rotated_token_is_used_for_the_next_write() {
    let (cluster, writing) = start_cluster(PACE).await;
    writing.write(&cluster, &[("a", "1")]).await;
    cluster.write_token("second");
    cluster.server.accept_tokens(&["second"]);
    writing.write(&cluster, &[("a", "2")]).await;
    assert_eq!(cluster.metrics.requests("nodefeatures", "get", "unauthorized"), 1);
}
