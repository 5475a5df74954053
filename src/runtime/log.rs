//! The log: lines to standard error, written by a thread of their own.
//!
//! Whoever reads standard error may stop reading (a container's log pipe is full, its disk hangs). Then lines are lost,
//! never time: nobody but that thread waits for the write.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::LogFormat;

/// Lines that may wait to be written; more are lost.
const LINES: usize = 1024;
/// How long the end waits for the last lines.
const LAST_MOMENTS: Duration = Duration::from_millis(200);

/// The log that was set up; its last lines are written when this goes.
#[must_use]
#[derive(Debug)]
pub struct Log(SyncSender<Item>);

/// What the thread is handed.
#[derive(Debug)]
enum Item {
    /// A whole line.
    Line(Vec<u8>),
    /// Somebody waits until what came before is written.
    Flush(SyncSender<()>),
}

/// Where a line goes.
#[derive(Clone)]
struct Lines(SyncSender<Item>);

/// Sets up the log, on standard error.
pub fn log_to_stderr(filter: &str, format: LogFormat) -> Result<Log> {
    let filter: Targets = filter.parse().with_context(|| format!("'{filter}' is not a log filter"))?;
    let (lines, waiting) = sync_channel(LINES);
    let writer = thread::Builder::new().name("log".to_owned()).spawn(move || write(&waiting));
    writer.context("cannot start the thread that writes the log")?;
    let log = tracing_subscriber::fmt::layer().with_writer(Lines(lines.clone())).with_target(false);
    let log = match format {
        LogFormat::Text => log.with_ansi(false).boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    let set = tracing_subscriber::registry().with(filter).with(log).try_init();
    set.map_err(|error| anyhow::anyhow!("cannot set up the log: {error}"))?;
    Ok(Log(lines))
}

/// Writes until nobody is left who logs. Nobody can be told of a line that cannot be written.
fn write(waiting: &Receiver<Item>) {
    for item in waiting {
        match item {
            Item::Line(line) => drop(io::stderr().write_all(&line)),
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done, written) = sync_channel(1);
        // Full: it is not being read, or lines have been lost anyway.
        if self.0.try_send(Item::Flush(done)).is_ok() {
            let _ = written.recv_timeout(LAST_MOMENTS);
        }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Write for Lines {
    /// Takes a whole line: what formats it hands it over at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match self.0.try_send(Item::Line(line.to_owned())) {
            Ok(()) | Err(TrySendError::Full(_)) => Ok(line.len()),
            Err(TrySendError::Disconnected(_)) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
