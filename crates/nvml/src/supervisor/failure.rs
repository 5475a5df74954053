//! The ends of agents, and what the node does without NVML. Pure; moments are arguments.
//!
//! Called by `machine`. [`Outage`] counts the time without a working agent, so that a pause, a hanging start and a
//! released driver count alike.

use std::time::Duration;

use super::host_probe::HostFingerprint;
use super::{Idle, Others};
use crate::call::LOAD;
use crate::protocol::CalledGpu;

/// The cause if NVML works and lists no GPU.
pub(super) const NO_GPUS: &str = "NVML lists no GPU on this node";

/// The remedy where no library loads.
const NO_LIBRARY: &str = "; run this container with the NVIDIA container runtime (runtimeClassName: nvidia, \
                          NVIDIA_VISIBLE_DEVICES=all), or name the driver's root with --nvml-library";

/// The end of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AgentEnd {
    /// The metric's label value; `None` if no process was started.
    pub cause: Option<&'static str>,
    /// The reason in words, for people.
    pub why: String,
    /// The GPU of the call that hung or crashed the agent.
    pub blamed: Option<CalledGpu>,
    pub reached: Reached,
}

impl AgentEnd {
    /// The end of an agent without a process.
    pub fn not_started(why: String) -> Self {
        Self { cause: None, why, blamed: None, reached: Reached::Failure }
    }
}

/// The progress of an agent at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// The agent found that an operator has released the driver.
    Released,
    /// No library loads, or NVML finds no driver or lists no GPU.
    NoDriver,
    /// No agent was started, or NVML was not initialised although its library exists.
    Failure,
    /// NVML was not initialised, since the library needed more memory than it may have.
    OverMemory,
    /// NVML was initialised: a later call ended the agent, possibly a call about one GPU.
    Nvml,
    /// The agent scanned the GPUs.
    Gpus,
}

/// The time without a working agent.
#[derive(Debug, Default)]
pub(super) enum Outage {
    /// No agent has worked yet: no GPU can be lost.
    #[default]
    Never,
    Up,
    Down {
        cause: String,
        report_at: Duration,
    },
    Reported,
}

impl Outage {
    /// Returns true if an agent of this process or of the previous one has scanned the GPUs. After that, linkwise
    /// waits for a driver that is gone.
    pub fn has_worked(&self) -> bool {
        !matches!(self, Self::Never)
    }

    /// Begins the time without a working agent, or gives it another cause. Does nothing before an agent has worked, or
    /// once the outage is reported.
    pub fn begin(&mut self, why: String, report_at: Duration) {
        match self {
            Self::Up => *self = Self::Down { cause: why, report_at },
            Self::Down { cause, .. } => *cause = why,
            Self::Never | Self::Reported => {}
        }
    }

    /// Begins the outage of a process that takes over from another one, whose agent has worked. It is reported at
    /// `report_at`.
    pub fn inherit(&mut self, cause: String, report_at: Duration) {
        if matches!(self, Self::Never) {
            *self = Self::Down { cause, report_at };
        }
    }

    /// Records that an agent works. Returns true if that ends a reported outage.
    pub fn end(&mut self) -> bool {
        matches!(std::mem::replace(self, Self::Up), Self::Reported)
    }

    /// The moment at which the outage is to be reported.
    pub fn due(&self) -> Option<Duration> {
        let Self::Down { report_at, .. } = self else { return None };
        Some(*report_at)
    }

    /// Returns the cause of the outage, once, when the grace period is over.
    pub fn report(&mut self, now: Duration) -> Option<String> {
        self.due().filter(|at| *at <= now)?;
        let Self::Down { cause, .. } = std::mem::replace(self, Self::Reported) else { return None };
        Some(cause)
    }
}

/// Decides what to do before NVML has shown a GPU, by `must_work` (--fail-on-init-error) or else by the GPUs on the PCI
/// bus. An error ends the process, so that its container is made again: a container gets its libraries and device nodes
/// when it is made. The tests beside `machine` have all cases as a table.
pub(super) fn without_nvml(
    reached: Reached,
    cause: &str,
    host: Option<&HostFingerprint>,
    must_work: Option<bool>,
    others: Others,
) -> Result<Idle, String> {
    let unavailable = format!("NVML cannot be initialised: {cause}");
    let remedy = if cause.starts_with(LOAD) { NO_LIBRARY } else { "" };
    if must_work == Some(true) && cause != NO_GPUS {
        return if others == Others::None { Err(unavailable + remedy) } else { Ok(Idle::Waiting(unavailable)) };
    }
    let Some(host) = host else {
        // It is unknown if there is a GPU, so the process does not end, and the node is not ready.
        let reason = format!("NVML cannot be initialised, and the PCI bus does not answer: {cause}");
        return Ok(Idle::Waiting(reason));
    };
    let gpus = host.gpus();
    if let Some(first) = gpus.first() {
        // A library that needs more memory would need it in another container too.
        if must_work == Some(false) || reached == Reached::OverMemory || others != Others::None {
            return Ok(Idle::Waiting(unavailable));
        }
        let number = gpus.len();
        return Err(format!("{number} NVIDIA GPU(s) on the PCI bus ({first} ...), but {unavailable}{remedy}"));
    }
    if reached != Reached::NoDriver && !host.is_tegra {
        // GPUs need not be on this bus (a simulated NVML, a /sys that is not the host's), and all of them may have
        // fallen off it: a library that exists and fails does not prove that there are none.
        let unknown = "no NVIDIA GPU on the PCI bus, which does not prove that the node has none";
        return Ok(Idle::Waiting(format!("{unavailable} ({unknown})")));
    }
    let foreign: Vec<String> =
        host.foreign().into_iter().map(|(pci, driver)| format!("{pci} is bound to {driver}")).collect();
    let foreign =
        if foreign.is_empty() { String::new() } else { format!(" for NVIDIA's driver ({})", foreign.join(", ")) };
    let tegra =
        if host.is_tegra { "; this is a Tegra, whose integrated GPU needs the NVIDIA device plugin" } else { "" };
    Ok(Idle::NoGpu(format!("no NVIDIA GPU on the PCI bus{foreign}, and NVML reports none: {cause}{tegra}")))
}
