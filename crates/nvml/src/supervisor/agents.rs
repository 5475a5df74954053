//! The agents: the active one, the standby that is to follow it, and those whose processes have not ended. Pure.
//!
//! Called by `machine`, which decides; this module keeps the books.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::host_probe::HostFingerprint;
use crate::protocol::{CalledGpu, Place};
use linkwise_core::backoff::Backoff;
use linkwise_core::topology::GpuUuid;

/// The number of unended processes at which no other agent is started: more processes do not help a driver in which
/// processes hang.
const MOST_UNREAPED: usize = 2;

/// The time that an agent has to end, and to report its last events, after it was asked to end; then it is killed.
pub(super) const RETIREMENT: Duration = Duration::from_secs(2);

/// Names one agent, in the order of their starts.
pub(super) type AgentId = u64;

/// The metric's label value for an agent that was killed because it had too much memory.
pub(super) const OVER_MEMORY: &str = "memory";

/// The end of an agent, as a plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AgentEnd {
    /// The metric's label value; `None` if no process was started.
    pub cause: Option<&'static str>,
    /// The reason in words, for people.
    pub why: String,
    /// The GPU whose call hung or crashed it.
    pub blamed: Option<CalledGpu>,
    /// Set if it found that an operator has released the driver.
    pub released: bool,
    /// Set if NVML was initialised, and still was at the end.
    pub initialised: bool,
    /// Set if NVML finds no driver: no library loads, or the library answered that no driver is loaded. A library that
    /// crashes, hangs or leaks exists, and so may a driver.
    pub no_driver: bool,
    /// Set if the process has ended; otherwise it was killed, and its end is still to come.
    pub reaped: bool,
}

impl AgentEnd {
    /// The end of an agent without a process.
    pub fn not_started(why: String) -> Self {
        Self { cause: None, why, blamed: None, released: false, initialised: false, no_driver: false, reaped: true }
    }
}

/// The reason for starting an agent beside a working one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RestartReason {
    /// A quarantined GPU is tried.
    Trial(Place),
    /// The active agent does not see the present state of the node.
    Renewal(String),
    /// A GPU is out of reach, and may be back for a new process.
    Lost(String),
}

impl fmt::Display for RestartReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trial(place) => write!(f, "trial of the quarantined GPU {} of {}", place.index, place.of),
            Self::Renewal(why) | Self::Lost(why) => f.write_str(why),
        }
    }
}

#[derive(Debug)]
pub(super) struct ActiveAgent {
    pub id: AgentId,
    /// The start of this agent, or of the first of several agents that followed each other without a gap.
    pub began: Duration,
    pub skipped: Vec<Place>,
    /// Set once the agent has scanned the GPUs.
    pub ready: bool,
    /// The GPUs whose events it reports: those present at its start.
    pub listens_to: BTreeSet<GpuUuid>,
    /// The host before the agent's start, or at the latest probe.
    pub host: Option<HostFingerprint>,
    /// The moment at which a standby is to follow this agent, and the reason.
    pub renewal: Option<(Duration, String)>,
    /// The pauses after standbys that failed.
    pub backoff: Backoff,
}

impl ActiveAgent {
    /// Records that a standby is needed; after a failed one, the moment is known already.
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

#[derive(Debug, Default)]
pub(super) struct Agents {
    last: AgentId,
    pub active: Option<ActiveAgent>,
    pub standby: Option<StandbyAgent>,
    /// The agents that were asked to end, and the moment at which each is killed. Their events still count.
    retired: BTreeMap<AgentId, Duration>,
    /// The agents that were killed but have not ended: a process that hangs in the kernel does not even die of SIGKILL.
    killed: BTreeSet<AgentId>,
}

impl Agents {
    /// The id of a new agent.
    pub fn next_id(&mut self) -> AgentId {
        self.last += 1;
        self.last
    }

    /// Returns true if another agent may be started.
    pub fn has_room(&self) -> bool {
        self.retired.len() + self.killed.len() <= MOST_UNREAPED
    }

    /// The number of killed processes that have not ended.
    pub fn unreaped(&self) -> usize {
        self.killed.len()
    }

    /// Returns true if no other agent is started because too many processes do not end.
    pub fn is_stuck(&self) -> bool {
        self.killed.len() > MOST_UNREAPED
    }

    /// Records that an agent was asked to end.
    pub fn retire(&mut self, id: AgentId, now: Duration) {
        self.retired.insert(id, now + RETIREMENT);
    }

    /// Records that an agent was killed.
    pub fn kill(&mut self, id: AgentId) {
        self.retired.remove(&id);
        self.killed.insert(id);
    }

    /// Records that the process has ended.
    pub fn reaped(&mut self, id: AgentId) {
        self.retired.remove(&id);
        self.killed.remove(&id);
    }

    /// Returns true if the agent was asked to end.
    pub fn is_retired(&self, id: AgentId) -> bool {
        self.retired.contains_key(&id)
    }

    /// The next retired agent to be killed, and the moment.
    pub fn next_kill(&self) -> Option<(Duration, AgentId)> {
        self.retired.iter().map(|(id, at)| (*at, *id)).min()
    }
}
