//! The agents that there are: the active one, the standby that is to follow it, and those whose processes have not
//! ended. Pure.
//!
//! Called by `machine`, which decides; this keeps the books.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::host_probe::HostFingerprint;
use crate::backoff::Backoff;
use crate::nvml::protocol::{CalledGpu, Place};
use crate::topology::GpuUuid;

/// So many processes may not have ended, and another agent is still started: a driver in which processes get stuck is
/// not helped by more of them.
const MOST_UNREAPED: usize = 2;

/// How long an agent that was asked to end has for it, and for the events that it still holds, before it is killed.
pub(super) const RETIREMENT: Duration = Duration::from_secs(2);

/// Names one agent, in the order of their starts.
pub(super) type AgentId = u64;

/// The metric's word for an agent that was killed because it had too much memory.
pub(super) const OVER_MEMORY: &str = "memory";

/// How an agent ended, as a plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AgentEnd {
    /// The metric's word; `None` where no process was started.
    pub cause: Option<&'static str>,
    /// For people.
    pub why: String,
    /// The GPU whose call hung or crashed it.
    pub blamed: Option<CalledGpu>,
    /// Whether NVML was initialised, and still was at the end.
    pub initialised: bool,
    /// Whether there is no driver as far as NVML goes: no library that loads, or it answered that none is loaded. A
    /// library that crashes, hangs or leaks is there, and so may be a driver.
    pub no_driver: bool,
    /// Whether the process has ended; else it was killed, and its end is still to come.
    pub reaped: bool,
}

impl AgentEnd {
    /// No process was started.
    pub fn not_started(why: String) -> Self {
        Self { cause: None, why, blamed: None, initialised: false, no_driver: false, reaped: true }
    }
}

/// Why an agent is started beside the one that works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RestartReason {
    /// To try a quarantined GPU.
    Trial(Place),
    /// The active agent does not see what there is now.
    Renewal(String),
}

impl fmt::Display for RestartReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trial(place) => write!(f, "trial of the quarantined GPU {} of {}", place.index, place.of),
            Self::Renewal(why) => f.write_str(why),
        }
    }
}

/// The agent that works.
#[derive(Debug)]
pub(super) struct ActiveAgent {
    pub id: AgentId,
    /// When it, or the first of those that followed each other without a gap, was started.
    pub began: Duration,
    pub skipped: Vec<Place>,
    /// Whether it has seen the GPUs.
    pub ready: bool,
    /// The GPUs whose events it reports: those of its start.
    pub listens_to: BTreeSet<GpuUuid>,
    /// The host before its start, or at the latest look.
    pub host: Option<HostFingerprint>,
    /// When a standby is to follow it, and why.
    pub renewal: Option<(Duration, String)>,
    /// The pauses after standbys that failed.
    pub backoff: Backoff,
}

impl ActiveAgent {
    /// A standby is needed; when, is known where one has failed.
    pub fn renew(&mut self, why: String, now: Duration) {
        self.renewal.get_or_insert((now, why));
    }
}

/// The agent that is to follow the active one.
#[derive(Debug)]
pub(super) struct StandbyAgent {
    pub id: AgentId,
    pub skipped: Vec<Place>,
    pub reason: RestartReason,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Agents {
    last: AgentId,
    pub active: Option<ActiveAgent>,
    pub standby: Option<StandbyAgent>,
    /// Asked to end, and when each is killed. Their events still count.
    retired: BTreeMap<AgentId, Duration>,
    /// Killed, and not ended: a process that is stuck in the kernel does not even die of SIGKILL.
    killed: BTreeSet<AgentId>,
}

impl Agents {
    /// The name of a new agent.
    pub fn next_id(&mut self) -> AgentId {
        self.last += 1;
        self.last
    }

    /// Whether another agent may be started.
    pub fn has_room(&self) -> bool {
        self.retired.len() + self.killed.len() <= MOST_UNREAPED
    }

    /// Processes that were killed and have not ended.
    pub fn unreaped(&self) -> usize {
        self.killed.len()
    }

    /// Whether so many do not end that no other agent is started.
    pub fn is_stuck(&self) -> bool {
        self.killed.len() > MOST_UNREAPED
    }

    /// An agent is asked to end.
    pub fn retire(&mut self, id: AgentId, now: Duration) {
        self.retired.insert(id, now + RETIREMENT);
    }

    /// An agent was killed.
    pub fn kill(&mut self, id: AgentId) {
        self.retired.remove(&id);
        self.killed.insert(id);
    }

    /// The process has ended.
    pub fn reaped(&mut self, id: AgentId) {
        self.retired.remove(&id);
        self.killed.remove(&id);
    }

    /// Whether the agent was asked to end.
    pub fn is_retired(&self, id: AgentId) -> bool {
        self.retired.contains_key(&id)
    }

    /// When the next retired agent is to be killed, and which.
    pub fn next_kill(&self) -> Option<(Duration, AgentId)> {
        self.retired.iter().map(|(id, at)| (*at, *id)).min()
    }
}
