//! A stand-in for the NVIDIA plugin, as far as the kubelet sees it: its socket's name, its ids, its answers.

use std::path::{Path, PathBuf};

use crate::kubelet_box::plugin::Plugin;

/// Its socket in the kubelet's folder for nvidia.com/gpu.
const SOCKET: &str = "nvidia-gpu.sock";

/// A plugin that is served and registered.
pub struct Predecessor {
    socket: PathBuf,
    plugin: Plugin,
}

impl Predecessor {
    /// Removes what an earlier one left, serves, and registers: in this order, as it does.
    pub async fn start(folder: &Path, ids: &[String]) -> Self {
        Self::start_at(folder, SOCKET, ids).await
    }

    /// The same with a socket of another name: another plugin.
    pub async fn start_at(folder: &Path, name: &str, ids: &[String]) -> Self {
        let socket = folder.join(name);
        let _ = std::fs::remove_file(&socket);
        let plugin = Plugin::serve_each(folder, name, ids);
        plugin.register().await.unwrap();
        Self { socket, plugin }
    }

    /// Ends as it does: its server stops, its streams end with it, and its socket is removed.
    pub async fn end(self) {
        self.plugin.end().await;
        std::fs::remove_file(&self.socket).unwrap();
    }
}
