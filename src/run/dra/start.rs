//! The decision, at the start of a process, about its part in DRA.
//!
//! If the door is DRA and no requirement is missing, the process publishes GPUs, and prepares and unprepares claims.
//! Otherwise its GPUs go through the device plugin. The process then prepares no claim, and unprepares those that are
//! left, as far as the requirements are met. If no claim is left, the DRA plugin does nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::CLAIMS;
use crate::config::{ApiServerArgs, Settings};
use linkwise_core::errors::chain;
use linkwise_core::state::Door;
use linkwise_host::cdi;
use linkwise_kubelet::dra::has_checkpoints;

/// The longest time that a start waits for one answer of the disk.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// A requirement that a process lacks, and without which no GPU goes through DRA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::run) enum MissingRequirement {
    #[error("DRA needs the node's name: set NODE_NAME (--node-name)")]
    NodeName,
    #[error("DRA needs the API server: KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig is given")]
    ApiServer,
    #[error("DRA needs the ServiceAccount's token: none is mounted")]
    Token,
    #[error("DRA needs CDI: {0}")]
    Cdi(String),
}

/// The part of a process in DRA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::run) struct Start {
    /// True if the node's GPUs go through DRA.
    pub serves: bool,
    /// True if claims are left, by their checkpoints.
    pub has_claims: bool,
    /// True if the API server is asked for claims, and stores the slices.
    pub has_api_server: bool,
    /// True if CDI specs are written for claims.
    pub has_cdi: bool,
    /// The missing requirements because of which GPUs that are to go through DRA stay with the device plugin.
    pub lacks: Vec<MissingRequirement>,
}

impl Start {
    /// Decides by the configured door, the checkpoints of claims that are left, and the missing requirements.
    fn of(wanted: Door, has_claims: bool, lacks: Vec<MissingRequirement>) -> Self {
        let serves = wanted == Door::Dra && lacks.is_empty();
        let is_cdi = |lack: &MissingRequirement| matches!(lack, MissingRequirement::Cdi(_));
        Self {
            serves,
            has_claims,
            has_api_server: serves || has_claims && lacks.iter().all(is_cdi),
            has_cdi: serves || has_claims && !lacks.iter().any(is_cdi),
            lacks: if wanted == Door::Dra { lacks } else { Vec::new() },
        }
    }
}

/// Reads which requirements of DRA are missing.
#[derive(Clone, Debug)]
pub(in crate::run) struct RequirementsReader {
    has_node_name: bool,
    api: ApiServerArgs,
    cdi: PathBuf,
}

impl RequirementsReader {
    pub fn new(settings: &Settings, node_name: Option<&str>, api: &ApiServerArgs) -> Self {
        let has_node_name = node_name.is_some_and(|name| !name.is_empty());
        Self { has_node_name, api: api.clone(), cdi: settings.cdi_dir.value.clone() }
    }

    /// The missing requirements. Waits at most a second for the disk.
    pub async fn lacks(&self) -> Vec<MissingRequirement> {
        let (api, cdi) = (self.api.clone(), self.cdi.clone());
        let read = spawn_blocking(move || (api.has_credentials(), cdi::prepare(&cdi).map_err(|error| chain(&error))));
        let late = || (false, Err(format!("{} does not answer", self.cdi.display())));
        let read = timeout(READ_TIMEOUT, read).await.ok().and_then(Result::ok);
        let (has_credentials, cdi) = read.unwrap_or_else(late);
        let api = match (self.api.is_given(), has_credentials) {
            (false, _) => Some(MissingRequirement::ApiServer),
            (true, false) => Some(MissingRequirement::Token),
            (true, true) => None,
        };
        let name = (!self.has_node_name).then_some(MissingRequirement::NodeName);
        name.into_iter().chain(api).chain(cdi.err().map(MissingRequirement::Cdi)).collect()
    }
}

/// Decides about the part of this process in DRA. A disk that hangs counts as if no claim were left.
pub(in crate::run) async fn start(wanted: Door, state_dir: Option<&Path>, requirements: &RequirementsReader) -> Start {
    let folder = state_dir.map(|folder| folder.join(CLAIMS));
    let has_claims = match folder {
        Some(folder) => timeout(READ_TIMEOUT, spawn_blocking(move || has_checkpoints(&folder))).await,
        None => Ok(Ok(false)),
    };
    let has_claims = matches!(has_claims, Ok(Ok(true)));
    // Reading the requirements makes the folder for CDI specs, which a node without DRA should not get.
    let reads_requirements = wanted == Door::Dra || has_claims;
    Start::of(wanted, has_claims, if reads_requirements { requirements.lacks().await } else { Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_go_through_dra_only_if_nothing_is_missing() {
        use MissingRequirement::{ApiServer, Cdi, NodeName, Token};
        let cdi = || Cdi("read-only".to_owned());
        let cases = [
            (Door::Dra, false, vec![], (true, true, true)),
            (Door::Dra, false, vec![cdi()], (false, false, false)),
            (Door::Dra, true, vec![cdi()], (false, true, false)),
            (Door::Dra, true, vec![NodeName, Token, cdi()], (false, false, false)),
            (Door::Plugin, false, vec![], (false, false, false)),
            // Claims that are left are unprepared as far as the requirements are met.
            (Door::Plugin, true, vec![], (false, true, true)),
            (Door::Plugin, true, vec![ApiServer], (false, false, true)),
        ];
        for (wanted, has_claims, lacks, (serves, has_api_server, has_cdi)) in cases {
            let start = Start::of(wanted, has_claims, lacks.clone());
            let shown = if wanted == Door::Dra { lacks } else { vec![] };
            assert_eq!(start, Start { serves, has_claims, has_api_server, has_cdi, lacks: shown });
        }
    }
}
