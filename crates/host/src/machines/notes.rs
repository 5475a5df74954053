//! The oddities of a dump, as warnings for the user, and the reading of numbers with such warnings. Called by the
//! readers of XML.

use crate::machines::xml::{Element, line, name};
use linkwise_core::quote::{excerpt, quoted};
use linkwise_core::topology::ProbeFailure;

/// The most kinds of notes that are kept; further ones are counted.
const MOST: usize = 50;

/// The notes, one for each kind of oddity, at its first place.
pub(super) struct Notes {
    /// The kind of the file, as the warnings name it.
    file: &'static str,
    /// The kept notes, each with the number of further ones like it.
    kept: Vec<(ProbeFailure, usize)>,
    more: usize,
}

impl Notes {
    /// Starts without notes, for a file of this kind.
    pub fn new(file: &'static str) -> Self {
        Self { file, kept: Vec::new(), more: 0 }
    }

    /// Notes an oddity of an element.
    pub fn add(&mut self, element: Element<'_>, what: impl Into<String>) {
        let error = what.into();
        if let Some((_, again)) = self.kept.iter_mut().find(|(note, _)| note.error == error) {
            *again += 1;
        } else if self.kept.len() == MOST {
            self.more += 1;
        } else {
            let own = element.attribute("busid").or_else(|| element.attribute("name")).map(excerpt);
            let call = [Some(excerpt(name(element))), own].into_iter().flatten().collect::<Vec<_>>().join(" ");
            let subject = format!("{}, line {}", self.file, line(element));
            self.kept.push((ProbeFailure { subject, call, error }, 0));
        }
    }

    /// Notes an oddity of an element that is left out or says nothing for it.
    pub fn none<T>(&mut self, element: Element<'_>, what: impl Into<String>) -> Option<T> {
        self.add(element, what);
        None
    }

    /// Returns all notes.
    pub fn into_failures(mut self) -> Vec<ProbeFailure> {
        for (note, again) in self.kept.iter_mut().filter(|(_, again)| *again > 0) {
            note.error.push_str(&format!(" ({again} more like it)"));
        }
        let error = format!("{} more, of other kinds", self.more);
        let rest = ProbeFailure { subject: self.file.to_owned(), call: "oddities".to_owned(), error };
        self.kept.into_iter().map(|(note, _)| note).chain((self.more > 0).then_some(rest)).collect()
    }

    /// A number, decimal or hexadecimal with 0x as NCCL reads them; an invalid one is noted.
    pub fn number(&mut self, element: Element<'_>, attribute: &str) -> Option<u32> {
        let text = element.attribute(attribute).filter(|text| !text.is_empty())?;
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
