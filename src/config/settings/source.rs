//! The sources of settings (flags, variables, the file) and their precedence. Reads the file and loads the settings, or
//! returns the reason why that failed.
//!
//! The flags are not derived as those of other options are: a setting's flag, default and check come from its one row
//! in the table, and the parsed value has to keep its origin.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};
use thiserror::Error;

use super::file::{Finding, Node, Severity};
use super::value::{Read, Value};
use super::{Origin, Setting, Settings};
use crate::config::removed;
use linkwise_system::files;

/// The longest configuration file, in bytes. Kubernetes bounds a ConfigMap to 1 MiB.
const MAX_FILE: u64 = 1 << 20;

/// A row of the settings' table: a setting's names and its reader.
pub(super) struct Row<T> {
    pub key: &'static str,
    pub read: Read<T>,
    /// The flag, and the name of its value in the help. The value of a BOOL may be left out, a LIST may be repeated, an
    /// empty OUTPUT (FILE in the help) is a value.
    pub flag: Option<(&'static str, &'static str)>,
    /// Other names of the flag; one of a single letter takes one dash.
    pub aliases: &'static [&'static str],
    /// The variables; the first one that is set wins.
    pub variables: &'static [&'static str],
}

impl<T: 'static> Row<T> {
    fn takes(&self, word: &str) -> bool {
        self.flag.is_some_and(|(_, takes)| takes == word)
    }

    pub fn arg(&self, help: &str, default: &str) -> Option<Arg> {
        let (flag, takes) = self.flag?;
        let mut help = help.to_owned();
        let documented = self.variables.iter().find(|variable| !variable.starts_with("GFD_"));
        if let Some(variable) = documented.or(self.variables.first()) {
            help.push_str(&format!(" [env: {variable}]"));
        }
        if !default.is_empty() {
            help.push_str(&format!(" [default: {default}]"));
        }
        let (read, takes_empty) = (self.read, self.takes("BOOL") || self.takes("OUTPUT"));
        let check = move |text: &str| match read(&Value::Word(text.to_owned())) {
            Err(problem) if takes_empty || !text.is_empty() => Err(problem),
            _ => Ok(text.to_owned()),
        };
        let value_name = if takes == "OUTPUT" { "FILE" } else { takes };
        let (short, long): (Vec<&str>, Vec<&str>) = self.aliases.iter().copied().partition(|alias| alias.len() == 1);
        let arg = Arg::new(flag).long(flag).value_name(value_name).help(help).value_parser(check);
        let arg = arg.short(short.first().and_then(|short| short.chars().next())).visible_aliases(long);
        Some(match takes {
            "LIST" => arg.action(ArgAction::Append),
            // Of a repeated flag the last one wins.
            "BOOL" => arg.num_args(0..=1).require_equals(true).default_missing_value("true").overrides_with(flag),
            _ => arg.overrides_with(flag),
        })
    }

    /// The value from the first source that has one: flag, environment, file, default. Errors are reported for every
    /// source, even if another one wins.
    pub fn pick(&self, default: T, sources: &Sources<'_>, findings: &mut Vec<Finding>) -> Setting<T> {
        let flag = self.flag.and_then(|(flag, _)| Some((sources.flags.get(flag)?, Origin::Flag(flag))));
        let variables = self.variables.iter().filter_map(|variable| {
            let text = sources.environment.get(variable)?;
            // An empty variable of a boolean is false, as for the NVIDIA plugin.
            let text = if text.is_empty() && self.takes("BOOL") { "false" } else { text };
            Some((text.to_owned(), Origin::Environment(variable)))
        });
        let words = flag.into_iter().chain(variables).map(|(text, origin)| (Value::Word(text), origin));
        let file = sources.file.at(self.key).map(|node| (node.value.clone(), Origin::File(node.line)));
        let mut chosen = None;
        for (value, origin) in words.chain(file) {
            // Empty texts count as unset, except for OUTPUT and BOOL: Helm charts set empty flags and variables.
            if value.text() == Some("") && !self.takes("OUTPUT") && !self.takes("BOOL") {
                continue;
            }
            match (self.read)(&value) {
                Ok(value) => chosen = chosen.or(Some(Setting { value, origin })),
                Err(problem) => findings.push(origin.finding(self.key, Severity::Error, problem)),
            }
        }
        chosen.unwrap_or(Setting { value: default, origin: Origin::Default })
    }
}

pub(super) struct Sources<'a> {
    pub flags: &'a Flags,
    pub environment: &'a Environment,
    /// The file; an empty one if there is none.
    pub file: &'a Node,
}

/// The flags that were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags(ArgMatches);

impl Flags {
    /// The text of a given flag; the texts of a list joined by commas.
    fn get(&self, flag: &str) -> Option<String> {
        let texts = self.0.try_get_many::<String>(flag).ok()??;
        Some(texts.map(String::as_str).collect::<Vec<_>>().join(","))
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        command.args(super::args())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// The prefix of linkwise's own variables.
const PREFIX: &str = "LINKWISE_";

/// The variables that settings have or had, and their texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The environment of this process.
    pub fn read() -> Self {
        #[expect(clippy::disallowed_methods, reason = "config may read argv and the environment")]
        let text = |variable: &str| Some(std::env::var_os(variable)?.to_string_lossy().into_owned());
        Self(Self::known().filter_map(|variable| Some((variable.to_owned(), text(variable)?))).collect())
    }

    /// An environment of these variables.
    #[cfg(test)]
    pub fn of<const N: usize>(variables: [(&str, &str); N]) -> Self {
        Self(variables.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect())
    }

    /// The names of the variables that settings have or had.
    fn known() -> impl Iterator<Item = &'static str> {
        super::VARIABLES.iter().copied().flatten().copied().chain(removed::variables())
    }

    fn get(&self, variable: &str) -> Option<&str> {
        self.0.get(variable).map(String::as_str)
    }

    /// The variables of this process with linkwise's prefix that no setting and no command reads. `of_commands` has
    /// those that commands read. Leaves out the variables that the kubelet sets for a Service called linkwise.
    pub fn unknown(of_commands: &BTreeSet<String>) -> Vec<String> {
        #[expect(clippy::disallowed_methods, reason = "config may read argv and the environment")]
        let set = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let of_service = |name: &str| name.contains("_SERVICE_") || name.contains("_PORT");
        let is_known = |name: &str| of_commands.contains(name) || Self::known().any(|other| other == name);
        set.filter(|name| name.starts_with(PREFIX) && !of_service(name) && !is_known(name)).collect()
    }

    /// An error for each variable of an earlier version that is set.
    pub(super) fn removed(&self) -> impl Iterator<Item = Finding> {
        let set = removed::variables().filter(|name| self.get(name).is_some_and(|text| !text.is_empty()));
        set.filter_map(|name| Some(Origin::Environment(name).finding("", Severity::Error, removed::refusal(name)?)))
    }
}

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
    Ok(Settings::build(&Flags::default(), &Environment::default(), &read(path)?).1)
}

/// The effective configuration of these flags, this process's environment and the file that they name.
pub fn load(flags: &Flags) -> Result<Loaded, ConfigError> {
    let environment = Environment::read();
    let path = Settings::build(flags, &environment, "").0.config_file.value;
    load_text(flags, &environment, &path.as_deref().map(read).transpose()?.unwrap_or_default())
}

/// The effective configuration of these flags, this environment and the text of the file that they name.
pub fn load_text(flags: &Flags, environment: &Environment, text: &str) -> Result<Loaded, ConfigError> {
    let (settings, findings) = Settings::build(flags, environment, text);
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        return Err(ConfigError::Rejected(settings.config_file.value, findings));
    }
    Ok(Loaded { settings, findings })
}

/// The text of a configuration file.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    let bytes = files::read(path, MAX_FILE).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => io::Error::new(ErrorKind::FileTooLarge, "it is larger than 1 MiB"),
        _ => error,
    });
    let not_text = |_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text");
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(not_text));
    text.map_err(|source| ConfigError::Unreadable(path.to_owned(), source))
}
