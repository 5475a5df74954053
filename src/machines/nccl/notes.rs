//! What was odd in a dump, for the user to read, and numbers read with such a note.

use crate::machines::xml::{Element, shortened};
use crate::topology::ProbeFailure;

/// Notes that are kept; of more only the number is told.
const MOST: usize = 50;

/// The notes.
#[derive(Default)]
pub(super) struct Notes {
    failures: Vec<ProbeFailure>,
    more: usize,
}

impl Notes {
    /// Notes what is odd about an element.
    pub fn add(&mut self, element: &Element, what: impl Into<String>) {
        if self.failures.len() == MOST {
            self.more += 1;
            return;
        }
        let subject = format!("NCCL dump, line {}", element.line);
        let call = match element.get("busid").or_else(|| element.get("name")) {
            Some(name) => format!("{} {}", shortened(&element.name), shortened(name)),
            None => shortened(&element.name),
        };
        self.failures.push(ProbeFailure { subject, call, error: what.into() });
    }

    /// All of them.
    pub fn into_failures(mut self) -> Vec<ProbeFailure> {
        if self.more > 0 {
            let error = format!("{} more oddities of this kind", self.more);
            self.failures.push(ProbeFailure { subject: "NCCL dump".to_owned(), call: "and".to_owned(), error });
        }
        self.failures
    }

    /// A number, decimal or hexadecimal with 0x as NCCL reads them; one that is none is noted.
    pub fn number(&mut self, element: &Element, attribute: &str) -> Option<u32> {
        let text = element.get(attribute).filter(|text| !text.is_empty())?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        if number.is_none() {
            self.add(element, format!("{attribute} '{}' is no number; taken as unknown", shortened(text)));
        }
        number
    }
}
