//! `linkwise config`: checks a configuration file, or shows the effective configuration.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use crate::config::settings::{Finding, Loaded, Origin, Setting, Severity, Shown, check, load, plain};
use crate::config::{ConfigArgs, ConfigCommand, Flags, Format};
use linkwise_core::words::count;
use linkwise_system::output::print;

/// Runs `linkwise config`.
pub fn config(args: &ConfigArgs) -> Result<()> {
    match &args.command {
        ConfigCommand::Check { file } => check_file(file),
        ConfigCommand::Show { flags, format } => show(flags, *format),
    }
}

/// Prints all findings on a file. Fails if one of them is a warning or an error.
fn check_file(file: &Path) -> Result<()> {
    let findings = check(file)?;
    let file = file.display();
    let mut text = String::new();
    for Finding { line, key, severity, problem } in &findings {
        let place = line.map_or_else(String::new, |line| format!(":{line}"));
        let key = if key.is_empty() { String::new() } else { format!(" {key}:") };
        let note = if *severity == Severity::Note { " note:" } else { "" };
        text.push_str(&format!("{file}{place}:{note}{key} {problem}\n"));
    }
    let wrong = findings.iter().filter(|finding| finding.severity > Severity::Note).count();
    if wrong == 0 {
        text.push_str(&format!("{file}: valid\n"));
    }
    print(&text)?;
    ensure!(wrong == 0, "{file}: {}", count(wrong, "problem"));
    Ok(())
}

/// Prints the effective settings with their origin.
fn show(flags: &Flags, format: Format) -> Result<()> {
    let Loaded { settings, findings } = load(flags)?;
    let shown = settings.shown();
    let text = match format {
        Format::Text => as_text(&shown, &settings.config_file, &findings),
        Format::Json => {
            let entry =
                |shown: Shown| (shown.key.to_owned(), json!({"value": shown.value, "origin": origin(shown.origin)}));
            let settings: Map<String, Value> = shown.into_iter().map(entry).collect();
            let finding =
                |finding: &Finding| json!({"line": finding.line, "key": finding.key, "problem": finding.problem});
            let findings: Vec<Value> = findings.iter().map(finding).collect();
            format!("{:#}\n", json!({"settings": settings, "findings": findings}))
        }
    };
    Ok(print(&text)?)
}

fn origin(origin: Origin) -> Value {
    match origin {
        Origin::Flag(flag) => json!({"from": "flag", "flag": flag}),
        Origin::Environment(variable) => json!({"from": "environment", "variable": variable}),
        Origin::File(line) => json!({"from": "file", "line": line}),
        Origin::Default => json!({"from": "default"}),
    }
}

/// Returns a line for each setting: key, value, origin; then the findings.
fn as_text(shown: &[Shown], file: &Setting<Option<PathBuf>>, findings: &[Finding]) -> String {
    let value = |shown: &Shown| match plain(&shown.value).replace('\n', "\\n") {
        empty if empty.is_empty() => "-".to_owned(),
        value => value,
    };
    let width =
        |of: &dyn Fn(&Shown) -> usize, limit: usize| shown.iter().map(of).filter(|n| *n <= limit).max().unwrap_or(0);
    let keys = width(&|shown| shown.key.chars().count(), usize::MAX);
    // A long value (sharing, resources) only moves its own origin to the right.
    let values = width(&|shown| value(shown).chars().count(), 48);
    let mut text = String::new();
    for shown in shown {
        text.push_str(&format!("{:keys$}  {:values$}  {}\n", shown.key, value(shown), shown.origin));
    }
    for finding in findings {
        let place = match (&file.value, finding.line) {
            (Some(path), Some(line)) => format!("{}:{line}: ", path.display()),
            _ => String::new(),
        };
        text.push_str(&format!("note: {place}{}: {}\n", finding.key, finding.problem));
    }
    text
}
