//! The log: lines to standard error, written by a thread of its own.
//!
//! The reader of standard error may stop (a container's log pipe is full, its disk hangs). Then lines are lost, but the
//! program goes on: only that thread waits for the write, and the exit of the process waits for it at most 200 ms.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use linkwise_core::quote::quoted;
use linkwise_core::words;

/// The most lines that may be queued; further ones are lost.
const MAX_LINES: usize = 1024;
/// The longest time that the exit waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(200);

/// The log; its last lines are written when this is dropped.
#[must_use]
#[derive(Debug)]
pub struct Log(SyncSender<Item>);

#[derive(Debug)]
enum Item {
    Line(Vec<u8>),
    /// A request to report when all lines before it are written.
    Flush(SyncSender<()>),
}

/// The writer that `tracing` formats each line into.
struct Lines(SyncSender<Item>);

/// The form of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// JSON for machines.
    Json,
}

words!(LogFormat { Text = "text", Json = "json" });

/// Sets up the log, on standard error. The crate `quiet` logs nothing, unless the filter names it.
pub fn log_to_stderr(filter: &str, quiet: &str, format: LogFormat) -> Result<Log> {
    check(filter)?;
    let all = format!("{quiet}=off,{filter}");
    let filter: Targets = all.parse().with_context(|| format!("'{filter}' is not a log filter"))?;
    let (sender, items) = sync_channel(MAX_LINES);
    let writer = thread::Builder::new().name("log".to_owned()).spawn(move || write(&items));
    writer.context("cannot start the thread that writes the log")?;
    let queue = sender.clone();
    let log = tracing_subscriber::fmt::layer().with_writer(move || Lines(queue.clone())).with_target(false);
    let log = match format {
        LogFormat::Text => log.with_ansi(false).boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    let set = tracing_subscriber::registry().with(filter).with(log).try_init();
    set.map_err(|error| anyhow::anyhow!("cannot set up the log: {error}"))?;
    Ok(Log(sender))
}

/// Refuses an item other than a level, one of our targets and TARGET=LEVEL. The filter would take it for the name of a
/// target, and the log would show no line at all.
fn check(filter: &str) -> Result<()> {
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    for item in filter.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let is_valid = match item.split_once('=') {
            Some((target, level)) => !target.is_empty() && !level.is_empty() && is_level(level),
            None => is_level(item) || item.starts_with("linkwise"),
        };
        let item = quoted(item);
        ensure!(is_valid, "{item} is not a level (off, error, warn, info, debug, trace) and not a TARGET=LEVEL");
    }
    Ok(())
}

/// Writes until the last sender is dropped. A line that cannot be written is lost: there is no other place to report
/// it.
fn write(items: &Receiver<Item>) {
    for item in items {
        match item {
            Item::Line(line) => drop(io::stderr().write_all(&line)),
            Item::Flush(done) => drop(done.send(())),
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done_sender, done) = sync_channel(1);
        // A full queue shows that the reader has stopped, or that lines have been lost anyway.
        if self.0.try_send(Item::Flush(done_sender)).is_ok() {
            let _ = done.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

impl Write for Lines {
    /// Queues a whole line: the formatter writes one at a time.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_filter_items_are_refused() {
        for filter in ["", "info", "WARN", "off", "debug,h2=warn", "linkwise_nvml", "linkwise_nvml=trace", " info ,"] {
            assert!(check(filter).is_ok(), "{filter}");
        }
        for filter in ["warning", "verbose", "inf", "trace5", "=", "=info", "h2=", "h2=loud", "info,verbose"] {
            assert!(check(filter).unwrap_err().to_string().contains("is not a level"), "{filter}");
        }
    }
}
