//! Decides when a new process asks for a GPU that no process in use reaches any more. Pure; moments are arguments.
//!
//! Called by `machine` at each poll. The library may answer GPU_IS_LOST for a GPU as long as a process lives, even after
//! the GPU was reset, and a process keeps the count of GPUs with which it started: only a new process sees such a GPU
//! again. New processes follow ever more rarely while the GPU stays out of reach.

use std::time::Duration;

use linkwise_core::backoff::Backoff;

/// The longest pause, as a multiple of the first.
const LONGEST: u32 = 60;

#[derive(Debug)]
pub(super) struct LostGpus {
    backoff: Backoff,
    /// The moment at which a new process asks next, and the GPU out of reach.
    next: Option<(Duration, String)>,
}

impl LostGpus {
    /// Starts with every GPU in reach. The first new process follows after `first`; each next pause is twice as long.
    pub fn new(first: Duration) -> Self {
        Self { backoff: Backoff::new(first, first.saturating_mul(LONGEST)), next: None }
    }

    /// Records a poll: one of the GPUs out of reach and the reason, or none.
    pub fn polled(&mut self, lost: Option<String>, now: Duration) {
        let Some(lost) = lost else {
            self.backoff.reset();
            self.next = None;
            return;
        };
        let at = self.next.take().map_or_else(|| now + self.backoff.failed(), |(at, _)| at);
        self.next = Some((at, lost));
    }

    /// The next new process: its moment, and the reason.
    pub fn next(&self) -> Option<(Duration, &str)> {
        self.next.as_ref().map(|(at, lost)| (*at, lost.as_str()))
    }

    /// Records that a new process asks now.
    pub fn asked(&mut self, now: Duration) {
        if let Some((at, _)) = &mut self.next {
            *at = now + self.backoff.failed();
        }
    }
}
