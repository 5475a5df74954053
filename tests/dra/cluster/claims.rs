//! The reader of claims: the API server's answers, retries, and the duration of a read.

use linkwise_api_server_box::{Answer, Fault, ResourceType};
use linkwise_cluster::ClaimReader;
use linkwise_core::claims::{Claim, ClaimName, ReadClaimError};
use serde_json::json;

use crate::cluster::support::{Cluster, PACE, within};

struct Reading {
    cluster: Cluster,
    reader: ClaimReader,
}

/// A reader, and a cluster with the claim `ns/one`.
async fn reading() -> Reading {
    let cluster = Cluster::start().await;
    let key = ResourceType::RESOURCE_CLAIMS.key(Some("ns"), "one");
    let requests = json!([{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]);
    cluster.server.put("kubectl", &key, json!({"spec": {"devices": {"requests": requests}}}));
    let reader = ClaimReader::new(cluster.client(PACE));
    Reading { cluster, reader }
}

impl Reading {
    async fn read(&self, name: &str) -> Result<Claim, ReadClaimError> {
        let claim = ClaimName { namespace: "ns".to_owned(), name: name.to_owned(), ..ClaimName::default() };
        within(self.reader.read(&claim)).await
    }

    fn gets(&self) -> usize {
        self.cluster.count("GET", "resourceclaims")
    }

    /// Answers this many GETs with `answer`.
    fn fail(&self, times: usize, answer: Answer) {
        self.cluster.server.fail(Fault::of("GET", "resourceclaims", times, answer));
    }

    /// Checks that the claim cannot be read with this answer and is not read again. Returns the error.
    async fn refusal(&self, answer: Answer) -> String {
        let before = self.gets();
        self.fail(1, answer);
        let Err(ReadClaimError::Failed(why)) = self.read("one").await else { panic!("the claim is read") };
        assert_eq!(self.gets(), before + 1, "{why}");
        why
    }
}

#[tokio::test]
async fn reading_a_claim_takes_one_get() {
    let reading = reading().await;
    let claim = reading.read("one").await.unwrap();
    assert_eq!((claim.metadata.to_string(), claim.status.allocation), ("ns/one".to_owned(), None));
    assert_eq!(reading.gets(), 1);
    assert_eq!(reading.read("two").await, Err(ReadClaimError::NotFound));
    assert_eq!(reading.gets(), 2, "a missing claim was read again");
}

#[tokio::test]
async fn transient_errors_are_retried_twice() {
    for code in [429, 500, 503] {
        let reading = reading().await;
        reading.fail(2, Answer::Refusal(code, "busy", None));
        assert!(reading.read("one").await.is_ok(), "{code}");
        assert_eq!(reading.gets(), 3);
        reading.fail(3, Answer::Refusal(code, "busy", None));
        let Err(ReadClaimError::Failed(why)) = reading.read("one").await else { panic!("{code}") };
        assert!(why.contains(&code.to_string()) && why.contains("busy"), "{why}");
        assert_eq!(reading.gets(), 6);
    }
    // A hung connection costs one attempt.
    let reading = reading().await;
    reading.fail(1, Answer::Silence);
    assert!(reading.read("one").await.is_ok());
    assert_eq!((reading.gets(), reading.cluster.metrics.requests("resourceclaims", "get", "timeout")), (2, 1));
}

#[tokio::test]
async fn refusals_and_invalid_answers_are_not_retried() {
    let reading = reading().await;
    for (answer, word) in [
        (Answer::Refusal(403, "no right to get claims", None), "no right"),
        (Answer::Text("{\"metadata\": {\"name\": 3}}".to_owned()), "cannot be read"),
        (Answer::Text("{\"metadata\": {\"name\": \"one\"}, \"status\": 3}".to_owned()), "cannot be read"),
        (Answer::Endless, "too long"),
    ] {
        let why = reading.refusal(answer).await;
        assert!(why.contains(word), "{why}");
    }
    let Err(ReadClaimError::Failed(why)) = reading.read("../secrets/x").await else { panic!("the path was read") };
    assert!(why.contains("'../secrets/x' is not a valid object name"), "{why}");
}

#[tokio::test]
async fn other_404_answer_is_not_a_missing_claim() {
    let reading = reading().await;
    let not_found = |kind: &str, name: &str| {
        let details = json!({"group": "resource.k8s.io", "kind": kind, "name": name});
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404,
            "reason": "NotFound", "message": "not found", "details": details});
        Answer::Page(404, status.to_string())
    };
    for (answer, word) in [
        (Answer::Page(404, "404 page not found\n".to_owned()), "404 page not found"),
        (Answer::Refusal(404, "the server could not find the requested resource", None), "could not find"),
        (not_found("", ""), "not found"),
        (not_found("namespaces", "one"), "not found"),
        (not_found("resourceclaims", "another"), "not found"),
    ] {
        let why = reading.refusal(answer).await;
        assert!(why.contains(word) && why.contains("may not serve resource.k8s.io/v1"), "{why}");
    }
    reading.fail(1, not_found("resourceclaims", "one"));
    assert_eq!(reading.read("one").await, Err(ReadClaimError::NotFound));
}

#[tokio::test]
async fn slow_claim_holds_up_no_other() {
    let reading = reading().await;
    reading.cluster.server.fail(Fault::of("GET", "resourceclaims/slow", usize::MAX, Answer::Silence));
    tokio::select! {
        biased;
        slow = reading.read("slow") => panic!("{slow:?}"),
        one = async {
            // The other claim is read only after the slow read was sent.
            while reading.gets() == 0 {
                tokio::task::yield_now().await;
            }
            reading.read("one").await
        } => assert!(one.is_ok()),
    }
    // The slow read is dropped by now.
    assert!(reading.read("one").await.is_ok());
}
