//! The inputs and the actions of the state machine, as plain values.

use std::time::Duration;

use super::super::Idle;
use super::super::agents::{AgentEnd, AgentId};
use super::super::host_probe::HostFingerprint;
use super::super::scan::HostScan;
use crate::protocol::{FromAgent, Place};
use linkwise_core::state::Event;
use linkwise_core::topology::NodeObservation;

/// The options for the driver; see `config::NvmlArgs`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Set if GPUs are unhealthy while NVML is unavailable.
    pub unhealthy_when_away: bool,
    /// `--fail-on-init-error`.
    pub fail_on_init_error: Option<bool>,
    /// The first pause before an agent is started again.
    pub pause: Duration,
    /// The time for which NVML may be unavailable before that is an outage.
    pub grace: Duration,
    /// The time until a quarantined GPU is tried first.
    pub trial: Duration,
    /// The time from one look at the PCI bus to the next on a node without GPUs.
    pub bus_look: Duration,
    /// The time from one poll of an agent to the next.
    pub poll: Duration,
    /// The longest time for one NVML call.
    pub call: Duration,
}

/// The part of other processes of linkwise on the node, for a process whose NVML cannot be initialised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Others {
    /// They need nothing of this process: a failure may end it.
    #[default]
    None,
    /// One of them may hand over the node: no failure ends this process.
    MayHandOver,
    /// One of them has handed over the GPUs that it saw, as if an agent of this process had seen them.
    HandedOver {
        /// True if NVML had been unavailable there for the grace period.
        away: bool,
    },
}

#[derive(Debug)]
pub(in crate::supervisor) enum Input {
    Message(AgentId, FromAgent),
    /// No more messages come from an agent, or none could be started.
    Ended(AgentId, AgentEnd),
    Reaped(AgentId),
    /// An operator released the driver, or resumed it.
    Released(bool),
    /// The host was probed; `None` if the probe broke off.
    Probed(Option<HostFingerprint>),
    /// The host was scanned; `None` if the scan broke off.
    HostScanned(Option<HostScan>),
    /// The part of other processes of linkwise changed.
    Others(Others),
    /// The time of [`super::DriverMachine::wake`] has come.
    Tick,
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::supervisor) enum Action {
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
    ScanHost,
    Publish(Box<NodeObservation>),
    Emit(Event),
    /// Report the reason why no GPU is offered.
    Idle(Idle),
    /// Count an agent's end, by its cause.
    CountEnd(&'static str),
    /// Report the number of GPUs whose events do not come.
    Unheard(u32),
    /// Count a failure to receive the driver's events.
    CountFailure,
    /// End the process, with this cause.
    Fail(String),
}
