//! Loads a machine by a name or a path; the content of a file decides its format.
//!
//! A node file is YAML, which this module reads and writes.

use std::io;
use std::path::Path;
use std::string::FromUtf8Error;

use serde::Deserialize;

use super::xml::{self, XmlError};
use super::{BUILT_IN, MAX_FILE_BYTES, Machine, MachineError, hwloc_xml, nccl, topo};
use crate::yaml::{fault, write};
use linkwise_core::quote::{excerpt, one_line};
use linkwise_core::topology::HostObservation;
use linkwise_system::files;

/// Loads a built-in machine by its name, or else the file at that path, `-` being standard input: a node file, an NCCL
/// topology dump, a hwloc XML or the text of `nvidia-smi topo -m`.
pub fn load(name_or_path: &str) -> Result<Machine, MachineError> {
    match BUILT_IN.iter().find(|(name, _)| *name == name_or_path) {
        Some((_, text)) => node_file(name_or_path, text),
        None => of_bytes(name_or_path, bytes_of(name_or_path)?),
    }
}

/// Reads a machine from the bytes of a file, whose content decides the format. Messages name `path`, the origin of the
/// bytes; a machine that is not a node file gets the name of the file in `path`, without extension. Opens no file.
pub fn of_bytes(path: &str, bytes: Vec<u8>) -> Result<Machine, MachineError> {
    let not_text = |error: FromUtf8Error| MachineError::NotText(path.to_owned(), error.utf8_error().valid_up_to());
    let text = String::from_utf8(bytes).map_err(not_text)?;
    if !text.trim_start_matches('\u{feff}').trim_start().starts_with('<') {
        let text = text.trim_start_matches('\u{feff}').to_owned();
        if topo::is_matrix(&text) {
            return topo::parse(&stem(path), &text).map_err(|error| MachineError::Topo(path.to_owned(), error));
        }
        if !text.contains("version") && !text.trim().is_empty() {
            return Err(MachineError::NoMachine(path.to_owned()));
        }
        return node_file(path, &text);
    }
    let document = xml::document(&text).map_err(broken("XML file", path))?;
    let root = document.root_element();
    match xml::name(root) {
        "topology" => hwloc_xml::parse(&stem(path), root).map_err(broken("hwloc XML", path)),
        "system" => nccl::parse(&stem(path), root).map_err(broken("NCCL topology dump", path)),
        "graphs" => Err(MachineError::NcclGraph(path.to_owned())),
        other => Err(MachineError::UnknownXml(path.to_owned(), excerpt(other))),
    }
}

/// Reads the host in a text that libhwloc wrote.
pub(crate) fn of_hwloc(xml: &str) -> Result<HostObservation, XmlError> {
    Ok(hwloc_xml::parse("", xml::document(xml)?.root_element())?.observed.host)
}

/// The path that stands for standard input.
const STDIN: &str = "-";

fn node_file(path: &str, text: &str) -> Result<Machine, MachineError> {
    Machine::parse(text).map_err(|error| MachineError::Content(path.to_owned(), error))
}

fn broken(kind: &'static str, path: &str) -> impl FnOnce(XmlError) -> MachineError {
    let path = path.to_owned();
    move |error| MachineError::Xml(kind, path, error)
}

fn stem(path: &str) -> String {
    Path::new(path).file_stem().map_or_else(|| path.to_owned(), |stem| stem.to_string_lossy().into_owned())
}

fn bytes_of(name_or_path: &str) -> Result<Vec<u8>, MachineError> {
    let path = name_or_path.to_owned();
    let read = match name_or_path {
        STDIN => files::read_all(io::stdin().lock(), MAX_FILE_BYTES),
        _ => files::read(Path::new(name_or_path), MAX_FILE_BYTES),
    };
    read.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound if looks_like_a_name(name_or_path) => MachineError::Unknown(path),
        io::ErrorKind::FileTooLarge => MachineError::TooLarge(path),
        _ => MachineError::Read(path, error),
    })
}

/// Returns true for a text without folder or extension, which was probably not meant as a file.
fn looks_like_a_name(text: &str) -> bool {
    !text.contains('/') && Path::new(text).extension().is_none()
}

/// The version of the format that this build reads and writes.
pub const VERSION: u32 = 1;

/// The fault of a node file's text, in one line; names the line of the text if that is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MachineFileError(String);

/// The one key that is read first, so that a newer file is refused for its version, not for its keys.
#[derive(Deserialize)]
struct Header {
    version: u32,
}

impl Machine {
    /// Reads a machine from the text of a node file.
    pub fn parse(text: &str) -> Result<Self, MachineFileError> {
        let problem = match yaml::<Header>(text)?.version {
            VERSION => return yaml(text),
            0 => format!("format version 0 does not exist (this build reads version {VERSION})"),
            later => format!("format version {later} is newer than this build reads (version {VERSION})"),
        };
        Err(MachineFileError(problem))
    }

    /// The text of a node file; [`Machine::parse`] reads it back equal.
    pub fn to_yaml(&self) -> Result<String, MachineFileError> {
        write(self).map_err(MachineFileError)
    }
}

/// Reads YAML. An error names the key and the line.
fn yaml<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, MachineFileError> {
    let mut key = String::new();
    let read = serde_saphyr::with_deserializer_from_str(text, |file| {
        serde_path_to_error::deserialize(file).map_err(|error| {
            key = format!("{}: ", one_line(&error.path().to_string()));
            error.into_inner()
        })
    });
    read.map_err(|error| {
        let key = if key.starts_with('.') { "" } else { key.as_str() };
        MachineFileError(format!("{key}{}", fault(&error)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of reading a file with this content.
    fn read_text(text: &[u8]) -> Result<Machine, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("field.xml");
        std::fs::write(&path, text).unwrap();
        load(path.to_str().unwrap()).map_err(|error| {
            let message = error.to_string();
            assert!(!message.contains('\n') && message.contains("field.xml"), "{message}");
            message
        })
    }

    const HWLOC: &str = "<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology><object type=\"Machine\"/></topology>";

    #[test]
    fn content_decides_the_format() {
        let yaml = read_text(b"version: 1\nname: x\nobserved: {gpus: []}\n").unwrap();
        let dump = read_text(b"\xef\xbb\xbf\n <!-- c -->\n<system version=\"1\"/>").unwrap();
        let host = read_text(HWLOC.as_bytes()).unwrap();
        assert_eq!([yaml.name, dump.name, host.name], ["x", "field", "field"]);
        assert_eq!([dump.source, host.source], [["NCCL topology dump"], ["hwloc XML"]]);
    }

    #[test]
    fn unreadable_files_are_refused_with_path_and_cause() {
        for (text, words) in [
            (&b"<graphs version=\"1\"/>"[..], "NCCL_TOPO_DUMP_FILE"),
            (b"<nvidia_smi_log/>", "<nvidia_smi_log>"),
            (b"<system version=\"2\">\n<cpu><pci><gpu gcn=\"gfx942\"/></pci></cpu></system>", "line 2: a dump of RCCL"),
            (b"<system version=\"1\"\n", "line 2"),
            (b"<system version=\"1\">\n<cpu>\n", "line 3"),
            (b"<system version=\"2\"/>", "version '2'"),
            (b"<topology>\n<object>\n", "line 3"),
            (b"<topology>\xff</topology>", "not UTF-8 text (byte 10)"),
            (b"01:00.0 3D controller: NVIDIA Corporation GH100\n", "neither a node file"),
            (b"<", "line 1"),
            (b"", "end of file"),
        ] {
            let message = read_text(text).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }

    fn refusal(text: &str) -> String {
        let message = Machine::parse(text).unwrap_err().to_string();
        let is_plain = ["\n", "{ ", "u32"].iter().all(|debug| !message.contains(debug));
        assert!(is_plain, "more than one line, or words of Rust: {message}");
        eprintln!("{message}");
        message
    }

    #[test]
    fn broken_text_is_refused_with_line() {
        let gpu = "version: 1\nname: x\nobserved:\n  gpus:\n    - {index: 0, uuid: GPU-0, pci: \"3b\"}\n";
        let inner = "version: 1\nname: x\nobserved:\n  gpus: []\n  host:\n    numa: 1\n";
        for (text, line, words) in [
            ("version: 1\nname: \"x\n", "line ", ""),
            ("version: 1\nname: x\nobserved:\n  gpus: 3\n", "line 4", "observed.gpus: expected a list"),
            ("version: 1\nname: x\nname: y\nobserved: {gpus: []}\n", "line 3", ""),
            ("version: one\nname: x\n", "line 1", ""),
            ("version: 1\nname: x\ncolour: red\nobserved: {gpus: []}\n", "line 3", "colour"),
            (inner, "line 6", "numa"),
            (gpu, "line 5", "'3b' is not a PCI address"),
            (
                gpu.replace("index: 0", "index: -1").as_str(),
                "line 5",
                "gpus[0].index: expected a whole number from 0 to 4294967295",
            ),
            (gpu.replace("pci: \"3b\"", "memory_mib: 1.5").as_str(), "line 5", "from 0 to 18446744073709551615"),
            ("version: 2\nname: x\nnovelty: 1\n", "", "version 2 is newer"),
            ("version: 0\nname: x\n", "", "version 0 does not exist"),
            ("name: x\nobserved: {gpus: []}\n", "", "version"),
        ] {
            let message = refusal(text);
            assert!(message.contains(line) && message.contains(words), "{text}\n{message}");
        }
        refusal("");
        refusal("- 1\n");
        refusal("<system version=\"1\"></system>\n");
    }

    #[test]
    fn alias_bombs_and_deep_nesting_are_refused() {
        let mut bomb = "version: 1\nname: x\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
        for level in 1..12 {
            let before = format!("*a{}", level - 1);
            bomb.push_str(&format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(",")));
        }
        refusal(&bomb);
        refusal(&format!("version: 1\nname: {}\n", "[".repeat(100_000)));
        let nest = "{kind: switch, devices: [".repeat(5_000);
        refusal(&format!("version: 1\nname: x\nobserved: {{gpus: [], host: {{host_bridges: [{{devices: [{nest}"));
    }
}
