//! YAML for people: errors in plain words, and output that is safe to print on a terminal.
//!
//! Called wherever linkwise shows an error of YAML, or prints YAML. serde-saphyr limits nodes, depth and the
//! multiplication of aliases, so that a small hostile file cannot take much memory.

use std::borrow::Cow;

use linkwise_core::quote::{escaped, one_line};
use serde::Serialize;
use serde_saphyr::{Error, MessageFormatter, SnippetMode, UserMessageFormatter};

/// Formats the messages of serde-saphyr, with plain words in place of the names of Rust types.
struct PlainWords;

impl MessageFormatter for PlainWords {
    fn format_message<'a>(&self, error: &'a Error) -> Cow<'a, str> {
        match error {
            Error::WithSnippet { error, .. } => self.format_message(error),
            Error::Budget { .. }
            | Error::AliasReplayLimitExceeded { .. }
            | Error::AliasExpansionLimitExceeded { .. }
            | Error::AliasReplayStackDepthExceeded { .. } => "too large or nested too deeply, with its aliases".into(),
            Error::Unexpected { expected: "mapping start", .. } => "expected a mapping".into(),
            Error::Unexpected { expected: "sequence start", .. } => "expected a list".into(),
            Error::Unexpected { expected: "scalar" | "string scalar", .. } => "expected one value".into(),
            Error::InvalidScalar { ty: "u32", .. } => whole_number(u32::MAX.into()).into(),
            Error::InvalidScalar { ty: "u64", .. } => whole_number(u64::MAX).into(),
            other => UserMessageFormatter.format_message(other),
        }
    }
}

fn whole_number(max: u64) -> String {
    format!("expected a whole number from 0 to {max}")
}

/// Formats an error of a YAML text as one line, with its place in the text.
pub fn fault(error: &Error) -> String {
    one_line(&error.render_with_options(serde_saphyr::render_options! {
        formatter: &PlainWords,
        snippets: SnippetMode::Off,
    }))
}

/// Writes YAML. If the text has characters that control a terminal, writes JSON: it is YAML that can escape all of
/// them.
pub fn write(value: &impl Serialize) -> Result<String, String> {
    let text = serde_saphyr::to_string(value).map_err(|error| one_line(&error.to_string()))?;
    if escaped(&text) == text {
        return Ok(text);
    }
    Ok(escaped(&serde_json::to_string_pretty(value).map_err(|error| one_line(&error.to_string()))?))
}
