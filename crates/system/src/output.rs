//! Standard output, where a closed pipe is not an error; tables; complaints on standard error; and the files that a
//! user names, which may be standard input.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use anyhow::{Context, Result};
use linkwise_core::quote::escaped;

/// Writes text or JSON to standard output. Control characters are escaped, because the text may come from anywhere.
pub fn print(text: &str) -> io::Result<()> {
    print_styled(&escaped(text))
}

/// Writes text with control characters to standard output. A closed pipe, as in `linkwise topology | head`, is not an
/// error.
pub fn print_styled(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes lines to standard error, each after the program's name and with control characters escaped. If standard error
/// is closed, the lines are lost.
pub fn complain<T: Display>(program: &str, lines: impl IntoIterator<Item = T>) {
    let mut errors = io::stderr().lock();
    for line in lines {
        let line = escaped(&format!("{line:#}")).replace('\n', "\\n");
        let _ = writeln!(errors, "{program}: {line}");
    }
}

/// Pads columns to their widest cell, with two blanks between them.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        // A format's own width is limited to 65,535, and a cell may come from a file.
        let pad = |cell: &String, width: &usize| " ".repeat(width.saturating_sub(cell.chars().count()));
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell}{}", pad(cell, width)));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Opens a file that a user named; `-` is standard input.
pub fn open(path: &Path) -> Result<Box<dyn Read>> {
    match path.to_str() {
        Some("-") => Ok(Box::new(io::stdin().lock())),
        _ => Ok(Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?)),
    }
}
