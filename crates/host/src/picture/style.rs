//! The style of a picture: the kinds of boxes and lines, with their colours and classes. Also makes texts harmless,
//! measures them and shortens them.
//!
//! Texts are measured without a font, so that the same machine gives the same picture everywhere: the widths are those
//! of wide fonts (DejaVu), rounded up, and a viewer's font is no wider.

use super::Holder;

/// The kind of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Package,
    /// An unknown package, or the place of the GPUs that are not in the host's tree.
    Unknown,
    /// A NUMA node.
    Node,
    Bridge,
    Switch,
    Port,
    Gpu,
    /// A GPU of a page: its holder, and true if it is unhealthy.
    Marked(Holder, bool),
    /// A GPU that NVML does not list.
    Unlisted,
    Nic,
    Plane,
    /// The number of NVLinks in a line.
    Count(LineKind),
}

/// The kind of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineKind {
    /// A line between a bridge, switch or port and a device below it.
    Pcie,
    /// NVLinks between GPUs of one package, or between a GPU and a plane.
    Near,
    /// NVLinks between GPUs of two packages.
    Crossing,
    /// NVLinks between GPUs of one holder, or between such a GPU and a plane; the holder has this colour.
    Held(u8),
}

impl Kind {
    /// Returns true for a box that frames others.
    pub fn is_frame(self) -> bool {
        matches!(self, Self::Package | Self::Unknown | Self::Node)
    }

    /// Returns true for a box in the row of GPUs. A bridge, switch or port is a bar above its devices.
    pub fn is_leaf(self) -> bool {
        self.is_gpu() || self == Self::Nic
    }

    pub fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu | Self::Marked(..) | Self::Unlisted)
    }

    /// Fill and border in a file; a page has its own colours.
    pub fn colours(self) -> (&'static str, &'static str) {
        match self {
            Self::Package => ("#f5f5f2", "#4a4a4a"),
            Self::Unknown => ("#fafafa", "#8a8a8a"),
            Self::Node => ("#ffffff", "#9a9a9a"),
            Self::Bridge => ("#dedee2", "#6e6e73"),
            Self::Switch => ("#e4dcf3", "#67558f"),
            Self::Port => ("#efeff2", "#6e6e73"),
            Self::Gpu | Self::Marked(..) => ("#dff0d4", "#3b7d23"),
            Self::Unlisted => ("#ffffff", "#8a8a8a"),
            Self::Nic => ("#d9e9f8", "#24639c"),
            Self::Plane => ("#cfe6bf", "#3b7d23"),
            Self::Count(line) => ("#ffffff", line.colour()),
        }
    }

    /// The class in a page's style sheet.
    pub fn class(self) -> String {
        match self {
            Self::Package => "package".to_owned(),
            Self::Unknown => "package unknown".to_owned(),
            Self::Node => "numa".to_owned(),
            Self::Bridge | Self::Port => "bridge".to_owned(),
            Self::Switch => "switch".to_owned(),
            Self::Gpu => "gpu free".to_owned(),
            Self::Unlisted => "gpu unlisted".to_owned(),
            Self::Nic => "nic".to_owned(),
            Self::Plane => "plane".to_owned(),
            Self::Count(line) => format!("count {}", line.class()),
            Self::Marked(holder, is_sick) => {
                let holder = match holder {
                    Holder::Nobody => "free".to_owned(),
                    Holder::One(colour) => format!("held c{colour}"),
                    Holder::Several => "held shared".to_owned(),
                };
                format!("gpu {holder}{}", if is_sick { " sick" } else { "" })
            }
        }
    }

    /// The style of a line of its text.
    pub fn style(self, line: usize) -> Style {
        match self {
            Self::Package | Self::Unknown | Self::Node if line == 0 => Style::Heading,
            kind if kind.is_gpu() && line == 0 => Style::Gpu,
            Self::Plane => Style::Heading,
            Self::Count(_) => Style::Count,
            Self::Package | Self::Unknown | Self::Bridge | Self::Switch | Self::Port => Style::Plain,
            // Below the name and the address, a page has its text about the GPU.
            Self::Marked(..) if line > 1 => Style::Mark,
            Self::Node | Self::Gpu | Self::Marked(..) | Self::Unlisted | Self::Nic => Style::Mono,
        }
    }
}

impl LineKind {
    /// The class in a page's style sheet.
    pub fn class(self) -> String {
        match self {
            Self::Pcie => "pcie".to_owned(),
            Self::Near => "near".to_owned(),
            Self::Crossing => "crossing".to_owned(),
            Self::Held(colour) => format!("held c{colour}"),
        }
    }

    pub fn colour(self) -> &'static str {
        match self {
            Self::Pcie => "#6e6e73",
            Self::Near | Self::Held(_) => "#3b7d23",
            Self::Crossing => "#0b6e8f",
        }
    }
}

/// The width of a line for this number of links.
pub(super) fn breadth(links: u32) -> i64 {
    i64::from(links).saturating_mul(2).clamp(2, 10)
}

/// The style of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Title,
    Subtitle,
    /// The name of a package or a NUMA node.
    Heading,
    /// The text of a bar or a legend.
    Plain,
    Gpu,
    /// A page's text about a GPU.
    Mark,
    /// An address, an interface, a list of CPUs.
    Mono,
    Count,
}

impl Style {
    /// The font's size in pixels.
    pub fn size(self) -> i64 {
        match self {
            Self::Title => 20,
            Self::Subtitle => 14,
            Self::Heading => 13,
            Self::Gpu => 15,
            Self::Mark => 12,
            Self::Plain | Self::Mono | Self::Count => 11,
        }
    }

    pub fn is_bold(self) -> bool {
        matches!(self, Self::Title | Self::Heading | Self::Gpu | Self::Count)
    }

    /// The height of a line.
    pub fn line(self) -> i64 {
        self.size() + 4
    }
}

/// The width of a text in pixels, rounded up.
pub(super) fn width(text: &str, style: Style) -> i64 {
    let em: i64 = text.chars().map(|letter| em(letter, style)).sum();
    let em = if style.is_bold() { em * 11 / 10 } else { em };
    (em * style.size() + 999) / 1000
}

/// The width of a letter in thousandths of the font's size.
fn em(letter: char, style: Style) -> i64 {
    match letter {
        _ if !letter.is_ascii() && !matches!(letter, '…' | '×' | '·') => 1100,
        _ if style == Style::Mono => 610,
        'i' | 'j' | 'l' | 't' | 'f' | 'r' | 'I' | ' ' | '.' | ',' | ':' | ';' | '\'' | '!' | '|' | '(' | ')' | '-'
        | '/' | '[' | ']' => 420,
        'm' | 'w' | 'M' | 'W' | '@' | '%' | '…' => 1000,
        'A'..='Z' | '+' | '=' | '<' | '>' | '~' | '#' | '&' | '×' => 840,
        _ => 640,
    }
}

/// Cuts a text to this width, with an ellipsis if it is wider.
pub(super) fn fit(text: &str, style: Style, room: i64) -> String {
    if width(text, style) <= room {
        return text.to_owned();
    }
    let mut kept = String::new();
    for letter in text.chars() {
        kept.push(letter);
        if width(&format!("{kept}…"), style) > room {
            kept.pop();
            break;
        }
    }
    kept.trim_end().to_owned() + "…"
}

/// Splits a text into lines of at most this width.
pub(super) fn wrap(text: &str, style: Style, room: i64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let longer = lines.last().map(|line| format!("{line} {word}")).filter(|line| width(line, style) <= room);
        match (longer, lines.last_mut()) {
            (Some(longer), Some(line)) => *line = longer,
            _ => lines.push(fit(word, style, room)),
        }
    }
    lines
}

/// The most characters that are kept of a text from a file.
const MAX_CHARACTERS: usize = 240;

/// Returns a character of untrusted text, or its replacement: white space becomes a blank, and characters that XML
/// forbids or that change the direction of writing are replaced.
pub fn harmless(letter: char) -> char {
    match letter {
        '\t' | '\n' | '\r' => ' ',
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}' => {
            '\u{fffd}'
        }
        _ if letter.is_control() => '\u{fffd}',
        _ => letter,
    }
}

/// Returns untrusted text as one [`harmless`] line, cut to `MAX_CHARACTERS`.
pub fn clean(text: &str) -> String {
    let mut letters = text.chars().map(harmless);
    let mut kept: String = letters.by_ref().take(MAX_CHARACTERS).collect();
    if letters.next().is_some() {
        kept.push('…');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_with_ellipsis() {
        assert_eq!(fit("mlx5_0", Style::Mono, 60), "mlx5_0");
        let short = fit("a_very_long_interface_name", Style::Mono, 60);
        assert!(short.ends_with('…') && width(&short, Style::Mono) <= 60, "{short}");
        assert_eq!(fit("abc", Style::Plain, 0), "…");
    }

    #[test]
    fn wrapped_lines_fit_and_keep_each_word() {
        let text = "one two three four five six seven eight nine ten";
        let lines = wrap(text, Style::Title, 200);
        assert!(lines.len() > 2 && lines.iter().all(|line| width(line, Style::Title) <= 200), "{lines:?}");
        assert_eq!(lines.join(" "), text);
        assert!(wrap("", Style::Title, 200).is_empty());
    }

    #[test]
    fn untrusted_text_is_one_harmless_line() {
        assert_eq!(clean("a\nb\u{0}c\u{202e}d\u{ffff}"), "a b\u{fffd}c\u{fffd}d\u{fffd}");
        assert_eq!(clean(&"x".repeat(1000)).chars().count(), 241);
    }
}
