//! Colours for a terminal, and plain text for everything else.
//!
//! Text is wrapped before it is coloured, because escape sequences would count as letters. Marks such as ✗ choose the
//! colours.

/// The widest line that is printed.
const WIDTH: usize = 100;

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const RESET: &str = "\x1b[0m";

#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub colour: bool,
}

impl Style {
    /// The text in lines of at most 100 columns, coloured on a terminal.
    pub fn render(self, text: &str) -> String {
        let lines = text.split('\n').flat_map(wrap);
        let lines: Vec<String> = lines.map(|line| if self.colour { colour(&line) } else { line }).collect();
        lines.join("\n")
    }
}

/// Breaks a line at spaces, and indents the lines after the first.
fn wrap(line: &str) -> Vec<String> {
    if line.chars().count() <= WIDTH {
        return vec![line.to_owned()];
    }
    let margin = line.chars().take_while(|letter| *letter == ' ').count() + 5;
    let mut lines = vec![" ".repeat(margin - 5)];
    for word in line.split_whitespace() {
        let last = lines.last().map_or(0, |line| line.chars().count());
        let fresh = lines.last().is_some_and(|line| line.trim().is_empty());
        if !fresh && last + 1 + word.chars().count() > WIDTH {
            lines.push(" ".repeat(margin));
        }
        if let Some(line) = lines.last_mut() {
            if !line.trim().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

fn colour(line: &str) -> String {
    if let Some(title) = line.strip_prefix("# ") {
        return format!("{BOLD}{title}{RESET}");
    }
    let text = line.trim_start();
    let whole = |code: &str| format!("{code}{line}{RESET}");
    match text.chars().next() {
        Some('✗') => whole(RED),
        Some('-') => whole(DIM),
        _ if text.starts_with("why:") => whole(DIM),
        // Only the marks are coloured, so that the names stay readable.
        _ => line
            .replace('●', &format!("{GREEN}●{RESET}"))
            .replace('✗', &format!("{RED}✗{RESET}"))
            .replace('○', &format!("{DIM}○{RESET}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_wrap_at_spaces() {
        let long = format!("  ✗ {}", "word ".repeat(40));
        let text = Style { colour: false }.render(&long);
        assert!(text.lines().count() > 1 && text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.starts_with("  ✗ word") && text.lines().nth(1).unwrap().starts_with("       word"), "{text}");
        assert_eq!(text.split_whitespace().count(), long.split_whitespace().count());
        assert_eq!(Style { colour: false }.render("a\n\n  b"), "a\n\n  b");
    }

    #[test]
    fn colour_escapes_only_on_terminal() {
        let text = "  GPU 0 ● train   GPU 1 ○ free";
        assert_eq!(Style { colour: false }.render(text), text);
        let coloured = Style { colour: true }.render(text);
        assert!(coloured.contains("\x1b[32m●\x1b[0m train"), "{coloured:?}");
    }
}
