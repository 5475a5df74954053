//! YAML for people: the faults of a text in plain words, and a text that a terminal shows as it is.
//!
//! Called by all that reads YAML which a person wrote, and by all that prints YAML. serde-saphyr limits nodes, depth and
//! the multiplication of aliases, so that a small hostile file stays small.

use std::borrow::Cow;

use linkwise_core::quote::{escaped, one_line};
use serde::Serialize;
use serde_saphyr::{Error, MessageFormatter, SnippetMode, UserMessageFormatter};

/// The messages of serde-saphyr, in plain words where they have names of Rust.
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

fn whole_number(most: u64) -> String {
    format!("expected a whole number from 0 to {most}")
}

/// The fault of a text in one line, with its place.
pub fn fault(error: &Error) -> String {
    one_line(&error.render_with_options(serde_saphyr::render_options! {
        formatter: &PlainWords,
        snippets: SnippetMode::Off,
    }))
}

/// Writes YAML. Text with characters that a terminal obeys becomes JSON, which is YAML that can escape each of them.
pub fn write(value: &impl Serialize) -> Result<String, String> {
    let text = serde_saphyr::to_string(value).map_err(|error| one_line(&error.to_string()))?;
    if escaped(&text) == text {
        return Ok(text);
    }
    Ok(escaped(&serde_json::to_string_pretty(value).map_err(|error| one_line(&error.to_string()))?))
}
