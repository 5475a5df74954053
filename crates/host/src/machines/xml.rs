//! XML within bounds, even if the text is hostile.
//!
//! Owns the limits: a size, a number of attributes of one element, a depth, a number of elements, and no entities of
//! the document's own. The memory for a text within them is proportional to its size; any other text is an error that
//! names the line. Called by the readers of `machines`; gives the elements no meaning.
//!
//! [`Notes`] gathers the oddities of a dump, as warnings for the user, and reads numbers with such warnings.

#[cfg(test)]
mod tests;

use roxmltree::{Document, Error, Node, ParsingOptions};

use linkwise_core::quote::{excerpt, one_line, quoted};
use linkwise_core::topology::ProbeFailure;

/// The most attributes of an element. NCCL itself stops at 16, hwloc has up to about twenty.
pub(super) const MAX_ATTRIBUTES: usize = 64;
/// The most bytes of a document. The largest hosts take less than one MiB.
pub(super) const MAX_BYTES: usize = 16 << 20;
/// The most elements, texts and comments: two for each element that a format may have.
pub(super) const MAX_NODES: u32 = 1 << 18;

pub(super) type Element<'d> = Node<'d, 'd>;

pub(super) struct Limits {
    /// The most elements inside of each other.
    pub depth: usize,
    pub elements: usize,
    /// True if words between elements are skipped; otherwise they are an error.
    pub can_have_text: bool,
}

/// The fault of an XML text, and its place: one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct XmlError {
    /// The line, counted from 1.
    pub line: u32,
    /// The fault.
    pub problem: String,
}

impl XmlError {
    pub(super) fn at(element: Element<'_>, problem: impl Into<String>) -> Self {
        Self { line: line(element), problem: problem.into() }
    }

    /// The error for a version of a format that this build does not read.
    pub(super) fn version(element: Element<'_>, format: &str, found: &str, known: &str) -> Self {
        let found = excerpt(found);
        Self::at(element, format!("{format} version '{found}' is not known (this build reads {known})"))
    }
}

pub(super) fn document(text: &str) -> Result<Document<'_>, XmlError> {
    let line_at = |byte: usize| {
        let before = text.get(..byte).unwrap_or_default().matches('\n').count();
        u32::try_from(before + 1).unwrap_or(u32::MAX)
    };
    if text.len() > MAX_BYTES {
        return Err(XmlError { line: 1, problem: format!("more than {} MiB of XML", MAX_BYTES >> 20) });
    }
    let tag = |at: usize| text.get(at + 1..).and_then(|rest| rest.split('<').next()).unwrap_or_default();
    if let Some((at, problem)) = text.match_indices('<').find_map(|(at, _)| Some((at, tag_fault(tag(at))?))) {
        return Err(XmlError { line: line_at(at), problem });
    }
    let options = ParsingOptions { allow_dtd: true, nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(text.trim_start_matches('\u{feff}'), options).map_err(|error| {
        let (line, problem) = match &error {
            Error::NoRootNode => (line_at(text.len()), "the text has no element".to_owned()),
            Error::UnclosedRootNode | Error::UnexpectedEndOfStream => {
                (line_at(text.len()), "the text ends before its elements are closed".to_owned())
            }
            Error::NodesLimitReached => (1, format!("more than {MAX_NODES} elements, texts and comments")),
            error => (error.pos().row, format!("not XML: {}", one_line(&error.to_string()))),
        };
        XmlError { line, problem }
    })
}

/// Returns the reason to refuse a tag before the parser sees it: the parser compares each attribute with all before it,
/// and expands entities, which can multiply.
fn tag_fault(tag: &str) -> Option<String> {
    if tag.starts_with("!DOCTYPE") && tag.contains('[') {
        return Some("a document type with declarations of its own (entities) is refused".to_owned());
    }
    let many = !tag.starts_with('!') && tag.matches(['"', '\'']).count() > 2 * MAX_ATTRIBUTES;
    many.then(|| format!("an element has more than {MAX_ATTRIBUTES} attributes"))
}

/// Checks the elements against the limits of their format.
pub(super) fn check(root: Element<'_>, limits: &Limits) -> Result<(), XmlError> {
    check_element(root, limits.depth, limits)?;
    match root.descendants().filter(Node::is_element).nth(limits.elements) {
        Some(element) => Err(XmlError::at(element, format!("more than {} elements", limits.elements))),
        None => Ok(()),
    }
}

/// Checks an element and those inside; `left` is the number of levels that they may have.
fn check_element(element: Element<'_>, left: usize, limits: &Limits) -> Result<(), XmlError> {
    let Some(left) = left.checked_sub(1) else {
        return Err(XmlError::at(element, format!("elements nest deeper than {}", limits.depth)));
    };
    for child in element.children() {
        let words = child.text().unwrap_or_default().trim();
        if child.is_text() && !limits.can_have_text && !words.is_empty() {
            return Err(XmlError::at(child, format!("text where elements belong: '{}'", excerpt(words))));
        }
        if child.is_element() {
            check_element(child, left, limits)?;
        }
    }
    Ok(())
}

pub(super) fn below(element: Element<'_>) -> impl Iterator<Item = Element<'_>> {
    element.children().filter(Node::is_element)
}

pub(super) fn name(element: Element<'_>) -> &str {
    element.tag_name().name()
}

/// The line on which an element or a text begins, from 1. Each call counts from the document's beginning.
pub(super) fn line(element: Element<'_>) -> u32 {
    let blanks = element.text().filter(|_| element.is_text()).map_or(0, |text| text.len() - text.trim_start().len());
    element.document().text_pos_at(element.range().start + blanks).row
}

/// The most kinds of notes that are kept; further ones are counted.
const MAX_KINDS: usize = 50;

/// Collects the oddities of a file: a note for each kind, at its first place.
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
        if let Some((_, repeats)) = self.kept.iter_mut().find(|(note, _)| note.error == error) {
            *repeats += 1;
        } else if self.kept.len() == MAX_KINDS {
            self.more += 1;
        } else {
            let own = element.attribute("busid").or_else(|| element.attribute("name")).map(excerpt);
            let call = [Some(excerpt(name(element))), own].into_iter().flatten().collect::<Vec<_>>().join(" ");
            let subject = format!("{}, line {}", self.file, line(element));
            self.kept.push((ProbeFailure { subject, call, error }, 0));
        }
    }

    /// Notes an oddity of an element that is left out, or that lacks a fact. Returns `None` for the caller to return.
    pub fn none<T>(&mut self, element: Element<'_>, what: impl Into<String>) -> Option<T> {
        self.add(element, what);
        None
    }

    /// Returns all notes.
    pub fn into_failures(mut self) -> Vec<ProbeFailure> {
        for (note, repeats) in self.kept.iter_mut().filter(|(_, repeats)| *repeats > 0) {
            note.error.push_str(&format!(" ({repeats} more like it)"));
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
            self.add(element, format!("{attribute} {} is not a number; taken as unknown", quoted(text)));
        }
        number
    }
}
