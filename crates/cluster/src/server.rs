//! [`ApiServer`]: makes all requests to the API server.
//!
//! Each request has a deadline and a bound on the length of its answer, and is counted. The client is made of kube's
//! parts, without kube's retries (`attempts` paces them) and without its log lines for each failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Response, header};
use http_body_util::Limited;
use kube::Client;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::client::ConfigExt;
use linkwise_core::quote::quoted;
use serde_json::Value;
use tower::{BoxError, ServiceBuilder};

use crate::access::Access;
use crate::error::{ApiError, credentials};
use crate::metrics::ApiMetrics;

/// The longest answer in bytes, a whole watch included: about ten times the largest object that etcd takes.
const LONGEST_ANSWER: usize = 16 << 20;

/// Deadlines and pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The longest time for a request; for a watch, until it begins.
    pub request: Duration,
    /// The duration of a watch before the server ends it. It is shortened by a random part.
    pub watch: Duration,
    /// The first pause after a failure.
    pub first: Duration,
    /// The longest pause after failures.
    pub longest: Duration,
    /// The time until a written object is compared again. It is shortened by a random part.
    pub reassert: Duration,
    /// The time between two writes of ResourceSlices, on average.
    pub write: Duration,
    /// The first pause before a repair of ResourceSlices that another program changes again and again.
    pub repair: Duration,
}

impl Pace {
    /// The pace for clusters of any size: after an outage of an hour, each node makes its requests within two minutes.
    pub const DEFAULT: Self = Self {
        request: Duration::from_secs(15),
        watch: Duration::from_secs(290),
        first: Duration::from_secs(1),
        longest: Duration::from_secs(120),
        reassert: Duration::from_secs(60),
        write: Duration::from_secs(1),
        repair: Duration::from_secs(1),
    };
}

/// The client of one follower or writer.
#[derive(Clone)]
pub struct ApiServer {
    access: Access,
    pace: Pace,
    metrics: ApiMetrics,
    client: Option<Client>,
    /// The seconds in the last answer's Retry-After, or 0.
    asked: Arc<AtomicU64>,
}

impl ApiServer {
    /// Makes no request yet.
    pub fn new(access: Access, pace: Pace, metrics: ApiMetrics) -> Self {
        Self { access, pace, metrics, client: None, asked: Arc::default() }
    }

    /// The same, with this deadline for requests.
    pub(crate) fn within(mut self, request: Duration) -> Self {
        self.pace.request = self.pace.request.min(request);
        self
    }

    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Makes a request. If the token, the CA or a connection may have caused an error, the next request has a new
    /// client.
    ///
    /// # Errors
    ///
    /// See [`ApiError`].
    pub(crate) async fn call<T, F: Future<Output = kube::Result<T>>>(
        &mut self,
        object: &'static str,
        verb: &'static str,
        request: impl FnOnce(Client) -> F,
    ) -> Result<T, ApiError> {
        let within = self.pace.request;
        let result = match tokio::time::timeout(within, self.attempt(request)).await {
            Ok(result) => result,
            Err(_) => Err(ApiError::TimedOut(within)),
        };
        self.count(object, verb, result.as_ref().err());
        result
    }

    /// Counts the outcome of a request, or of a watch that broke later.
    pub(crate) fn count(&mut self, object: &'static str, verb: &'static str, error: Option<&ApiError>) {
        if error.is_some_and(ApiError::is_of_the_client) {
            self.client = None;
        }
        self.metrics.count(object, verb, error.map_or("ok", ApiError::outcome));
    }

    async fn attempt<T, F: Future<Output = kube::Result<T>>>(
        &mut self,
        request: impl FnOnce(Client) -> F,
    ) -> Result<T, ApiError> {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => self.client.insert(connect(&self.access, &self.asked).await?).clone(),
        };
        self.asked.store(0, Ordering::Relaxed);
        request(client).await.map_err(|error| {
            let asked = self.asked.load(Ordering::Relaxed);
            ApiError::of(&error, (asked > 0).then(|| Duration::from_secs(asked)))
        })
    }
}

/// A kind of object, by group, version, kind and name in paths.
pub(crate) fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

/// Makes an object of the client's type.
pub(crate) fn typed(object: Value) -> Result<DynamicObject, ApiError> {
    serde_json::from_value(object).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Checks a name of foreign origin before it becomes a part of a path.
///
/// # Errors
///
/// [`ApiError::Malformed`]: no object and no namespace can have this name.
pub(crate) fn named(name: &str) -> Result<(), ApiError> {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let is_name = !name.is_empty() && !name.starts_with('.') && name.bytes().all(inner);
    is_name.then_some(()).ok_or_else(|| ApiError::Malformed(format!("{} is no name of an object", quoted(name))))
}

async fn connect(access: &Access, asked: &Arc<AtomicU64>) -> Result<Client, ApiError> {
    let config = access.config().await?;
    let wrong = |error: kube::Error| credentials(&error);
    let connector = config.rustls_https_connector().map_err(wrong)?;
    let executor = hyper_util::rt::TokioExecutor::new();
    let http = hyper_util::client::legacy::Client::builder(executor).build(connector);
    let asked = Arc::clone(asked);
    let service = ServiceBuilder::new()
        .map_response(move |response: Response<_>| {
            let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            asked.store(after.and_then(|after| after.trim().parse().ok()).unwrap_or(0), Ordering::Relaxed);
            response.map(|body| Limited::new(body, LONGEST_ANSWER))
        })
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(wrong)?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}
