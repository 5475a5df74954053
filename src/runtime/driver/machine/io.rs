//! What the machine takes and what it asks for, as plain values.

use std::time::Duration;

use super::super::Idle;
use super::super::agents::{AgentEnd, AgentId};
use super::super::host_probe::HostFingerprint;
use super::super::scan::HostScan;
use crate::nvml::protocol::{FromAgent, Place};
use crate::state::Event;
use crate::topology::NodeObservation;

/// The options of the life with the driver; see `config::NvmlArgs`.
#[derive(Clone, Debug)]
pub(in crate::runtime) struct Settings {
    /// Whether GPUs are unhealthy while NVML is unavailable.
    pub unhealthy_when_away: bool,
    /// `--fail-on-init-error`.
    pub fail_on_init_error: Option<bool>,
    /// The first pause before an agent is started again.
    pub pause: Duration,
    /// How long NVML may be unavailable before that is an outage.
    pub grace: Duration,
    /// When a quarantined GPU is tried for the first time.
    pub trial: Duration,
    /// From one look at the PCI bus to the next on a node without GPUs.
    pub bus_look: Duration,
    /// From one poll of an agent to the next.
    pub poll: Duration,
    /// How long one NVML call may take.
    pub call: Duration,
}

/// What happened.
#[derive(Debug)]
pub(in crate::runtime::driver) enum Input {
    /// An agent sent a message.
    Message(AgentId, FromAgent),
    /// Nothing more comes from an agent, or none could be started.
    Ended(AgentId, AgentEnd),
    /// An agent's process has ended.
    Reaped(AgentId),
    /// An operator released the driver, or resumed it.
    Released(bool),
    /// The host was probed; `None` where that broke off.
    Probed(Option<HostFingerprint>),
    /// The host was scanned; `None` where that broke off.
    HostScanned(Option<HostScan>),
    /// The time of [`super::DriverMachine::wake`] has come.
    Tick,
}

/// What has to be done.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::runtime::driver) enum Action {
    /// Start an agent that skips these GPUs.
    Start(AgentId, Vec<Place>),
    /// Ask an agent for a full scan.
    Rescan(AgentId),
    /// Ask an agent to end; its messages are still read.
    Dismiss(AgentId),
    /// Kill an agent, and report when its process has ended.
    Kill(AgentId),
    /// Probe the host; the library is the one that this agent has loaded.
    Probe(Option<AgentId>),
    /// Scan the host.
    ScanHost,
    /// Publish the node.
    Publish(Box<NodeObservation>),
    /// Apply an event to the node's state.
    Emit(Event),
    /// Report why nothing is offered.
    Idle(Idle),
    /// Count an agent's end, by its cause.
    CountEnd(&'static str),
    /// Report how many GPUs' events are not heard.
    Unheard(u32),
    /// Count a failure to hear the driver's events.
    CountFailure,
    /// End the process, with this cause.
    Fail(String),
}
