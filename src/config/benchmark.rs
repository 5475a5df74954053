//! The options of `linkwise expect` and `linkwise verify`.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;

use clap::Args;

use super::machine::gpu;
use super::{Format, NodeArgs};
use linkwise_core::quote::quoted;
use linkwise_core::state::GpuSelector;

/// `linkwise expect`.
#[derive(Clone, Debug, Args)]
pub struct ExpectArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs, as indices or UUIDs with commas; by default all
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// The GPUs by a pod that has them.
    #[command(flatten)]
    pub pod: PodArgs,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
}

/// `linkwise verify`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Exits with 0 if the bandwidth is as expected, or no claim is made; with 1 if it is not, or \
                        cannot be read; with 2 if the command line is wrong.")]
pub struct VerifyArgs {
    /// The machine; in a container it has the container's GPUs only.
    #[command(flatten)]
    pub node: NodeArgs,
    /// The GPUs of the run, as indices or UUIDs with commas; by default those that the text lists by their PCI
    /// addresses, or all of a machine that has as many
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = gpu)]
    pub gpus: Option<Vec<GpuSelector>>,
    /// The GPUs by a pod that has them.
    #[command(flatten)]
    pub pod: PodArgs,
    /// Text for people or JSON for scripts
    #[arg(long, default_value = "text")]
    pub format: Format,
    /// What all_reduce_perf of nccl-tests printed, with NCCL's log or without (- for standard input)
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// The GPUs of a pod of this node, as the running linkwise has them.
#[derive(Clone, Debug, Args)]
pub struct PodArgs {
    /// The GPUs of a pod of this node, of all its containers or of one
    #[arg(long, value_name = "NAMESPACE/POD[/CONTAINER]", conflicts_with = "gpus", value_parser = pod)]
    pub pod: Option<PodName>,
    /// The admin socket of the running linkwise (its --admin-socket), which knows the pods
    #[arg(long, value_name = "PATH", env = "LINKWISE_ADMIN_SOCKET", default_value = "/run/linkwise/admin.sock")]
    // An empty variable is no error of a command that needs no socket.
    #[arg(value_parser = |text: &str| Ok::<_, Infallible>(PathBuf::from(text)))]
    pub socket: PathBuf,
}

/// A pod, or one of its containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// The container; `None`: all of them.
    pub container: Option<String>,
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.pod)?;
        self.container.as_ref().map_or(Ok(()), |container| write!(f, "/{container}"))
    }
}

/// Reads `NAMESPACE/POD` or `NAMESPACE/POD/CONTAINER`.
fn pod(text: &str) -> Result<PodName, String> {
    let mut parts = text.split('/');
    let named = (parts.next(), parts.next(), parts.next(), parts.next());
    let (Some(namespace), Some(pod), container, None) = named else {
        return Err(format!("{} is not NAMESPACE/POD or NAMESPACE/POD/CONTAINER", quoted(text)));
    };
    if [Some(namespace), Some(pod), container].contains(&Some("")) {
        return Err(format!("{} has an empty name", quoted(text)));
    }
    Ok(PodName { namespace: namespace.to_owned(), pod: pod.to_owned(), container: container.map(str::to_owned) })
}
