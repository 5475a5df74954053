//! The NCCL topology file that containers with GPUs are shown (`--expose-nccl-topology`): of this machine as it was
//! seen last.
//!
//! One of the things that `handover` keeps up to date; what is in the file is `machines`' knowledge.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::sync::watch;

use crate::config::Settings;
use crate::files;
use crate::kubelet;
use crate::machines;
use crate::topology::NodeObservation;

/// The file and what goes into it.
pub(super) struct TopologyFile {
    /// On the host, and in our container.
    folder: PathBuf,
    seen: watch::Receiver<Arc<NodeObservation>>,
}

impl TopologyFile {
    /// `None` where nobody asked for it. Fails where its folder cannot be written.
    pub fn prepare(settings: &Settings, seen: watch::Receiver<Arc<NodeObservation>>) -> Result<Option<Self>> {
        if !settings.expose_nccl_topology.value {
            return Ok(None);
        }
        let folder = settings.nccl_topology_dir.value.clone();
        files::prepare_folder(&folder)
            .with_context(|| format!("cannot write NCCL's topology file to {}", folder.display()))?;
        Ok(Some(Self { folder, seen }))
    }

    pub fn folder(&self) -> PathBuf {
        self.folder.clone()
    }

    /// Where the file is.
    pub fn path(&self) -> PathBuf {
        self.folder.join(kubelet::NCCL_FILE)
    }

    /// Writes what was seen last; whether that is new.
    pub fn write(&self) -> io::Result<bool> {
        let seen = Arc::clone(&self.seen.borrow());
        files::write_if_changed(&self.path(), machines::nccl_topology_file(&seen).as_bytes(), 0o644)
    }
}
