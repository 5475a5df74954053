//! [`ClaimReader`]: reads ResourceClaims for the DRA plugin, which prepares their devices.
//!
//! The only reader of claims. Each query of the plugin is a GET, with up to two retries if it fails for a
//! passing reason. Its deadline leaves the kubelet, which waits for 45 s, time to try again. Queries do not wait for
//! each other.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use linkwise_core::claims::Claim;
use linkwise_kubelet::dra::{ClaimQuery, ClaimQueryError, parse_claim};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::server::{ApiServer, named, resource};

/// The kind, in metrics.
const OBJECT: &str = "resourceclaims";

/// The longest time for one query, with all its attempts.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest time for one GET: a connection that hangs leaves time for another.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The number of retries of a GET.
const RETRIES: u32 = 2;

/// The pause before the first retry; before the second it is twice as long.
const PAUSE: Duration = Duration::from_millis(200);

/// The most queries at a time. A node starts few pods at once.
const AT_ONCE: usize = 16;

/// Reads claims.
pub struct ClaimReader {
    server: ApiServer,
}

impl ClaimReader {
    /// Makes no request yet.
    pub fn new(server: ApiServer) -> Self {
        Self { server: server.within(ATTEMPT) }
    }

    /// Answers queries until `shutdown`, or until the channel is closed.
    pub async fn run(mut self, mut queries: mpsc::Receiver<ClaimQuery>, shutdown: CancellationToken) {
        let work = async {
            let mut running = FuturesUnordered::new();
            loop {
                tokio::select! {
                    query = queries.recv(), if running.len() < AT_ONCE => match query {
                        Some(query) => running.push(answer(self.server.clone(), query)),
                        None => break,
                    },
                    // The returned client works, or is empty after an error that a new client may not have.
                    Some(server) = running.next() => self.server = server,
                }
            }
            while running.next().await.is_some() {}
        };
        shutdown.run_until_cancelled(work).await;
    }
}

/// Answers one query. The caller logs the errors.
async fn answer(mut server: ApiServer, query: ClaimQuery) -> ApiServer {
    let ClaimQuery { namespace, name, mut answer } = query;
    let outcome = tokio::select! {
        result = read(&mut server, &namespace, &name) => Some(result),
        // The caller has gone.
        () = answer.closed() => None,
    };
    let Some(result) = outcome else { return server };
    let result = result.map_err(|error| match error.code() {
        Some(404) if error.is_missing(OBJECT, &name) => ClaimQueryError::NotFound,
        // This 404 says nothing about the claim, which may be prepared here.
        Some(404) => {
            ClaimQueryError::Failed(format!("{error} (no resource.k8s.io/v1? Kubernetes 1.34 or newer has it)"))
        }
        _ => ClaimQueryError::Failed(error.to_string()),
    });
    // The caller may have gone.
    let _ = answer.send(result);
    server
}

async fn read(server: &mut ApiServer, namespace: &str, name: &str) -> Result<Claim, ApiError> {
    for name in [namespace, name] {
        named(name)?;
    }
    let deadline = Instant::now() + DEADLINE;
    let mut pause = PAUSE;
    for _ in 0..RETRIES {
        let Ok(result) = timeout_at(deadline, get(server, namespace, name)).await else { break };
        let error = match result {
            Err(error) if is_passing(&error) => error,
            result => return result,
        };
        let wait = error.retry_after().unwrap_or_default().max(pause);
        if Instant::now() + wait >= deadline {
            return Err(error);
        }
        tokio::time::sleep(wait).await;
        pause = pause.saturating_mul(2);
    }
    timeout_at(deadline, get(server, namespace, name)).await.unwrap_or(Err(ApiError::TimedOut(DEADLINE)))
}

/// Returns true if the same request may succeed in a moment.
fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::Refused { code, .. } => matches!(code, 401 | 429 | 500..),
        ApiError::Unreachable(_) | ApiError::TimedOut(_) => true,
        ApiError::Access(_) | ApiError::Malformed(_) => false,
    }
}

async fn get(server: &mut ApiServer, namespace: &str, name: &str) -> Result<Claim, ApiError> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let get =
        |client| async move { Api::<DynamicObject>::namespaced_with(client, &namespace, &claims()).get(&name).await };
    let object = server.call(OBJECT, "get", get).await?;
    parsed(&object)
}

fn claims() -> ApiResource {
    resource("resource.k8s.io", "v1", "ResourceClaim", OBJECT)
}

fn parsed(object: &DynamicObject) -> Result<Claim, ApiError> {
    let text = serde_json::to_vec(object).map_err(|error| ApiError::Malformed(error.to_string()))?;
    parse_claim(&text).map_err(|error| ApiError::Malformed(error.to_string()))
}
