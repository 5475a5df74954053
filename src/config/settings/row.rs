//! One setting's names (its flag, its variables, its key in the file), how it is read, and which source wins.
//!
//! Also [`Flags`], the flags that were given. They are not derived as other commands' options are: a setting's flag,
//! default and check come from its one row in the table, and the parsed value has to remember its origin.

use std::collections::BTreeMap;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::environment::Environment;
use super::given::{Given, Read};
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Severity, Value};

/// A setting's names and reader.
#[derive(Clone, Copy)]
pub struct Row<T: 'static> {
    pub flag: Option<&'static str>,
    aliases: &'static [&'static str],
    pub variables: &'static [&'static str],
    takes: &'static str,
    /// Whether a change applies while linkwise runs; otherwise it applies at the next start.
    pub at_once: bool,
    /// Whether an empty text is a value; otherwise it is as if unset.
    takes_empty: bool,
    read: Read<T>,
}

impl<T: 'static> Row<T> {
    pub const fn new(read: Read<T>) -> Self {
        Self { flag: None, aliases: &[], variables: &[], takes: "", at_once: false, takes_empty: false, read }
    }

    /// The flag, and the name of its value in the help. The value of a BOOL may be left out, a LIST may be repeated.
    pub const fn flag(self, flag: &'static str, takes: &'static str) -> Self {
        Self { flag: Some(flag), takes, ..self }
    }

    /// Other names of the flag; one of a single letter takes one dash.
    pub const fn aliases(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    /// The variables; the first one that is set wins.
    pub const fn variables(self, variables: &'static [&'static str]) -> Self {
        Self { variables, ..self }
    }

    /// A change applies while linkwise runs.
    pub const fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }

    /// An empty text is a value.
    pub const fn takes_empty(self) -> Self {
        Self { takes_empty: true, ..self }
    }

    fn is_boolean(&self) -> bool {
        self.takes == "BOOL"
    }

    /// Whether an empty text is read.
    fn reads(&self, text: &str) -> bool {
        !text.is_empty() || self.is_boolean() || self.takes_empty
    }

    /// The flag for clap.
    pub fn arg(&self, help: &str, default: &str) -> Option<Arg> {
        let flag = self.flag?;
        let (read, empty) = (self.read, self.reads(""));
        let mut help = help.to_owned();
        let documented = self.variables.iter().find(|variable| !variable.starts_with("GFD_"));
        if let Some(variable) = documented.or(self.variables.first()) {
            help.push_str(&format!(" [env: {variable}]"));
        }
        if !default.is_empty() {
            help.push_str(&format!(" [default: {default}]"));
        }
        let check = move |text: &str| match read(Given::Text(text)) {
            Err(problem) if empty || !text.is_empty() => Err(problem),
            _ => Ok(text.to_owned()),
        };
        let arg = Arg::new(flag).long(flag).value_name(self.takes).help(help).value_parser(check);
        let (short, long): (Vec<&str>, Vec<&str>) = self.aliases.iter().copied().partition(|alias| alias.len() == 1);
        let arg = arg.short(short.first().and_then(|short| short.chars().next())).visible_aliases(long);
        Some(match self.takes {
            "LIST" => arg.action(ArgAction::Append),
            // Of a repeated flag the last one wins.
            "BOOL" => arg.num_args(0..=1).require_equals(true).default_missing_value("true").overrides_with(flag),
            _ => arg.overrides_with(flag),
        })
    }

    /// The value from the first source that has one: flag, environment, file, default. Errors are reported for every
    /// source, also where another one wins.
    pub fn pick(&self, key: &str, default: T, sources: &Sources<'_>, findings: &mut Vec<Finding>) -> Setting<T> {
        let mut read = |given: Given<'_>, line: Option<u64>, key: String| {
            let wrong = |problem| findings.push(Finding { line, key, severity: Severity::Error, problem });
            (self.read)(given).map_err(wrong).ok()
        };
        let from_file = sources.file.at(key).and_then(|node| {
            let unset = matches!(&node.value, Value::Text(text) if !self.reads(text));
            let value = if unset { None } else { read(Given::Node(node), Some(node.line), key.to_owned()) };
            value.map(|value| Setting { value, origin: Origin::File { line: node.line } })
        });
        let from_environment = self.variables.iter().find_map(|variable| {
            let text = sources.environment.get(variable)?;
            // An empty variable is false where the NVIDIA plugin expects a boolean, and otherwise as if unset.
            let text = if text.is_empty() && self.is_boolean() { "false" } else { text };
            let value = if self.reads(text) { read(Given::Text(text), None, (*variable).to_owned()) } else { None };
            value.map(|value| Setting { value, origin: Origin::Environment { variable } })
        });
        let from_flag = self.flag.and_then(|flag| {
            // An empty flag is as if unset: Helm charts set flags and variables to nothing.
            let text = sources.flags.get(flag).filter(|text| self.reads(text))?;
            let value = read(Given::Text(text), None, format!("--{flag}"))?;
            Some(Setting { value, origin: Origin::Flag { flag } })
        });
        let found = from_flag.or(from_environment).or(from_file);
        found.unwrap_or(Setting { value: default, origin: Origin::Default })
    }
}

/// Where values come from.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// The command line.
    pub flags: &'a Flags,
    /// The environment.
    pub environment: &'a Environment,
    /// The file; an empty one where there is none.
    pub file: &'a File,
}

/// The flags that were given, by name, as texts; those of a list joined by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags(BTreeMap<&'static str, String>);

impl Flags {
    /// The text of a flag that was given.
    pub fn get(&self, flag: &str) -> Option<&str> {
        self.0.get(flag).map(String::as_str)
    }
}

impl clap::FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = super::FLAGS
            .iter()
            .flatten()
            .copied()
            .filter(|flag| matches.value_source(flag) == Some(ValueSource::CommandLine));
        let texts = |flag| matches.get_many::<String>(flag).unwrap_or_default().map(String::as_str).collect::<Vec<_>>();
        Ok(Self(given.map(|flag| (flag, texts(flag).join(","))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.extend(Self::from_arg_matches(matches)?.0);
        Ok(())
    }
}

impl clap::Args for Flags {
    fn augment_args(command: Command) -> Command {
        command.args(super::args())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
