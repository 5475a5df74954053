//! Faults that tests inject: the server answers some requests wrongly, or not at all.

use std::collections::VecDeque;

/// The wrong answer to a request.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A Status with this code and message, and a Retry-After in seconds if there is one.
    Refusal(u16, &'static str, Option<u32>),
    /// This text with the code 200.
    Text(String),
    /// This text with this code, as a proxy or an API server answers an unknown path.
    Page(u16, String),
    /// An endless text.
    Endless,
    /// No answer; the connection stays open, and the server does not carry the request out.
    Silence,
    /// No answer, as with `Silence`, but the server carries the request out.
    Lost,
}

/// A fault, and the requests that it hits.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The method of the requests; empty for any method.
    pub method: &'static str,
    /// A part of their path or query; empty for any path.
    pub contains: &'static str,
    /// The number of such requests that still get the answer.
    pub times: usize,
    /// The answer that they get.
    pub answer: Answer,
}

impl Fault {
    /// Makes a fault for the next requests of this method whose path or query contains a text.
    pub fn of(method: &'static str, contains: &'static str, times: usize, answer: Answer) -> Self {
        Self { method, contains, times, answer }
    }
}

/// The injected faults, in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Faults(VecDeque<Fault>);

impl Faults {
    pub fn add(&mut self, fault: Fault) {
        self.0.push_back(fault);
    }

    /// Takes the answer of the first fault that hits this request; the fault hits one request less from now on.
    pub fn take(&mut self, method: &str, uri: &str) -> Option<Answer> {
        let hits = |fault: &Fault| {
            (fault.method.is_empty() || fault.method == method) && uri.contains(fault.contains) && fault.times > 0
        };
        let fault = self.0.iter_mut().find(|fault| hits(fault))?;
        fault.times -= 1;
        Some(fault.answer.clone())
    }
}
