//! Standard output, where a closed pipe is no error; and the files that a person names, among them standard input.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use anyhow::{Context, Result};

/// Writes to standard output; `linkwise topology | head` is not a failure.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// A file that a person named, or standard input.
pub fn open(path: &Path) -> Result<Box<dyn Read>> {
    match path.to_str() {
        Some("-") => Ok(Box::new(io::stdin().lock())),
        _ => Ok(Box::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?)),
    }
}
