//! Reports each NVML call to the parent before it is made, so that a call that hangs or crashes has a name.
//!
//! Only the loop that waits for events does not report its calls; the wait has a limit of its own. A report is one
//! small write to a socket: an agent makes some hundreds at its start, some dozens in each poll.
//!
//! With `--nvml-calls`, a file gets a line for each reported call that has returned: the function, the GPU's index or
//! `-`, the return code (`0`, the error, or `not offered`), and the time in microseconds, with tabs between them. Users
//! attach the file to a report about hardware that the developers lack.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nvml_wrapper::error::NvmlError;

use super::agent::{Parent, print_error};
use super::call::{Answer, answer};
use super::protocol::{Called, CalledGpu, FromAgent, Place};
use linkwise_core::topology::GpuUuid;

/// Makes and reports calls, all about one GPU or about none.
#[derive(Clone)]
pub struct Calls {
    parent: Arc<Parent>,
    gpu: Option<CalledGpu>,
    record: Option<Arc<File>>,
}

impl Calls {
    /// Starts with calls about no GPU. If the record cannot be opened, standard error has the reason, and no call is
    /// recorded.
    pub fn new(parent: Arc<Parent>, record: Option<&Path>) -> Self {
        let open = |path: &Path| match OpenOptions::new().create(true).append(true).open(path) {
            Ok(file) => Some(Arc::new(file)),
            Err(error) => {
                print_error(&format!("cannot open --nvml-calls {}: {error}", path.display()));
                None
            }
        };
        Self { parent, gpu: None, record: record.and_then(open) }
    }

    /// Returns a copy for calls about a GPU.
    pub fn about(&self, place: Place, uuid: Option<GpuUuid>) -> Self {
        Self { gpu: Some(CalledGpu { place, uuid }), ..self.clone() }
    }

    /// Reports one of nvml-wrapper's calls and makes it.
    pub fn ask<T>(&self, call: &'static str, make: impl FnOnce() -> Result<T, NvmlError>) -> Answer<T> {
        self.raw(call, || answer(call, make()))
    }

    /// Reports a raw call and makes it.
    pub fn raw<T>(&self, call: &'static str, make: impl FnOnce() -> Answer<T>) -> Answer<T> {
        self.report(call);
        self.unreported(call, make)
    }

    /// Makes a call without a report; [`Self::report`] made one before.
    pub fn unreported<T>(&self, call: &'static str, make: impl FnOnce() -> Answer<T>) -> Answer<T> {
        let begin = Instant::now();
        let answer = make();
        if let Some(mut file) = self.record.as_deref() {
            let gpu = self.gpu.as_ref().map_or("-".to_owned(), |gpu| gpu.place.index.to_string());
            let code = match &answer {
                Ok(Some(_)) => "0".to_owned(),
                Ok(None) => "not offered".to_owned(),
                Err(error) => error.to_string(),
            };
            // If the disk is full, only the record suffers.
            let _ = file.write_all(format!("{call}\t{gpu}\t{code}\t{}\n", begin.elapsed().as_micros()).as_bytes());
        }
        answer
    }

    /// Reports the next call or calls, all of this name.
    pub fn report(&self, call: &str) {
        let called = Called { call: call.to_owned(), gpu: self.gpu.clone() };
        self.parent.send(&FromAgent::Calling(called));
    }
}
