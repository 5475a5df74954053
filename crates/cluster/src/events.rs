//! [`EventWriter`]: writes events about pods (`events.k8s.io/v1`), each once.
//!
//! The writer follows a list of the events that are due now, and is their only writer. There is no queue: a pod that
//! has ended is no longer on the list, so that after an outage of the API server only events that still hold are
//! written. An event's name is made of its pod's name and UID, so that the writer finds an event that an earlier
//! process wrote. No pod is read for its UID: the kubelet's checkpoint has the UIDs of pods with devices of the device
//! plugin, and a claim has the UIDs of its pods.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DynamicObject, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::{ApiError, Attempts};
use crate::server::{ApiServer, check_name, resource, typed};
use linkwise_core::publish::PodEvent;

/// The kinds, in metrics.
const EVENTS: &str = "events";
const CLAIMS: &str = "resourceclaims";

/// The reporting controller, as `kubectl describe` shows it.
const CONTROLLER: &str = "linkwise.dev/linkwise";

/// The longest `reportingInstance` that the API takes, in bytes.
const MAX_INSTANCE: usize = 128;

/// The longest note, in bytes.
const MAX_NOTE: usize = 1024;

/// The longest name of an object, in bytes.
const MAX_NAME: usize = 253;

/// A pod by namespace and name.
type Pod = (String, String);

/// Writes events about the pods of one node.
pub struct EventWriter {
    server: ApiServer,
    node: String,
    attempts: Attempts,
    bucket: Bucket,
    /// Pods on the list whose events need no more work.
    done: BTreeSet<Pod>,
    /// The pod whose event failed last. The other events are written first, because this event may be the cause.
    failed: Option<Pod>,
}

impl EventWriter {
    /// The rights that the writer needs in all namespaces: verb, API group and resource.
    pub const RIGHTS: [(&'static str, &'static str, &'static str); 1] = [("create", "events.k8s.io", EVENTS)];

    /// Makes no request yet. `node` is the name of the pods' node.
    pub fn new(server: ApiServer, node: String) -> Self {
        let attempts = Attempts::of("write an event about a pod", server.pace());
        Self { server, node, attempts, bucket: Bucket::default(), done: BTreeSet::new(), failed: None }
    }

    /// Writes due events until `shutdown`, or until the channel is closed. Errors are logged and tried again.
    pub async fn run(mut self, mut due: watch::Receiver<Arc<Vec<PodEvent>>>, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.follow(&mut due)).await;
    }

    async fn follow(&mut self, due: &mut watch::Receiver<Arc<Vec<PodEvent>>>) {
        let began = Instant::now();
        loop {
            let listed = Arc::clone(&due.borrow_and_update());
            self.done.retain(|done| listed.iter().any(|event| pod(event) == *done));
            let Some(event) = self.next(&listed) else {
                if due.changed().await.is_err() {
                    return;
                }
                continue;
            };
            let now = began.elapsed();
            if let Err(wait) = self.bucket.check(now) {
                if let Ok(Err(_)) = tokio::time::timeout(wait, due.changed()).await {
                    return;
                }
                continue;
            }
            match self.write(event).await {
                Ok(is_written) => {
                    if is_written {
                        self.bucket.take(now);
                    }
                    self.attempts.succeeded();
                    self.done.insert(pod(event));
                    self.failed = None;
                }
                Err(error) => {
                    self.failed = Some(pod(event));
                    // The pause is kept even if the list changes meanwhile: the server may have asked for it.
                    tokio::time::sleep(self.attempts.failed(&error)).await;
                }
            }
        }
    }

    /// The event to write next. The event that failed last comes after all others.
    fn next<'a>(&self, listed: &'a [PodEvent]) -> Option<&'a PodEvent> {
        let failed = self.failed.as_ref().and_then(|failed| listed.iter().position(|event| pod(event) == *failed));
        let after = failed.and_then(|failed| listed.get(failed.saturating_add(1)..)).unwrap_or_default();
        after.iter().chain(listed).find(|event| !self.done.contains(&pod(event)))
    }

    /// Writes an event. Returns false if it exists already, or if [`Self::uid`] returns `None`.
    async fn write(&mut self, event: &PodEvent) -> Result<bool, ApiError> {
        let Some(uid) = self.uid(event).await? else { return Ok(false) };
        let object = typed(object(event, &uid, &self.node))?;
        let (resource, namespace) = (resource("events.k8s.io", "v1", "Event", EVENTS), event.namespace.clone());
        let create = |client| async move {
            let api = Api::<DynamicObject>::namespaced_with(client, &namespace, &resource);
            api.create(&PostParams::default(), &object).await
        };
        match self.server.call(EVENTS, "create", create).await {
            Ok(_) => Ok(true),
            Err(error) if error.code() == Some(409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The UID of the event's pod, by which `kubectl describe` finds its events; `None` if it is unknown or a name is
    /// invalid.
    async fn uid(&mut self, event: &PodEvent) -> Result<Option<String>, ApiError> {
        let uid = match (&event.uid, event.claim.as_deref().and_then(|claim| claim.split_once('/'))) {
            (Some(uid), _) => Some(uid.clone()),
            (None, Some((namespace, name))) => self.uid_by_claim(namespace, name, &event.pod).await?,
            (None, None) => None,
        };
        // A request with an invalid name would be repeated for ever.
        let is_valid = |uid: &String| [&event.namespace, &event.pod, uid].iter().all(|name| check_name(name).is_ok());
        Ok(uid.filter(is_valid))
    }

    /// The UID of a pod, from the pods for which a claim is reserved. `None` if the claim or the pod is missing, or
    /// without the right to read claims, which linkwise needs for DRA only.
    async fn uid_by_claim(&mut self, namespace: &str, name: &str, pod: &str) -> Result<Option<String>, ApiError> {
        if [namespace, name].into_iter().any(|name| check_name(name).is_err()) {
            return Ok(None);
        }
        let resource = resource("resource.k8s.io", "v1", "ResourceClaim", CLAIMS);
        let get =
            |client| async { Api::<DynamicObject>::namespaced_with(client, namespace, &resource).get(name).await };
        match self.server.call(CLAIMS, "get", get).await {
            Ok(found) => {
                let users = found.data["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
                let ours = users.into_iter().find(|user| user["resource"] == "pods" && user["name"] == *pod);
                Ok(ours.and_then(|user| user["uid"].as_str().map(str::to_owned)))
            }
            Err(error) if error.code() == Some(403) || error.is_missing(CLAIMS, name) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn pod(event: &PodEvent) -> Pod {
    (event.namespace.clone(), event.pod.clone())
}

/// The event as an object of the API.
fn object(event: &PodEvent, uid: &str, node: &str) -> Value {
    let PodEvent { namespace, pod, reason, note, .. } = event;
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name(pod, uid), "namespace": namespace},
        "eventTime": MicroTime(Timestamp::now()),
        "type": "Warning",
        "reason": reason,
        "action": "Allocate",
        "note": cut(note, MAX_NOTE),
        "reportingController": CONTROLLER,
        "reportingInstance": cut(node, MAX_INSTANCE),
        "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": pod, "uid": uid},
    })
}

/// The pod's name and UID, cut to the length that a name may have.
fn name(pod: &str, uid: &str) -> String {
    let begin = cut(pod, MAX_NAME.saturating_sub(uid.len().saturating_add(1)));
    format!("{}.{uid}", begin.trim_end_matches(['-', '.']))
}

/// The beginning of a text, at most this number of bytes.
fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

/// The most events in a row: enough for a node whose GPUs are all held by pods with two GPUs each.
const MAX_BURST: u32 = 10;

/// The time between two events after such a burst. A thousand nodes whose jobs end and begin all the time write 17
/// events a second.
const EVENT_INTERVAL: Duration = Duration::from_secs(60);

/// A token bucket, as the time at which it is full again. Each event adds [`EVENT_INTERVAL`] to this time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    full_at: Duration,
}

impl Bucket {
    /// Allows an event at this time, or returns the time to wait as `Err`.
    pub fn check(&self, now: Duration) -> Result<(), Duration> {
        let wait = self.full_at.saturating_sub(now).saturating_sub(EVENT_INTERVAL.saturating_mul(MAX_BURST - 1));
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    /// Takes a token for an event that was written at this time.
    pub fn take(&mut self, now: Duration) {
        self.full_at = self.full_at.max(now).saturating_add(EVENT_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_to_what_the_api_takes() {
        let uid = "5b3c7d0e-0b4f-4a57-9c5f-3f8c4a4f6a11";
        assert_eq!(name("train-0", uid), format!("train-0.{uid}"));
        let longest = name(&format!("{}{}", "a".repeat(214), "-.b".repeat(13)), uid);
        assert_eq!(longest, format!("{}.{uid}", "a".repeat(214)));
        assert_eq!(name(&"a".repeat(253), uid).len(), 253);
        assert_eq!((cut("größe", 3), cut("größe", 4), cut("", 3)), ("gr", "grö", ""));
    }

    #[test]
    fn burst_then_one_a_minute() {
        let (mut bucket, mut now) = (Bucket::default(), Duration::from_secs(5000));
        for _ in 0..MAX_BURST {
            assert_eq!(bucket.check(now), Ok(()));
            bucket.take(now);
        }
        assert_eq!(bucket.check(now), Err(EVENT_INTERVAL));
        now += EVENT_INTERVAL / 2;
        assert_eq!(bucket.check(now), Err(EVENT_INTERVAL / 2));
        now += EVENT_INTERVAL / 2;
        assert_eq!(bucket.check(now), Ok(()));
        bucket.take(now);
        assert_eq!(bucket.check(now), Err(EVENT_INTERVAL));
        // The bucket is full again, and holds one burst.
        now += EVENT_INTERVAL * MAX_BURST * 3;
        for _ in 0..MAX_BURST {
            assert_eq!(bucket.check(now), Ok(()));
            bucket.take(now);
        }
        assert!(bucket.check(now).is_err());
    }
}
