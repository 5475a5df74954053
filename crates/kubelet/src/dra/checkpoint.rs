//! Checkpoints: one file for each claim that is prepared, or was being prepared when the process ended.
//!
//! Called by `claim_manager`, in blocking tasks. A file that cannot be read is reported and set aside. Other claims go
//! on, and the file goes when its claim is unprepared. While the disk is full, claims that cannot be prepared get that
//! error. The core decides the content of a checkpoint.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Occurrence;
use linkwise_core::claims::{ClaimName, Prepared, PreparedDevice};
use linkwise_core::quote::{one_line, quoted};
use linkwise_core::state::PreparedClaim;
use linkwise_system::files;

/// The version of the files.
const VERSION: u32 = 1;

/// The longest file that is read. A claim has 32 devices at most, of some 300 bytes each; earlier versions kept some KiB
/// of edits for each request.
const LONGEST: u64 = 1 << 20;

/// Only the agent reads them.
const MODE: u32 = 0o600;

/// The end of the name of a file that was set aside.
const ASIDE: &str = ".ignored";

/// The progress of the preparation of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Progress {
    /// Something may have been done.
    Started,
    /// Everything is done, and the kubelet may have been told.
    Completed,
}

/// A claim that is prepared, or being prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    version: u32,
    /// The progress.
    pub progress: Progress,
    /// The boot in which the checkpoint was written; `None` where it is unknown.
    pub boot: Option<String>,
    /// The claim.
    pub claim: ClaimName,
    /// The devices of the claim, and what comes with them.
    pub prepared: Prepared,
}

impl Checkpoint {
    /// A checkpoint of a preparation that begins.
    pub fn started(boot: Option<String>, claim: ClaimName, prepared: Prepared) -> Self {
        Self { version: VERSION, progress: Progress::Started, boot, claim, prepared }
    }

    /// The same, completed.
    pub fn completed(self) -> Self {
        Self { progress: Progress::Completed, ..self }
    }

    /// The claim's entry in the node's ledger. Devices with admin access are left out: other claims may have them too.
    pub fn for_ledger(&self) -> PreparedClaim {
        let taken = || self.prepared.devices.iter().filter(|device| !device.admin);
        PreparedClaim {
            claim: self.claim.clone(),
            gpus: taken().map(|device| device.gpu.clone()).collect(),
            devices: taken().map(|device| device.device.clone()).collect(),
            made: taken().filter(|device| device.made.is_some()).map(|device| device.device.clone()).collect(),
        }
    }

    /// Returns true if MIG devices were being made for the claim, in this boot, that the checkpoint does not have.
    pub fn is_half_made(&self, boot: Option<&str>) -> bool {
        !self.is_of_another_boot(boot) && self.prepared.devices.iter().any(PreparedDevice::is_unmade)
    }

    /// Returns true if the checkpoint was certainly written in another boot than this.
    pub fn is_of_another_boot(&self, boot: Option<&str>) -> bool {
        self.boot.as_deref().zip(boot).is_some_and(|(of, this)| of != this)
    }

    /// Returns true if the preparation was completed in this boot.
    pub fn is_completed_in(&self, boot: Option<&str>) -> bool {
        self.progress == Progress::Completed && boot.is_some() && self.boot.as_deref() == boot
    }
}

/// Returns true if a text can be a UID, and so a part of a file's and of a CDI device's name.
pub(super) fn is_uid(text: &str) -> bool {
    let ends = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 128
        && ends(bytes.first())
        && ends(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// The folder of checkpoints.
#[derive(Debug)]
pub(super) struct CheckpointFolder {
    folder: PathBuf,
}

impl CheckpointFolder {
    /// The checkpoints in a folder, and the files in it that are no checkpoints. A folder that is missing has none.
    pub fn open(folder: &Path) -> io::Result<(Self, Vec<Checkpoint>, Vec<Occurrence>)> {
        // Where it cannot be made, the first write tries again.
        let _ = fs::create_dir_all(folder);
        let (mut checkpoints, mut ignored) = (Vec::new(), Vec::new());
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            entries => Some(entries?),
        };
        let paths = entries.into_iter().flatten().map(|entry| Ok(entry?.path()));
        let mut paths: Vec<PathBuf> = paths.collect::<io::Result<_>>()?;
        paths.sort_unstable();
        for path in paths {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(files::DRAFT) {
                // A draft of a process that was killed while it wrote.
                let _ = fs::remove_file(&path);
            } else if let Some(uid) = name.strip_suffix(".json").filter(|uid| is_uid(uid)) {
                match read(&path, uid) {
                    Ok(checkpoint) => checkpoints.push(checkpoint),
                    Err(why) => {
                        let aside = with_suffix(&path, ASIDE);
                        let set_aside = fs::rename(&path, aside).is_ok();
                        ignored.push(Occurrence::CheckpointIgnored { path, why, set_aside });
                    }
                }
            } else if !name.ends_with(&format!(".json{ASIDE}")) {
                let why = "its name is not that of a checkpoint".to_owned();
                ignored.push(Occurrence::CheckpointIgnored { path, why, set_aside: false });
            }
        }
        Ok((Self { folder: folder.to_owned() }, checkpoints, ignored))
    }

    /// Puts a checkpoint on the disk, over the one that is there.
    pub fn write(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(checkpoint)?;
        fs::create_dir_all(&self.folder)?;
        files::write(&self.path(&checkpoint.claim.uid), &text, MODE)
    }

    /// Removes all files of a claim.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        let path = self.path(uid);
        files::remove(&path)?;
        files::remove(&with_suffix(&path, ASIDE)).map(drop)
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{uid}.json"))
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Reads one file; its name has the UID of its claim.
fn read(path: &Path, uid: &str) -> Result<Checkpoint, String> {
    parse(&files::read(path, LONGEST).map_err(|error| error.to_string())?, uid)
}

/// Reads the checkpoint of the claim with this UID.
///
/// # Errors
///
/// The fault in words, on one line: no JSON, another version, no checkpoint, or another claim.
pub fn parse(bytes: &[u8], uid: &str) -> Result<Checkpoint, String> {
    let said = |error: serde_json::Error| one_line(&error.to_string());
    let value: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not whole JSON: {}", said(error)))?;
    let version = value.get("version").cloned().unwrap_or_default();
    if version != VERSION {
        let version = one_line(&version.to_string());
        return Err(format!("its version is {version}; this linkwise reads {VERSION}"));
    }
    let checkpoint: Checkpoint =
        serde_json::from_value(value).map_err(|error| format!("it is no checkpoint: {}", said(error)))?;
    if checkpoint.claim.uid != uid {
        return Err(format!("it is of the claim with the UID {}", quoted(&checkpoint.claim.uid)));
    }
    Ok(checkpoint)
}
