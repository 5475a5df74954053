//! Untrusted text (from files, from answers of other programs) made fit for a message: one line, no control characters,
//! limited length. Every adapter that repeats such text in an error or a log line uses this.

use crate::prelude::*;

/// The most characters that [`excerpt`] repeats.
const MAX_EXCERPT: usize = 80;

/// The most characters of another library's or program's message that [`one_line`] repeats.
const MAX_MESSAGE: usize = 1000;

/// Repeats at most 80 characters of a text. Control characters, line separators, invisible characters and the backslash
/// are escaped as in Rust (`\n`, `\u{1b}`).
pub fn excerpt(text: &str) -> String {
    shown(text, MAX_EXCERPT)
}

/// [`excerpt`] in single quotes.
pub fn quoted(text: &str) -> String {
    format!("'{}'", excerpt(text))
}

/// Repeats a whole message of another library or program, up to 1000 characters. Blanks and line ends become one blank;
/// other characters that cannot be printed are escaped.
pub fn one_line(text: &str) -> String {
    shown(&text.split_whitespace().collect::<Vec<_>>().join(" "), MAX_MESSAGE)
}

/// Puts JSON escapes in place of characters that a terminal obeys or does not show, in text or JSON. Line ends stay.
pub fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        let is_shown = if char.is_ascii() { !char.is_ascii_control() } else { char.escape_debug().len() == 1 };
        if is_shown || char == '\n' {
            shown.push(char);
        } else {
            shown.extend(char.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    shown
}

/// The error for a text that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} {why}", quoted(text))]
pub struct ParseError {
    text: String,
    why: &'static str,
}

impl ParseError {
    /// Makes the error. `why` follows the text in quotes: `is not a PCI address`.
    pub(crate) fn new(text: &str, why: &'static str) -> Self {
        Self { text: text.to_owned(), why }
    }
}

/// Escapes a text, and cuts it after at most `max` characters of the escaped form.
fn shown(text: &str, max: usize) -> String {
    let (mut shown, mut left) = (String::new(), max);
    for char in text.chars() {
        let escaped: String = if matches!(char, '\'' | '"') { char.into() } else { char.escape_debug().collect() };
        let Some(rest) = left.checked_sub(escaped.chars().count()) else {
            shown.push_str(" ...");
            break;
        };
        left = rest;
        shown.push_str(&escaped);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_shown_on_one_line_without_controls() {
        assert_eq!(quoted("it's a\nb\u{1b}[31m\u{2028}\u{202e}"), "'it's a\\nb\\u{1b}[31m\\u{2028}\\u{202e}'");
        assert_eq!(one_line("expected ','\n\n  found \u{7}"), "expected ',' found \\u{7}");
        assert_eq!(excerpt("é=ü 漢字"), "é=ü 漢字");
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(excerpt(&"x".repeat(80)), "x".repeat(80));
        assert_eq!(excerpt(&"x".repeat(81)), "x".repeat(80) + " ...");
        assert_eq!(one_line(&"x".repeat(2000)), "x".repeat(1000) + " ...");
        assert_eq!(one_line(&"\u{7f}".repeat(2000)), "\\u{7f}".repeat(166) + " ...");
    }
}
