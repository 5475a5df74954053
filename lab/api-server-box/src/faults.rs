//! Faults on order: requests that get something else than an answer.

use std::collections::VecDeque;

/// The thing that a request gets instead of an answer.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A Status with this code and message, and a Retry-After in seconds.
    Refusal(u16, &'static str, Option<u32>),
    /// This text as a 200, for any request.
    Text(String),
    /// This text with this code: a proxy's page, or the API server's own page for an unknown path.
    Page(u16, String),
    /// Text without an end.
    Endless,
    /// No answer; the connection stays open.
    Silence,
    /// No answer, as `Silence`, but the request is carried out.
    Lost,
}

/// A fault of some requests.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The method, or empty for all.
    pub method: &'static str,
    /// A part of the path or the query, or empty for all.
    pub contains: &'static str,
    /// The number of requests that get it.
    pub times: usize,
    /// The answer that they get.
    pub answer: Answer,
}

impl Fault {
    /// A fault of the next requests of this method to a path with this text in it.
    pub fn of(method: &'static str, contains: &'static str, times: usize, answer: Answer) -> Self {
        Self { method, contains, times, answer }
    }
}

/// The faults that are left, in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Faults(VecDeque<Fault>);

impl Faults {
    pub fn add(&mut self, fault: Fault) {
        self.0.push_back(fault);
    }

    /// The fault of this request; one less of it is left.
    pub fn take(&mut self, method: &str, uri: &str) -> Option<Answer> {
        let meant = |fault: &Fault| {
            (fault.method.is_empty() || fault.method == method) && (uri.contains(fault.contains)) && fault.times > 0
        };
        let fault = self.0.iter_mut().find(|fault| meant(fault))?;
        fault.times -= 1;
        Some(fault.answer.clone())
    }
}
