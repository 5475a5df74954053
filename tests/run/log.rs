//! The log of the code that a test runs in its own thread.

use std::io;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::Level;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::run::node::LIMIT;

/// Collects linkwise's own log lines, from DEBUG up, until it is dropped.
pub struct Log {
    pub lines: watch::Sender<Vec<String>>,
    _guard: DefaultGuard,
}

struct Lines(watch::Sender<Vec<String>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.send_modify(|lines| lines.push(String::from_utf8_lossy(line).into_owned()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    pub fn start() -> Self {
        let lines = watch::Sender::new(Vec::new());
        let writer = lines.clone();
        let plain = tracing_subscriber::fmt::layer().with_ansi(false).with_target(false).without_time();
        let plain = plain.with_writer(move || Lines(writer.clone()));
        // Libraries log too much.
        let ours = Targets::new().with_target("linkwise", Level::DEBUG);
        Self { lines, _guard: tracing_subscriber::registry().with(plain.with_filter(ours)).set_default() }
    }

    /// Waits for a line that contains all of these words.
    pub async fn wait(&self, words: &[&str]) {
        self.wait_times(1, words).await;
    }

    /// Waits for this many lines that each contain all of these words.
    pub async fn wait_times(&self, times: usize, words: &[&str]) {
        let is_match = |line: &&String| words.iter().all(|word| line.contains(word));
        let mut lines = self.lines.subscribe();
        let found = timeout(LIMIT, lines.wait_for(|lines| lines.iter().filter(is_match).count() >= times)).await;
        let found = found.map(|found| drop(found.unwrap()));
        found.unwrap_or_else(|_| panic!("{words:?} is not {times} times in {:#?}", self.lines.borrow()));
    }
}
