//! Lines of a terminal: their pieces, their widths, and the place at which they are cut.
//!
//! Text from outside comes in through [`Piece::new`], which escapes it; all other text is linkwise's own. A line that
//! is too long ends in an ellipsis, so that a terminal never wraps one.

use unicode_width::UnicodeWidthChar;

use linkwise_core::quote::one_line;

const ELLIPSIS: char = '…';

/// Blanks between two columns of a table.
const GAP: usize = 2;

/// The least width of a column before another column is left out.
const NARROWEST: usize = 12;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tint {
    #[default]
    Plain,
    Title,
    Dim,
    Good,
    Fair,
    Bad,
}

/// Text in one colour, without control characters that a terminal obeys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    tint: Tint,
    text: String,
}

pub(super) type Line = Vec<Piece>;

pub(super) struct Column {
    pub title: &'static str,
    /// Set for numbers, which are aligned to the right.
    pub right: bool,
    /// The order in which columns are left out if there is little room: the largest number first; 0 never.
    pub drop: u8,
}

pub(super) struct Table<const N: usize> {
    pub columns: [Column; N],
    pub rows: Vec<[Piece; N]>,
}

impl Tint {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Title => "\x1b[1m",
            Self::Dim => "\x1b[2m",
            Self::Good => "\x1b[32m",
            Self::Fair => "\x1b[33m",
            Self::Bad => "\x1b[31m",
        }
    }
}

impl Piece {
    /// Text of any origin.
    pub fn new(tint: Tint, text: &str) -> Self {
        Self { tint, text: one_line(text) }
    }

    fn blank(width: usize) -> Self {
        Self { tint: Tint::Plain, text: " ".repeat(width) }
    }

    fn width(&self) -> usize {
        self.text.chars().map(width).sum()
    }

    /// Cuts the text to at most `room` columns; the last one shows that there is more.
    fn cut(&self, room: usize) -> Self {
        if self.width() <= room {
            return self.clone();
        }
        let mut left = room.saturating_sub(1);
        let kept = self.text.chars().take_while(|char| {
            let fits = width(*char) <= left;
            left = left.saturating_sub(width(*char));
            fits
        });
        let mut text: String = kept.collect();
        text.extend(Some(ELLIPSIS).filter(|_| room > 0));
        Self { tint: self.tint, text }
    }
}

/// The columns that a terminal gives a character; characters of width 0 were escaped.
fn width(char: char) -> usize {
    char.width().unwrap_or(0)
}

/// A line of `room` columns at most.
pub(super) fn cut(line: &[Piece], room: usize) -> Line {
    let mut left = room;
    let mut kept = Line::new();
    for (at, piece) in line.iter().enumerate() {
        let more = line.iter().skip(at + 1).any(|piece| piece.width() > 0);
        if piece.width() > left || (more && piece.width() == left) {
            // One column is for the ellipsis, even if the cut is between two pieces.
            let text = format!("{}{ELLIPSIS}", piece.text);
            kept.push(Piece { tint: piece.tint, text }.cut(left));
            break;
        }
        left -= piece.width();
        kept.push(piece.clone());
    }
    kept
}

pub(super) fn written(line: &[Piece], color: bool) -> String {
    let end = line.iter().rposition(|piece| !piece.text.trim_end().is_empty()).map_or(0, |last| last + 1);
    let mut text = String::new();
    for (at, piece) in line.iter().take(end).enumerate() {
        let shown = if at + 1 == end { piece.text.trim_end() } else { &piece.text };
        match piece.tint.code() {
            "" => text += shown,
            _ if !color => text += shown,
            code => text += &format!("{code}{shown}\x1b[0m"),
        }
    }
    text
}

impl<const N: usize> Table<N> {
    /// The lines, the titles first, in `room` columns; none without rows. An empty column is left out.
    pub fn lines(&self, room: usize) -> Vec<Line> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        let natural = |at: usize| self.rows.iter().filter_map(|row| row.get(at)).map(Piece::width).max().unwrap_or(0);
        // The index of each shown column, and its width.
        let mut shown: Vec<(usize, &Column, usize)> =
            (0..).zip(&self.columns).map(|(at, c)| (at, c, natural(at))).collect();
        shown.retain(|(.., width)| *width > 0);
        for (_, column, width) in &mut shown {
            *width = (*width).max(column.title.len());
        }
        let total = |widths: &[(usize, &Column, usize)], most: usize| -> usize {
            widths.iter().map(|(.., width)| (*width).min(most) + GAP).sum::<usize>().saturating_sub(GAP)
        };
        while total(&shown, NARROWEST) > room {
            let drop = shown.iter().map(|(_, column, _)| column.drop).max().unwrap_or(0);
            if drop == 0 {
                break;
            }
            shown.retain(|(_, column, _)| column.drop != drop);
        }
        while total(&shown, usize::MAX) > room {
            let widest = shown.iter_mut().map(|(.., width)| width).max();
            match widest.filter(|width| **width > NARROWEST) {
                Some(width) => *width -= 1,
                None => break,
            }
        }
        let titles = self.columns.each_ref().map(|column| Piece::new(Tint::Title, column.title));
        let line = |row: &[Piece; N]| {
            let mut line = Line::new();
            for (at, column, width) in &shown {
                let Some(piece) = row.get(*at).map(|piece| piece.cut(*width)) else { continue };
                let pad = Piece::blank(width.saturating_sub(piece.width()));
                let gap = Piece::blank(if line.is_empty() { 0 } else { GAP });
                line.extend(if column.right { [gap, pad, piece] } else { [gap, piece, pad] });
            }
            cut(&trimmed(line), room)
        };
        std::iter::once(&titles).chain(&self.rows).map(line).collect()
    }
}

/// A line without blanks at its end: they would be cut with an ellipsis.
fn trimmed(mut line: Line) -> Line {
    while line.last().is_some_and(|piece| piece.text.trim().is_empty()) {
        line.pop();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Piece {
        Piece::new(Tint::Plain, text)
    }

    fn text(line: &[Piece]) -> String {
        written(line, false)
    }

    #[test]
    fn cut_keeps_to_columns_of_wide_characters() {
        for (given, room, kept) in [
            ("train", 5, "train"),
            ("train-1", 5, "trai…"),
            ("漢字漢字", 8, "漢字漢字"),
            ("漢字漢字", 7, "漢字漢…"),
            // Half of a wide character cannot be shown.
            ("漢字漢字", 6, "漢字…"),
            ("a", 0, ""),
            ("ab", 1, "…"),
        ] {
            assert_eq!(plain(given).cut(room).text, kept, "{given} in {room}");
            assert_eq!(text(&cut(&[plain(given)], room)), kept, "{given} in {room}");
        }
        // The cut may lie between two pieces too.
        assert_eq!(text(&cut(&[plain("ab"), plain("cd")], 2)), "a…");
        assert_eq!(text(&cut(&[plain("ab"), plain("cd")], 3)), "ab…");
        assert_eq!(text(&cut(&[plain("ab"), plain("cd")], 4)), "abcd");
    }

    #[test]
    fn text_from_outside_has_no_escapes() {
        let hostile = plain("a\x1b[2J\u{9b}1m\r\nb\u{202e}c\u{301}\u{200b}");
        assert_eq!(hostile.text, "a\\u{1b}[2J\\u{9b}1m b\\u{202e}c\\u{301}\\u{200b}");
    }

    #[test]
    fn colours_are_written_only_where_wanted() {
        let line = [Piece::new(Tint::Bad, "sick"), Piece::blank(4)];
        assert_eq!((written(&line, true), text(&line)), ("\x1b[31msick\x1b[0m".to_owned(), "sick".to_owned()));
    }

    #[test]
    fn table_drops_then_narrows_then_cuts() {
        let column = |title, right, drop| Column { title, right, drop };
        let columns =
            || [column("POD", false, 0), column("WHY", false, 2), column("NONE", false, 0), column("N", true, 1)];
        let rows = vec![
            [plain("a-pod-with-a-long-name"), plain("fragmented by others"), plain(""), plain("12")],
            [plain("b"), plain(""), plain(""), plain("3")],
        ];
        let table = Table { columns: columns(), rows };
        let lines = |room| table.lines(room).iter().map(|line| text(line)).collect::<Vec<_>>();
        assert_eq!(
            lines(60),
            [
                "POD                     WHY                    N",
                "a-pod-with-a-long-name  fragmented by others  12",
                "b                                              3",
            ]
        );
        assert_eq!(
            lines(32),
            [
                "POD            WHY             N",
                "a-pod-with-a…  fragmented b…  12",
                "b                              3"
            ]
        );
        assert_eq!(lines(20), ["POD                N", "a-pod-with-a-lo…  12", "b                  3"]);
        assert_eq!(lines(6), ["POD", "a-pod…", "b"]);
    }
}
