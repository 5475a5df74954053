//! [`Access`]: the address of the API server, and the credentials for it.
//!
//! In a pod, the address comes from the environment, and the token and the CA are the files that the kubelet mounts;
//! elsewhere both come from a kubeconfig. The files are read whenever a client is made, so that a new client has the
//! current token and CA.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Config, config};
use linkwise_core::quote::quoted;
use thiserror::Error;

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
    /// Neither a ServiceAccount nor a kubeconfig exists.
    #[error("no API server: KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig (KUBECONFIG) is given")]
    Nowhere,
    /// The host and the port make no address.
    #[error("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT make no address: {}", quoted(.0))]
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
    /// ServiceAccount. An empty kubeconfig or host is none.
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
                readable(&token)?;
                let mut config = Config::new(address);
                // Only the cluster's CA counts, and it is read anew every minute. Without a list, even an empty one,
                // kube begins with the system's certificates and fails if there are none, as in the image.
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

fn readable(token: &Path) -> Result<(), AccessError> {
    std::fs::metadata(token).map(drop).map_err(|source| AccessError::Token(token.to_owned(), source))
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
    fn kubeconfig_beats_the_pod_and_without_both_there_is_no_access() {
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
