//! [`MpsClient`]: the folders that a container needs as a client of a resource's MPS control daemon.
//!
//! The daemon has the limits. They are not repeated here, so a container cannot get other limits than those in effect.

use crate::prelude::*;

use super::injection::Mount;
use crate::state::ResourceName;

/// The path of the MPS root in the containers of the daemon, of the plugin and of the pods.
pub const MPS_CONTAINER_ROOT: &str = "/mps";

/// The folder of the control daemon's sockets, below the folder of its resource.
pub const MPS_PIPE: &str = "pipe";

/// The folder of shared memory: below the MPS root that of all daemons, below a daemon's folder its own.
pub const MPS_SHM: &str = "shm";

/// The /dev/shm of a control daemon and its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpsShm {
    /// One for all daemons: of resources, as with the NVIDIA plugin, and of claims by an older release.
    Common,
    /// The daemon's own: of claims.
    Own,
}

/// The folders that a client shares with its daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsClient {
    /// The control daemon's sockets.
    pub pipe: Mount,
    /// The shared memory.
    pub shm: Mount,
}

impl MpsClient {
    /// Makes a client of the daemon of `resource`; `host_root` is the MPS root on the host (`--mps-root`).
    pub fn new(host_root: &str, resource: &ResourceName, shm: MpsShm) -> Self {
        let host_root = host_root.trim_end_matches('/');
        let pipe = |root: &str| format!("{root}/{resource}/{MPS_PIPE}");
        let shm = match shm {
            MpsShm::Common => format!("{host_root}/{MPS_SHM}"),
            MpsShm::Own => format!("{host_root}/{resource}/{MPS_SHM}"),
        };
        Self {
            pipe: Mount { host: pipe(host_root), container: pipe(MPS_CONTAINER_ROOT), read_only: false },
            shm: Mount { host: shm, container: "/dev/shm".to_owned(), read_only: false },
        }
    }
}
