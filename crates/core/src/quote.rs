//! Text from outside (files, answers of other programs) as it may stand in a message: on one line, without control
//! characters, not too long. Every adapter that repeats such text in an error or a log line uses this.

use crate::prelude::*;

/// The longest piece of a text that [`excerpt`] repeats, in characters.
const EXCERPT: usize = 80;

/// The longest message of another library or program that [`one_line`] repeats, in characters.
const MESSAGE: usize = 1000;

/// At most 80 characters of a text: control characters, line separators and invisible ones are escaped as in Rust
/// (`\n`, `\u{1b}`), and so is the backslash.
pub fn excerpt(text: &str) -> String {
    shown(text, EXCERPT)
}

/// [`excerpt`] in single quotes.
pub fn quoted(text: &str) -> String {
    format!("'{}'", excerpt(text))
}

/// A whole message of another library or program, up to 1000 characters: blanks and line ends become one blank, what
/// else is not printable is escaped.
pub fn one_line(text: &str) -> String {
    shown(&text.split_whitespace().collect::<Vec<_>>().join(" "), MESSAGE)
}

fn shown(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for (number, char) in text.chars().enumerate() {
        if number == most {
            shown.push_str(" ...");
            break;
        }
        match char {
            '\'' | '"' => shown.push(char),
            char => shown.extend(char.escape_debug()),
        }
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
    }
}
