//! One setting's names (its flag, its variables, its key in the file), its reader, and the order of its sources.
//!
//! This module also has [`Flags`], the given flags. They are not derived as other commands' options are: a setting's
//! flag, default and check come from its one row in the table, and the parsed value has to remember its origin.

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::environment::Environment;
use super::given::{Given, Read};
use super::{Origin, Setting};
use crate::config::file::{File, Finding, Severity};

/// A setting's names and reader.
#[derive(Clone, Copy)]
pub struct Row<T: 'static> {
    pub flag: Option<&'static str>,
    aliases: &'static [&'static str],
    pub variables: &'static [&'static str],
    takes: &'static str,
    /// Set if a change applies while linkwise runs; otherwise it applies at the next start.
    pub at_once: bool,
    /// Set if an empty text is a value; otherwise an empty text counts as unset.
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

    /// Marks that a change applies while linkwise runs.
    pub const fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }

    /// Marks that an empty text is a value.
    pub const fn takes_empty(self) -> Self {
        Self { takes_empty: true, ..self }
    }

    fn is_boolean(&self) -> bool {
        self.takes == "BOOL"
    }

    /// Returns true if the text is read, and not counted as unset.
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
    /// source, even if another one wins.
    pub fn pick(&self, key: &str, default: T, sources: &Sources<'_>, findings: &mut Vec<Finding>) -> Setting<T> {
        let flag = self.flag.and_then(|flag| Some((sources.flags.get(flag)?, Origin::Flag(flag))));
        let variables = self.variables.iter().filter_map(|variable| {
            let text = sources.environment.get(variable)?;
            // An empty variable is false where the NVIDIA plugin expects a boolean.
            let text = if text.is_empty() && self.is_boolean() { "false" } else { text };
            Some((text.to_owned(), Origin::Environment(variable)))
        });
        let texts: Vec<(String, Origin)> = flag.into_iter().chain(variables).collect();
        let node = sources.file.at(key).map(|node| (Given::Node(node), Origin::File(node.line)));
        let given = texts.iter().map(|(text, origin)| (Given::Text(text), *origin)).chain(node);
        let mut values = Vec::new();
        // Other empty texts count as unset: Helm charts set flags and variables to empty texts.
        for (given, origin) in given.filter(|(given, _)| given.text().is_none_or(|text| self.reads(text))) {
            match (self.read)(given) {
                Ok(value) => values.push(Setting { value, origin }),
                Err(problem) => findings.push(origin.finding(key, Severity::Error, problem)),
            }
        }
        values.into_iter().next().unwrap_or(Setting { value: default, origin: Origin::Default })
    }
}

/// The sources of values.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// The command line.
    pub flags: &'a Flags,
    /// The environment.
    pub environment: &'a Environment,
    /// The file; an empty one if there is none.
    pub file: &'a File,
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

impl clap::FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
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
