//! The paths under the MPS root. Pure.
//!
//! The layout is that of the NVIDIA device plugin (its `cmd/mps-control-daemon/mps/root.go`): containers that were
//! started under one plugin find their pipes again under the other.

use std::path::{Path, PathBuf};

use linkwise_core::publish::{MPS_PIPE, MPS_SHM};
use linkwise_core::state::ResourceName;

/// The MPS root on the host, unless the operator sets another: the default of NVIDIA's chart.
pub const HOST_ROOT: &str = "/run/nvidia/mps";

/// The longest path of a Unix socket on Linux, in bytes: `sun_path` holds 108 with its zero.
const MAX_SOCKET_PATH: usize = 107;

/// The longest name of a socket that the control daemon makes in its pipe directory.
const LONGEST_PIPE: &str = "control_privileged";

/// An MPS root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
}

/// The reason why a resource can have no folder under an MPS root.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{0}: {1}")]
pub struct LayoutError(ResourceName, String);

impl Layout {
    /// An MPS root, at its path in this container, or on the host.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The root itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of one resource.
    pub fn resource(&self, resource: &ResourceName) -> PathBuf {
        self.root.join(resource.as_str())
    }

    /// The control daemon's sockets: `CUDA_MPS_PIPE_DIRECTORY`.
    pub fn pipe(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join(MPS_PIPE)
    }

    /// The logs of the control daemon and its servers: `CUDA_MPS_LOG_DIRECTORY`.
    pub fn log(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join("log")
    }

    /// The file that shows that a resource's limits hold; see [`super::Marker`].
    pub fn marker(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join(".started")
    }

    /// The folder with a file for each GPU whose compute mode `mps-control-daemon` set; see [`super::set_exclusive`].
    pub fn exclusive(&self) -> PathBuf {
        self.root.join(".exclusive")
    }

    /// The file that `mps-control-daemon` locks to keep another one from the root.
    pub fn lock(&self) -> PathBuf {
        self.root.join(".lock")
    }

    /// The folder that the daemons of resources and their clients share as /dev/shm.
    pub fn shm(&self) -> PathBuf {
        self.root.join(MPS_SHM)
    }

    /// The folder that the daemon of a claim and its clients share as /dev/shm.
    pub fn own_shm(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join(MPS_SHM)
    }

    /// The file that is there while a daemon's own shared memory is mounted.
    pub(super) fn own_shm_record(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join(".shm")
    }

    /// The file with the reason for which a resource's daemon does not serve.
    pub fn failure(&self, resource: &ResourceName) -> PathBuf {
        self.resource(resource).join(".failed")
    }

    /// Checks that a resource can have its folder here.
    pub fn check(&self, resource: &ResourceName) -> Result<(), LayoutError> {
        let path = self.pipe(resource).join(LONGEST_PIPE);
        let problem = if Path::new(resource.as_str()).starts_with(MPS_SHM) {
            format!("cannot share the domain '{MPS_SHM}' by MPS: MPS clients mount the folder of that name as /dev/shm")
        } else if path.as_os_str().len() > MAX_SOCKET_PATH {
            let path = path.display();
            format!(
                "the control daemon's socket {path} is longer than a socket's path can be ({MAX_SOCKET_PATH} bytes)"
            )
        } else {
            return Ok(());
        };
        Err(LayoutError(resource.clone(), problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linkwise_core::publish::{MPS_CONTAINER_ROOT, MpsClient, MpsShm};

    #[test]
    fn layout_is_the_nvidia_plugins() {
        let (mps, gpu) = (Layout::new(MPS_CONTAINER_ROOT), ResourceName::gpu());
        assert_eq!(mps.pipe(&gpu), Path::new("/mps/nvidia.com/gpu/pipe"));
        assert_eq!(mps.log(&gpu), Path::new("/mps/nvidia.com/gpu/log"));
        assert_eq!(mps.marker(&gpu), Path::new("/mps/nvidia.com/gpu/.started"));
        assert_eq!(mps.shm(), Path::new("/mps/shm"));
    }

    #[test]
    fn clients_mount_the_daemons_folders() {
        let (host, gpu) = (Layout::new(HOST_ROOT), ResourceName::gpu());
        let MpsClient { pipe, shm } = MpsClient::new(HOST_ROOT, &gpu, MpsShm::Common);
        assert_eq!(Path::new(&pipe.host), host.pipe(&gpu));
        assert_eq!(Path::new(&pipe.container), Layout::new(MPS_CONTAINER_ROOT).pipe(&gpu));
        assert_eq!((Path::new(&shm.host), shm.container.as_str()), (host.shm().as_path(), "/dev/shm"));
        let MpsClient { shm, .. } = MpsClient::new(HOST_ROOT, &gpu, MpsShm::Own);
        assert_eq!((Path::new(&shm.host), shm.container.as_str()), (host.own_shm(&gpu).as_path(), "/dev/shm"));
    }

    #[test]
    fn resource_that_can_have_no_folder_is_refused() {
        let check = |name: &str| {
            Layout::new(MPS_CONTAINER_ROOT).check(&name.parse().unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(check("nvidia.com/gpu.shared"), Ok(()));
        let longest = MAX_SOCKET_PATH - "/mps//gpu/pipe/control_privileged".len();
        let fits = format!("{}/gpu", "a".repeat(longest).replacen("aa", "a.", 20));
        assert_eq!(check(&fits), Ok(()), "{fits}");
        let long = check(&format!("{fits}s")).unwrap_err();
        assert!(long.contains("longer than a socket's path can be") && long.contains("gpus/pipe"), "{long}");
        assert!(check("shm/gpu").unwrap_err().contains("/dev/shm"));
    }
}
