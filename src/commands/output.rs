//! Standard output, where a closed pipe is no error.

use std::io::{self, Write};

/// Writes to standard output; `linkwise topology | head` is not a failure.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
