//! A line on a terminal about work that takes longer than a second: its name, its progress, and its duration.
//!
//! The line goes to standard error, appears after a second, and vanishes when the work is done. It is not shown if
//! standard error is not a terminal. A thread draws it, so that it also moves while work blocks or computes.

use crate::lock;
use std::fmt;
use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The time after which the line appears.
const AFTER: Duration = Duration::from_secs(1);

/// The time from one drawing to the next.
const AGAIN: Duration = Duration::from_millis(250);

/// The width of the bar, in characters.
const BAR: usize = 30;

/// The most characters of the line: one that wraps would not be cleared, and the cursor needs one column.
const MAX_LINE: usize = 79;

/// Work in progress; it ends when this is dropped.
pub struct Progress {
    seen: Arc<Seen>,
    /// Ends the thread when it is dropped; `None` if no line is drawn.
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

struct Seen {
    what: Mutex<String>,
    done: AtomicUsize,
    /// The number of pieces; 0 if it is unknown.
    all: AtomicUsize,
    since: Instant,
}

impl Progress {
    /// Begins work of unknown length.
    pub fn start(what: &str) -> Self {
        Self::of(what, 0)
    }

    /// Begins work of `all` pieces.
    pub fn of(what: &str, all: usize) -> Self {
        let (done, all) = (AtomicUsize::new(0), AtomicUsize::new(all));
        let seen = Arc::new(Seen { what: Mutex::new(what.to_owned()), done, all, since: Instant::now() });
        let drawing = Some(channel()).filter(|_| stderr().is_terminal()).and_then(|(end, ended)| {
            let shown = Arc::clone(&seen);
            let thread = Builder::new().name("progress".to_owned()).spawn(move || draw(&shown, &ended));
            // Without a thread there is no line; the work goes on.
            Some((end, thread.ok()?))
        });
        Self { seen, drawing }
    }

    /// Shows that the work goes on with another step.
    pub fn step(&self, what: &str) {
        *lock(&self.seen.what) = what.to_owned();
    }

    /// Records that this number of pieces is done.
    pub fn done(&self, pieces: usize) {
        self.seen.done.store(pieces, Ordering::Relaxed);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.drawing.take() {
            drop(end);
            // A thread that panicked has no line to clear.
            let _ = thread.join();
        }
    }
}

fn draw(seen: &Seen, ended: &Receiver<()>) {
    let mut pause = AFTER;
    while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let line: String = seen.to_string().chars().take(MAX_LINE).collect();
        // If the line cannot be written, the work goes on.
        let _ = write!(stderr().lock(), "\r{line}\x1b[K");
        pause = AGAIN;
    }
    if pause == AGAIN {
        // This returns to the start of the line, and clears it.
        let _ = write!(stderr().lock(), "\r\x1b[K");
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = lock(&self.what);
        match (self.done.load(Ordering::Relaxed), self.all.load(Ordering::Relaxed)) {
            (_, 0) => write!(f, "{what}, {} s", self.since.elapsed().as_secs()),
            (done, all) => {
                let full = (done * BAR).checked_div(all).unwrap_or(0).min(BAR);
                let percent = (done * 100).checked_div(all).unwrap_or(0);
                let bar: String = (0..BAR).map(|at| if at < full { '#' } else { '.' }).collect();
                write!(f, "{what:<12} [{bar}] {percent:>3} %  {done} of {all}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_shows_the_share_that_is_done() {
        let progress = Progress::of("plugin", 1000);
        let shown = |done| {
            progress.done(done);
            progress.seen.to_string()
        };
        assert_eq!([0, 500, 999, 1000].map(|done| shown(done).matches('#').count()), [0, 15, 29, 30]);
        assert!(shown(500).ends_with(" 50 %  500 of 1000"));
        let unknown = Progress::start("one");
        unknown.step("two");
        assert!(unknown.seen.to_string().starts_with("two, "));
    }
}
