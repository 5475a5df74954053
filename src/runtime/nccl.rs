//! The NCCL topology file that containers with GPUs get (`--expose-nccl-topology`): this machine as last observed.
//!
//! `cdi_sync` keeps it up to date; `machines` makes its text.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::sync::watch;

use crate::config::Settings;
use crate::files;
use crate::machines;
use crate::publish::injection::NCCL_FILE;
use crate::topology::NodeObservation;

/// The file and its source.
pub(super) struct TopologyFile {
    /// At the same path on the host and in our container.
    folder: PathBuf,
    observed: watch::Receiver<Arc<NodeObservation>>,
}

impl TopologyFile {
    /// `None` where the operator did not ask for it. Fails where its folder cannot be written.
    pub fn prepare(settings: &Settings, observed: watch::Receiver<Arc<NodeObservation>>) -> Result<Option<Self>> {
        if !settings.expose_nccl_topology.value {
            return Ok(None);
        }
        let folder = settings.nccl_topology_dir.value.clone();
        files::prepare_folder(&folder)
            .with_context(|| format!("cannot write NCCL's topology file to {}", folder.display()))?;
        Ok(Some(Self { folder, observed }))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the last observation; returns whether the file changed.
    pub fn write(&self) -> io::Result<bool> {
        let observed = Arc::clone(&self.observed.borrow());
        let path = self.folder.join(NCCL_FILE);
        files::write_if_changed(&path, machines::nccl_topology_file(&observed).as_bytes(), 0o644)
    }
}
