//! [`Access`]: where the API server is, and as whom to ask it.
//!
//! In a pod: the address from the environment, and the token and the CA that the kubelet mounts; elsewhere a
//! kubeconfig. Both are read whenever a client is made, so that a new one has the token and the CA of that moment.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Config, config};
use linkwise::config::ApiServerArgs;
use linkwise::quote::quoted;
use thiserror::Error;

/// Where the API server is, and the credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// As the pod's ServiceAccount.
    InCluster {
        /// `https://host:port`.
        url: String,
        /// The folder with `token` and `ca.crt`.
        service_account: PathBuf,
    },
    /// As a kubeconfig has it.
    Kubeconfig(PathBuf),
}

/// Why there is no way to ask.
#[derive(Debug, Error)]
pub enum AccessError {
    /// Neither of the two ways.
    #[error("no API server: KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig (KUBECONFIG) is given")]
    Nowhere,
    /// The host and the port make no address.
    #[error("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT make no address: {}", quoted(.0))]
    Address(String),
    /// The token is not there.
    #[error("cannot read the ServiceAccount's token {path} (automountServiceAccountToken?)")]
    Token {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The kubeconfig cannot be used.
    #[error("cannot use the kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<KubeconfigError>,
    },
    /// The CA or the credentials cannot be used.
    #[error("cannot use the API server's CA or the credentials: {0}")]
    Credentials(String),
}

impl Access {
    /// The way that the options name.
    ///
    /// # Errors
    ///
    /// [`AccessError::Nowhere`].
    pub fn of(args: &ApiServerArgs) -> Result<Self, AccessError> {
        if !args.kubeconfig.is_empty() {
            return Ok(Self::Kubeconfig(PathBuf::from(&args.kubeconfig)));
        }
        let host = args.api_server_host.as_str();
        if host.is_empty() {
            return Err(AccessError::Nowhere);
        }
        let port = args.api_server_port;
        let url = match host.parse() {
            Ok(IpAddr::V6(host)) => format!("https://[{host}]:{port}"),
            _ => format!("https://{host}:{port}"),
        };
        Ok(Self::InCluster { url, service_account: args.service_account_dir.clone() })
    }

    /// The client's configuration, with what the files hold now.
    pub(crate) async fn config(&self) -> Result<Config, AccessError> {
        let mut config = match self {
            Self::InCluster { url, service_account } => {
                let address = url.parse().map_err(|_| AccessError::Address(url.clone()))?;
                let token = service_account.join("token");
                readable(&token)?;
                let mut config = Config::new(address);
                // The cluster's CA alone, read anew every minute. Without a list, even an empty one, kube begins with the
                // system's certificates and fails where there are none, as in the image.
                config.root_cert_file = Some(service_account.join("ca.crt"));
                config.root_cert = Some(Vec::new());
                config.auth_info =
                    config::AuthInfo { token_file: Some(token.display().to_string()), ..Default::default() };
                config
            }
            Self::Kubeconfig(path) => {
                let wrong = |source| AccessError::Kubeconfig { path: path.clone(), source: Box::new(source) };
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
    std::fs::metadata(token).map(drop).map_err(|source| AccessError::Token { path: token.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(kubeconfig: &str, host: &str) -> Result<Access, AccessError> {
        Access::of(&ApiServerArgs {
            kubeconfig: kubeconfig.to_owned(),
            api_server_host: host.to_owned(),
            api_server_port: 6443,
            service_account_dir: "/s".into(),
        })
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
