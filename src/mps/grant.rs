//! What a container needs to be a client of a resource's MPS daemon. Pure.
//!
//! Called for each answer to Allocate; the limits are the daemon's and not repeated here, so that a container cannot
//! be given others than the ones that hold.

use std::path::{Path, PathBuf};

use super::layout::{CONTAINER_ROOT, Layout};
use crate::state::ResourceName;

/// By which the CUDA libraries find the control daemon.
const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// What Allocate adds to the GPUs themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Variables, name and value.
    pub environment: Vec<(String, String)>,
    /// Folders of the host, to be written to.
    pub mounts: Vec<Mount>,
}

/// A folder of the host in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where the container sees it.
    pub container: PathBuf,
    /// Where it is.
    pub host: PathBuf,
}

/// What a container with a replica of `resource` gets; `host_root` is the MPS root on the host (`--mps-root`).
pub fn grant(host_root: &Path, resource: &ResourceName) -> Grant {
    let (inside, host) = (Layout::new(CONTAINER_ROOT), Layout::new(host_root));
    let pipe = inside.pipe(resource);
    Grant {
        environment: vec![(PIPE_DIRECTORY.to_owned(), pipe.display().to_string())],
        mounts: vec![
            Mount { container: pipe, host: host.pipe(resource) },
            Mount { container: PathBuf::from("/dev/shm"), host: host.shm() },
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mps::HOST_ROOT;

    #[test]
    fn a_container_gets_the_pipe_and_the_shared_memory() {
        insta::assert_debug_snapshot!(grant(Path::new(HOST_ROOT), &ResourceName::gpu()), @r#"
        Grant {
            environment: [
                (
                    "CUDA_MPS_PIPE_DIRECTORY",
                    "/mps/nvidia.com/gpu/pipe",
                ),
            ],
            mounts: [
                Mount {
                    container: "/mps/nvidia.com/gpu/pipe",
                    host: "/run/nvidia/mps/nvidia.com/gpu/pipe",
                },
                Mount {
                    container: "/dev/shm",
                    host: "/run/nvidia/mps/shm",
                },
            ],
        }
        "#);
    }
}
