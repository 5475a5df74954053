//! What the machine takes and what it asks for, as plain values.

use std::time::Duration;

use super::super::Idle;
use super::super::agents::{AgentEnd, AgentId, RestartReason};
use super::super::host_probe::HostFingerprint;
use super::super::scan::HostScan;
use crate::nvml::protocol::{FromAgent, Place};
use crate::nvml::scan::CallFailure;
use crate::state::{Event, NodeIdentity};
use crate::topology::{GpuUuid, NodeObservation, PciAddress};

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
    /// Boot and driver were identified; `None` where that broke off.
    Identified(Option<NodeIdentity>),
    /// The time of [`super::Machine::wake`] has come.
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
    /// Read the identity of boot and driver.
    Identify,
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
    /// Write a line to the log.
    Log(Note),
    /// End the process, with this cause.
    Fail(String),
}

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::runtime::driver) enum Note {
    /// No agent works. `news` is whether the cause is another one than the last time.
    Unavailable {
        cause: String,
        again_in: Duration,
        news: bool,
    },
    /// An agent has seen the GPUs.
    Available {
        gpus: usize,
        driver: Option<String>,
        library: Option<String>,
    },
    /// No agent has worked for the grace period.
    Outage {
        cause: String,
    },
    StandbyStarted(RestartReason),
    StandbyFailed {
        reason: RestartReason,
        cause: String,
        again_in: Duration,
    },
    /// The active agent's driver is gone: another agent is started.
    Replaced {
        cause: String,
    },
    Quarantined {
        gpu: Option<GpuUuid>,
        index: u32,
        cause: String,
    },
    OutOfQuarantine {
        gpu: Option<GpuUuid>,
        index: u32,
    },
    /// Killed agents do not end.
    Stuck {
        agents: usize,
    },
    CallFailed(CallFailure),
    /// A GPU that another driver holds.
    HeldByOther {
        gpu: PciAddress,
        driver: String,
    },
    NoGpu {
        reason: String,
    },
    GpuAppeared(PciAddress),
}
