//! Reports each NVML call to the parent before it is made, so that a call that hangs or crashes has a name.
//!
//! All threads of the agent use it, except the one that waits for events, whose calls have a limit of their own. A
//! report is one small write to a socket: some hundreds at the start, some dozens in each poll.

use std::sync::Arc;

use nvml_wrapper::error::NvmlError;

use super::agent::Parent;
use super::call::{Answer, answer};
use super::protocol::{Called, CalledGpu, FromAgent, Place};
use linkwise_core::topology::GpuUuid;

/// Makes calls about one GPU, or about none.
#[derive(Clone)]
pub struct Calls {
    parent: Option<Arc<Parent>>,
    gpu: Option<CalledGpu>,
}

impl Calls {
    /// Calls about no GPU.
    pub fn new(parent: Arc<Parent>) -> Self {
        Self { parent: Some(parent), gpu: None }
    }

    /// Calls that are not reported: those of the thread that waits for events.
    pub fn unreported() -> Self {
        Self { parent: None, gpu: None }
    }

    /// Calls about a GPU.
    pub fn about(&self, place: Place, uuid: Option<GpuUuid>) -> Self {
        Self { parent: self.parent.clone(), gpu: Some(CalledGpu { place, uuid }) }
    }

    /// Reports one of nvml-wrapper's calls and makes it.
    pub fn ask<T>(&self, call: &'static str, made: impl FnOnce() -> Result<T, NvmlError>) -> Answer<T> {
        self.report(call);
        answer(call, made())
    }

    /// Reports a raw call and makes it.
    pub fn raw<T>(&self, call: &'static str, made: impl FnOnce() -> Answer<T>) -> Answer<T> {
        self.report(call);
        made()
    }

    /// Reports the next calls, which all have the same name.
    pub fn report(&self, call: &str) {
        let Some(parent) = &self.parent else { return };
        let called = Called { call: call.to_owned(), gpu: self.gpu.clone() };
        parent.send(&FromAgent::Calling(called));
    }
}
