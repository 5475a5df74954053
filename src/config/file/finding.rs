//! What can be wrong with a configuration, as plain values that print as one line each.

use std::fmt;

use thiserror::Error;

/// One thing about a configuration that somebody should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The line of the file, from 1; none where the matter is not one of the file.
    pub line: Option<u64>,
    /// The key, as a path (`sharing.mps.resources[0].replicas`), or the flag or variable.
    pub key: String,
    /// What is the matter.
    pub problem: Problem,
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Weight {
    /// Worth a line in the log; nobody refuses it.
    Note,
    /// `config check` refuses it; `run` says so and works, as the NVIDIA plugin does.
    Doubt,
    /// Nobody works with it.
    Error,
}

/// What is the matter with a key.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// The text is no YAML.
    #[error("{0}")]
    Yaml(String),
    /// The file says so itself.
    #[error("this build reads version v1, found {0}")]
    Version(String),
    /// A key that nobody reads.
    #[error("unknown key{}", nearest(.0.as_deref()))]
    UnknownKey(Option<String>),
    /// A key in other letters, which the NVIDIA plugin reads all the same.
    #[error("read as {0}")]
    OtherCase(String),
    /// A value of another kind or out of its range.
    #[error("expected {expected}, found {found}")]
    Value {
        /// What there should be.
        expected: String,
        /// What there is.
        found: String,
    },
    /// A key that must be there.
    #[error("'{0}' is missing")]
    Missing(&'static str),
    /// An entry that was there before.
    #[error("{thing} is listed already in line {line}")]
    Again {
        /// What.
        thing: String,
        /// Where it was first.
        line: u64,
    },
    /// A pattern that another one swallows.
    #[error("pattern {pattern} never counts: all that it matches is matched by line {line}")]
    Unreached {
        /// The pattern.
        pattern: String,
        /// Where the wider one is.
        line: u64,
    },
    /// A shared resource takes a name that is in use.
    #[error("the name {name} is taken by {by}")]
    NameTaken {
        /// The name.
        name: String,
        /// Who has it.
        by: String,
    },
    /// Two entries share the same devices.
    #[error("some devices of {name} are shared twice: line {line} takes {what}")]
    Overlap {
        /// The resource.
        name: String,
        /// The other entry.
        line: u64,
        /// What that one takes, in words.
        what: String,
    },
    /// A GPU is both left out and shared.
    #[error("{device} is shared, but left out by linkwise.filter.exclude in line {line}")]
    SharedAndExcluded {
        /// The GPU.
        device: String,
        /// Where it is left out.
        line: u64,
    },
    /// MPS cannot share MIG devices.
    #[error("MPS cannot share MIG devices: {0}")]
    MpsWithMig(String),
    /// Both kinds of sharing at once.
    #[error("time-slicing and MPS exclude each other: sharing.timeSlicing is ignored, as the NVIDIA plugin ignores it")]
    BothSharings,
    /// Understood, and without effect here.
    #[error("{0}")]
    NoEffect(&'static str),
    /// What the NVIDIA plugin ignores is ignored until it is asked for.
    #[error("ignored, as the NVIDIA plugin ignores it; 'linkwise: {{naming: true}}' in this file makes it count")]
    NamingOff,
}

fn nearest(known: Option<&str>) -> String {
    known.map_or_else(String::new, |known| format!("; did you mean '{known}'?"))
}

impl Problem {
    /// How much it matters.
    pub fn weight(&self) -> Weight {
        match self {
            Self::OtherCase(_) | Self::NoEffect(_) | Self::NamingOff => Weight::Note,
            Self::UnknownKey(_) | Self::BothSharings => Weight::Doubt,
            _ => Weight::Error,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        self.problem.fmt(f)
    }
}
