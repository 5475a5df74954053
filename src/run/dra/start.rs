//! Decides which parts of DRA a process serves: from the settings, from the leftovers of earlier processes, and from
//! its own rights.
//!
//! A pod without DRA has neither DRA's folders nor its token. Leftovers of DRA are finished with the rights that exist:
//! no combination ends the process or keeps the device plugin from serving.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::CLAIMS;
use crate::config::{ApiServerArgs, Settings};
use linkwise_core::errors::chain;
use linkwise_core::state::DraGpus;
use linkwise_host::cdi;
use linkwise_node::keeper;

/// The longest time that a start waits for the disk to show leftovers and rights.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::run) struct Leftovers {
    /// The health record names GPUs of DRA.
    pub gpus: bool,
    /// The folder has checkpoints of claims.
    pub claims: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) struct Rights {
    /// The node's name is known.
    pub node_name: bool,
    /// The address of an API server is known.
    pub api_server: bool,
    /// A token or a kubeconfig exists.
    pub credentials: bool,
    /// The folder of CDI specs can be written; otherwise the error.
    pub cdi: Result<(), String>,
    /// The kubelet's folder of registration sockets exists.
    pub sockets: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::run) enum Lack {
    #[error("DRA needs the node's name: set NODE_NAME (--node-name)")]
    NodeName,
    #[error("DRA needs the API server: KUBERNETES_SERVICE_HOST is not set (no pod?), and no --kubeconfig is given")]
    ApiServer,
    #[error("DRA needs the ServiceAccount's token: none is mounted")]
    Token,
    #[error("DRA needs CDI: {0}")]
    Cdi(String),
}

/// The parts of DRA that this process serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) enum Served {
    /// Nothing: only time and the kubelet's list of holders decide about the leftovers.
    Nothing,
    All,
    /// The leftovers of DRA; no GPU goes through it.
    Left {
        /// Claims are read and slices are emptied at the API server.
        api_server: bool,
        cdi: bool,
        sockets: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::run) struct Start {
    pub served: Served,
    /// The missing rights for which GPUs that are to go through DRA stay with the device plugin.
    pub lacks: Vec<Lack>,
}

impl Start {
    pub const OFF: Self = Self { served: Served::Nothing, lacks: Vec::new() };

    pub fn of(wanted: bool, left: Leftovers, rights: &Rights) -> Self {
        let lacks = if wanted { rights.lacks() } else { Vec::new() };
        if wanted && lacks.is_empty() {
            return Self { served: Served::All, lacks };
        }
        let sockets = rights.sockets;
        // Without claims and without sockets, a DRA plugin has no work.
        if !(left.claims || left.gpus && sockets) {
            return Self { served: Served::Nothing, lacks };
        }
        let api_server = sockets && rights.node_name && rights.api_server && rights.credentials;
        Self { served: Served::Left { api_server, cdi: rights.cdi.is_ok(), sockets }, lacks }
    }

    pub fn has_plugin(&self) -> bool {
        self.served != Served::Nothing
    }

    pub fn has_api_server(&self) -> bool {
        matches!(self.served, Served::All | Served::Left { api_server: true, .. })
    }

    /// Returns true if CDI specs are written for claims.
    pub fn has_cdi(&self) -> bool {
        matches!(self.served, Served::All | Served::Left { cdi: true, .. })
    }

    /// Returns true if the kubelet can unprepare claims.
    pub fn has_sockets(&self) -> bool {
        matches!(self.served, Served::All | Served::Left { sockets: true, .. })
    }

    /// Returns true if GPUs may go through DRA from now on, without a restart.
    pub fn can_serve(&self) -> bool {
        matches!(self.served, Served::All | Served::Left { api_server: true, cdi: true, sockets: true })
    }
}

impl Rights {
    /// The rights that GPUs need to go through DRA and that are missing. A missing folder of the kubelet may still
    /// appear.
    fn lacks(&self) -> Vec<Lack> {
        let mut lacks = Vec::new();
        if !self.node_name {
            lacks.push(Lack::NodeName);
        }
        if !self.api_server {
            lacks.push(Lack::ApiServer);
        } else if !self.credentials {
            lacks.push(Lack::Token);
        }
        lacks.extend(self.cdi.clone().err().map(Lack::Cdi));
        lacks
    }
}

#[derive(Clone, Debug)]
pub(in crate::run) struct RightsReader {
    node_name: bool,
    api: ApiServerArgs,
    cdi: PathBuf,
    registry: PathBuf,
}

impl RightsReader {
    pub fn new(settings: &Settings, node_name: Option<&str>, api: &ApiServerArgs) -> Self {
        Self {
            node_name: node_name.is_some_and(|name| !name.is_empty()),
            api: api.clone(),
            cdi: settings.cdi_dir.value.clone(),
            registry: settings.dra_registry_dir.value.clone(),
        }
    }

    /// The rights that GPUs need to go through DRA and that are missing. The disk is given at most a second.
    pub async fn lacks(&self) -> Vec<Lack> {
        self.read().await.lacks()
    }

    async fn read(&self) -> Rights {
        let this = self.clone();
        let late = || Rights {
            node_name: self.node_name,
            api_server: self.api.is_given(),
            credentials: false,
            cdi: Err(format!("{} does not answer", self.cdi.display())),
            sockets: false,
        };
        let read = timeout(READ_TIMEOUT, spawn_blocking(move || this.read_now())).await;
        read.ok().and_then(Result::ok).unwrap_or_else(late)
    }

    fn read_now(&self) -> Rights {
        Rights {
            node_name: self.node_name,
            api_server: self.api.is_given(),
            credentials: self.api.has_credentials(),
            cdi: cdi::prepare(&self.cdi).map_err(|error| chain(&error)),
            sockets: self.registry.is_dir(),
        }
    }
}

/// Decides for a start. If the disk hangs, there are no leftovers.
pub(in crate::run) async fn start(settings: &Settings, state_dir: Option<&Path>, rights: &RightsReader) -> Start {
    let wanted = settings.dra_gpus.value != DraGpus::None;
    let left = match state_dir.map(Path::to_owned) {
        Some(folder) => timeout(READ_TIMEOUT, spawn_blocking(move || leftovers(&folder))).await,
        None => Ok(Ok(Leftovers::default())),
    };
    let left = left.ok().and_then(Result::ok).unwrap_or_default();
    // A node without DRA gets no folder for CDI specs.
    if !wanted && left == Leftovers::default() {
        return Start::OFF;
    }
    Start::of(wanted, left, &rights.read().await)
}

/// Finds the leftovers of the last process. It reads files.
fn leftovers(state_dir: &Path) -> Leftovers {
    let record = keeper::read(&state_dir.join(keeper::FILE)).ok().flatten();
    let mut claims = std::fs::read_dir(state_dir.join(CLAIMS)).into_iter().flatten().flatten();
    let is_checkpoint = |name: &std::ffi::OsStr| Path::new(name).extension().is_some_and(|end| end == "json");
    Leftovers {
        gpus: record.is_some_and(|record| !record.dra.is_empty()),
        claims: claims.any(|entry| is_checkpoint(&entry.file_name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Rights = Rights { node_name: true, api_server: true, credentials: true, cdi: Ok(()), sockets: true };

    fn read_only() -> Result<(), String> {
        Err("read-only".to_owned())
    }

    /// The kinds of pods: with DRA, with events and CDI, plain, by hand, and DRA's with a missing mount.
    fn pods() -> [(&'static str, Rights); 5] {
        let plain = Rights { node_name: false, api_server: true, credentials: false, cdi: read_only(), sockets: false };
        [
            ("dra", ALL),
            ("events, cdi", Rights { sockets: false, ..ALL }),
            ("plain", plain.clone()),
            ("by hand", Rights { api_server: false, ..plain }),
            ("no cdi", Rights { cdi: read_only(), ..ALL }),
        ]
    }

    #[test]
    fn gpus_go_through_dra_only_with_all_rights() {
        let starts =
            pods().map(|(pod, rights)| (pod, Start::of(true, Leftovers { gpus: true, claims: true }, &rights)));
        let cdi = Lack::Cdi("read-only".to_owned());
        let all = || Start { served: Served::All, lacks: Vec::new() };
        // Leftover claims are finished all the same: their GPUs are in the ledger, and MPS keeps its orders.
        let lacking = |lacks: &[Lack], api_server, sockets| Start {
            served: Served::Left { api_server, cdi: false, sockets },
            lacks: lacks.to_vec(),
        };
        let expected = [
            ("dra", all()),
            // The folder of sockets may still appear.
            ("events, cdi", all()),
            ("plain", lacking(&[Lack::NodeName, Lack::Token, cdi.clone()], false, false)),
            ("by hand", lacking(&[Lack::NodeName, Lack::ApiServer, cdi.clone()], false, false)),
            ("no cdi", lacking(&[cdi], true, true)),
        ];
        assert_eq!(starts, expected);
    }

    #[test]
    fn leftovers_are_finished_with_the_rights_that_there_are() {
        let finish =
            |api_server, cdi, sockets| Start { served: Served::Left { api_server, cdi, sockets }, ..Start::OFF };
        let cases = [
            // The columns are GPUs, claims; then each pod in order.
            ((false, false), [Start::OFF, Start::OFF, Start::OFF, Start::OFF, Start::OFF]),
            ((true, false), [finish(true, true, true), Start::OFF, Start::OFF, Start::OFF, finish(true, false, true)]),
            (
                (false, true),
                [
                    finish(true, true, true),
                    finish(false, true, false),
                    finish(false, false, false),
                    finish(false, false, false),
                    finish(true, false, true),
                ],
            ),
        ];
        for ((gpus, claims), expected) in cases {
            for ((pod, rights), expected) in pods().into_iter().zip(expected) {
                let left = Leftovers { gpus, claims };
                assert_eq!(Start::of(false, left, &rights), expected, "{pod}: {left:?}");
            }
        }
    }

    #[test]
    fn sockets_alone_let_the_kubelet_unprepare() {
        let alone = Rights { node_name: false, api_server: false, credentials: false, cdi: read_only(), sockets: true };
        let start = Start::of(false, Leftovers { gpus: true, claims: true }, &alone);
        assert_eq!(start.served, Served::Left { api_server: false, cdi: false, sockets: true });
        assert!(start.has_plugin() && !start.has_api_server() && !start.has_cdi() && !start.can_serve());
    }

    #[test]
    fn broken_and_newer_files_are_leftovers_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join(keeper::FILE);
        let texts = [
            ("{", false),
            (r#"{"version": 1, "dra": 3}"#, false),
            // The core ignores a record of another version.
            (r#"{"version": 2, "dra": ["GPU-1"]}"#, false),
            (r#"{"version": 1, "dra": ["GPU-1"]}"#, true),
        ];
        for (text, gpus) in texts {
            std::fs::write(&record, text).unwrap();
            assert_eq!(leftovers(folder.path()), Leftovers { gpus, claims: false }, "{text}");
        }
        std::fs::write(folder.path().join(CLAIMS), "a file in the folder's place").unwrap();
        assert!(!leftovers(folder.path()).claims);
        std::fs::remove_file(folder.path().join(CLAIMS)).unwrap();
        std::fs::create_dir(folder.path().join(CLAIMS)).unwrap();
        for (name, claims) in [("a.json.ignored", false), (".linkwise-draft", false), ("a.json", true)] {
            std::fs::write(folder.path().join(CLAIMS).join(name), "no checkpoint").unwrap();
            assert_eq!(leftovers(folder.path()).claims, claims, "{name}");
        }
    }
}
