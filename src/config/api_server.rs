//! The options that say where the API server is, and with which credentials it is asked.

use std::path::PathBuf;

use clap::Args;
use linkwise_cluster::{Access, AccessError};

/// The API server and the credentials for it.
#[derive(Clone, Debug, Args)]
pub struct ApiServerArgs {
    /// The kubeconfig file that names the API server and the credentials; by default those of the pod's ServiceAccount
    #[arg(long, value_name = "FILE", env = "KUBECONFIG", default_value = "", hide_default_value = true)]
    pub kubeconfig: String,
    /// The API server's host, as Kubernetes sets it in every pod; empty outside of a cluster
    #[arg(long, value_name = "HOST", env = "KUBERNETES_SERVICE_HOST", default_value = "", hide = true)]
    pub api_server_host: String,
    /// The API server's port, as Kubernetes sets it in every pod
    #[arg(long, value_name = "PORT", env = "KUBERNETES_SERVICE_PORT", default_value_t = 443, hide = true)]
    pub api_server_port: u16,
    /// The folder into which the kubelet mounts the pod's token and the API server's CA
    #[arg(
        long,
        value_name = "FOLDER",
        env = "LINKWISE_SERVICE_ACCOUNT_DIR",
        default_value = "/var/run/secrets/kubernetes.io/serviceaccount",
        hide = true
    )]
    pub service_account_dir: PathBuf,
}

impl ApiServerArgs {
    /// The access that these options name. Fails if they name none.
    pub fn access(&self) -> Result<Access, AccessError> {
        Access::of(&self.kubeconfig, (&self.api_server_host, self.api_server_port), &self.service_account_dir)
    }

    /// Returns true if the credentials exist too. It reads a file's metadata.
    pub fn has_credentials(&self) -> bool {
        let token = || self.service_account_dir.join("token").exists();
        !self.kubeconfig.is_empty() || (!self.api_server_host.is_empty() && token())
    }

    /// Returns true if there is an API server: in a pod, or by a kubeconfig.
    pub fn is_given(&self) -> bool {
        !self.kubeconfig.is_empty() || !self.api_server_host.is_empty()
    }
}
