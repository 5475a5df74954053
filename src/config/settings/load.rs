//! Reading the configuration: the file's text, the settings, and whether anybody works with them.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Environment, Flags, Settings, Sources};
use crate::config::file::{File, Finding, Weight};

/// The longest configuration file, in bytes. Kubernetes bounds a ConfigMap to 1 MiB.
pub(in crate::config) const LONGEST_FILE: u64 = 1 << 20;

/// Why there is no configuration to work with.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something in it, or on the command line, or in the environment, is wrong.
    #[error("{}", refusal(path.as_deref(), findings))]
    Refused {
        /// The file, where there is one.
        path: Option<PathBuf>,
        /// What is wrong; at least one is an error.
        findings: Vec<Finding>,
    },
}

/// A configuration to work with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// What counts.
    pub settings: Settings,
    /// What is odd about it; none is an error.
    pub findings: Vec<Finding>,
}

/// The first error with its place, and how many more there are.
fn refusal(path: Option<&Path>, findings: &[Finding]) -> String {
    let mut errors = findings.iter().filter(|finding| finding.problem.weight() == Weight::Error);
    let Some(first) = errors.next() else { return "nothing is wrong".to_owned() };
    let mut words = match (path, first.line) {
        (Some(path), Some(_)) => format!("{}: {first}", path.display()),
        _ => first.to_string(),
    };
    match (errors.count(), path) {
        (0, _) => {}
        (more, Some(path)) => {
            words.push_str(&format!(" (and {more} more: see 'linkwise config check {}')", path.display()));
        }
        (more, None) => words.push_str(&format!(" (and {more} more)")),
    }
    words
}

/// Everything that is to be said of a file alone, without flags and variables: by line.
pub fn check(path: &Path) -> Result<Vec<Finding>, ConfigError> {
    let text = text_of(path)?;
    Ok(settings(&Flags::default(), &Environment::default(), &text).1)
}

/// The effective configuration of these flags, this environment and the file that they name.
pub fn load(flags: &Flags, environment: &Environment) -> Result<Loaded, ConfigError> {
    let path = settings(flags, environment, "").0.config_file.value;
    let text = path.as_deref().map(text_of).transpose()?.unwrap_or_default();
    let (settings, findings) = settings(flags, environment, &text);
    if findings.iter().any(|finding| finding.problem.weight() == Weight::Error) {
        return Err(ConfigError::Refused { path, findings });
    }
    Ok(Loaded { settings, findings })
}

/// The settings of a file's text, and all that is odd about it. Where the text is no YAML, what it does not say is no
/// matter.
fn settings(flags: &Flags, environment: &Environment, text: &str) -> (Settings, Vec<Finding>) {
    let (file, mut findings) = File::parse(text);
    let settings = Settings::build(&Sources { flags, environment, file: &file }, &mut findings);
    (settings, findings)
}

/// The text of a configuration file.
fn text_of(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    file.take(LONGEST_FILE + 1).read_to_string(&mut text).map_err(unreadable)?;
    if u64::try_from(text.len()).is_ok_and(|length| length > LONGEST_FILE) {
        return Err(unreadable(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 MiB")));
    }
    Ok(text)
}
