//! Tells the parent of each NVML call before it is made, so that one that hangs or crashes has a name.
//!
//! Used by all of `nvml`'s child side but the thread that waits for events, which has its own limit. A record is one small write to a
//! socket: some hundreds at the start, some dozens a round.

use std::sync::Arc;

use nvml_wrapper::error::NvmlError;

use super::agent::Parent;
use super::call::{Answer, answer};
use super::protocol::{Called, CalledGpu, FromAgent, Place};
use crate::topology::GpuUuid;

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

    /// Calls that nobody is told of: those of the thread that waits for events, whose own limit covers them.
    pub fn untold() -> Self {
        Self { parent: None, gpu: None }
    }

    /// Calls about a GPU.
    pub fn about(&self, place: Place, uuid: Option<GpuUuid>) -> Self {
        Self { parent: self.parent.clone(), gpu: Some(CalledGpu { place, uuid }) }
    }

    /// Tells of one of nvml-wrapper's calls and makes it.
    pub fn ask<T>(&self, call: &'static str, made: impl FnOnce() -> Result<T, NvmlError>) -> Answer<T> {
        self.tell(call);
        answer(call, made())
    }

    /// Tells of a raw call and makes it.
    pub fn raw<T>(&self, call: &'static str, made: impl FnOnce() -> Answer<T>) -> Answer<T> {
        self.tell(call);
        made()
    }

    /// Tells of calls that are made next, all of one name.
    pub fn tell(&self, call: &str) {
        let Some(parent) = &self.parent else { return };
        let called = Called { call: call.to_owned(), gpu: self.gpu.clone() };
        // Fails where the parent is gone only, and then the thread that hears the parent ends the process.
        let _ = parent.send(&FromAgent::Calling(called));
    }
}
