//! [`Finding`]: one fault or oddity in a configuration, as a plain value that prints as one line.

use std::fmt;

/// One thing in a configuration that an operator should see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The line of the file, from 1; `None` for a flag, a variable, or the file as a whole.
    pub line: Option<u64>,
    /// The key as a path (`sharing.mps.resources[0].replicas`), or the flag or variable. Text of the file in it is
    /// escaped.
    pub key: String,
    /// The severity.
    pub severity: Severity,
    /// The fault, in words. Text of the file in it is quoted and escaped.
    pub problem: String,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth a log line; the file is valid.
    Note,
    /// `config check` rejects the file; `run` logs a warning and works with it, as the NVIDIA plugin does.
    Warning,
    /// The configuration is rejected.
    Error,
}

impl Finding {
    /// An error at a line of the file.
    pub fn error(line: u64, key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { line: Some(line), key: key.into(), severity: Severity::Error, problem: problem.into() }
    }

    /// A warning at a line of the file.
    pub fn warning(line: u64, key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(line, key, problem) }
    }

    /// A note at a line of the file.
    pub fn note(line: u64, key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { severity: Severity::Note, ..Self::error(line, key, problem) }
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
        f.write_str(&self.problem)
    }
}
