//! Checkpoints: one file for each claim that is prepared, or was being prepared when the process ended.
//!
//! Called by `claim_manager`, `life` and the program's start, in blocking tasks. A file that cannot be read is reported
//! and stays: a disk may fail for a moment, and a later version may have written it. The GPUs that can be read in it
//! are still held. Fields that this version does not know stay in a file that it writes again. A claim whose checkpoint
//! cannot be written fails with that error. The core decides the content of a checkpoint.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use linkwise_core::claims::{ClaimName, Prepared, PreparedDevice};
use linkwise_core::names::is_word;
use linkwise_core::quote::{one_line, quoted};
use linkwise_core::state::PreparedClaim;
use linkwise_system::files;

/// The version of the files.
const VERSION: u32 = 1;

/// The longest file that is read, in bytes. A claim has 32 devices at most, of some 300 bytes each; earlier versions
/// kept some KiB of edits for each request.
const MAX_FILE: u64 = 1 << 20;

/// The mode of the files, which only linkwise reads.
const MODE: u32 = 0o600;

/// The end of the names of files that an earlier version set aside, because it could not read them.
const ASIDE: &str = ".ignored";

/// The progress of the preparation of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Progress {
    /// Something may have been done.
    Started,
    /// Everything is done, and the kubelet may have the answer.
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
    /// The fields of the file that this version does not know, at the depth where they were.
    #[serde(skip)]
    unknown: Value,
}

/// A file that this version cannot read as a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Unreadable {
    /// The fault in words.
    pub why: String,
    /// True if no version can read anything in it: it is not complete JSON.
    pub is_torn: bool,
    /// The checkpoint as far as it can be read; `None` if not even its claim can.
    pub parts: Option<Box<Checkpoint>>,
}

/// A checkpoint in the folder, or the unreadable file in its place.
pub(super) type Found = Result<Checkpoint, Box<Unreadable>>;

/// A folder with what was in it when it was opened.
pub(super) struct Opened {
    pub store: CheckpointFolder,
    /// The files of claims, by UID.
    pub found: Vec<(String, Found)>,
    /// The files whose names are not those of checkpoints.
    pub foreign: Vec<PathBuf>,
}

impl Checkpoint {
    /// A checkpoint of a preparation that begins.
    pub fn started(boot: Option<String>, claim: ClaimName, prepared: Prepared) -> Self {
        Self { version: VERSION, progress: Progress::Started, boot, claim, prepared, unknown: Value::Null }
    }

    /// This checkpoint, with the fields of the claim's last one that this version does not know.
    pub fn after(self, last: Option<&Self>) -> Self {
        Self { unknown: last.map(|last| last.unknown.clone()).unwrap_or_default(), ..self }
    }

    /// The text of the file: this version's fields, and the fields of other versions that [`parse`] found.
    ///
    /// # Errors
    ///
    /// None: every checkpoint can be written as JSON.
    pub fn text(&self) -> serde_json::Result<Vec<u8>> {
        let mut value = serde_json::to_value(self)?;
        add(&mut value, &self.unknown);
        serde_json::to_vec_pretty(&value)
    }

    /// This checkpoint, completed.
    pub fn completed(self) -> Self {
        Self { progress: Progress::Completed, ..self }
    }

    /// Returns true if the claim has MIG devices, made for it or by an administrator.
    pub fn has_mig(&self) -> bool {
        self.prepared.devices.iter().any(|device| device.mig.is_some() || device.made.is_some())
    }

    /// The claim's entry in the node's ledger.
    pub fn entry(&self, boot: Option<&str>) -> PreparedClaim {
        let is_of_another_boot = self.is_of_another_boot(boot);
        PreparedClaim { claim: self.claim.clone(), prepared: self.prepared.clone(), is_of_another_boot }
    }

    /// Returns true if the checkpoint orders MIG devices whose UUIDs it does not have, and may be of this boot.
    pub fn is_half_made(&self, boot: Option<&str>) -> bool {
        !self.is_of_another_boot(boot) && self.prepared.devices.iter().any(PreparedDevice::is_unmade)
    }

    /// Returns true if the checkpoint was certainly written in another boot than this.
    pub fn is_of_another_boot(&self, boot: Option<&str>) -> bool {
        self.boot.as_deref().zip(boot).is_some_and(|(written, this)| written != this)
    }

    /// Returns true if the preparation was completed in this boot.
    pub fn is_completed_in(&self, boot: Option<&str>) -> bool {
        self.progress == Progress::Completed && boot.is_some() && self.boot.as_deref() == boot
    }
}

/// Returns true if a text can be a UID, and so a part of a file's and of a CDI device's name.
pub(super) fn is_uid(text: &str) -> bool {
    text.len() <= 128 && is_word(text, b"-_.")
}

/// Returns true if a folder has a checkpoint, or a file that may be one.
pub fn has_any(folder: &Path) -> bool {
    let mut files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.any(|file| file.path().extension().is_some_and(|end| end == "json"))
}

/// The folder of checkpoints.
#[derive(Debug)]
pub(super) struct CheckpointFolder {
    folder: PathBuf,
}

impl CheckpointFolder {
    /// Opens a folder. A missing folder has no files; it is made if `makes` is true, or by the first write.
    pub fn open(folder: &Path, makes: bool) -> io::Result<Opened> {
        if makes {
            // If the folder cannot be made, the first write tries again.
            let _ = fs::create_dir_all(folder);
        }
        let (mut found, mut foreign) = (Vec::new(), Vec::new());
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            entries => Some(entries?),
        };
        let paths = entries.into_iter().flatten().map(|entry| Ok(entry?.path()));
        let mut paths: Vec<PathBuf> = paths.collect::<io::Result<_>>()?;
        for path in &mut paths {
            // This version may be able to read a file that another version set aside.
            let before = path.to_str().and_then(|name| name.strip_suffix(ASIDE)).map(PathBuf::from);
            if let Some(before) = before.filter(|before| !before.exists())
                && fs::rename(&*path, &before).is_ok()
            {
                *path = before;
            }
        }
        paths.sort_unstable();
        for path in paths {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(files::DRAFT) {
                // A draft of a process that was killed while it wrote.
                let _ = fs::remove_file(&path);
            } else if let Some(uid) = name.strip_suffix(".json").filter(|uid| is_uid(uid)) {
                found.push((uid.to_owned(), read(&path, uid)));
            } else if !name.ends_with(&format!(".json{ASIDE}")) {
                foreign.push(path);
            }
        }
        Ok(Opened { store: Self { folder: folder.to_owned() }, found, foreign })
    }

    /// Reads the checkpoint of a claim.
    pub fn read(&self, uid: &str) -> Found {
        read(&self.path(uid), uid)
    }

    /// Writes a checkpoint, over the previous one. Does not wait for the disk: a checkpoint is read by the process that
    /// follows a killed one, and the kernel has the file. After a crash of the machine no container runs, MIG devices
    /// and MPS control daemons are gone, and the kubelet has every claim prepared again, which overwrites a file
    /// that the crash tore.
    pub fn write(&self, checkpoint: &Checkpoint) -> io::Result<()> {
        let text = checkpoint.text()?;
        fs::create_dir_all(&self.folder)?;
        files::write_for_this_boot(&self.path(&checkpoint.claim.uid), &text, MODE)
    }

    /// Removes all files of a claim.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        files::remove_for_this_boot(&self.path(uid))?;
        files::remove_for_this_boot(&self.folder.join(format!("{uid}.json{ASIDE}"))).map(drop)
    }

    pub fn path(&self, uid: &str) -> PathBuf {
        self.folder.join(format!("{uid}.json"))
    }
}

/// Reads the file of the claim with this UID.
fn read(path: &Path, uid: &str) -> Found {
    let unreadable = |error: io::Error| Box::new(Unreadable { why: error.to_string(), is_torn: false, parts: None });
    let bytes = files::read(path, MAX_FILE).map_err(unreadable)?;
    parse(&bytes, uid).map_err(|why| {
        let value = serde_json::from_slice::<Value>(&bytes).ok();
        let parts = value.as_ref().and_then(|value| parts(value, uid)).map(Box::new);
        Box::new(Unreadable { why, is_torn: value.is_none(), parts })
    })
}

/// The parts of a checkpoint that can be read, which a later version may have written.
fn parts(value: &Value, uid: &str) -> Option<Checkpoint> {
    let claim = ClaimName::deserialize(&value["claim"]).ok().filter(|claim| claim.uid == uid)?;
    let prepared = &value["prepared"];
    let devices = prepared["devices"].as_array().into_iter().flatten();
    let devices = devices.filter_map(|device| PreparedDevice::deserialize(device).ok()).collect();
    let mps = Option::deserialize(&prepared["mps"]).unwrap_or_default();
    let boot = value["boot"].as_str().map(str::to_owned);
    Some(Checkpoint::started(boot, claim, Prepared { devices, mps, ..Prepared::default() }))
}

/// Reads the checkpoint of the claim with this UID.
///
/// # Errors
///
/// The fault in words, on one line: not JSON, another version, not a checkpoint, or another claim's.
pub fn parse(bytes: &[u8], uid: &str) -> Result<Checkpoint, String> {
    let cause = |error: serde_json::Error| one_line(&error.to_string());
    let mut value: Value =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not complete JSON: {}", cause(error)))?;
    let version = value.get("version").cloned().unwrap_or_default();
    if version != VERSION {
        let version = one_line(&version.to_string());
        return Err(format!("its version is {version}; this linkwise reads {VERSION}"));
    }
    let mut checkpoint: Checkpoint =
        Checkpoint::deserialize(&value).map_err(|error| format!("it is not a checkpoint: {}", cause(error)))?;
    if checkpoint.claim.uid != uid {
        return Err(format!("it belongs to the claim with the UID {}", quoted(&checkpoint.claim.uid)));
    }
    // Earlier versions kept edits here. The claim's CDI spec has them now.
    if let Some(prepared) = value.get_mut("prepared").and_then(Value::as_object_mut) {
        prepared.remove("edits");
    }
    checkpoint.unknown = unknown(&value, &serde_json::to_value(&checkpoint).map_err(cause)?);
    Ok(checkpoint)
}

/// The fields of `all` that `known` lacks, at their depth; null if there are none.
fn unknown(all: &Value, known: &Value) -> Value {
    match (all, known) {
        (Value::Object(all), Value::Object(known)) => {
            let fields = all.iter().map(|(key, value)| {
                (key.clone(), known.get(key).map_or_else(|| value.clone(), |known| unknown(value, known)))
            });
            let fields: serde_json::Map<_, _> = fields.filter(|(_, value)| !value.is_null()).collect();
            if fields.is_empty() { Value::Null } else { Value::Object(fields) }
        }
        (Value::Array(all), Value::Array(known)) if all.len() == known.len() => {
            let values: Vec<Value> = all.iter().zip(known).map(|(value, known)| unknown(value, known)).collect();
            if values.iter().all(Value::is_null) { Value::Null } else { Value::Array(values) }
        }
        _ => Value::Null,
    }
}

/// Adds fields at their depth. A list whose length changed gets none: its elements may have moved.
fn add(value: &mut Value, more: &Value) {
    match (value, more) {
        (Value::Object(value), Value::Object(more)) => {
            for (key, more) in more {
                match value.get_mut(key) {
                    Some(value) => add(value, more),
                    None => drop(value.insert(key.clone(), more.clone())),
                }
            }
        }
        (Value::Array(values), Value::Array(more)) if values.len() == more.len() => {
            values.iter_mut().zip(more).for_each(|(value, more)| add(value, more));
        }
        _ => {}
    }
}
