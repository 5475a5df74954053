//! Loads the configuration: from the file to the settings, or to the reason why there are none.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Environment, Flags, Settings, Sources};
use crate::config::file::{File, Finding, Severity};

/// The longest configuration file, in bytes. Kubernetes bounds a ConfigMap to 1 MiB.
pub(in crate::config) const LONGEST_FILE: u64 = 1 << 20;

/// The reason why no configuration could be loaded.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}", .0.display())]
    Unreadable(PathBuf, #[source] io::Error),
    /// The file, the command line or the environment has errors.
    #[error("{}", rejection(.0.as_deref(), .1))]
    Rejected(Option<PathBuf>, Vec<Finding>),
}

/// A valid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The effective settings.
    pub settings: Settings,
    /// Warnings and notes.
    pub findings: Vec<Finding>,
}

/// The first error with its place, and the number of further errors.
fn rejection(path: Option<&Path>, findings: &[Finding]) -> String {
    let mut errors = findings.iter().filter(|finding| finding.severity == Severity::Error);
    let Some(first) = errors.next() else { return "no error".to_owned() };
    let mut text = match (path, first.line) {
        (Some(path), Some(_)) => format!("{}: {first}", path.display()),
        _ => first.to_string(),
    };
    match (errors.count(), path) {
        (0, _) => {}
        (more, Some(path)) => {
            text.push_str(&format!(" (and {more} more: see 'linkwise config check {}')", path.display()));
        }
        (more, None) => text.push_str(&format!(" (and {more} more)")),
    }
    text
}

/// All findings about a file alone, without flags and variables, by line.
pub fn check(path: &Path) -> Result<Vec<Finding>, ConfigError> {
    let text = read(path)?;
    Ok(settings(&Flags::default(), &Environment::default(), &text).1)
}

/// The effective configuration of these flags, this environment and the file that they name.
pub fn load(flags: &Flags, environment: &Environment) -> Result<Loaded, ConfigError> {
    let path = settings(flags, environment, "").0.config_file.value;
    load_text(flags, environment, &path.as_deref().map(read).transpose()?.unwrap_or_default())
}

/// The effective configuration of these flags, this environment and the text of the file that they name.
pub fn load_text(flags: &Flags, environment: &Environment, text: &str) -> Result<Loaded, ConfigError> {
    let (settings, findings) = settings(flags, environment, text);
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        return Err(ConfigError::Rejected(settings.config_file.value, findings));
    }
    Ok(Loaded { settings, findings })
}

fn settings(flags: &Flags, environment: &Environment, text: &str) -> (Settings, Vec<Finding>) {
    let (file, mut findings) = File::parse(text);
    let settings = Settings::build(&Sources { flags, environment, file: &file }, &mut findings);
    (settings, findings)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let read = || {
        let mut bytes = Vec::new();
        fs::File::open(path)?.take(LONGEST_FILE + 1).read_to_end(&mut bytes)?;
        text_of(bytes)
    };
    read().map_err(|source| ConfigError::Unreadable(path.to_owned(), source))
}

/// The text of a file that was read up to one byte beyond [`LONGEST_FILE`].
pub(in crate::config) fn text_of(bytes: Vec<u8>) -> io::Result<String> {
    if u64::try_from(bytes.len()).is_ok_and(|length| length > LONGEST_FILE) {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 MiB"));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}
