//! One setting's names: its flag, its variables, its key in the file, and how it is read.
//!
//! Also the flags that were given, as clap hands them over: texts by flag, checked, not yet values.

use std::collections::BTreeMap;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::environment::Environment;
use super::given::{Given, Read};
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Problem, Value};

/// A setting's names. What it is for stands where the table lists it.
#[derive(Clone, Copy)]
pub struct Row<T: 'static> {
    pub flag: Option<&'static str>,
    aliases: &'static [&'static str],
    pub variables: &'static [&'static str],
    pub key: Option<&'static str>,
    takes: &'static str,
    read: Read<T>,
}

impl<T: 'static> Row<T> {
    pub const fn new(read: Read<T>) -> Self {
        Self { flag: None, aliases: &[], variables: &[], key: None, takes: "", read }
    }

    /// A flag that takes a value, called so in the help. A BOOL may stand alone, a LIST may be given several times.
    pub const fn flag(self, flag: &'static str, takes: &'static str) -> Self {
        Self { flag: Some(flag), takes, ..self }
    }

    /// Other names of the flag.
    pub const fn aliases(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    /// Its variables; the first one that is set counts.
    pub const fn variables(self, variables: &'static [&'static str]) -> Self {
        Self { variables, ..self }
    }

    /// Its key in the file.
    pub const fn key(self, key: &'static str) -> Self {
        Self { key: Some(key), ..self }
    }

    fn is_boolean(&self) -> bool {
        self.takes == "BOOL"
    }

    /// The flag for clap.
    pub fn arg(&self, help: &str, default: &str) -> Option<Arg> {
        let flag = self.flag?;
        let (read, boolean) = (self.read, self.is_boolean());
        let mut help = help.to_owned();
        if let Some(variable) = self.variables.first() {
            help.push_str(&format!(" [env: {variable}]"));
        }
        if !default.is_empty() {
            help.push_str(&format!(" [default: {default}]"));
        }
        let check = move |text: &str| match read(Given::Text(text)) {
            Err(problem) if boolean || !text.is_empty() => Err(problem.to_string()),
            _ => Ok(text.to_owned()),
        };
        let arg = Arg::new(flag).long(flag).value_name(self.takes).help(help).value_parser(check);
        let arg = arg.visible_aliases(self.aliases.iter().copied());
        Some(match self.takes {
            "LIST" => arg.action(ArgAction::Append),
            // Given twice, the last one counts.
            "BOOL" => arg.num_args(0..=1).require_equals(true).default_missing_value("true").overrides_with(flag),
            _ => arg.overrides_with(flag),
        })
    }

    /// The value from the first source that has one: flag, environment, file, default. What is wrong with any of them
    /// is told, also where another one counts.
    pub fn pick(&self, default: T, sources: &Sources<'_>, findings: &mut Vec<Finding>) -> Setting<T> {
        let mut told = |given: Given<'_>, line: Option<u64>, key: String| {
            let tell = |problem| findings.push(Finding { line, key, problem });
            (self.read)(given).map_err(tell).ok()
        };
        let from_file = self.key.and_then(|key| {
            let node = sources.file.at(key)?;
            let empty = matches!(&node.value, Value::Text(text) if text.is_empty()) && !self.is_boolean();
            let value = if empty { None } else { told(Given::Node(node), Some(node.line), key.to_owned()) };
            value.map(|value| Setting { value, origin: Origin::File { line: node.line } })
        });
        let from_environment = self.variables.iter().find_map(|variable| {
            let text = sources.environment.get(variable)?;
            // An empty variable is false where the NVIDIA plugin expects a boolean, else as good as none.
            let text = if text.is_empty() && self.is_boolean() { "false" } else { text };
            let value = if text.is_empty() { None } else { told(Given::Text(text), None, (*variable).to_owned()) };
            value.map(|value| Setting { value, origin: Origin::Environment { variable } })
        });
        let from_flag = self.flag.and_then(|flag| {
            // As with a variable: charts set both to nothing.
            let text = sources.flags.get(flag).filter(|text| !text.is_empty() || self.is_boolean())?;
            let value = told(Given::Text(text), None, format!("--{flag}"))?;
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
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for flag in super::flags() {
            if matches.value_source(flag) == Some(ValueSource::CommandLine) {
                let values: Vec<&str> =
                    matches.get_many::<String>(flag).unwrap_or_default().map(String::as_str).collect();
                self.0.insert(flag, values.join(","));
            }
        }
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

/// A finding about a key of the file that is read by hand.
pub fn tell(findings: &mut Vec<Finding>, line: u64, key: impl Into<String>, problem: Problem) {
    findings.push(Finding { line: Some(line), key: key.into(), problem });
}
