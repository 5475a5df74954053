//! What was odd in a dump, as warnings for the user, and numbers read with such a warning. Called by the readers of
//! XML.

use crate::machines::xml::Element;
use crate::quote::{excerpt, quoted};
use crate::topology::ProbeFailure;

/// Kinds of note that are kept; further ones are counted.
const MOST: usize = 50;

/// The notes, one for each thing that is odd, at the first place where it is.
pub(super) struct Notes {
    /// What kind of file it is, as the warnings name it.
    file: &'static str,
    kept: Vec<Note>,
    more: usize,
}

struct Note {
    subject: String,
    call: String,
    what: String,
    /// How many more there are of this kind.
    again: usize,
}

impl Notes {
    /// No notes yet on a file of that kind.
    pub fn new(file: &'static str) -> Self {
        Self { file, kept: Vec::new(), more: 0 }
    }

    /// Notes what is odd about an element.
    pub fn add(&mut self, element: &Element, what: impl Into<String>) {
        let what = what.into();
        if let Some(note) = self.kept.iter_mut().find(|note| note.what == what) {
            note.again += 1;
            return;
        }
        if self.kept.len() == MOST {
            self.more += 1;
            return;
        }
        let subject = format!("{}, line {}", self.file, element.line);
        let call = match element.get("busid").or_else(|| element.get("name")) {
            Some(name) => format!("{} {}", excerpt(&element.name), excerpt(name)),
            None => excerpt(&element.name),
        };
        self.kept.push(Note { subject, call, what, again: 0 });
    }

    /// All of them.
    pub fn into_failures(self) -> Vec<ProbeFailure> {
        let failure = |Note { subject, call, what, again }| {
            let error = if again == 0 { what } else { format!("{what} ({again} more like it)") };
            ProbeFailure { subject, call, error }
        };
        let mut failures: Vec<ProbeFailure> = self.kept.into_iter().map(failure).collect();
        if self.more > 0 {
            let error = format!("{} more, of other kinds", self.more);
            failures.push(ProbeFailure { subject: self.file.to_owned(), call: "oddities".to_owned(), error });
        }
        failures
    }

    /// A number, decimal or hexadecimal with 0x as NCCL reads them; an invalid one is noted.
    pub fn number(&mut self, element: &Element, attribute: &str) -> Option<u32> {
        let text = element.get(attribute).filter(|text| !text.is_empty())?;
        let number = match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        if number.is_none() {
            self.add(element, format!("{attribute} {} is no number; taken as unknown", quoted(text)));
        }
        number
    }
}
