//! Tests of the follower of a node's labels: what it publishes, and which faults it survives.

use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault};
use linkwise_cluster::{NodeLabels, Pace, follow_node};
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, node_key, until, within};

/// A follower of the node `n`.
struct Following {
    cluster: Cluster,
    labels: watch::Receiver<Option<NodeLabels>>,
    running: Running,
}

/// A cluster whose node `n` has the label `a` with the value 1.
async fn labelled() -> Cluster {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    cluster
}

fn follow(cluster: Cluster, pace: Pace) -> Following {
    let (sender, labels) = watch::channel(None);
    let following = follow_node(cluster.client(pace), "n".to_owned(), sender);
    let running = Running::of(|shutdown| async move { _ = shutdown.run_until_cancelled(following).await });
    Following { cluster, labels, running }
}

/// A follower that has read the node, and watches it.
async fn watching(pace: Pace) -> Following {
    let mut following = follow(labelled().await, pace);
    following.wait("1").await;
    following.cluster.server.wait_for_watches(1).await;
    following
}

fn node_labels<const N: usize>(labels: [(&str, &str); N]) -> NodeLabels {
    NodeLabels::Of(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
}

impl Following {
    /// Waits until these labels are published.
    async fn wait_labels(&mut self, expected: NodeLabels) {
        within(self.labels.wait_for(|now| now.as_ref() == Some(&expected))).await.unwrap();
    }

    /// Waits until the label `a` with this value is published, and no other label.
    async fn wait(&mut self, value: &str) {
        self.wait_labels(node_labels([("a", value)])).await;
    }

    /// Sets the label `a` to 2, and waits until that is published.
    async fn relabel(&mut self) {
        self.cluster.label_node("n", json!({"a": "2"}));
        self.wait("2").await;
    }

    fn requests(&self, verb: &'static str, outcome: &'static str) -> u64 {
        self.cluster.metrics.requests("nodes", verb, outcome)
    }
}

#[tokio::test]
async fn labels_follow_the_node() {
    let cluster = labelled().await;
    cluster.label_node("other", json!({"a": "9"}));
    let mut following = follow(cluster, PACE);
    following.wait("1").await;
    following.cluster.server.wait_for_watches(1).await;
    following.cluster.label_node("n", json!({"a": "2", "b": "1"}));
    following.wait_labels(node_labels([("a", "2"), ("b", "1")])).await;
    following.cluster.server.remove(&node_key("n"));
    following.wait_labels(NodeLabels::Absent).await;
    following.cluster.label_node("n", json!({}));
    following.wait_labels(node_labels([])).await;
    let requests = following.cluster.server.requests().len();
    assert_eq!((following.cluster.count("GET", "watch"), requests), (1, 2), "more than a list and a watch");
    following.running.end().await;
}

#[tokio::test]
async fn labels_are_read_after_each_list_fault() {
    let quick = Pace { request: Duration::from_secs(2), ..PACE };
    for (answer, outcome) in [
        (Answer::Refusal(403, "nodes is forbidden", None), "forbidden"),
        (Answer::Refusal(404, "no such resource", None), "not_found"),
        (Answer::Refusal(410, "too old", None), "expired"),
        (Answer::Refusal(429, "too many requests", Some(0)), "throttled"),
        (Answer::Refusal(500, "internal error", None), "server_error"),
        (Answer::Refusal(503, "not ready", None), "server_error"),
        (Answer::Text("<html>a proxy's page</html>".to_owned()), "malformed"),
        (Answer::Text(json!({"kind": "NodeList", "items": 3}).to_string()), "malformed"),
        (Answer::Endless, "malformed"),
        (Answer::Silence, "timeout"),
    ] {
        let cluster = labelled().await;
        cluster.server.fail(Fault::of("GET", "nodes?", 2, answer));
        let mut following = follow(cluster, quick);
        following.wait("1").await;
        assert_eq!(following.requests("list", outcome), 2, "{outcome}");
        following.running.end().await;
    }
}

#[tokio::test]
async fn labels_follow_the_node_after_each_watch_fault() {
    for (answer, outcome) in [
        (Answer::Refusal(403, "nodes is forbidden", None), "forbidden"),
        (Answer::Refusal(410, "too old resource version", None), "expired"),
        (Answer::Refusal(500, "internal error", None), "server_error"),
        (Answer::Text("{\"type\": \"MODIFIED\", \"object\": 3}\n".to_owned()), "malformed"),
        (Answer::Text("{\"type\": \"ADDED\", \"object\": {\"metadata\": {\"name\": \"x\"}}}\n".to_owned()), "ok"),
        (Answer::Endless, "malformed"),
    ] {
        let cluster = labelled().await;
        cluster.server.fail(Fault::of("GET", "watch=true", 2, answer));
        let mut following = follow(cluster, PACE);
        within(following.cluster.server.wait_for_watches(1)).await;
        following.relabel().await;
        assert!(following.requests("watch", outcome) >= 2, "{outcome}");
        following.running.end().await;
    }
}

#[tokio::test]
async fn expired_watch_misses_nothing() {
    let mut following = watching(PACE).await;
    following.cluster.server.expire_watches();
    following.cluster.label_node("n", json!({"a": "2"}));
    following.cluster.server.expire_watches();
    following.wait("2").await;
}

#[tokio::test]
async fn watch_that_ends_normally_is_continued() {
    let mut following = watching(Pace { watch: Duration::from_secs(1), ..PACE }).await;
    until(|| following.cluster.count("GET", "watch=true") >= 3).await;
    following.relabel().await;
    assert_eq!(following.requests("list", "ok"), 1, "the node was listed again");
}

#[tokio::test]
async fn rotated_token_is_read_when_the_old_one_is_refused() {
    let mut following = watching(PACE).await;
    following.cluster.write_token("second");
    following.cluster.server.accept_tokens(&["second"]);
    // Without an outage the open watch would go on with the old token.
    following.cluster.server.go_away().await;
    following.cluster.label_node("n", json!({"a": "2"}));
    following.cluster.server.come_back().await;
    following.wait("2").await;
    assert_eq!(following.cluster.server.requests().last().unwrap().token.as_deref(), Some("second"));
}

#[tokio::test]
async fn labels_stay_while_the_server_is_away() {
    let mut following = watching(PACE).await;
    following.cluster.server.go_away().await;
    until(|| following.requests("list", "unreachable") >= 5).await;
    assert_eq!(*following.labels.borrow_and_update(), Some(node_labels([("a", "1")])));
    following.cluster.label_node("n", json!({"a": "2"}));
    following.cluster.server.come_back().await;
    following.wait("2").await;
}

#[tokio::test]
async fn wrong_or_missing_token_is_read_again() {
    for (token, outcome) in [(Some("wrong"), "unauthorized"), (None, "no_access")] {
        let cluster = labelled().await;
        match token {
            Some(token) => cluster.write_token(token),
            None => std::fs::remove_file(cluster.folder().join("token")).unwrap(),
        }
        let mut following = follow(cluster, PACE);
        until(|| following.requests("list", outcome) >= 3).await;
        assert_eq!(*following.labels.borrow(), None);
        following.cluster.write_token("first");
        following.wait("1").await;
    }
}
