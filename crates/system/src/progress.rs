//! A line on a terminal about work that takes longer than a second: its name and its duration.
//!
//! The line goes to standard error, appears after a second, and vanishes when the work is done. It is not shown if
//! standard error is not a terminal. A thread draws it, so that it also moves while work blocks or computes.

use crate::lock;
use std::io::{IsTerminal, Write, stderr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The time after which the line appears.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// The time from one drawing to the next.
const DRAW_INTERVAL: Duration = Duration::from_millis(250);

/// The line about work in progress, until this is dropped.
pub struct Progress {
    what: Arc<Mutex<String>>,
    /// Ends the thread when it is dropped; `None` if no line is drawn.
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Begins work.
    pub fn start(what: &str) -> Self {
        let what = Arc::new(Mutex::new(what.to_owned()));
        let drawing = Some(channel()).filter(|_| stderr().is_terminal()).and_then(|(end_sender, end)| {
            let shown = Arc::clone(&what);
            let thread = Builder::new().name("progress".to_owned()).spawn(move || draw(&shown, &end));
            // Without a thread there is no line; the work goes on.
            Some((end_sender, thread.ok()?))
        });
        Self { what, drawing }
    }

    /// Shows that the work goes on with another step.
    pub fn step(&self, what: &str) {
        *lock(&self.what) = what.to_owned();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end_sender, thread)) = self.drawing.take() {
            drop(end_sender);
            // If the thread panicked, its line may stay.
            let _ = thread.join();
        }
    }
}

fn draw(what: &Mutex<String>, end: &Receiver<()>) {
    let (since, mut pause) = (Instant::now(), FIRST_DELAY);
    while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let (what, seconds) = (lock(what).clone(), since.elapsed().as_secs());
        // If the line cannot be written, the work goes on.
        let _ = write!(stderr().lock(), "\r{what}, {seconds} s\x1b[K");
        pause = DRAW_INTERVAL;
    }
    if pause == DRAW_INTERVAL {
        // This returns to the start of the line, and clears it.
        let _ = write!(stderr().lock(), "\r\x1b[K");
    }
}
