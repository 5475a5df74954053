//! Limits the time without a message from the agent, and knows the call during which the agent fell silent: a pure
//! state machine.
//!
//! Called by `child`, which passes on each message, and kills the agent when a deadline has expired. Moments are
//! arguments.

use std::time::Duration;

use tokio::time::Instant;

use super::agent::INIT;
use super::events::WAIT_TIMEOUT;
use super::full_scan::HANDLE;
use super::protocol::{Called, FromAgent};

/// The longest times for the agent's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The limit for starting the process, for loading and initialising the library, and, until the first scan is done,
    /// for the call that gives a GPU's handle: without persistence mode the driver starts the GPU for this call, which
    /// takes seconds.
    pub start: Duration,
    /// The limit for any other call.
    pub call: Duration,
}

impl Default for Limits {
    /// Allows for several timeouts of the driver in a call that meets a fault: a timeout of the GPU's system processor
    /// is 6 s (the text of XID 119). An answer is better evidence than a kill.
    fn default() -> Self {
        Self { start: Duration::from_secs(120), call: Duration::from_secs(30) }
    }
}

/// The longest usual delay of a wake-up; a longer one means that this process was suspended.
const MAX_LATENESS: Duration = Duration::from_secs(1);

/// The limits of one agent.
#[derive(Debug)]
pub struct Watchdog {
    limits: Limits,
    poll: Duration,
    /// The call that has not returned.
    pub open_call: Option<Called>,
    /// The time that the deadline allows.
    pub limit: Duration,
    /// The deadline for the next message; messages about events do not count.
    pub deadline: Instant,
    stage: Stage,
}

/// The progress of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Initialising,
    Scanning,
    Ready,
}

impl Watchdog {
    /// Starts with an agent that is being started.
    pub fn new(limits: Limits, poll: Duration, now: Instant) -> Self {
        let (limit, stage) = (limits.start, Stage::Initialising);
        Self { limits, poll, open_call: None, limit, deadline: now + limit, stage }
    }

    /// Returns true if NVML was initialised at the last message.
    pub fn has_initialised(&self) -> bool {
        self.stage != Stage::Initialising
    }

    /// Records that the agent is about to make a call.
    pub fn calling(&mut self, called: Called, now: Instant) {
        let initialises = called.call == INIT;
        if !initialises && self.stage == Stage::Initialising {
            self.stage = Stage::Scanning;
        }
        let starts = initialises || (called.call == HANDLE && self.stage == Stage::Scanning);
        self.open_call = Some(called);
        self.set_limit(if starts { self.limits.start } else { self.limits.call }, now);
    }

    /// Records a message. Returns the duration of the wait for events if the wait is stuck.
    pub fn received(&mut self, message: &FromAgent, now: Instant) -> Option<Duration> {
        match message {
            FromAgent::Ready(_) | FromAgent::Polled { .. } | FromAgent::MigDone(_) | FromAgent::Leaving(_) => {
                if matches!(message, FromAgent::Ready(_)) {
                    self.stage = Stage::Ready;
                }
                self.open_call = None;
                self.set_limit(self.poll + self.limits.call, now);
            }
            // These come from the thread that waits for events, and say nothing about the polling thread.
            FromAgent::Xid { .. } | FromAgent::DoubleBitEcc { .. } | FromAgent::Failed { .. } => {}
            FromAgent::Calling(called) => self.calling(called.clone(), now),
        }
        let FromAgent::Polled { waiting_ms, .. } = message else { return None };
        let waiting = Duration::from_millis(*waiting_ms);
        (waiting > WAIT_TIMEOUT + self.limits.call).then_some(waiting)
    }

    /// Confirms a deadline that is due. If this process woke more than a second late (it was suspended, and maybe the
    /// agent with it), starts the deadline again and returns false.
    pub fn confirm_expiry(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.deadline) > MAX_LATENESS {
            self.set_limit(self.limit, now);
            return false;
        }
        true
    }

    fn set_limit(&mut self, limit: Duration, now: Instant) {
        self.limit = limit;
        self.deadline = now + limit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::NodeScan;
    use std::collections::BTreeMap;

    const LIMITS: Limits = Limits { start: Duration::from_secs(120), call: Duration::from_secs(30) };
    const POLL: Duration = Duration::from_secs(10);

    fn called(call: &str) -> Called {
        Called { call: call.to_owned(), gpu: None }
    }

    fn polled(waiting_ms: u64) -> FromAgent {
        FromAgent::Polled { gpus: BTreeMap::new(), missing: Vec::new(), unheard: 0, waiting_ms }
    }

    #[test]
    fn each_call_and_each_poll_has_its_limit() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        let left = |watchdog: &Watchdog| watchdog.deadline - start;
        assert_eq!((left(&watchdog), watchdog.open_call.as_ref()), (LIMITS.start, None));
        watchdog.calling(called(INIT), start);
        assert_eq!((left(&watchdog), watchdog.has_initialised()), (LIMITS.start, false));
        watchdog.calling(called("nvmlDeviceGetCount_v2"), start);
        assert_eq!((left(&watchdog), watchdog.has_initialised()), (LIMITS.call, true));
        watchdog.calling(called(HANDLE), start);
        assert_eq!(left(&watchdog), LIMITS.start);
        watchdog.calling(called("nvmlDeviceGetName"), start);
        assert_eq!((left(&watchdog), watchdog.open_call.as_ref()), (LIMITS.call, Some(&called("nvmlDeviceGetName"))));
        // An event says nothing about the open call.
        let event = FromAgent::DoubleBitEcc { gpu: "GPU-1".parse().unwrap() };
        assert_eq!(watchdog.received(&event, start + POLL), None);
        assert_eq!((left(&watchdog), watchdog.open_call.as_ref().is_some()), (LIMITS.call, true));
        assert_eq!(watchdog.received(&polled(0), start), None);
        assert_eq!((left(&watchdog), watchdog.open_call.as_ref()), (POLL + LIMITS.call, None));
        assert!(watchdog.confirm_expiry(watchdog.deadline));
    }

    #[test]
    fn handle_call_has_the_long_limit_until_ready() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        let handle = |watchdog: &mut Watchdog| {
            watchdog.calling(called(HANDLE), start);
            watchdog.deadline - start
        };
        // The GPUs are asked one after the other.
        assert_eq!((handle(&mut watchdog), handle(&mut watchdog)), (LIMITS.start, LIMITS.start));
        let ready = FromAgent::Ready(Box::new(NodeScan::bare(Vec::new())));
        assert_eq!(watchdog.received(&ready, start), None);
        assert_eq!(handle(&mut watchdog), LIMITS.call);
        assert_eq!(watchdog.received(&polled(0), start), None);
        assert_eq!(handle(&mut watchdog), LIMITS.call);
    }

    #[test]
    fn stuck_wait_for_events_is_detected() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        let longest = u64::try_from((WAIT_TIMEOUT + LIMITS.call).as_millis()).unwrap();
        assert_eq!(watchdog.received(&polled(longest), start), None);
        assert_eq!(watchdog.received(&polled(longest + 1), start), Some(Duration::from_millis(longest + 1)));
    }

    #[test]
    fn deadline_starts_again_after_a_suspension() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        watchdog.calling(called("nvmlDeviceGetName"), start);
        let late = watchdog.deadline + Duration::from_secs(60);
        assert!(!watchdog.confirm_expiry(late));
        assert_eq!(watchdog.deadline, late + LIMITS.call);
        assert!(watchdog.confirm_expiry(watchdog.deadline));
    }
}
