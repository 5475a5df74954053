//! XML within bounds: a tree of elements with their lines, however hostile the text.
//!
//! Owns the limits: a depth, a number of elements and attributes, a length of each value, no entities of the
//! document's own. A text within them costs memory in proportion to its elements; any other is an error that
//! names the line. Called by the readers of `machines`; gives the elements no meaning.

use quick_xml::XmlVersion;
use quick_xml::events::{BytesStart, BytesText, Event};
use quick_xml::reader::Reader;

use crate::quote::{excerpt, one_line};

/// Attributes of an element. NCCL itself stops at 16, hwloc has up to some twenty.
pub(super) const MAX_ATTRIBUTES: usize = 32;
/// Bytes of a name or a value: the CPU mask of 8192 CPUs takes 2816.
pub(super) const MAX_VALUE: usize = 4096;

/// What one format may take.
pub(super) struct Limits {
    /// Elements inside of each other.
    pub depth: usize,
    pub elements: usize,
    pub bytes: usize,
    /// Whether words between elements are skipped; without, they are an error.
    pub text: bool,
}

/// What is wrong with an XML text, and where: one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct XmlError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub fault: XmlFault,
}

/// What can be wrong with an XML text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlFault {
    /// Not XML.
    #[error("not XML: {0}")]
    Syntax(String),
    /// Nothing but blanks and comments.
    #[error("no element in it")]
    Empty,
    /// It stops before its elements are closed.
    #[error("the text ends inside <{name}>, which opens on line {opened}")]
    Truncated {
        /// The innermost open element.
        name: String,
        /// Its line.
        opened: usize,
    },
    /// More after the end.
    #[error("more follows the end of the root element")]
    Trailing,
    /// Words where elements belong.
    #[error("text where elements belong: '{0}'")]
    Text(String),
    /// A document type with declarations of its own.
    #[error("a document type with declarations of its own (entities) is not taken")]
    Declarations,
    /// Deeper than is taken.
    #[error("elements nest deeper than {0}")]
    TooDeep(usize),
    /// More elements than are taken.
    #[error("more than {0} elements")]
    TooManyElements(usize),
    /// More bytes than are taken.
    #[error("more than {} MiB of XML", .0 >> 20)]
    TooLarge(usize),
    /// More than `MAX_ATTRIBUTES`.
    #[error("<{0}> has more than {MAX_ATTRIBUTES} attributes")]
    TooManyAttributes(String),
    /// Longer than `MAX_VALUE`.
    #[error("a name or value is longer than {MAX_VALUE} bytes")]
    TooLong,
    /// One attribute twice.
    #[error("attribute '{0}' twice")]
    DuplicateAttribute(String),
    /// A version of the format that this build does not read.
    #[error("{format} version '{found}' is not known (this build reads {known})")]
    Version {
        /// The format.
        format: &'static str,
        /// The version in the file.
        found: String,
        /// The versions that are read.
        known: &'static str,
    },
    /// A hwloc XML whose first object is no machine.
    #[error("no Machine object in the hwloc XML")]
    NoMachine,
}

/// One element.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Element {
    pub name: String,
    /// The line on which it opens, from 1.
    pub line: usize,
    attributes: Vec<(String, String)>,
    pub children: Vec<Element>,
}

impl Element {
    /// The value of an attribute.
    pub fn get(&self, attribute: &str) -> Option<&str> {
        self.attributes.iter().find(|(name, _)| name == attribute).map(|(_, value)| value.as_str())
    }
}

/// Reads a document within its format's limits.
pub(super) fn tree(text: &str, limits: &Limits) -> Result<Element, XmlError> {
    let mut scan = Scan::new(text);
    if text.len() > limits.bytes {
        return Err(scan.error(XmlFault::TooLarge(limits.bytes)));
    }
    let (mut open, mut root): (Vec<Element>, _) = (Vec::new(), None);
    let mut elements = 0;
    loop {
        match scan.next()? {
            Event::Start(_) | Event::Text(_) if root.is_some() => return Err(scan.error(XmlFault::Trailing)),
            Event::Start(start) => {
                elements += 1;
                if elements > limits.elements {
                    return Err(scan.error(XmlFault::TooManyElements(limits.elements)));
                }
                if open.len() == limits.depth {
                    return Err(scan.error(XmlFault::TooDeep(limits.depth)));
                }
                let element = element(&start).map_err(|fault| scan.error(fault))?;
                open.push(Element { line: scan.line, ..element });
            }
            Event::End(_) => match (open.pop(), open.last_mut()) {
                (Some(closed), Some(parent)) => parent.children.push(closed),
                (closed, _) => root = closed,
            },
            Event::Text(text) if !limits.text || open.is_empty() => {
                return Err(scan.error(XmlFault::Text(excerpt(text.trim()))));
            }
            Event::Eof => {
                let innermost = open.last().map(|open| (excerpt(&open.name), open.line));
                let truncated = innermost.map(|(name, opened)| XmlFault::Truncated { name, opened });
                return root.ok_or_else(|| scan.error(truncated.unwrap_or(XmlFault::Empty)));
            }
            _ => {}
        }
    }
}

/// The name of the root element, read no further than that.
pub(super) fn root(text: &str) -> Result<String, XmlError> {
    let mut scan = Scan::new(text);
    loop {
        match scan.next()? {
            Event::Start(start) => return own(start.name().as_ref()).map_err(|fault| scan.error(fault)),
            Event::Text(text) => return Err(scan.error(XmlFault::Text(excerpt(text.trim())))),
            Event::End(_) | Event::Eof => return Err(scan.error(XmlFault::Empty)),
            _ => {}
        }
    }
}

fn own(text: &str) -> Result<String, XmlFault> {
    if text.len() > MAX_VALUE { Err(XmlFault::TooLong) } else { Ok(text.to_owned()) }
}

fn element(start: &BytesStart<'_>) -> Result<Element, XmlFault> {
    let mut element = Element { name: own(start.name().as_ref())?, ..Element::default() };
    let mut attributes = start.attributes();
    // Their own check compares each with all before it, however many there are.
    for attribute in attributes.with_checks(false) {
        let attribute = attribute.map_err(|error| XmlFault::Syntax(one_line(&error.to_string())))?;
        if element.attributes.len() == MAX_ATTRIBUTES {
            return Err(XmlFault::TooManyAttributes(excerpt(&element.name)));
        }
        if attribute.value.len() > MAX_VALUE {
            return Err(XmlFault::TooLong);
        }
        let key = own(attribute.key.as_ref())?;
        if element.get(&key).is_some() {
            return Err(XmlFault::DuplicateAttribute(excerpt(&key)));
        }
        // Only the five predefined entities and character references are known, and those do not multiply.
        let value = attribute.normalized_value(XmlVersion::Implicit1_0);
        let value = value.map_err(|error| XmlFault::Syntax(one_line(&error.to_string())))?;
        element.attributes.push((key, value.into_owned()));
    }
    Ok(element)
}

/// The events of a document, with their lines. An empty element is opened and closed.
struct Scan<'t> {
    text: &'t str,
    reader: Reader<&'t [u8]>,
    /// The line of the event last returned.
    line: usize,
    /// Up to where lines were counted.
    counted: usize,
}

impl<'t> Scan<'t> {
    fn new(text: &'t str) -> Self {
        let text = text.trim_start_matches('\u{feff}');
        let mut reader = Reader::from_str(text);
        reader.config_mut().expand_empty_elements = true;
        Self { text, reader, line: 1, counted: 0 }
    }

    fn error(&self, fault: XmlFault) -> XmlError {
        XmlError { line: self.line, fault }
    }

    /// Counts lines up to a byte.
    fn count_to(&mut self, byte: u64) -> usize {
        let byte = usize::try_from(byte).unwrap_or(usize::MAX).min(self.text.len());
        let passed = self.text.as_bytes().get(self.counted..byte).unwrap_or_default();
        self.line += passed.iter().filter(|byte| **byte == b'\n').count();
        self.counted = self.counted.max(byte);
        byte
    }

    /// The next event; whatever is text becomes `Text` as it is written, and blanks are left out.
    fn next(&mut self) -> Result<Event<'t>, XmlError> {
        loop {
            let from = self.count_to(self.reader.buffer_position());
            match self.reader.read_event() {
                Ok(Event::Text(_) | Event::CData(_) | Event::GeneralRef(_)) => {
                    let to = usize::try_from(self.reader.buffer_position()).unwrap_or(usize::MAX);
                    let text = self.text.get(from..to).unwrap_or_default();
                    let blanks = text.len() - text.trim_start().len();
                    if blanks < text.len() {
                        self.count_to(u64::try_from(from + blanks).unwrap_or(u64::MAX));
                        return Ok(Event::Text(BytesText::from_escaped(text)));
                    }
                }
                Ok(Event::DocType(declared)) if declared.contains('[') => {
                    return Err(self.error(XmlFault::Declarations));
                }
                Ok(event) => return Ok(event),
                Err(error) => {
                    self.count_to(self.reader.error_position());
                    return Err(self.error(XmlFault::Syntax(one_line(&error.to_string()))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
