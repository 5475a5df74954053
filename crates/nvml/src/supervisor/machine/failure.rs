//! The ends of agents, and their consequences: a pause, a standby that is tried again later, an idle node, or the end
//! of the process.

use std::time::Duration;

use super::super::Idle;
use super::super::agents::{ActiveAgent, AgentEnd, AgentId, OVER_MEMORY, RestartReason};
use super::super::host_probe::HostFingerprint;
use super::{Action, DriverMachine, Others, Stage};

/// The cause if NVML works and there is no GPU.
pub(super) const NO_GPUS: &str = "NVML lists no GPU on this node";

/// The progress of an agent at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// NVML finds no driver, or lists no GPU.
    NoDriver,
    /// NVML was not initialised: its library, or a driver, exists and failed.
    Failure,
    /// NVML was not initialised, since the library needed more memory than it may have.
    OverMemory,
    /// NVML was initialised: a later call ended the agent, possibly a call about one GPU.
    Nvml,
    /// The agent scanned the GPUs.
    Gpus,
}

impl DriverMachine {
    /// Records that a standby failed: another one follows later.
    pub(super) fn standby_failed(&mut self, reason: RestartReason, cause: String, now: Duration) {
        let again_in = match (&reason, &mut self.agents.active) {
            (RestartReason::Trial(place), _) => self.quarantine.put_off(*place, now),
            (RestartReason::Renewal(why), Some(active)) => {
                let pause = active.backoff.failed();
                active.renewal = Some((now + pause, why.clone()));
                pause
            }
            (RestartReason::Lost(_), _) => self.lost.next().map_or(Duration::ZERO, |(at, _)| at.saturating_sub(now)),
            (RestartReason::Renewal(_), None) => return,
        };
        tracing::warn!(%reason, cause, ?again_in, "standby NVML agent failed; the active one goes on");
    }

    pub(super) fn ended(&mut self, id: AgentId, end: AgentEnd, now: Duration) {
        let active = self.agents.active.take_if(|active| active.id == id);
        let standby = self.agents.standby.take_if(|standby| standby.id == id || active.is_some());
        let is_known = active.is_some() || standby.is_some() || self.agents.is_retired(id);
        if end.reaped {
            self.agents.reaped(id);
        } else if is_known {
            self.kill(id);
        }
        if active.is_none() && standby.is_none() {
            return;
        }
        self.actions.extend(end.cause.map(Action::CountEnd));
        let is_trial = standby.as_ref().is_some_and(|standby| matches!(standby.reason, RestartReason::Trial(_)));
        // An active agent that ends during a trial may have been ended by the tried GPU.
        if let Some(gpu) = end.blamed.filter(|_| active.is_none() || !is_trial) {
            self.quarantine.blame(&gpu, end.why.clone(), now);
        }
        match (active, standby) {
            (Some(active), standby) => {
                if let Some(standby) = standby {
                    self.kill(standby.id);
                }
                let reached = match (active.ready, end.initialised) {
                    (true, _) => Reached::Gpus,
                    (false, true) => Reached::Nvml,
                    (false, false) if end.no_driver => Reached::NoDriver,
                    (false, false) if end.cause == Some(OVER_MEMORY) => Reached::OverMemory,
                    (false, false) => Reached::Failure,
                };
                self.without_agent(active, reached, end.why, now);
            }
            (None, Some(standby)) => self.standby_failed(standby.reason, end.why, now),
            (None, None) => {}
        }
    }

    /// Decides what follows from the active agent's failure for the node, and pauses.
    fn without_agent(&mut self, active: ActiveAgent, reached: Reached, cause: String, now: Duration) {
        let pause = self.backoff.failed_after(now.saturating_sub(active.began));
        self.initialised |= matches!(reached, Reached::Nvml | Reached::Gpus);
        if self.outage.has_worked() {
            self.outage.begin(cause.clone(), now);
        } else if self.initialised && cause != NO_GPUS {
            // This container can open the driver: the quarantine has to find the GPU behind the failure, and another
            // container would fail in the same way.
            let reason = format!("NVML is initialised, but no agent has seen the GPUs: {cause}");
            self.act(Action::Idle(Idle::Waiting(reason)));
        } else {
            match self.without_nvml(reached, &cause, active.host.as_ref()) {
                Ok(idle @ Idle::Waiting(_)) => self.act(Action::Idle(idle)),
                Ok(Idle::NoGpu(reason)) => {
                    tracing::info!(reason, "no NVIDIA GPU on this node: idle until one appears");
                    self.act(Action::Idle(Idle::NoGpu(reason)));
                    self.stage = Stage::Idle { look_at: now + self.settings.bus_look };
                    return;
                }
                Err(cause) => {
                    self.stage = Stage::Failed;
                    return self.act(Action::Fail(cause));
                }
            }
        }
        // Without a driver this goes on for ever: there is one line for each cause, and the metric counts the starts.
        if !self.unavailable.replace([cause.clone()]).is_empty() || reached == Reached::Gpus {
            tracing::warn!(cause, again_in = ?pause, "NVML unavailable");
        } else {
            tracing::debug!(cause, again_in = ?pause, "NVML unavailable");
        }
        self.stage = Stage::Pausing { until: now + pause };
    }

    /// Decides what to do if NVML never answered: as the option says, or else by the GPUs on the PCI bus. An error ends
    /// the process, so that its container is made anew: a container gets its libraries and device nodes when it is
    /// made. The tests beside this file have all cases as a table.
    fn without_nvml(&self, reached: Reached, cause: &str, host: Option<&HostFingerprint>) -> Result<Idle, String> {
        let unavailable = format!("NVML cannot be initialised: {cause}");
        let must_work = self.settings.fail_on_init_error;
        if must_work == Some(true) && cause != NO_GPUS {
            return if self.others == Others::None { Err(unavailable) } else { Ok(Idle::Waiting(unavailable)) };
        }
        let Some(host) = host else {
            // It is unknown if there is a GPU: this is no reason to end, and none to rest.
            let reason = format!("NVML cannot be initialised, and the PCI bus does not answer: {cause}");
            return Ok(Idle::Waiting(reason));
        };
        let gpus = host.gpus();
        if let Some(first) = gpus.first() {
            // A library that needs more memory would need it in another container too.
            if must_work == Some(false) || reached == Reached::OverMemory || self.others != Others::None {
                return Ok(Idle::Waiting(unavailable));
            }
            let number = gpus.len();
            return Err(format!("{number} NVIDIA GPU(s) on the PCI bus ({first} ...), but {unavailable}"));
        }
        if reached != Reached::NoDriver && !host.is_tegra {
            // GPUs need not be on this bus (a simulated NVML, a /sys that is not the host's), and all of them may have
            // fallen off it: a library that exists and fails does not prove that there are none.
            let unknown = "no NVIDIA GPU on the PCI bus; whether there is one is unknown until NVML answers";
            return Ok(Idle::Waiting(format!("{unavailable} ({unknown})")));
        }
        let others: Vec<String> =
            host.foreign().into_iter().map(|(pci, driver)| format!("{pci} is bound to {driver}")).collect();
        let others =
            if others.is_empty() { String::new() } else { format!(" for NVIDIA's driver ({})", others.join(", ")) };
        let tegra =
            if host.is_tegra { "; this is a Tegra, whose integrated GPU needs the NVIDIA device plugin" } else { "" };
        Ok(Idle::NoGpu(format!("no NVIDIA GPU on the PCI bus{others}, and none by NVML: {cause}{tegra}")))
    }

    /// Ends the active agent, which is of no use.
    pub(super) fn useless(&mut self, reached: Reached, cause: &str, now: Duration) {
        let Some(active) = self.agents.active.take() else { return };
        self.act(Action::CountEnd("replaced"));
        self.retire(active.id, now);
        self.without_agent(active, reached, cause.to_owned(), now);
    }
}
