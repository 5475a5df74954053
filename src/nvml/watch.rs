//! The child's second look at its GPUs: a cheap call to each, again and again, and a full look
//! whenever the parent asks for one.
//!
//! Runs on a thread of its own, so that neither a wait for events nor the parent's socket waits
//! for it. Called by `agent`.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;

use super::agent::{AgentError, Parent, ready};
use super::call::answer;
use super::probe::{self, Gpu};
use super::protocol::{FromAgent, ToAgent};
use crate::topology::{GpuUuid, ProbeFailure};

/// What the thread works with.
pub struct Watch {
    /// The library.
    pub nvml: &'static Nvml,
    /// Where to tell it.
    pub parent: Arc<Parent>,
    /// What the parent asks.
    pub asked: Receiver<ToAgent>,
    /// How long from one round of calls to the next.
    pub interval: Duration,
    /// The GPUs that were there at the start, whose events are told.
    pub gpus: Arc<Vec<Gpu<'static>>>,
    /// What went wrong when their events were registered; true until the child ends.
    pub unregistered: Vec<ProbeFailure>,
}

impl Watch {
    /// Polls and answers until the parent is gone.
    ///
    /// # Errors
    ///
    /// The parent cannot be told.
    pub fn run(self) -> Result<(), AgentError> {
        let mut lost: Vec<GpuUuid> = Vec::new();
        // GPUs that came later: polled, though without events until a new child registers them.
        let mut later: Vec<Gpu<'static>> = Vec::new();
        let mut next_round = Instant::now();
        loop {
            match self.asked.recv_timeout(next_round.saturating_duration_since(Instant::now())) {
                Ok(ToAgent::Observe) => later = self.observe()?,
                Err(RecvTimeoutError::Timeout) => {
                    for gpu in self.gpus.iter().chain(&later) {
                        self.poll(gpu, &mut lost)?;
                    }
                    next_round = Instant::now() + self.interval;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Tells a change between lost and not lost. Any other answer, or none, proves neither.
    fn poll(&self, gpu: &Gpu<'_>, lost: &mut Vec<GpuUuid>) -> Result<(), AgentError> {
        // The memory and the names are answered from a cache; a temperature has to be read.
        const CALL: &str = "nvmlDeviceGetTemperature";
        let known = lost.iter().position(|uuid| *uuid == gpu.uuid);
        match (answer(CALL, gpu.device.temperature(TemperatureSensor::Gpu)), known) {
            (Err(error), None) if error.is_gpu_lost() => {
                lost.push(gpu.uuid.clone());
                self.parent.send(&FromAgent::Lost { gpu: gpu.uuid.clone(), call: CALL.to_owned() })
            }
            (Ok(Some(_)), Some(at)) => {
                lost.swap_remove(at);
                self.parent.send(&FromAgent::Back { gpu: gpu.uuid.clone() })
            }
            _ => Ok(()),
        }
    }

    /// A fresh look; gives the GPUs that were not there at the start.
    fn observe(&self) -> Result<Vec<Gpu<'static>>, AgentError> {
        let (gpus, mut failures) = probe::list(self.nvml);
        let at_start = |gpu: &Gpu<'_>| self.gpus.iter().any(|known| known.uuid == gpu.uuid);
        failures.extend(self.unregistered.iter().cloned());
        for gpu in gpus.iter().filter(|gpu| !at_start(gpu)) {
            failures.push(ProbeFailure {
                subject: gpu.pci.to_string(),
                call: "nvmlDeviceRegisterEvents".to_owned(),
                error: "it came after the agent's start: no events until the agent starts again".to_owned(),
            });
        }
        self.parent.send(&ready(self.nvml, &gpus, failures))?;
        Ok(gpus.into_iter().filter(|gpu| !at_start(gpu)).collect())
    }
}
