//! The options of `linkwise mps-control-daemon`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use thiserror::Error;

use super::{HostArgs, LogArgs};
use crate::inventory::{ResourceName, ResourceNameError};

/// `linkwise mps-control-daemon`.
#[derive(Clone, Debug, Args)]
pub struct MpsControlDaemonArgs {
    /// What else to do than to run the daemons.
    #[command(subcommand)]
    pub command: Option<MpsCommand>,
    /// Share this node's GPUs by MPS under this name, N replicas of each, such as nvidia.com/gpu=4; without it there is
    /// nothing to do, and it waits
    #[arg(long, value_name = "NAME=N", env = "LINKWISE_MPS_RESOURCE")]
    pub resource: Option<SharedResource>,
    /// Where the host's MPS root is mounted in this container (the plugin's --mps-root is where it is on the host)
    #[arg(long, value_name = "PATH", env = "LINKWISE_MPS_CONTAINER_ROOT", default_value = "/mps", global = true)]
    pub container_root: PathBuf,
    /// The driver and the host.
    #[command(flatten)]
    pub host: HostArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
}

/// What else `linkwise mps-control-daemon` does.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum MpsCommand {
    /// Mount the shared memory of MPS under the MPS root, where it is not mounted yet (the privileged init container)
    MountShm,
}

/// A resource and into how many each of its GPUs is shared: `nvidia.com/gpu=4`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedResource {
    /// Its name.
    pub name: ResourceName,
    /// Replicas of each GPU, 1 or more.
    pub replicas: u32,
}

/// Why a text names no shared resource.
#[derive(Debug, Error)]
pub enum SharedResourceError {
    /// It has not the form.
    #[error("'{0}' is not a shared resource (expected NAME=N with N from 1, such as nvidia.com/gpu=4)")]
    Form(String),
    /// The name is none.
    #[error(transparent)]
    Name(#[from] ResourceNameError),
}

impl FromStr for SharedResource {
    type Err = SharedResourceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').and_then(|(name, count)| Some((name, count.parse().ok().filter(|n| *n > 0)?)));
        let (name, replicas) = parts.ok_or_else(|| SharedResourceError::Form(text.to_owned()))?;
        Ok(Self { name: name.parse()?, replicas })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_resource_is_a_name_and_a_number() {
        let read = |text: &str| text.parse::<SharedResource>().map_err(|error| error.to_string());
        assert_eq!(read("nvidia.com/gpu=4"), Ok(SharedResource { name: ResourceName::gpu(), replicas: 4 }));
        for wrong in
            ["", "nvidia.com/gpu", "nvidia.com/gpu=", "nvidia.com/gpu=0", "nvidia.com/gpu=-1", "nvidia.com/gpu=1e9"]
        {
            assert!(read(wrong).unwrap_err().contains("expected NAME=N"), "{wrong}");
        }
        assert!(read("gpu=4").unwrap_err().contains("'gpu' is not an extended resource name"));
    }
}
