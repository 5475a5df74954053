//! Keeps the NVML child alive and turns what it says into events.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::idle::{self, Idle};
use super::operator::Release;
use crate::hwloc;
use crate::inventory::{Event, MigInstance};
use crate::metrics::Metrics;
use crate::nvml::child::{Agent, AgentCommand};
use crate::nvml::protocol::FromAgent;
use crate::topology::{GpuObservation, NodeObservation, ProbeFailure};

/// Pauses before the child is started again: doubling from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How long a child may take to initialise NVML and see all GPUs. Without persistence mode the driver starts each GPU for
/// it, which takes seconds; a call that hangs takes for ever.
const FIRST_LOOK: Duration = Duration::from_secs(120);

/// What NVML's answer comes to where it works and there is no GPU.
const NO_GPUS: &str = "NVML lists no GPU on this node";

/// The driver's side of the node.
pub(super) struct Driver {
    pub command: AgentCommand,
    pub sysfs: PathBuf,
    pub fail_on_init_error: Option<bool>,
    pub events: mpsc::Sender<Event>,
    pub metrics: Arc<Metrics>,
    /// Whether an operator wants the driver for something else.
    pub release: Release,
    /// Why there is nothing to offer, for /readyz.
    pub idle: watch::Sender<Idle>,
}

impl Driver {
    /// Lives until `shutdown`; fails where NVML cannot be initialised and that is not to be lived with.
    pub async fn run(self, shutdown: CancellationToken) -> Result<()> {
        shutdown.run_until_cancelled(self.live()).await.unwrap_or(Ok(()))
    }

    async fn live(&self) -> Result<()> {
        let mut pause = Duration::ZERO;
        let mut seen = false;
        let mut told = None;
        loop {
            self.release.over().await;
            let began = Instant::now();
            let holding = self.release.holding();
            let (ready, why) = self.one_child().await?;
            drop(holding);
            self.metrics.agent_up(false);
            if self.release.is_wished() {
                pause = Duration::ZERO;
                continue;
            }
            pause = next_pause(pause, began.elapsed());
            seen |= ready;
            if !seen && self.live_without(&why).await? {
                // A GPU has come: the pauses were another matter's.
                pause = Duration::ZERO;
                continue;
            }
            // Where there is no driver this goes on for ever: one line for a cause, the metric counts the starts.
            if ready || told.as_ref() != Some(&why) {
                tracing::warn!(cause = why, again_in = ?pause, "NVML is not to be had");
            } else {
                tracing::debug!(cause = why, again_in = ?pause, "NVML is not to be had, as before");
            }
            told = Some(why);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.release.wished() => {}
            }
        }
    }

    /// One child from its start to its end: whether it got as far as to see the GPUs, and why it ended.
    async fn one_child(&self) -> Result<(bool, String)> {
        self.metrics.agent_started();
        let mut agent = match Agent::spawn(&self.command) {
            Ok(agent) => agent,
            // No process or no memory to be had is a matter of time.
            Err(error) => return Ok((false, format!("{:#}", anyhow::Error::from(error)))),
        };
        let mut ready = false;
        let mut failed = None;
        loop {
            let said = async { if ready { agent.next().await } else { agent.next_within(FIRST_LOOK).await } };
            let said = tokio::select! {
                said = said => said,
                () = self.release.wished() => {
                    agent.end().await.context("cannot end the NVML agent")?;
                    return Ok((ready, "an operator asked to let go of the driver".to_owned()));
                }
            };
            let message = match said {
                Ok(message) => message,
                // What the child said before it ended explains more than its exit code.
                Err(ended) => {
                    return Ok((ready, failed.unwrap_or_else(|| format!("{:#}", anyhow::Error::from(ended)))));
                }
            };
            let event = match message {
                // Nothing to look after, and a child would look at it for ever.
                FromAgent::Ready { gpus, .. } if gpus.is_empty() && idle::on_bus(&self.sysfs).await?.is_empty() => {
                    agent.end().await.context("cannot end the NVML agent")?;
                    return Ok((ready, NO_GPUS.to_owned()));
                }
                FromAgent::Ready { driver, nvml, gpus, failures } => {
                    ready = true;
                    self.metrics.agent_up(true);
                    tracing::info!(
                        gpus = gpus.len(),
                        driver = driver.as_deref().unwrap_or("unknown"),
                        nvml = nvml.as_deref().unwrap_or("unknown"),
                        "NVML answers"
                    );
                    if gpus.is_empty() {
                        self.idle.send_replace(Idle::Waiting(NO_GPUS.to_owned()));
                    }
                    Event::Observed(Box::new(self.observed(gpus, failures).await?))
                }
                FromAgent::Xid { gpu, code, gpu_instance, compute_instance } => {
                    self.metrics.xid(&gpu, code);
                    let instance = gpu_instance.map(|gpu_instance| MigInstance { gpu_instance, compute_instance });
                    Event::Xid { gpu, code, instance }
                }
                FromAgent::DoubleBitEcc { gpu } => Event::DoubleBitEcc { gpu },
                FromAgent::Lost { gpu, call } => Event::GpuLost { gpu, call },
                FromAgent::Back { gpu } => {
                    tracing::warn!(%gpu, "a lost GPU answers again; it stays unhealthy until linkwise starts anew");
                    continue;
                }
                // What keeps it from seeing the GPUs is what it ends with. Afterwards it goes on, and its end has
                // another cause.
                FromAgent::Failed { call, error } if !ready => {
                    failed = Some(format!("{call}: {error}"));
                    continue;
                }
                FromAgent::Failed { call, error } => {
                    tracing::warn!(call, error, "NVML failed");
                    continue;
                }
            };
            self.events.send(event).await.context("nobody takes events any more")?;
        }
    }

    /// NVML's GPUs and the host around them.
    async fn observed(&self, gpus: Vec<GpuObservation>, mut failures: Vec<ProbeFailure>) -> Result<NodeObservation> {
        let sysfs = self.sysfs.clone();
        // hwloc takes tens of milliseconds.
        let host = tokio::task::spawn_blocking(move || hwloc::observe(&sysfs));
        let (host, more) = host.await.context("the look at the host broke off")?;
        failures.extend(more);
        Ok(NodeObservation { gpus, host, failures })
    }

    /// Whether to live without NVML, which never answered: by the option, else by what is on the PCI bus. `true` once a
    /// node without GPUs has got one.
    async fn live_without(&self, why: &str) -> Result<bool> {
        let gpus = idle::on_bus(&self.sysfs).await?;
        match (self.fail_on_init_error, gpus.first()) {
            (_, None) if why == NO_GPUS => {}
            (Some(true), _) => bail!("NVML cannot be initialised: {why}"),
            // Libraries and device nodes are given at a container's creation: it has to be made anew.
            (None, Some(first)) => {
                bail!(
                    "{} NVIDIA GPU(s) on the PCI bus ({first} ...), but NVML cannot be initialised: {why}",
                    gpus.len()
                )
            }
            (Some(false), Some(_)) => {
                self.idle.send_replace(Idle::Waiting(format!("NVML cannot be initialised: {why}")));
                return Ok(false);
            }
            (None | Some(false), None) => {}
        }
        let reason = format!("no NVIDIA GPU on the PCI bus, and none by NVML: {why}");
        tracing::info!(reason, "this node has no NVIDIA GPU: idle until one is on its PCI bus");
        self.idle.send_replace(Idle::NoGpu(reason));
        self.metrics.idle(true);
        let first = idle::gpu_appears(&self.sysfs).await?;
        self.metrics.idle(false);
        self.idle.send_replace(Idle::Waiting(format!("GPU {first} has come, and was not looked at yet")));
        tracing::info!(gpu = %first, "an NVIDIA GPU is on the PCI bus now");
        Ok(true)
    }
}

/// The pause after a child that lived so long. Doubling, also where each child sees the GPUs and dies soon after; one
/// that lasted died of something new.
fn next_pause(last: Duration, lived: Duration) -> Duration {
    let (first, longest) = PAUSES;
    if lived >= longest { first } else { (last * 2).clamp(first, longest) }
}

/// One look at the GPUs through a child that then ends.
pub async fn look(command: &AgentCommand) -> Result<(Vec<GpuObservation>, Vec<ProbeFailure>)> {
    let mut agent = Agent::spawn(command)?;
    let mut failed = None;
    loop {
        match agent.next_within(FIRST_LOOK).await {
            Ok(FromAgent::Ready { gpus, failures, .. }) => {
                agent.end().await.context("cannot end the NVML agent")?;
                return Ok((gpus, failures));
            }
            Ok(FromAgent::Failed { call, error }) => failed = Some(format!("{call}: {error}")),
            Ok(_) => {}
            Err(ended) => match failed {
                Some(failed) => bail!("{failed}"),
                None => return Err(ended.into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_a_child_lasts() {
        let second = Duration::from_secs;
        let mut pause = Duration::ZERO;
        let pauses = [0, 1, 59, 0, 2, 0, 3, 0, 61, 0].map(|lived| {
            pause = next_pause(pause, second(lived));
            pause.as_secs()
        });
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]);
    }
}
