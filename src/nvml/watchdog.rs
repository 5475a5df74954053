//! How long the agent may be silent, and which call it was in when it fell silent: a pure state machine.
//!
//! Called by `child`, which passes on each message, and kills the agent when a deadline has expired. Moments are
//! arguments.

use std::time::Duration;

use tokio::time::Instant;

use super::agent::INIT;
use super::events::WAIT;
use super::probe::HANDLE;
use super::protocol::{Called, FromAgent};

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Starting the process, loading and initialising the library, the call that gives a GPU's handle until the child
    /// has seen the GPUs: without persistence mode the driver starts the GPUs for it, which takes seconds each.
    pub start: Duration,
    /// Any other call.
    pub call: Duration,
}

impl Default for Limits {
    /// A call that meets a fault may take several time-outs of the driver's own before it answers: one to the GPU's
    /// system processor is 6 s (the text of XID 119), and an answer is better evidence than a kill.
    fn default() -> Self {
        Self { start: Duration::from_secs(120), call: Duration::from_secs(30) }
    }
}

/// Waking later than this means that this process was suspended.
const LATE: Duration = Duration::from_secs(1);

/// Follows one child.
#[derive(Debug)]
pub struct Watchdog {
    limits: Limits,
    /// From one round to the next.
    poll: Duration,
    open: Option<Called>,
    limit: Duration,
    until: Instant,
    stage: Stage,
}

/// How far the child has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It loads and initialises the library.
    Initialising,
    /// It looks at the GPUs for the first time.
    Looking,
    /// It has seen them.
    Ready,
}

impl Watchdog {
    /// A child that is being started.
    pub fn new(limits: Limits, poll: Duration, now: Instant) -> Self {
        let (limit, stage) = (limits.start, Stage::Initialising);
        Self { limits, poll, open: None, limit, until: now + limit, stage }
    }

    /// The deadline for the next message.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// The call that has not returned.
    pub fn open(&self) -> Option<&Called> {
        self.open.as_ref()
    }

    /// Whether NVML was initialised at the last message.
    pub fn has_initialised(&self) -> bool {
        self.stage != Stage::Initialising
    }

    /// The time from the last message to the deadline.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The child is about to make a call.
    pub fn calling(&mut self, called: Called, now: Instant) {
        let initialises = called.call == INIT;
        if !initialises && self.stage == Stage::Initialising {
            self.stage = Stage::Looking;
        }
        let starts = initialises || (called.call == HANDLE && self.stage == Stage::Looking);
        self.open = Some(called);
        self.give(if starts { self.limits.start } else { self.limits.call }, now);
    }

    /// Takes any other message. Returns how long the wait for events has lasted, where it is stuck.
    pub fn heard(&mut self, message: &FromAgent, now: Instant) -> Option<Duration> {
        match message {
            FromAgent::Ready(_) | FromAgent::Polled { .. } | FromAgent::MigDone(_) | FromAgent::Leaving(_) => {
                if matches!(message, FromAgent::Ready(_)) {
                    self.stage = Stage::Ready;
                }
                self.open = None;
                self.give(self.poll + self.limits.call, now);
            }
            // These come from the thread that waits, whatever the other one does.
            FromAgent::Xid { .. } | FromAgent::DoubleBitEcc { .. } | FromAgent::Failed { .. } => {}
            FromAgent::Calling(called) => self.calling(called.clone(), now),
        }
        let FromAgent::Polled { waiting_ms, .. } = message else { return None };
        let waiting = Duration::from_millis(*waiting_ms);
        (waiting > WAIT + self.limits.call).then_some(waiting)
    }

    /// Whether the deadline has expired. If this process woke more than a second late (it was suspended, and maybe the
    /// agent with it), the deadline starts anew instead.
    pub fn is_expired(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.until) > LATE {
            self.give(self.limit, now);
            return false;
        }
        true
    }

    fn give(&mut self, limit: Duration, now: Instant) {
        self.limit = limit;
        self.until = now + limit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml::scan::NodeScan;
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
        let left = |watchdog: &Watchdog| watchdog.until() - start;
        assert_eq!((left(&watchdog), watchdog.open()), (LIMITS.start, None));
        watchdog.calling(called(INIT), start);
        assert_eq!((left(&watchdog), watchdog.has_initialised()), (LIMITS.start, false));
        watchdog.calling(called("nvmlDeviceGetCount_v2"), start);
        assert_eq!((left(&watchdog), watchdog.has_initialised()), (LIMITS.call, true));
        watchdog.calling(called(HANDLE), start);
        assert_eq!(left(&watchdog), LIMITS.start);
        watchdog.calling(called("nvmlDeviceGetName"), start);
        assert_eq!((left(&watchdog), watchdog.open()), (LIMITS.call, Some(&called("nvmlDeviceGetName"))));
        // An event says nothing of the call that is open.
        let xid = FromAgent::DoubleBitEcc { gpu: "GPU-1".parse().unwrap() };
        assert_eq!(watchdog.heard(&xid, start + POLL), None);
        assert_eq!((left(&watchdog), watchdog.open().is_some()), (LIMITS.call, true));
        assert_eq!(watchdog.heard(&polled(0), start), None);
        assert_eq!((left(&watchdog), watchdog.open()), (POLL + LIMITS.call, None));
        assert!(watchdog.is_expired(watchdog.until()));
    }

    #[test]
    fn handle_call_has_the_long_limit_until_ready() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        let handle = |watchdog: &mut Watchdog| {
            watchdog.calling(called(HANDLE), start);
            watchdog.until() - start
        };
        // GPU after GPU.
        assert_eq!((handle(&mut watchdog), handle(&mut watchdog)), (LIMITS.start, LIMITS.start));
        let (gpus, failures) = (Vec::new(), Vec::new());
        let (driver, library, cuda) = (Ok(None), Ok(None), Ok(None));
        let ready = FromAgent::Ready(Box::new(NodeScan {
            driver,
            library,
            path: String::new(),
            cuda,
            count: Some(0),
            gpus,
            failures,
        }));
        assert_eq!(watchdog.heard(&ready, start), None);
        assert_eq!(handle(&mut watchdog), LIMITS.call);
        assert_eq!(watchdog.heard(&polled(0), start), None);
        assert_eq!(handle(&mut watchdog), LIMITS.call);
    }

    #[test]
    fn stuck_wait_for_events_is_detected() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        let longest = u64::try_from((WAIT + LIMITS.call).as_millis()).unwrap();
        assert_eq!(watchdog.heard(&polled(longest), start), None);
        assert_eq!(watchdog.heard(&polled(longest + 1), start), Some(Duration::from_millis(longest + 1)));
    }

    #[test]
    fn deadline_starts_anew_after_a_suspension() {
        let start = Instant::now();
        let mut watchdog = Watchdog::new(LIMITS, POLL, start);
        watchdog.calling(called("nvmlDeviceGetName"), start);
        let late = watchdog.until() + Duration::from_secs(60);
        assert!(!watchdog.is_expired(late));
        assert_eq!(watchdog.until(), late + LIMITS.call);
        assert!(watchdog.is_expired(watchdog.until()));
    }
}
