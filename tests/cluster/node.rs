//! The follower of a node: what it publishes, and what it survives.

use std::collections::BTreeMap;
use std::time::Duration;

use linkwise_api_server_box::{Answer, Fault};
use linkwise_cluster::{NodeFollower, NodeLabels, Pace};
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::support::{Cluster, PACE, Running, node_key, within};

type Published = watch::Receiver<Option<NodeLabels>>;

fn follow(cluster: &Cluster, pace: Pace) -> (Published, Running) {
    let (sender, labels) = watch::channel(None);
    let follower = NodeFollower::new(cluster.client(pace), "n".to_owned());
    (labels, Running::of(|shutdown| follower.run(sender, shutdown)))
}

fn of<const N: usize>(labels: [(&str, &str); N]) -> NodeLabels {
    NodeLabels::Of(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
}

async fn published(labels: &mut Published, expected: &NodeLabels) {
    within(labels.wait_for(|now| now.as_ref() == Some(expected))).await.unwrap();
}

#[tokio::test]
async fn labels_follow_the_node() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    cluster.label_node("other", json!({"a": "9"}));
    let (mut labels, running) = follow(&cluster, PACE);
    published(&mut labels, &of([("a", "1")])).await;
    cluster.server.wait_for_watches(1).await;
    cluster.label_node("n", json!({"a": "2", "b": "1"}));
    published(&mut labels, &of([("a", "2"), ("b", "1")])).await;
    cluster.server.remove(&node_key("n"));
    published(&mut labels, &NodeLabels::Absent).await;
    cluster.label_node("n", json!({}));
    published(&mut labels, &NodeLabels::Of(BTreeMap::new())).await;
    assert_eq!((cluster.count("GET", "watch"), cluster.server.requests().len()), (1, 2), "one list, one watch");
    running.end().await;
}

#[tokio::test]
async fn label_is_read_after_each_fault_of_a_list() {
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
        let cluster = Cluster::start().await;
        cluster.label_node("n", json!({"a": "1"}));
        cluster.server.fail(Fault::of("GET", "nodes?", 2, answer));
        let (mut labels, running) = follow(&cluster, quick);
        published(&mut labels, &of([("a", "1")])).await;
        assert_eq!(cluster.metrics.requests("nodes", "list", outcome), 2, "{outcome}");
        running.end().await;
    }
}

#[tokio::test]
async fn node_is_read_anew_after_each_fault_of_a_watch() {
    for (answer, outcome) in [
        (Answer::Refusal(403, "nodes is forbidden", None), "forbidden"),
        (Answer::Refusal(410, "too old resource version", None), "expired"),
        (Answer::Refusal(500, "internal error", None), "server_error"),
        (Answer::Text("{\"type\": \"MODIFIED\", \"object\": 3}\n".to_owned()), "malformed"),
        (Answer::Text("{\"type\": \"ADDED\", \"object\": {\"metadata\": {\"name\": \"x\"}}}\n".to_owned()), "ok"),
        (Answer::Endless, "malformed"),
    ] {
        let cluster = Cluster::start().await;
        cluster.label_node("n", json!({"a": "1"}));
        cluster.server.fail(Fault::of("GET", "watch=true", 2, answer));
        let (mut labels, running) = follow(&cluster, PACE);
        within(cluster.server.wait_for_watches(1)).await;
        cluster.label_node("n", json!({"a": "2"}));
        published(&mut labels, &of([("a", "2")])).await;
        assert!(cluster.metrics.requests("nodes", "watch", outcome) >= 2, "{outcome}");
        running.end().await;
    }
}

#[tokio::test]
async fn expired_watch_misses_nothing() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    let (mut labels, running) = follow(&cluster, PACE);
    published(&mut labels, &of([("a", "1")])).await;
    cluster.server.wait_for_watches(1).await;
    cluster.server.expire_watches();
    cluster.label_node("n", json!({"a": "2"}));
    cluster.server.expire_watches();
    published(&mut labels, &of([("a", "2")])).await;
    running.end().await;
}

#[tokio::test]
async fn watch_that_ends_in_its_time_is_continued() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    let (mut labels, running) = follow(&cluster, Pace { watch: Duration::from_secs(1), ..PACE });
    published(&mut labels, &of([("a", "1")])).await;
    let watches = |requests: &Vec<_>| {
        let watch = |request: &&linkwise_api_server_box::Request| request.uri.contains("watch=true");
        requests.iter().filter(watch).count() >= 3
    };
    within(cluster.server.wait_for_requests(watches)).await;
    cluster.label_node("n", json!({"a": "2"}));
    published(&mut labels, &of([("a", "2")])).await;
    assert_eq!(cluster.metrics.requests("nodes", "list", "ok"), 1, "it is not read anew");
    running.end().await;
}

#[tokio::test]
async fn rotated_token_is_read_when_the_old_one_is_refused() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    let (mut labels, running) = follow(&cluster, PACE);
    published(&mut labels, &of([("a", "1")])).await;
    cluster.server.wait_for_watches(1).await;
    cluster.write_token("second");
    cluster.server.accept_tokens(&["second"]);
    // The watch that is open would stay so.
    cluster.server.go_away().await;
    cluster.label_node("n", json!({"a": "2"}));
    cluster.server.come_back().await;
    published(&mut labels, &of([("a", "2")])).await;
    assert_eq!(cluster.server.requests().last().unwrap().token.as_deref(), Some("second"));
    running.end().await;
}

#[tokio::test]
async fn wrong_token_is_read_again_until_it_is_right() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    cluster.write_token("wrong");
    let (mut labels, running) = follow(&cluster, PACE);
    let refused = |requests: &Vec<_>| requests.len() >= 3;
    within(cluster.server.wait_for_requests(refused)).await;
    assert_eq!(*labels.borrow(), None);
    cluster.write_token("first");
    published(&mut labels, &of([("a", "1")])).await;
    assert!(cluster.metrics.requests("nodes", "list", "unauthorized") >= 3);
    running.end().await;
}

#[tokio::test]
async fn labels_stay_while_the_server_is_away_and_follow_after() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    let (mut labels, running) = follow(&cluster, PACE);
    published(&mut labels, &of([("a", "1")])).await;
    cluster.server.wait_for_watches(1).await;
    cluster.server.go_away().await;
    crate::cluster::support::until(|| cluster.metrics.requests("nodes", "list", "unreachable") >= 5).await;
    assert_eq!(*labels.borrow_and_update(), Some(of([("a", "1")])));
    cluster.label_node("n", json!({"a": "2"}));
    cluster.server.come_back().await;
    published(&mut labels, &of([("a", "2")])).await;
    running.end().await;
}

#[tokio::test]
async fn credentials_that_come_late_are_used() {
    let cluster = Cluster::start().await;
    cluster.label_node("n", json!({"a": "1"}));
    let token = cluster.folder().join("token");
    std::fs::remove_file(&token).unwrap();
    let (mut labels, running) = follow(&cluster, PACE);
    crate::cluster::support::until(|| cluster.metrics.requests("nodes", "list", "no_access") >= 2).await;
    cluster.write_token("first");
    published(&mut labels, &of([("a", "1")])).await;
    running.end().await;
}
