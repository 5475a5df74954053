//! [`ClaimReader`]: reads ResourceClaims for the DRA plugin, which prepares their devices.
//!
//! The only reader of claims. Each read is a GET, with up to two retries if it fails for a passing reason. Its deadline
//! leaves the kubelet, which waits for 45 s, time to try again. Reads do not wait for each other.

use std::sync::Mutex;
use std::time::Duration;

use kube::Api;
use kube::api::DynamicObject;
use linkwise_core::claims::{Claim, ClaimName, ReadClaimError};
use linkwise_system::lock;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::server::{ApiServer, named, resource};

/// The kind, in metrics.
const OBJECT: &str = "resourceclaims";

/// The longest time for one read, with all its attempts.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest time for one GET: a connection that hangs leaves time for another.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The number of retries of a GET.
const RETRIES: u32 = 2;

/// The pause before the first retry; before the second it is twice as long.
const PAUSE: Duration = Duration::from_millis(200);

/// The most reads at a time. A node starts few pods at once.
const MAX_CONCURRENT_READS: usize = 16;

/// Reads claims.
pub struct ClaimReader {
    server: Mutex<ApiServer>,
    at_once: Semaphore,
}

impl ClaimReader {
    /// Makes no request yet.
    pub fn new(server: ApiServer) -> Self {
        Self { server: Mutex::new(server.within(ATTEMPT)), at_once: Semaphore::new(MAX_CONCURRENT_READS) }
    }

    /// Reads a claim by its namespace and name. The caller logs the errors.
    ///
    /// # Errors
    ///
    /// There is no such claim, or the API server does not give it.
    pub async fn read(&self, claim: &ClaimName) -> Result<Claim, ReadClaimError> {
        let _one = self.at_once.acquire().await;
        let mut server = lock(&self.server).clone();
        let read = read(&mut server, &claim.namespace, &claim.name).await;
        // It works, or is empty after an error that a new client may not have.
        *lock(&self.server) = server;
        read.map_err(|error| match error.code() {
            Some(404) if error.is_missing(OBJECT, &claim.name) => ReadClaimError::NotFound,
            // This 404 says nothing about the claim, which may be prepared here.
            Some(404) => {
                ReadClaimError::Failed(format!("{error} (no resource.k8s.io/v1? Kubernetes 1.34 or newer has it)"))
            }
            _ => ReadClaimError::Failed(error.to_string()),
        })
    }
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
    let claims = resource("resource.k8s.io", "v1", "ResourceClaim", OBJECT);
    let get = |client| async { Api::<DynamicObject>::namespaced_with(client, namespace, &claims).get(name).await };
    let object = server.call(OBJECT, "get", get).await?;
    let text = serde_json::to_vec(&object).map_err(|error| ApiError::Malformed(error.to_string()))?;
    Claim::from_json(&text).map_err(|error| ApiError::Malformed(error.to_string()))
}
