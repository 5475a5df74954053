//! [`ApiServer`]: makes all requests to the API server.
//!
//! Each request has a deadline and a bound on the length of its answer, and is counted. The client is made of kube's
//! parts, without kube's retries (`Attempts` or the caller paces them) and without its log lines for each failure.
//!
//! [`Access`] is the server's address and the credentials for it, from a kubeconfig. Without one, the address comes
//! from the pod's environment, and the token and the CA are the files that the kubelet mounts. The files are read
//! whenever a client is made, so that a new client has the current token and CA.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Response, header};
use http_body_util::Limited;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::client::ConfigExt;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config, config};
use serde_json::Value;
use thiserror::Error;
use tower::{BoxError, ServiceBuilder};

use crate::error::{ApiError, ApiMetrics, sentence};
use linkwise_core::quote::quoted;

/// The longest answer in bytes, a whole watch included: about ten times the largest object that etcd takes.
const MAX_ANSWER: usize = 16 << 20;

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

/// The client of one part of the program.
#[derive(Clone)]
pub struct ApiServer {
    access: Access,
    pace: Pace,
    metrics: ApiMetrics,
    client: Option<Client>,
    /// The seconds in the last answer's Retry-After, or 0.
    retry_after: Arc<AtomicU64>,
}

impl ApiServer {
    /// Makes no request yet.
    pub fn new(access: Access, pace: Pace, metrics: ApiMetrics) -> Self {
        Self { access, pace, metrics, client: None, retry_after: Arc::default() }
    }

    /// Another client of the same API server, for another part of the program. It counts in the same metrics.
    pub fn another(&self) -> Self {
        Self::new(self.access.clone(), self.pace, self.metrics.clone())
    }

    /// The counts of requests.
    pub fn metrics(&self) -> &ApiMetrics {
        &self.metrics
    }

    /// Limits the time for each request.
    pub(crate) fn with_timeout(mut self, request: Duration) -> Self {
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
        let timeout = self.pace.request;
        let attempt = async {
            let client = match &self.client {
                Some(client) => client.clone(),
                None => self.client.insert(connect(&self.access, &self.retry_after).await?).clone(),
            };
            self.retry_after.store(0, Ordering::Relaxed);
            request(client).await.map_err(|error| {
                let seconds = self.retry_after.load(Ordering::Relaxed);
                ApiError::of(&error, (seconds > 0).then(|| Duration::from_secs(seconds)))
            })
        };
        let result = tokio::time::timeout(timeout, attempt).await.unwrap_or(Err(ApiError::TimedOut(timeout)));
        self.count(object, verb, result.as_ref().err());
        result
    }

    /// Counts the outcome of a request or broken watch, and drops a client that may be at fault.
    pub(crate) fn count(&mut self, object: &'static str, verb: &'static str, error: Option<&ApiError>) {
        if error.is_some_and(ApiError::is_client_fault) {
            self.client = None;
        }
        self.metrics.count(object, verb, error.map_or("ok", ApiError::outcome));
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
pub(crate) fn check_name(name: &str) -> Result<(), ApiError> {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let is_name = !name.is_empty() && !name.starts_with('.') && name.bytes().all(is_allowed);
    is_name.then_some(()).ok_or_else(|| ApiError::Malformed(format!("{} is not a valid object name", quoted(name))))
}

async fn connect(access: &Access, retry_after: &Arc<AtomicU64>) -> Result<Client, ApiError> {
    let config = access.config().await?;
    let wrong = |error: kube::Error| AccessError::Credentials(sentence(&error));
    let connector = config.rustls_https_connector().map_err(wrong)?;
    let executor = hyper_util::rt::TokioExecutor::new();
    let http = hyper_util::client::legacy::Client::builder(executor).build(connector);
    let retry_after = Arc::clone(retry_after);
    let service = ServiceBuilder::new()
        .map_response(move |response: Response<_>| {
            let after = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            retry_after.store(after.and_then(|after| after.trim().parse().ok()).unwrap_or(0), Ordering::Relaxed);
            response.map(|body| Limited::new(body, MAX_ANSWER))
        })
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(wrong)?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

/// The address of the API server, and the credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// The pod's ServiceAccount.
    InCluster {
        /// `https://host:port`.
        url: String,
        /// The folder with `token` and `ca.crt`.
        service_account: PathBuf,
    },
    /// The cluster and the user of a kubeconfig.
    Kubeconfig(PathBuf),
}

/// The reason why no client can be made.
#[derive(Debug, Error)]
pub enum AccessError {
    /// Neither the environment nor a kubeconfig names an API server.
    #[error("no API server: KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig (KUBECONFIG) is given")]
    Nowhere,
    /// The host and the port do not form an address.
    #[error("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT do not form an address: {}", quoted(.0))]
    Address(String),
    /// The token file is missing.
    #[error("cannot read the ServiceAccount's token {0} (automountServiceAccountToken?)")]
    Token(PathBuf, #[source] std::io::Error),
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {0}")]
    Kubeconfig(PathBuf, #[source] Box<KubeconfigError>),
    /// The CA or the credentials cannot be used.
    #[error("cannot use the API server's CA or the credentials: {0}")]
    Credentials(String),
}

impl Access {
    /// The access that a kubeconfig gives, or else the pod: the host and port in its environment, and the folder of its
    /// ServiceAccount. An empty kubeconfig or host counts as absent.
    ///
    /// # Errors
    ///
    /// [`AccessError::Nowhere`].
    pub fn of(kubeconfig: &str, (host, port): (&str, u16), service_account: &Path) -> Result<Self, AccessError> {
        if !kubeconfig.is_empty() {
            return Ok(Self::Kubeconfig(PathBuf::from(kubeconfig)));
        }
        if host.is_empty() {
            return Err(AccessError::Nowhere);
        }
        let url = match host.parse() {
            Ok(IpAddr::V6(host)) => format!("https://[{host}]:{port}"),
            _ => format!("https://{host}:{port}"),
        };
        Ok(Self::InCluster { url, service_account: service_account.to_owned() })
    }

    /// The client's configuration, made of the current files.
    pub(crate) async fn config(&self) -> Result<Config, AccessError> {
        let mut config = match self {
            Self::InCluster { url, service_account } => {
                let address = url.parse().map_err(|_| AccessError::Address(url.clone()))?;
                let token = service_account.join("token");
                std::fs::metadata(&token).map_err(|source| AccessError::Token(token.clone(), source))?;
                let mut config = Config::new(address);
                // Only the cluster's CA counts, and kube reads it again every minute. With `root_cert: None`
                // kube begins with the system's certificates, and fails if there are none, as in the image.
                config.root_cert_file = Some(service_account.join("ca.crt"));
                config.root_cert = Some(Vec::new());
                config.auth_info =
                    config::AuthInfo { token_file: Some(token.display().to_string()), ..Default::default() };
                config
            }
            Self::Kubeconfig(path) => {
                let wrong = |source| AccessError::Kubeconfig(path.clone(), Box::new(source));
                let file = Kubeconfig::read_from(path).map_err(wrong)?;
                Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)?
            }
        };
        // `Attempts` paces, logs and counts attempts.
        config.default_retry = false;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(kubeconfig: &str, host: &str) -> Result<Access, AccessError> {
        Access::of(kubeconfig, (host, 6443), Path::new("/s"))
    }

    #[test]
    fn ipv6_host_is_bracketed() {
        for (host, expected) in [
            ("10.0.0.1", "https://10.0.0.1:6443"),
            ("fd00::1", "https://[fd00::1]:6443"),
            ("kubernetes.default.svc", "https://kubernetes.default.svc:6443"),
        ] {
            let Access::InCluster { url, .. } = access("", host).unwrap() else { panic!("{host}") };
            assert_eq!(url, expected);
            assert!(url.parse::<http::Uri>().is_ok(), "{url}");
        }
    }

    #[test]
    fn kubeconfig_takes_precedence_over_the_pod() {
        assert_eq!(access("/k", "10.0.0.1").unwrap(), Access::Kubeconfig("/k".into()));
        assert!(access("", "").unwrap_err().to_string().contains("KUBERNETES_SERVICE_HOST"));
    }

    #[tokio::test]
    async fn unusable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let pod = Access::InCluster { url: "https://h:1".to_owned(), service_account: folder.path().to_owned() };
        assert!(pod.config().await.unwrap_err().to_string().contains("/token"));
        let file = folder.path().join("kubeconfig");
        std::fs::write(&file, "clusters: 3").unwrap();
        let error = Access::Kubeconfig(file.clone()).config().await.unwrap_err();
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
    }
}
