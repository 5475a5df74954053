//! [`ClaimReader`]: reads ResourceClaims for the DRA plugin, which prepares their devices.
//!
//! Each read is a GET, with up to two retries after transient errors. Up to 16 reads run at once, and each
//! ends within 10 s, so that the kubelet, which would wait for 45 s, can try again sooner.

use std::sync::Mutex;
use std::time::Duration;

use kube::Api;
use kube::api::DynamicObject;
use linkwise_core::claims::{Claim, ClaimName, ReadClaimError};
use linkwise_system::lock;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::server::{ApiServer, check_name, resource};

/// The kind, in metrics.
const OBJECT: &str = "resourceclaims";

/// The longest time for one read, with all its attempts.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest time for one GET, so that a connection that hangs leaves time for a retry.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// The most retries of a GET.
const MAX_RETRIES: u32 = 2;

/// The pause before the first retry; before the second it is twice as long.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The most reads at a time. A node starts few pods at once.
const MAX_CONCURRENT_READS: usize = 16;

/// Reads claims.
pub struct ClaimReader {
    server: Mutex<ApiServer>,
    permits: Semaphore,
}

impl ClaimReader {
    /// Makes no request yet.
    pub fn new(server: ApiServer) -> Self {
        Self { server: Mutex::new(server.with_timeout(ATTEMPT_TIMEOUT)), permits: Semaphore::new(MAX_CONCURRENT_READS) }
    }

    /// Reads a claim by its namespace and name. The caller logs the errors.
    ///
    /// # Errors
    ///
    /// The claim does not exist, or the API server does not return it.
    pub async fn read(&self, claim: &ClaimName) -> Result<Claim, ReadClaimError> {
        let _permit = self.permits.acquire().await;
        let mut server = lock(&self.server).clone();
        let read = read(&mut server, &claim.namespace, &claim.name).await;
        // If the client may have caused the error, the copy has dropped it, and the next read makes a new client.
        *lock(&self.server) = server;
        read.map_err(|error| match error.code() {
            Some(404) if error.is_missing(OBJECT, &claim.name) => ReadClaimError::NotFound,
            // This 404 does not name the claim, so the claim may exist and be prepared on this node.
            Some(404) => ReadClaimError::Failed(format!(
                "{error} (the API server may not serve resource.k8s.io/v1, which needs Kubernetes 1.34 or newer)"
            )),
            _ => ReadClaimError::Failed(error.to_string()),
        })
    }
}

async fn read(server: &mut ApiServer, namespace: &str, name: &str) -> Result<Claim, ApiError> {
    for name in [namespace, name] {
        check_name(name)?;
    }
    let deadline = Instant::now() + READ_TIMEOUT;
    let mut pause = RETRY_DELAY;
    for _ in 0..MAX_RETRIES {
        let Ok(result) = timeout_at(deadline, get(server, namespace, name)).await else { break };
        let error = match result {
            Err(error) if is_transient(&error) => error,
            result => return result,
        };
        let wait = error.retry_after().unwrap_or_default().max(pause);
        if Instant::now() + wait >= deadline {
            return Err(error);
        }
        tokio::time::sleep(wait).await;
        pause = pause.saturating_mul(2);
    }
    timeout_at(deadline, get(server, namespace, name)).await.unwrap_or(Err(ApiError::TimedOut(READ_TIMEOUT)))
}

/// Returns true if the same request may succeed in a moment.
fn is_transient(error: &ApiError) -> bool {
    match error {
        ApiError::Refused { code, .. } => matches!(code, 401 | 429 | 500..),
        ApiError::Unreachable(_) | ApiError::TimedOut(_) => true,
        ApiError::Access(_) | ApiError::Malformed(_) => false,
    }
}

async fn get(server: &mut ApiServer, namespace: &str, name: &str) -> Result<Claim, ApiError> {
    let claims = resource("resource.k8s.io", "v1", "ResourceClaim", OBJECT);
    let get = |client| async { Api::<DynamicObject>::namespaced_with(client, namespace, &claims).get(name).await };
    let object = server.call(OBJECT, "get", get).await?;
    let text = serde_json::to_vec(&object).map_err(|error| ApiError::Malformed(error.to_string()))?;
    Claim::from_json(&text).map_err(|error| ApiError::Malformed(error.to_string()))
}
